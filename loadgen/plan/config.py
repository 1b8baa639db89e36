"""Settings of a loadgen run, checked before anything is sent."""

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
"""Patterns that without a rate are a closed loop."""
CLOSED_PARALLEL = 4
CLOSED_ROUNDS = 8
"""Sessions for each one at a time, where no flag bounds a closed loop."""
SINGLE_TURN = LengthDistribution(1, 1)
USUAL_PROMPT = LengthDistribution(256, 256)
USUAL_GROUP = 8
"""Sessions of a group with ``--pattern rollouts``."""

STAGED_PROMPT = LengthDistribution(64, 10_000)
"""Of ``--pattern calibration``, shortest to longest."""
STAGED_PARALLEL = 8
STAGED_ROUNDS = 3
MOST_GROUPED = 1 << 14
"""Sessions of a group: a thousand groups are planned at once."""
MOST_RATE = 1e6
LEAST_RANGE = 8
"""Least ratio of the longest to the shortest prompt, so that sizes tell costs apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig(RunSettings):
    """Settings of a run: content (dataset, lengths, prefixes, turns), times (pattern, rate, bounds), target, trace."""

    api: Api = "completions"
    pattern: Pattern = "poisson"
    rate: float | None = None
    """Sessions a second; null: closed loop, or the pattern decides."""
    group_size: int = 1
    """Sessions that start from one first prompt; ``rate`` and ``number`` count these groups."""
    rate_series: tuple[tuple[float, float], ...] = ()
    """(seconds, rate) in order of time; each rate holds until the next."""
    duration_s: float | None = None
    """No session starts after it. Null: until ``number``, or the pattern's end."""
    """End of open sessions at ``ends_s``."""
    number: int | None = None
    """Sessions; null: until the time is over, or once through the dataset."""
    parallel: int | None = None
    """Most requests in flight, in a closed loop also most open sessions; null: no limit."""
    seed: int = 0
    nonce: str | None = None
    """Second seed of prompts' tokens, not of lengths and times; null: tokens follow from ``seed`` alone."""
    dataset: str = RANDOM
    dataset_path: Path | None = None
    prompt_tokens: LengthDistribution = USUAL_PROMPT
    """New tokens of each turn, without the shared prefix."""
    output_tokens: LengthDistribution | None = None
    """Null: the dataset's, else 16."""
    prefix_count: int = 0
    prefix_tokens: int = 0
    turns: LengthDistribution | None = None
    """Of a random session, null: 1. Of a dataset: shorter sessions are skipped, longer ones cut; null: all as they are.
    """
    think_s: LengthDistribution | None = None
    """From a response's end to the next send; null: the dataset's, else 0."""

    def __post_init__(self) -> None:
        RunSettings.__post_init__(self)
        _check_numbers(self)
        _check_pattern(self)
        _check_staged(self)
        _check_bounds(self)
        _check_dataset(self)

    @property
    def open_loop(self) -> bool:
        """True if sessions arrive at their own times, not when others end."""
        return self.rate is not None or self.pattern == "series"

    @property
    def tokens_from(self) -> int:
        """Seed of prompts' tokens."""
        if self.nonce is None:
            return self.seed
        return int.from_bytes(hashlib.blake2b(f"{self.seed} {self.nonce}".encode(), digest_size=8).digest(), "little")

    @property
    def has_texts(self) -> bool:
        """True if a dataset's texts are sent."""
        return self.dataset_path is not None and DATASETS[self.dataset].has_texts

    @property
    def arrivals(self) -> str:
        """The pattern's name; a closed loop has no arrivals of its own."""
        if self.open_loop or self.pattern not in CLOSED_PATTERNS:
            return self.pattern
        return "closed loop, rollouts" if self.pattern == "rollouts" else "closed loop"

    def words(self) -> list[str]:
        """Return the parts of a start line about the load."""
        words = [f"{self.arrivals}{'' if self.rate is None else f' {self.rate:g}/s'}"]
        words += [] if self.ends_s is None else [f"for {self.ends_s:g} s"]
        groups = "" if self.group_size == 1 else f"groups of {self.group_size} "
        words += [] if self.number is None else [f"{self.number} {groups}sessions"]
        words += [] if self.parallel is None else [f"at most {self.parallel} in flight"]
        nonce = [] if self.nonce is None else [f"nonce {self.nonce}"]
        return [*words, *self.fields.words(), f"seed {self.seed}", *nonce]

    @property
    def ends_s(self) -> float | None:
        """Seconds; null: ``number`` or the dataset ends the run."""
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
        """Most workers of which each has sessions, now and then all at once; null: any number."""
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
        _refuse("--rate", config.rate, "--pattern series, which has rates of its own")


def _check_staged(config: LoadConfig) -> None:
    """Refuse flags that change ``--pattern calibration``: see ``loadgen.plan.stages``."""
    if config.pattern != "calibration":
        return
    designed = "--pattern calibration, which says by itself what comes when"
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
        raise InputError("--parallel: expected 2 or more with --pattern calibration: it measures what several cost")
    if not config.fields.stream:
        raise InputError("--no-stream: with --pattern calibration, which times every token; expected streams")
    if config.ray is not None or config.procs not in (None, 1):
        raise InputError("--ray, --procs: with --pattern calibration, which one process sends")


def _check_bounds(config: LoadConfig) -> None:
    if config.pattern == "calibration":
        return
    if not config.open_loop and config.pattern not in CLOSED_PATTERNS:
        raise InputError(f"--rate: missing; expected arrivals a second with --pattern {config.pattern}")
    if not config.open_loop and config.parallel is None:
        raise InputError("--rate: missing; expected arrivals a second, or --parallel for a closed loop")
    if config.ends_s is None and config.number is None and config.dataset_path is None:
        raise InputError("--duration, --number: both missing; expected a bound, or the run would never end")


def _check_dataset(config: LoadConfig) -> None:
    name = config.dataset
    if config.dataset_path is None and name != RANDOM:
        raise InputError(f"--dataset: {name} without a file; expected {name}:PATH")
    if config.dataset_path is not None and config.turns is not None and config.turns.shape != "uniform":
        raise InputError(f"--turns: {config.turns} with --dataset {name}; expected MIN:MAX")
    if config.has_texts and config.api == "completions":
        raise InputError(f"--api: completions with --dataset {name}, which is texts; expected --api chat")
    if config.has_texts and config.prefix_count:
        raise InputError(f"--prefix-count: with --dataset {name}, which says all there is; expected neither")


def _refuse(flag: str, value: object, reason: str) -> None:
    if value is not None:
        raise InputError(f"{flag}: {value} with {reason}")
