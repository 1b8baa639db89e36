"""Layout of a deployment: memory behind the pool, prefill and decode workers, tensor parallelism; and its assumptions.

Nothing in a capture tells of these, so that each brings assumptions: a result carries their list.
"""

import argparse
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from sim.latency.modelfile import Model, Parameter
from sim.latency.terms import STEP_TERMS
from sim.vllm.config import EngineConfig
from sim.vllm.eviction import VLLM, parse_evict
from tracefile.commandline.durations import duration
from tracefile.records.errors import InputError
from tracefile.records.latenames import LateModule

if TYPE_CHECKING:
    import numpy as np

    from sim.workload.arrivals import Arrivals
else:  # numpy, which the flags need not
    np = LateModule("numpy")


Write = Literal["through", "evict"]
"""Time at which a block goes to the host: when its prompt is computed, or when the pool evicts it."""
Load = Literal["beside", "layerwise"]
"""``beside``: a request waits for its blocks while others run, as in vLLM. ``layerwise``: it runs at once, and its step
lasts as long as the transfer at least."""
MOST_WORKERS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Layout of engines and memory. Raises InputError naming the flag of what cannot be."""

    host_blocks: int = 0
    """Blocks that the host's memory holds for each engine; 0: none."""
    disk_blocks: int = 0
    kv_bytes_per_token: int = 0
    """KV cache of a token over all layers; 0: not told."""
    host_gb_per_s: float = 25.0
    """Each way, at once."""
    host_latency_ms: float = 0.05
    """Of each transfer."""
    disk_gb_per_s: float = 3.0
    disk_latency_ms: float = 0.5
    tier_write: Write = "through"
    tier_load: Load = "beside"
    prefetch: bool = False
    """Read blocks from the disk into the host's memory when a request comes, not when it is admitted."""
    shared_tiers: bool = False
    """One host memory and disk for all engines of a fleet; each has links of its own."""
    prefill_workers: int = 0
    decode_workers: int = 0
    kv_link_gb_per_s: float = 25.0
    """Link of each decode worker, over which the KV of prompts comes."""
    kv_link_latency_ms: float = 1.0
    tensor_parallel: int = 1
    """GPUs of an engine, as a multiple of the captured engine's."""
    tensor_parallel_overhead: float = 0.1
    """Communication for each further GPU, as a share of a step's work on one."""

    def __post_init__(self) -> None:
        if self.disk_blocks and not self.host_blocks:
            raise InputError("--disk-blocks: a disk is behind the host's memory; expected --host-blocks, too")
        if (self.prefill_workers == 0) != (self.decode_workers == 0):
            raise InputError("--prefill-workers, --decode-workers: expected both or none")
        if (self.host_blocks or self.prefill_workers) and not self.kv_bytes_per_token:
            raise InputError("--kv-bytes-per-token: not told; expected the KV cache's bytes of a token over all layers")
        if self.host_blocks and self.prefill_workers:
            raise InputError("--host-blocks: not simulated behind prefill and decode workers; expected one of the two")
        if self.shared_tiers and not self.host_blocks:
            raise InputError("--shared-tiers: nothing is shared; expected --host-blocks")

    @property
    def tiers(self) -> "Deployment | None":
        """Return this, if there is memory behind the pool."""
        return self if self.host_blocks else None

    @property
    def workers(self) -> int:
        return self.prefill_workers + self.decode_workers

    @property
    def gpus(self) -> int:
        """GPUs of a replica, as a multiple of the captured engine's."""
        return self.tensor_parallel

    def require_room(self, arrivals: "Arrivals", block_size: int) -> None:
        """Raise InputError if a tier is smaller than a prompt."""
        longest = int((arrivals.prompt_tokens[arrivals.runs] // block_size).max(initial=0))
        for flag, blocks in (("--host-blocks", self.host_blocks), ("--disk-blocks", self.disk_blocks)):
            if 0 < blocks < longest:
                raise InputError(f"{flag}: {blocks} blocks; expected {longest} or more, as many as the longest prompt")

    def engine(self, engine: EngineConfig, settings: Any) -> dict[str, Any]:
        """Return settings of an engine of this many GPUs, besides those asked for: the pool grows with them.

        Raises InputError for an engine with KV groups beside tiers or workers, or whose pool cannot write its
        evictions to the host.
        """
        if engine.kv_groups is not None and (self.host_blocks or self.workers):
            raise InputError(
                "--kv-groups: not simulated with tiers or prefill and decode workers; expected one of the two"
            )
        if self.host_blocks and self.tier_write == "evict" and parse_evict(engine.evict).policy != VLLM:
            raise InputError(f"--evict: {engine.evict}; expected vllm beside --tier-write evict")
        if self.tensor_parallel == 1 or "num_gpu_blocks" in settings:
            return {}
        return {"num_gpu_blocks": engine.usable_blocks * self.tensor_parallel + 1}

    def model(self, model: Model) -> Model:
        """Return the latency model of an engine of this many GPUs: work in a step is divided, its constants stay."""
        if self.tensor_parallel == 1:
            return model
        gpus = self.tensor_parallel
        factor = (1.0 + self.tensor_parallel_overhead * (gpus - 1)) / gpus
        divided = np.array([factor if name in _WORK else 1.0 for name in model.parameters])
        parameters = {
            name: Parameter(value=known.value * own, unit=known.unit)
            for (name, known), own in zip(model.parameters.items(), divided.tolist(), strict=True)
        }
        draws = (np.array(model.draws) * divided).tolist() if model.draws else []
        return msgspec.structs.replace(model, parameters=parameters, draws=draws)

    def meta(self) -> dict[str, Any]:
        """Return what a predicted trace's header tells of this; empty: the captured deployment."""
        usual = asdict(Deployment())
        told = {name: value for name, value in asdict(self).items() if value != usual[name]}
        said = list(self.assumptions())
        return {"deployment": told, "assumptions": said} if said else {}

    def assumptions(self) -> Iterator[str]:
        """Yield what a result with this layout assumes and no capture can confirm."""
        if self.host_blocks:
            yield (
                f"host memory: {self.host_gb_per_s:g} GB/s each way and {self.host_latency_ms:g} ms a transfer, one "
                f"after another; copies slow no step; {self.kv_bytes_per_token:,} bytes of KV a token"
            )
            yield "host memory evicts the least recently used block, the deepest of a prompt first, as vLLM's LRU"
        if self.disk_blocks:
            yield f"disk: {self.disk_gb_per_s:g} GB/s each way and {self.disk_latency_ms:g} ms a transfer"
        if self.shared_tiers:
            yield "a shared memory answers all engines at once: only each engine's own link is a limit"
        if self.prefill_workers:
            yield (
                f"KV of a prompt goes to its decode worker at {self.kv_link_gb_per_s:g} GB/s after "
                f"{self.kv_link_latency_ms:g} ms, one prompt after another; a prefill worker frees it at once"
            )
            yield "the first token comes from the decode worker, which computes the prompt's last token again"
        if self.tensor_parallel > 1:
            yield (
                f"{self.tensor_parallel} times the GPUs: a step's work takes (1 + {self.tensor_parallel_overhead:g} × "
                f"{self.tensor_parallel - 1}) / {self.tensor_parallel} of its time, its constants as long as before; "
                "the pool is as many times as large"
            )


_WORK = frozenset(term.name for term in STEP_TERMS if term.work in ("prefill", "decode"))


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str, str], int]:
    """Return a reader of whole numbers in a range."""

    def read(flag: str, word: str) -> int:
        try:
            found = int(word)
        except ValueError:
            found = least - 1
        if not least <= found <= most:
            raise InputError(f"{flag}: {word!r}; expected a whole number from {least} to {most}")
        return found

    return read


def positive(flag: str, word: str) -> float:
    """Read a number above 0."""
    try:
        found = float(word)
    except ValueError:
        found = 0.0
    if not 0.0 < found < float("inf"):
        raise InputError(f"{flag}: {word!r}; expected a number above 0, such as 2 or 0.5")
    return found


def one_of(*words: str) -> Callable[[str, str], str]:
    """Return a reader of one of these words."""

    def read(flag: str, word: str) -> str:
        if word not in words:
            raise InputError(f"{flag}: {word!r}; expected {' or '.join(words)}")
        return word

    return read


def seconds(flag: str, word: str) -> float:
    """Read a duration."""
    try:
        return duration(word)
    except argparse.ArgumentTypeError as error:
        raise InputError(f"{flag}: {error}") from None


def _duration_ms(flag: str, word: str) -> float:
    return 1e3 * seconds(flag, word)


def _share(flag: str, word: str) -> float:
    return 0.0 if word == "0" else positive(flag, word)


Reader = Callable[[str, str], Any]
"""Reads a flag's word, given the flag. Raises InputError."""
_SWITCH = one_of("on", "off")
DEPLOYMENT_FLAGS: dict[str, tuple[type, str, str, Reader, str]] = {
    "host-blocks": (int, "N", "KV blocks that each engine's host keeps behind the pool", whole(0), "host_blocks"),
    "disk-blocks": (int, "N", "KV blocks that a disk keeps behind the host's memory", whole(0), "disk_blocks"),
    "kv-bytes-per-token": (int, "N", "bytes of a token's KV over all layers", whole(1), "kv_bytes_per_token"),
    "host-gb-per-s": (float, "X", "GB/s to the host's memory, each way (default 25)", positive, "host_gb_per_s"),
    "host-latency": (str, "TIME", "time of a transfer (default 0.05ms)", _duration_ms, "host_latency_ms"),
    "disk-gb-per-s": (float, "X", "GB/s of the disk, each way (default 3)", positive, "disk_gb_per_s"),
    "disk-latency": (str, "TIME", "time of a transfer (default 0.5ms)", _duration_ms, "disk_latency_ms"),
    "tier-write": (
        str,
        "WHEN",
        "blocks go to the host when their prompt is computed (through, default) or when the pool evicts them (evict)",
        one_of(*get_args(Write)),
        "tier_write",
    ),
    "tier-load": (
        str,
        "HOW",
        "a request waits for its blocks while others run (beside, the default), or runs at once, in a step at least as "
        "long as the transfer (layerwise)",
        one_of(*get_args(Load)),
        "tier_load",
    ),
    "prefetch": (bool, "", "read from the disk when a request comes, not when it is admitted", _SWITCH, "prefetch"),
    "shared-tiers": (bool, "", "one host memory and disk for all engines of a fleet", _SWITCH, "shared_tiers"),
    "prefill-workers": (int, "N", "engines that only compute prompts", whole(0, MOST_WORKERS), "prefill_workers"),
    "decode-workers": (int, "N", "engines that only generate", whole(0, MOST_WORKERS), "decode_workers"),
    "kv-link-gb-per-s": (float, "X", "GB/s to each decode worker (default 25)", positive, "kv_link_gb_per_s"),
    "kv-link-latency": (str, "TIME", "time of a transfer (default 1ms)", _duration_ms, "kv_link_latency_ms"),
    "tensor-parallel": (
        int,
        "N",
        "GPUs, as a multiple of the captured engine's (default 1)",
        whole(1, MOST_WORKERS),
        "tensor_parallel",
    ),
    "tensor-parallel-overhead": (
        float,
        "X",
        "communication for each further GPU, as a share of the work (default 0.1)",
        _share,
        "tensor_parallel_overhead",
    ),
}
"""By flag: kind and metavar of its value, help, reader, field of ``Deployment``."""


_TIERS, _WORKERS = ("host-blocks",), ("prefill-workers", "decode-workers")
NEEDED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("host-gb-per-s", "host-latency", "tier-write", "tier-load"), _TIERS),
    **dict.fromkeys(("disk-gb-per-s", "disk-latency", "prefetch"), ("disk-blocks",)),
    **dict.fromkeys(("kv-link-gb-per-s", "kv-link-latency"), _WORKERS),
    "kv-bytes-per-token": _TIERS + _WORKERS,
    "tensor-parallel-overhead": ("tensor-parallel",),
}
"""By flag: those of which it needs one to have an effect."""


def refuse_alone(given: Collection[str]) -> None:
    """Raise InputError for a flag of a deployment beside none of those that it needs."""
    for name, needed in NEEDED.items():
        if name in given and not any(one in given for one in needed):
            raise InputError(f"--{name}: without {' or '.join(f'--{one}' for one in needed)}; expected both")


def add_deployment_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of a deployment."""
    group = parser.add_argument_group("deployment", "memory behind the pool, workers, GPUs (docs/capacity.md)")
    for name, (kind, metavar, said, _, _) in DEPLOYMENT_FLAGS.items():
        if kind is bool:
            group.add_argument(f"--{name}", action="store_true", help=said)
        else:
            group.add_argument(f"--{name}", metavar=metavar, help=said)


def deployment_of(arguments: argparse.Namespace) -> Deployment:
    """Return the deployment that flags ask for. Raises InputError."""
    found: dict[str, Any] = {}
    names: set[str] = set()
    for name, (kind, _, _, read, field) in DEPLOYMENT_FLAGS.items():
        given = getattr(arguments, name.replace("-", "_"))
        if given not in (None, False):
            found[field] = True if kind is bool else read(f"--{name}", given)
            names.add(name)
    refuse_alone(names)
    return Deployment(**found)
