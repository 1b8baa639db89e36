"""Settings of a loadgen run, checked before the first request."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loadgen.core.lengths import UNBOUNDED, LengthDistribution
from loadgen.core.settings import RunSettings, check_positive
from loadgen.datasets import DATASETS, RANDOM
from loadgen.text.api_messages import Api
from tracefile.records.errors import InputError

Pattern = Literal["constant", "poisson", "series", "multiturn", "rollouts", "calibration"]

CLOSED_PATTERNS: tuple[Pattern, ...] = ("poisson", "multiturn", "rollouts")
"""Patterns that are a closed loop without --rate."""
CLOSED_PARALLEL = 4
CLOSED_ROUNDS = 8
"""Default sessions for each of --parallel, if no flag bounds a closed loop."""
SINGLE_TURN = LengthDistribution(1, 1)
USUAL_PROMPT = LengthDistribution(256, 256)
USUAL_GROUP = 8
"""Sessions of a group with ``--pattern rollouts``."""

STAGED_PROMPT = LengthDistribution(64, 10_000)
"""Prompt tokens of ``--pattern calibration``, shortest to longest."""
STAGED_PARALLEL = 8
STAGED_ROUNDS = 3
MOST_GROUPED = 1 << 14
"""Maximum sessions of a group: a thousand groups are planned at once."""
MOST_RATE = 1e6
LEAST_RANGE = 8
"""Minimum ratio of the longest to the shortest prompt, so that prefill costs can be fitted over size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig(RunSettings):
    """Settings of a load: content (dataset, tokens, prefixes, turns), arrivals (pattern, rate, bounds), target."""

    api: Api = "completions"
    pattern: Pattern = "poisson"
    rate: float | None = None
    """Sessions a second; null: closed loop, or the pattern decides."""
    group_size: int = 1
    """Sessions with the same first prompt; ``rate`` and ``number`` count these groups."""
    rate_series: tuple[tuple[float, float], ...] = ()
    """(seconds, rate) in order of time; each rate holds until the next."""
    duration_s: float | None = None
    """No session starts later. Null: until ``number``, or the end of the pattern."""
    number: int | None = None
    """Sessions; null: until the time is over, or one pass over the dataset."""
    parallel: int | None = None
    """Limit of requests in flight, in a closed loop also of open sessions; null: no limit."""
    seed: int = 0
    nonce: str | None = None
    """Second seed of prompt tokens, not of lengths and times; null: tokens follow from ``seed`` alone."""
    dataset: str = RANDOM
    dataset_path: Path | None = None
    prompt_tokens: LengthDistribution = USUAL_PROMPT
    """New tokens of each turn, without the shared prefix."""
    output_tokens: LengthDistribution | None = None
    """Null: the dataset's, else 16."""
    prefix_count: int = 0
    prefix_tokens: int = 0
    turns: LengthDistribution | None = None
    """Turns of a random session, null: 1. In a dataset, shorter sessions are skipped, longer cut; null: unchanged."""
    think_s: LengthDistribution | None = None
    """Think time from a response's end to the next send; null: the dataset's, else 0."""

    def __post_init__(self) -> None:
        RunSettings.__post_init__(self)
        _check_numbers(self)
        _check_pattern(self)
        _check_staged(self)
        _check_bounds(self)
        _check_dataset(self)

    @property
    def open_loop(self) -> bool:
        """True if sessions arrive at planned times, independent of response latency."""
        return self.rate is not None or self.pattern == "series"

    @property
    def tokens_from(self) -> int:
        """Seed of prompt tokens."""
        if self.nonce is None:
            return self.seed
        return int.from_bytes(hashlib.blake2b(f"{self.seed} {self.nonce}".encode(), digest_size=8).digest(), "little")

    @property
    def has_texts(self) -> bool:
        """True if texts of a dataset are sent."""
        return self.dataset_path is not None and DATASETS[self.dataset].has_texts

    @property
    def arrivals(self) -> str:
        """Name of the pattern, or of the closed loop."""
        if self.open_loop or self.pattern not in CLOSED_PATTERNS:
            return self.pattern
        return "closed loop, rollouts" if self.pattern == "rollouts" else "closed loop"

    def words(self) -> list[str]:
        """Return the parts of the start line that describe the load."""
        words = [f"{self.arrivals}{'' if self.rate is None else f' {self.rate:g}/s'}"]
        words += [] if self.ends_s is None else [f"for {self.ends_s:g} s"]
        groups = "" if self.group_size == 1 else f"groups of {self.group_size} "
        words += [] if self.number is None else [f"{self.number} {groups}sessions"]
        words += [] if self.parallel is None else [f"at most {self.parallel} in flight"]
        nonce = [] if self.nonce is None else [f"nonce {self.nonce}"]
        return [*words, *self.fields.words(), f"seed {self.seed}", *nonce]

    @property
    def ends_s(self) -> float | None:
        """End of the run in seconds; null: ``number`` or the dataset ends the run."""
        if self.pattern == "series" and self.duration_s is None and self.number is None:
            return self.rate_series[-1][0]
        return self.duration_s

    @property
    def once(self) -> bool:
        return self.dataset_path is not None and self.number is None and self.ends_s is None

    @property
    def single_turns(self) -> bool:
        turns = self.turns or (None if self.dataset_path is not None else SINGLE_TURN)
        return turns is not None and turns.high == 1

    @property
    def most_workers(self) -> int | None:
        """Maximum workers with sessions to send; null: no limit."""
        if self.pattern == "calibration":
            return 1
        limit = None if self.open_loop else self.parallel
        return min((bound for bound in (self.number, limit) if bound is not None), default=None)


def _check_numbers(config: LoadConfig) -> None:
    for flag, value in {
        "--rate": config.rate,
        "--duration": config.duration_s,
        "--number": config.number,
        "--parallel": config.parallel,
    }.items():
        check_positive(flag, value)
    if (config.rate or 0.0) > MOST_RATE:
        raise InputError(f"--rate: {config.rate:g}; expected at most {MOST_RATE:,.0f} a second")
    if config.nonce == "":
        raise InputError("--nonce: empty; expected a word")
    if not 1 <= config.group_size <= MOST_GROUPED:
        raise InputError(f"--group-size: {config.group_size}; expected 1 to {MOST_GROUPED}")
    if config.prefix_count < 0 or not 0 <= config.prefix_tokens <= UNBOUNDED:
        raise InputError(f"--prefix-count, --prefix-tokens: expected 0 or more, tokens at most {UNBOUNDED:,.0f}")
    if (config.prefix_count > 0) != (config.prefix_tokens > 0):
        raise InputError(
            f"--prefix-count, --prefix-tokens: {config.prefix_count} prefixes of {config.prefix_tokens} tokens; "
            "expected both above 0, or neither"
        )


def _check_pattern(config: LoadConfig) -> None:
    is_series = config.pattern == "series"
    if is_series != bool(config.rate_series):
        raise InputError("--rate-series: expected it with --pattern series, and only there")
    if is_series:
        _refuse("--rate", config.rate, "--pattern series, which sets the rates")


def _check_staged(config: LoadConfig) -> None:
    """Refuse flags that change ``--pattern calibration``: see ``loadgen.plan.stages``."""
    if config.pattern != "calibration":
        return
    designed = "--pattern calibration, which sets the load"
    for flag, value in {
        "--rate": config.rate,
        "--think": config.think_s,
        "--turns": config.turns,
        "--dataset": config.dataset_path,
        "--group-size": None if config.group_size == 1 else config.group_size,
        "--prefix-count": config.prefix_count or None,
    }.items():
        _refuse(flag, value, designed)
    prompts = config.prompt_tokens
    if prompts.shape != "uniform" or prompts.high < LEAST_RANGE * prompts.low:
        raise InputError(
            f"--prompt-tokens: {prompts}; expected LOW:HIGH with --pattern calibration, HIGH at least 8 LOW"
        )
    if config.parallel is None or config.parallel < 2:
        raise InputError("--parallel: expected 2 or more with --pattern calibration, which measures batches")
    if not config.fields.stream:
        raise InputError("--no-stream: with --pattern calibration, which measures ITL; expected streams")
    if config.ray is not None or config.procs not in (None, 1):
        raise InputError("--ray, --procs: with --pattern calibration; expected one local process")


def _check_bounds(config: LoadConfig) -> None:
    if config.pattern == "calibration":
        return
    if not config.open_loop and config.pattern not in CLOSED_PATTERNS:
        raise InputError(f"--rate: missing; expected sessions a second with --pattern {config.pattern}")
    if not config.open_loop and config.parallel is None:
        raise InputError("--rate: missing; expected sessions a second, or --parallel for a closed loop")
    if config.ends_s is None and config.number is None and config.dataset_path is None:
        raise InputError("--duration, --number: both missing; expected a bound of the run")


def _check_dataset(config: LoadConfig) -> None:
    name = config.dataset
    if config.dataset_path is None and name != RANDOM:
        raise InputError(f"--dataset: {name} without a file; expected {name}:PATH")
    if config.dataset_path is not None and config.turns is not None and config.turns.shape != "uniform":
        raise InputError(f"--turns: {config.turns} with --dataset {name}; expected MIN:MAX")
    if config.has_texts and config.api == "completions":
        raise InputError(f"--api: completions with --dataset {name}, which has texts; expected --api chat")
    if config.has_texts and config.prefix_count:
        raise InputError(f"--prefix-count: with --dataset {name}, which has its prefixes; expected neither")


def _refuse(flag: str, value: object, reason: str) -> None:
    if value is not None:
        raise InputError(f"{flag}: {value} with {reason}")
