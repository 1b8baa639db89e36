"""KV cache offloading of a deployment to host memory, and its assumptions.

A capture does not record host memory: a result lists the assumptions of its model.
"""

import argparse
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sim.vllm.config import EngineConfig
from tracefile.commandline.durations import duration
from tracefile.records.errors import InputError

if TYPE_CHECKING:
    from sim.workload.arrivals import Arrivals


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """KV cache offloading settings. Raises InputError naming the flag."""

    host_blocks: int = 0
    """Host memory of each engine, in KV cache blocks; 0: no offloading."""
    kv_bytes_per_token: int = 0
    """KV cache bytes of a token over all layers; 0: not set."""
    host_gb_per_s: float = 25.0
    """Bandwidth of the host link per direction; both directions run at once."""
    host_latency_ms: float = 0.05
    """Fixed time of a transfer."""

    def __post_init__(self) -> None:
        if self.host_blocks and not self.kv_bytes_per_token:
            raise InputError("--kv-bytes-per-token: not set; expected the KV cache's bytes of a token over all layers")

    @property
    def tiers(self) -> "Deployment | None":
        """The deployment; None: no KV cache offloading."""
        return self if self.host_blocks else None

    def require_host_capacity(self, arrivals: "Arrivals", block_size: int) -> None:
        """Raise InputError if host memory holds fewer blocks than the longest prompt."""
        longest = int((arrivals.prompt_tokens[arrivals.runs] // block_size).max(initial=0))
        if 0 < self.host_blocks < longest:
            raise InputError(
                f"--host-blocks: {self.host_blocks} blocks; expected {longest} or more, as many as the longest prompt"
            )

    def check(self, engine: EngineConfig) -> None:
        """Raise InputError for several KV groups together with offloading."""
        if engine.kv_groups is not None and self.host_blocks:
            raise InputError("--kv-groups: not simulated with --host-blocks; expected one of the two")

    def meta(self) -> dict[str, Any]:
        """Return the header fields of a predicted trace; empty: no offloading."""
        defaults = asdict(Deployment())
        changed = {name: value for name, value in asdict(self).items() if value != defaults[name]}
        assumptions = list(self.assumptions())
        return {"deployment": changed, "assumptions": assumptions} if assumptions else {}

    def assumptions(self) -> Iterator[str]:
        """Yield the assumptions of KV cache offloading, which no capture can confirm."""
        if self.host_blocks:
            yield (
                f"host memory: {self.host_gb_per_s:g} GB/s each way and {self.host_latency_ms:g} ms a transfer, one "
                f"after another; copies slow no step; {self.kv_bytes_per_token:,} bytes of KV a token"
            )
            yield "host memory evicts the least recently used block, the deepest of a prompt first, as vLLM's LRU"


def integer(least: int, most: int = 2**31 - 1) -> Callable[[str, str], int]:
    """Return a parser of integers from ``least`` to ``most``."""

    def read(flag: str, word: str) -> int:
        try:
            number = int(word)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise InputError(f"{flag}: {word!r}; expected a whole number from {least} to {most}")
        return number

    return read


def positive(flag: str, word: str) -> float:
    """Parse a number above 0."""
    try:
        number = float(word)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise InputError(f"{flag}: {word!r}; expected a number above 0, such as 2 or 0.5")
    return number


def _duration_ms(flag: str, word: str) -> float:
    try:
        return 1e3 * duration(word)
    except argparse.ArgumentTypeError as error:
        raise InputError(f"{flag}: {error}") from None


Reader = Callable[[str, str], Any]
"""Parses the value of a flag; arguments: flag, text. Raises InputError."""
DEPLOYMENT_FLAGS: dict[str, tuple[type, str, str, Reader, str]] = {
    "host-blocks": (int, "N", "host memory of each engine for offloading, in KV blocks", integer(0), "host_blocks"),
    "kv-bytes-per-token": (int, "N", "KV cache bytes of a token over all layers", integer(1), "kv_bytes_per_token"),
    "host-gb-per-s": (float, "X", "bandwidth to host memory in GB/s, each way (default 25)", positive, "host_gb_per_s"),
    "host-latency": (str, "TIME", "time of a transfer (default 0.05ms)", _duration_ms, "host_latency_ms"),
}
"""Flags: type, metavar, help, parser, field of ``Deployment``."""


def refuse_alone(flags: Collection[str]) -> None:
    """Raise InputError for a flag of host memory without ``--host-blocks``."""
    for name in ("host-gb-per-s", "host-latency", "kv-bytes-per-token"):
        if name in flags and "host-blocks" not in flags:
            raise InputError(f"--{name}: without --host-blocks; expected both")


def add_deployment_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of KV cache offloading."""
    group = parser.add_argument_group("deployment", "KV cache offloading to host memory (docs/capacity.md)")
    for name, (_, metavar, description, _, _) in DEPLOYMENT_FLAGS.items():
        group.add_argument(f"--{name}", metavar=metavar, help=description)


def deployment_of(arguments: argparse.Namespace) -> Deployment:
    """Return the KV cache offloading that the flags set. Raises InputError."""
    values: dict[str, Any] = {}
    names: set[str] = set()
    for name, (_, _, _, read, field) in DEPLOYMENT_FLAGS.items():
        value = getattr(arguments, name.replace("-", "_"))
        if value is not None:
            values[field] = read(f"--{name}", value)
            names.add(name)
    refuse_alone(names)
    return Deployment(**values)
