"""The matrix as data: which loads are captured, in which ways, on which models, in the order of what they are worth.

The model of step times is fitted on the calibration loads alone. Every other load is a gate that no fit ever saw.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Way = Literal["warm", "again", "again-2", "replayed", "cold-replayed", "small", "uncached", "uncached-again"]
"""How a load meets the engine: from an emptied cache; the same once or twice more (A/A); its capture replayed, or
replayed with a nonce for every request; into a pool too small for it; with prefix caching off, once or twice."""
REPLAY_FLAGS: dict[Way, tuple[str, ...]] = {"replayed": ("--reset-cache",), "cold-replayed": ("--cold-prompts",)}

_SESSION = "--pattern multiturn --turns 5 --think 0.2s:1.0s --prefix-count 2 --prompt-tokens 64:256"
_SINGLE = "--prefix-count 4 --prefix-tokens 2000 --prompt-tokens 32:500 --output-tokens 8:64"
_MOMENT_S = 0.01


def bursts(size: int, every_s: float = 8.0, number: int = 6) -> str:
    """Flags of ``number`` bursts of about ``size`` requests at once."""
    starts = [every_s * burst for burst in range(number)]
    rates = [f"{start:g}:{size / _MOMENT_S:g},{start + _MOMENT_S:g}:0" for start in starts]
    return f"--pattern series --rate-series {','.join([*rates, f'{every_s * number:g}:0'])}"


def staircase(low: float, high: float, steps: int = 5, step_s: float = 8.0) -> str:
    """Flags of steps of equally spaced rates."""
    rates = [f"{step_s * step:g}:{low + step * (high - low) / (steps - 1):g}" for step in range(steps)]
    return f"--pattern series --rate-series {','.join([*rates, f'{step_s * steps:g}:0'])}"


# 128 hidden × 2 layers, float32: a cold prompt of 10,000 tokens takes 2 to 2.6 s on one core, one of 2,250 about 0.15.
LOADS_128X2 = {
    "calibration-1": "--pattern calibration --parallel 16 --seed 1",
    "calibration-2": "--pattern calibration --parallel 16 --seed 2",
    "calibration-3": "--pattern calibration --parallel 16 --seed 3",
    "calibration-4": "--pattern calibration --parallel 16 --seed 4",
    # As many answers at once as the engine takes.
    "calibration-5": "--pattern calibration --parallel 32 --seed 5",
    # Warm at a fifth of what the engine can do; cold at more than three times that.
    "session-fast": f"{_SESSION} --prefix-tokens 10000 --output-tokens 16:64 --rate 0.3 --duration 90s --seed 51",
    # The same sessions where a cold cache keeps up as well: six tenths of the engine.
    "session-slow": f"{_SESSION} --prefix-tokens 10000 --output-tokens 16:64 --rate 0.05 --number 8 --seed 52",
    "session-short": f"{_SESSION} --prefix-tokens 3000 --output-tokens 16:64 --rate 0.3 --duration 90s --seed 53",
    "poisson-slow": f"--pattern poisson {_SINGLE} --rate 1.5 --duration 75s --seed 54",
    "poisson-fast": f"--pattern poisson {_SINGLE} --rate 4 --duration 40s --seed 55",
    "staircase": f"{staircase(2, 20)} {_SINGLE} --seed 56",
    "burst": f"{bursts(20)} {_SINGLE} --seed 57",
}
# 256 × 4 takes three to four times as long, so its loads are as much slower or shorter; calibrations have one round.
LOADS_256X4 = {
    "calibration-1": "--pattern calibration --number 63 --seed 4",
    "calibration-2": "--pattern calibration --number 63 --seed 5",
    "calibration-3": "--pattern calibration --number 63 --seed 6",
    "calibration-4": "--pattern calibration --parallel 32 --number 183 --seed 7",
    "session-fast": f"{_SESSION} --prefix-tokens 5000 --output-tokens 16:64 --rate 0.15 --number 16 --seed 61",
    "session-slow": f"{_SESSION} --prefix-tokens 5000 --output-tokens 16:64 --rate 0.05 --number 8 --seed 66",
    "session-short": f"{_SESSION} --prefix-tokens 2000 --output-tokens 16:64 --rate 0.12 --number 12 --seed 62",
    "poisson-slow": f"--pattern poisson {_SINGLE} --rate 0.6 --number 50 --seed 63",
    "poisson-fast": f"--pattern poisson {_SINGLE} --rate 1.4 --number 60 --seed 64",
    "staircase": f"{staircase(0.6, 6)} {_SINGLE} --seed 65",
    "burst": f"{bursts(8)} {_SINGLE} --seed 67",
}


@dataclass(frozen=True, slots=True)
class Rates:
    """Sizes of a round's loads: as the engine can take them, warm and cold."""

    calibration: str = "--parallel 16"
    sessions: float = 0.3
    """A second."""
    sessions_s: int = 90
    singles: float = 3.0
    """Requests a second."""
    single_requests: int = 330
    burst: int = 20
    """Requests at once, every 8 s."""


def one_round(seed: int, rates: Rates) -> dict[str, str]:
    """Loads of one more round, all with seeds of their own: three calibrations, four gates."""
    long, short = (f"{_SESSION} --prefix-tokens {size} --output-tokens 16:64" for size in (10000, 3000))
    paced = f"--rate {rates.sessions:g} --duration {rates.sessions_s}s"
    singles = f"--rate {rates.singles:g} --number {rates.single_requests}"
    return {
        **{f"calibration-{k}": f"--pattern calibration {rates.calibration} --seed {seed + k}" for k in (1, 2, 3)},
        "session-fast": f"{long} {paced} --seed {seed + 4}",
        "session-short": f"{short} {paced} --seed {seed + 5}",
        # 330 requests, warm and cold below saturation: the one p99 here that is not the slowest few.
        "poisson-long": f"--pattern poisson {_SINGLE} {singles} --seed {seed + 6}",
        "burst": f"{bursts(rates.burst)} {_SINGLE} --seed {seed + 7}",
    }


# The later rounds were made after the model's shape was decided.
LOADS = {"128x2": LOADS_128X2, "256x4": LOADS_256X4}
LOADS |= {f"128x2-{name}": one_round(seed, Rates()) for name, seed in (("second", 100), ("third", 200))}
# SGLang's attention on a CPU takes three times as long, and as long behind a cached prefix as behind none.
_SGLANG = Rates(
    calibration="--prompt-tokens 64:4096 --parallel 16 --number 128",
    sessions=0.15,
    sessions_s=75,
    singles=1.2,
    single_requests=110,
    burst=8,
)
LOADS["128x2-sglang"] = one_round(400, _SGLANG)
del LOADS["128x2-sglang"]["session-fast"]
SERVERS: dict[str, Literal["sglang"]] = {"128x2-sglang": "sglang"}
"""Real engines that are no vLLM, by the rounds made on them."""
SGLANG_KV_TOKENS, SGLANG_STEP_TOKENS = 200_000, 8192
SCHEDULERS: dict[str, tuple[str, ...]] = {
    "128x2-sglang": (
        *("--max-num-seqs", "32", "--max-num-batched-tokens", str(SGLANG_STEP_TOKENS)),
        *("--num-gpu-blocks", str(SGLANG_KV_TOKENS // 32 + 1), "--no-async-scheduling"),
    )
}
"""Flags of a model's scheduler, where they are not ``SCHEDULER``."""
# vLLM tells neither; scripts/vllm_engine.py starts it so.
SCHEDULER = ("--max-num-seqs", "32", "--max-num-batched-tokens", "2048")

SMALL_POOL_BLOCKS = {"128x2": 700, "256x4": 520}
"""Room for both prefixes of the long sessions (626 and 314 blocks of 32 tokens) and for two or three conversations, or
six: the engine refuses fewer blocks than its longest request takes (513)."""

# Each line is one engine's work; a line is a restart, which takes about a minute.
ORDER: dict[str, tuple[str, ...]] = {
    "128x2": (
        "warm: calibration-1 calibration-2 calibration-3 session-fast session-short poisson-slow poisson-fast",
        "uncached: session-fast session-short poisson-slow poisson-fast",
        "warm: staircase burst session-slow",
        "again: session-fast session-short poisson-slow poisson-fast",
        "replayed: session-fast",
        "cold-replayed: session-fast session-short poisson-slow poisson-fast",
        "small: session-fast session-slow",
        "uncached: session-slow burst staircase",
        "again: staircase burst session-slow",
        "warm: calibration-4 calibration-5",
        "cold-replayed: burst session-slow staircase",
    ),
    "256x4": (
        "warm: calibration-1 calibration-2 session-fast poisson-slow session-short",
        "warm: session-slow poisson-fast staircase burst",
        "cold-replayed: session-fast session-slow session-short poisson-slow poisson-fast staircase burst",
        "uncached: session-fast session-slow session-short poisson-slow poisson-fast staircase burst",
        "small: session-fast session-slow",
        "again: session-fast session-slow session-short poisson-slow poisson-fast staircase burst",
        "replayed: session-fast",
        "warm: calibration-3 calibration-4",
    ),
}
# A calibration before, between and after the gates, so that the host's drift within the round is theirs, too.
_ROUND = (
    "warm: calibration-1 session-short poisson-long burst session-fast",
    "again: session-short poisson-long burst session-fast",
    "warm: calibration-2",
    "again-2: session-short poisson-long burst session-fast",
    "cold-replayed: session-short poisson-long burst",
    "uncached: session-short poisson-long burst",
    "uncached-again: session-short poisson-long burst",
    "warm: calibration-3",
)
ORDER |= dict.fromkeys(("128x2-second", "128x2-third"), _ROUND)
ORDER["128x2-sglang"] = (
    "warm: calibration-1 session-short poisson-long burst",
    "cold-replayed: session-short poisson-long burst",
    "warm: calibration-2",
    "again: session-short poisson-long burst",
    "warm: calibration-3",
    "uncached: session-short poisson-long burst",
)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of the engine under study; captures of equal settings share one start."""

    hidden: int
    layers: int
    blocks: int | None = None
    """KV blocks, the null block included. Null: what fits in the engine's memory, more than any load asks for."""
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class Capture:
    """Trace of the matrix."""

    shape: str
    """The model, hidden × layers, and the round if it is a later one: ``128x2``, ``128x2-second``."""
    load: str
    way: Way = "warm"

    @property
    def name(self) -> str:
        """The trace's name within its model's folder."""
        return self.load if self.way == "warm" else f"{self.load}-{self.way}"

    @property
    def engine(self) -> EngineSettings:
        """The engine that it needs."""
        hidden, layers = map(int, self.shape.partition("-")[0].split("x"))
        blocks = SMALL_POOL_BLOCKS[self.shape] if self.way == "small" else None
        return EngineSettings(hidden, layers, blocks, prefix_caching=not self.way.startswith("uncached"))

    @property
    def is_replay(self) -> bool:
        """Made by replaying the warm capture, not by sending the load."""
        return self.way in REPLAY_FLAGS

    @property
    def is_calibration(self) -> bool:
        """Fitted on, and therefore never judged by."""
        return self.load.startswith("calibration")

    @property
    def has_sessions(self) -> bool:
        """Return whether its requests wait for one another."""
        return self.load.startswith("session")


def captures(shapes: Sequence[str] | None = None) -> list[Capture]:
    """The whole matrix of these models, the most valuable first. Null: of all."""
    found: list[Capture] = []
    for shape in LOADS if shapes is None else shapes:
        for line in ORDER[shape]:
            way, _, loads = line.partition(": ")
            found += [Capture(shape, load, _way(way)) for load in loads.split()]
    return found


def _way(name: str) -> Way:
    return next(way for way in get_args(Way) if way == name)
