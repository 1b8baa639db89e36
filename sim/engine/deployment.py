"""Layout of a deployment: memory behind the pool, and its assumptions.

Nothing in a capture tells of these, so that each brings assumptions: a result carries their list.
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
    """Layout of engines and memory. Raises InputError naming the flag of what cannot be."""

    host_blocks: int = 0
    """Blocks that the host's memory holds for each engine; 0: none."""
    kv_bytes_per_token: int = 0
    """KV cache of a token over all layers; 0: not told."""
    host_gb_per_s: float = 25.0
    """Each way, at once."""
    host_latency_ms: float = 0.05
    """Of each transfer."""

    def __post_init__(self) -> None:
        if self.host_blocks and not self.kv_bytes_per_token:
            raise InputError("--kv-bytes-per-token: not told; expected the KV cache's bytes of a token over all layers")

    @property
    def tiers(self) -> "Deployment | None":
        """Return this, if there is memory behind the pool."""
        return self if self.host_blocks else None

    def require_room(self, arrivals: "Arrivals", block_size: int) -> None:
        """Raise InputError if the host's memory is smaller than a prompt."""
        longest = int((arrivals.prompt_tokens[arrivals.runs] // block_size).max(initial=0))
        if 0 < self.host_blocks < longest:
            raise InputError(
                f"--host-blocks: {self.host_blocks} blocks; expected {longest} or more, as many as the longest prompt"
            )

    def check(self, engine: EngineConfig) -> None:
        """Raise InputError for KV groups beside tiers."""
        if engine.kv_groups is not None and self.host_blocks:
            raise InputError("--kv-groups: not simulated with memory behind the pool; expected one of the two")

    def meta(self) -> dict[str, Any]:
        """Return what a predicted trace's header tells of this; empty: the captured deployment."""
        usual = asdict(Deployment())
        changed = {name: value for name, value in asdict(self).items() if value != usual[name]}
        assumptions = list(self.assumptions())
        return {"deployment": changed, "assumptions": assumptions} if assumptions else {}

    def assumptions(self) -> Iterator[str]:
        """Yield what a result with this layout assumes and no capture can confirm."""
        if self.host_blocks:
            yield (
                f"host memory: {self.host_gb_per_s:g} GB/s each way and {self.host_latency_ms:g} ms a transfer, one "
                f"after another; copies slow no step; {self.kv_bytes_per_token:,} bytes of KV a token"
            )
            yield "host memory evicts the least recently used block, the deepest of a prompt first, as vLLM's LRU"


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str, str], int]:
    """Return a reader of whole numbers in a range."""

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
    """Read a number above 0."""
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
"""Reads a flag's word, given the flag. Raises InputError."""
DEPLOYMENT_FLAGS: dict[str, tuple[type, str, str, Reader, str]] = {
    "host-blocks": (int, "N", "KV blocks that each engine's host keeps behind the pool", whole(0), "host_blocks"),
    "kv-bytes-per-token": (int, "N", "bytes of a token's KV over all layers", whole(1), "kv_bytes_per_token"),
    "host-gb-per-s": (float, "X", "GB/s to the host's memory, each way (default 25)", positive, "host_gb_per_s"),
    "host-latency": (str, "TIME", "time of a transfer (default 0.05ms)", _duration_ms, "host_latency_ms"),
}
"""By flag: kind and metavar of its value, help, reader, field of ``Deployment``."""


def refuse_alone(given: Collection[str]) -> None:
    """Raise InputError for a flag of the host's memory without ``--host-blocks``."""
    for name in ("host-gb-per-s", "host-latency", "kv-bytes-per-token"):
        if name in given and "host-blocks" not in given:
            raise InputError(f"--{name}: without --host-blocks; expected both")


def add_deployment_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of a deployment."""
    group = parser.add_argument_group("deployment", "memory behind the pool (docs/capacity.md)")
    for name, (_, metavar, description, _, _) in DEPLOYMENT_FLAGS.items():
        group.add_argument(f"--{name}", metavar=metavar, help=description)


def deployment_of(arguments: argparse.Namespace) -> Deployment:
    """Return the deployment that flags ask for. Raises InputError."""
    values: dict[str, Any] = {}
    names: set[str] = set()
    for name, (_, _, _, read, field) in DEPLOYMENT_FLAGS.items():
        given = getattr(arguments, name.replace("-", "_"))
        if given is not None:
            values[field] = read(f"--{name}", given)
            names.add(name)
    refuse_alone(names)
    return Deployment(**values)
