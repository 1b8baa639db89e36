"""Pace of the reference server, and its log of each request: the ground truth for a client.

All times are of the monotonic clock that every process of a machine shares (``time.perf_counter_ns``). The server
notes the last byte of a request and the write of the first token, so a client's TTFT error is never negative: it is
the way there and back through the kernel, and the client's delay.
"""

from dataclasses import dataclass

import msgspec

from loadgen.core.draws import below, text_key

NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Times and pieces of the server's responses."""

    ttft_low_ms: float = 0.0
    ttft_high_ms: float = 0.0
    """From a request's last byte to the first write, drawn by request id."""
    gap_ms: float = 0.0
    """Between two writes; 0: all at once."""
    tokens_per_write: int = 1
    """Events of later writes; the first write has one."""
    prompt_tokens: int = 256
    """Usage's prompt tokens: the server does not read prompts."""

    def ttft_ns(self, request_id: str) -> int:
        low_ns, high_ns = (round(bound * NS_PER_MS) for bound in (self.ttft_low_ms, self.ttft_high_ms))
        return low_ns + below(text_key(request_id), high_ns - low_ns + 1)


class Served(msgspec.Struct, array_like=True):
    """Request as the server saw it, in ns of the monotonic clock; null: it did not come to that."""

    request_id: str
    """Its ``X-Request-Id``, else its number, ``#7``."""
    received_ns: int
    """Start of the read with its last byte."""
    due_ns: int
    first_write_ns: int | None
    """Just before the first token's bytes went to the kernel."""
    last_write_ns: int | None
    """Just before the stream's end, likewise."""
    tokens: int
    writes: int
    """Pieces of the complete stream."""

    @property
    def ttft_ns(self) -> int | None:
        return None if self.first_write_ns is None else self.first_write_ns - self.received_ns


class ServerLog(msgspec.Struct, frozen=True):
    """Log of the server after a run."""

    served: list[Served]
    cpu_ns: int
    started_ns: int
    read_ns: int
