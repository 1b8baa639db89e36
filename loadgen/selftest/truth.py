"""What the built-in server is asked to do, and what it knows of each request: the truth that a client is held against.

All times are of the system's monotonic clock, which every process of a machine shares (``time.perf_counter_ns``). The
server notes when a request's last byte had come and when it wrote the first token, each just before it goes on, so a
client that says how long the first token took can only say more than the server knows: its TTFT error, never negative,
is the way there, the way back through the kernel, and however late the client was to look.
"""

import math
from dataclasses import dataclass

import msgspec

from loadgen.core.draws import below, text_key
from tracefile import InputError

NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When and in which pieces the server writes its answers."""

    ttft_low_ms: float = 0.0
    ttft_high_ms: float = 0.0
    """From a request's last byte to the first token's write: drawn between the two by the request's id."""
    gap_ms: float = 0.0
    """Between two writes; 0: all at once."""
    tokens_per_write: int = 1
    """Events of later writes; the first write has one."""
    prompt_tokens: int = 256
    """What usage says of every prompt: the server does not read them."""

    def __post_init__(self) -> None:
        if not 0 <= self.ttft_low_ms <= self.ttft_high_ms < math.inf:
            raise InputError(
                f"--ttft-ms: {self.ttft_low_ms:g}:{self.ttft_high_ms:g}; expected MS or MIN:MAX, 0 or more"
            )
        if not 0 <= self.gap_ms < math.inf or self.tokens_per_write < 1 or self.prompt_tokens < 1:
            raise InputError(
                f"--gap-ms, --tokens-per-write, --prompt-tokens: {self.gap_ms:g}, {self.tokens_per_write}, "
                f"{self.prompt_tokens}; expected 0 or more, 1 or more, 1 or more"
            )

    def ttft_ns(self, request_id: str) -> int:
        """How long this request's first token takes: the same for whoever knows its id."""
        low_ns, high_ns = (round(bound * NS_PER_MS) for bound in (self.ttft_low_ms, self.ttft_high_ms))
        return low_ns + below(text_key(request_id), high_ns - low_ns + 1)


class Served(msgspec.Struct, frozen=True, array_like=True):
    """One request as the server saw it, times in ns of the monotonic clock; null: it did not come to that."""

    request_id: str
    """As its ``X-Request-Id`` says; its number, ``#7``, if it has none."""
    received_ns: int
    """Clock at the start of the read that brought its last byte."""
    due_ns: int
    """When the first token was to be written."""
    first_write_ns: int | None
    """Clock just before the first token's bytes went to the kernel."""
    last_write_ns: int | None
    """The same of the stream's end."""
    tokens: int
    """As asked for."""
    writes: int
    """Pieces that the whole stream has."""

    @property
    def ttft_ns(self) -> int | None:
        """The true time to first token."""
        return None if self.first_write_ns is None else self.first_write_ns - self.received_ns

    @property
    def lateness_ns(self) -> int | None:
        """How late the server was itself: no error of the client's, which is held against what was done."""
        return None if self.first_write_ns is None else self.first_write_ns - self.due_ns


class Truth(msgspec.Struct, frozen=True):
    """What the server has to say after a run."""

    served: list[Served]
    """In order of arrival."""
    cpu_ns: int
    """CPU time of the server's process so far."""
    started_ns: int
    """Clock when it began to listen."""
    told_ns: int
    """Clock when it said so."""
