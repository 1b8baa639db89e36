"""Layout of a deployment, beyond the captured engine: GPUs; and its assumptions.

Nothing in a capture tells of these, so that each brings assumptions: a result carries their list.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from sim.latency.modelfile import Model, Parameter
from sim.latency.terms import STEP_TERMS
from sim.vllm.config import EngineConfig
from tracefile.records.errors import InputError

MOST_WORKERS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Layout of engines and memory. Raises InputError naming the flag of what cannot be."""

    tensor_parallel: int = 1
    """GPUs of an engine, as a multiple of the captured engine's."""
    tensor_parallel_overhead: float = 0.1
    """Communication for each further GPU, as a share of a step's work on one."""

    @property
    def gpus(self) -> int:
        """GPUs of a replica, as a multiple of the captured engine's."""
        return self.tensor_parallel

    def engine(self, engine: EngineConfig, settings: Any) -> dict[str, Any]:
        """Return settings of an engine of this many GPUs, besides those asked for: the pool grows with them."""
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

    def assumptions(self) -> Iterator[str]:
        """Yield what a result with this layout assumes and no capture can confirm."""
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


def _share(flag: str, word: str) -> float:
    return 0.0 if word == "0" else positive(flag, word)


Reader = Callable[[str, str], Any]
"""Reads a flag's word, given the flag. Raises InputError."""
DEPLOYMENT_FLAGS: dict[str, tuple[type, str, str, Reader]] = {
    "tensor-parallel": (int, "N", "GPUs, as a multiple of the captured engine's", whole(1, MOST_WORKERS)),
    "tensor-parallel-overhead": (
        float,
        "X",
        "communication for each further GPU, as a share of the work (default 0.1)",
        _share,
    ),
}
"""By flag, after whose name a field of ``Deployment`` is called: kind and metavar of its value, help, reader."""
