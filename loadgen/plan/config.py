"""Settings of a loadgen run, checked before anything is sent."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engines.recognition import AUTO
from loadgen.core.bodyfields import PLAIN, BodyFields
from loadgen.core.lengths import UNBOUNDED, LengthDistribution
from loadgen.core.request import SESSION_HEADER
from loadgen.core.runflags import ONE_PROCESS, RunFlags
from loadgen.core.vocabulary import ORDINARY, Vocabulary
from loadgen.datasets import DATASETS, RANDOM, Dataset
from loadgen.text.spoken import Api
from tracefile import InputError

Pattern = Literal[
    "constant", "poisson", "gamma", "burst", "staircase", "ramp", "series", "multiturn", "rollouts", "calibration"
]
Spacing = Literal["poisson", "constant", "gamma"]

CLOSED_PATTERNS: tuple[Pattern, ...] = ("poisson", "multiturn", "rollouts")
"""Patterns that without a rate are a closed loop."""
CLOSED_PARALLEL = 4
CLOSED_ROUNDS = 8
"""Sessions for each one at a time, where no flag bounds a closed loop."""
CHANGING: tuple[Pattern, ...] = ("staircase", "ramp", "series")
ONE_TURN = LengthDistribution(1, 1)
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
class LoadConfig:
    """Settings of a run: content (dataset, lengths, prefixes, turns), times (pattern, rate, bounds), target, trace."""

    url: str
    trace: Path
    model: str = "auto"
    dialect: str = AUTO
    """Engine of the request fields; ``auto``: ask the engine."""
    api: Api = "completions"
    tokenizer: str = "auto"
    """Path, ``engine`` or ``none``; ``auto``: the engine's if it has /tokenize."""
    chat_template: bool = False
    """Apply the chat template here and send the ids as completions."""
    pattern: Pattern = "poisson"
    rate: float | None = None
    """Sessions a second; null: closed loop, or the pattern decides."""
    rate_to: float | None = None
    burstiness: float | None = None
    """Shape of gamma-distributed gaps; null: no gamma."""
    spacing: Spacing | None = None
    """Gaps at a changing rate; null: poisson."""
    group_size: int = 1
    """Sessions that start from one first prompt; ``rate`` and ``number`` count these groups."""
    group_gap_s: LengthDistribution | None = None
    """Between starts of a group's sessions; null: they start together."""
    burst_size: int | None = None
    burst_every_s: float | None = None
    steps: int | None = None
    step_s: float | None = None
    rate_series: tuple[tuple[float, float], ...] = ()
    """(seconds, rate) in order of time."""
    rate_between: Literal["steps", "lines"] = "steps"
    """Keep each rate until the next row, or interpolate."""
    duration_s: float | None = None
    """No session starts after it. Null: until ``number``, or the pattern's end."""
    at_end: Literal["finish", "cancel"] = "finish"
    """End of open sessions at ``ends_s``."""
    number: int | None = None
    """Sessions; null: until the time is over, or once through the dataset."""
    parallel: int | None = None
    """Most requests in flight; null: no limit."""
    parallel_sessions: int | None = None
    """Most open sessions; null: no limit, or in a closed loop ``parallel``."""
    seed: int = 0
    nonce: str | None = None
    """Second seed of prompts' tokens, not of lengths and times; null: tokens follow from ``seed`` alone."""
    dataset: str = RANDOM
    dataset_path: Path | None = None
    dataset_offset: int = 0
    first_turn_tokens: LengthDistribution | None = None
    """First turn of a conversation cut out of texts; null: the texts' own turns."""
    subsequent_turn_tokens: LengthDistribution | None = None
    prompt_tokens: LengthDistribution = USUAL_PROMPT
    """New tokens of each turn, without the shared prefix."""
    output_tokens: LengthDistribution | None = None
    """Null: the dataset's, else 16."""
    prefix_count: int = 0
    prefix_tokens: int = 0
    turns: LengthDistribution = ONE_TURN
    min_turns: int | None = None
    max_turns: int | None = None
    think_s: LengthDistribution | None = None
    """From a response's end to the next send; null: the dataset's, else 0."""
    tool_latency_s: LengthDistribution | None = None
    """From a response's end to the turn with a tool's output; null: ``think_s``, else the dataset's."""
    tool_role: Literal["user", "tool"] = "user"
    fields: BodyFields = PLAIN
    """Fields of every body beside those of the plan."""
    session_headers: tuple[str, ...] = (SESSION_HEADER,)
    vocabulary: Vocabulary = ORDINARY
    timeout_s: float | None = 600.0
    overwrite: bool = False
    as_json: bool = False
    """Print the summary as one JSON object on stdout, its lines on stderr."""
    run: RunFlags = ONE_PROCESS

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_pattern(self)
        _check_staged(self)
        _check_bounds(self)
        _check_groups(self)
        _check_shape(self)
        _check_dataset(self)
        _check_text(self)

    @property
    def sends_ids(self) -> bool:
        """True if prompts are token ids without a template."""
        return self.api == "completions" and not self.chat_template

    @property
    def open_loop(self) -> bool:
        """True if sessions arrive at their own times, not when others end."""
        return self.rate is not None or self.pattern in ("burst", "series")

    @property
    def tokens_from(self) -> int:
        """Seed of prompts' tokens."""
        if self.nonce is None:
            return self.seed
        return int.from_bytes(hashlib.blake2b(f"{self.seed} {self.nonce}".encode(), digest_size=8).digest(), "little")

    @property
    def arrivals(self) -> str:
        """The pattern's name; a closed loop has no arrivals of its own."""
        if self.open_loop or self.pattern not in CLOSED_PATTERNS:
            return self.pattern
        return "closed loop, rollouts" if self.pattern == "rollouts" else "closed loop"

    def words(self) -> list[str]:
        """Return the parts of a start line about the load."""
        rate = "" if self.rate is None else f" {self.rate:g}{'' if self.rate_to is None else f':{self.rate_to:g}'}/s"
        words = [f"{self.arrivals}{rate}"]
        cancelled = ", then cancelled" if self.at_end == "cancel" else ""
        words += [] if self.ends_s is None else [f"for {self.ends_s:g} s{cancelled}"]
        groups = "" if self.group_size == 1 else f"groups of {self.group_size} "
        words += [] if self.number is None else [f"{self.number} {groups}sessions"]
        words += [] if self.requests_at_once is None else [f"at most {self.requests_at_once} in flight"]
        nonce = [] if self.nonce is None else [f"nonce {self.nonce}"]
        return [*words, *self.fields.words(), f"seed {self.seed}", *nonce]

    @property
    def ends_s(self) -> float | None:
        """Seconds; null: ``number`` or the dataset ends the run."""
        if self.pattern == "staircase" and self.steps is not None and self.step_s is not None:
            return self.steps * self.step_s
        if self.pattern == "series" and self.duration_s is None and self.number is None:
            return self.rate_series[-1][0]
        return self.duration_s

    @property
    def once(self) -> bool:
        return self.dataset_path is not None and self.number is None and self.ends_s is None

    @property
    def single_turns(self) -> bool:
        return self.max_turns == 1 if self.dataset_path is not None else self.turns.high == 1

    @property
    def sessions_at_once(self) -> int | None:
        """Null: any number. A closed loop without its own limit keeps one session for each slot."""
        if self.parallel_sessions is not None or self.open_loop:
            return self.parallel_sessions
        return self.parallel

    @property
    def most_shards(self) -> int | None:
        """Most shards of which each has sessions, now and then all at once; null: any number."""
        if self.pattern == "calibration":
            return 1
        return min((bound for bound in (self.number, self.sessions_at_once) if bound is not None), default=None)

    @property
    def requests_at_once(self) -> int | None:
        """Null: any number."""
        if self.open_loop or self.parallel is not None:
            return self.parallel
        return self.parallel_sessions


def _check_numbers(config: LoadConfig) -> None:
    _check_positive("--rate", config.rate)
    if max(config.rate or 0.0, config.rate_to or 0.0) > MOST_RATE:
        raise InputError(f"--rate: {config.rate:g}; expected at most {MOST_RATE:,.0f} a second")
    _check_positive("--duration", config.duration_s)
    _check_positive("--number", config.number)
    _check_positive("--parallel", config.parallel)
    _check_positive("--parallel-sessions", config.parallel_sessions)
    _check_positive("--timeout", config.timeout_s)
    _check_positive("--burst-size", config.burst_size)
    _check_positive("--burst-every", config.burst_every_s)
    _check_positive("--step-duration", config.step_s)
    _check_positive("--min-turns", config.min_turns)
    _check_positive("--max-turns", config.max_turns)
    if config.burstiness is not None and not config.burstiness > 0:
        raise InputError(f"--burstiness: {config.burstiness:g}; expected a number above 0")
    if config.steps is not None and config.steps < 2:
        raise InputError(f"--steps: {config.steps}; expected 2 or more")
    if config.rate_to is not None and not 0 <= config.rate_to < math.inf:
        raise InputError(f"--rate: to {config.rate_to:g}; expected 0 or more")
    if config.nonce == "":
        raise InputError("--nonce: empty; expected a word")
    if config.dataset_offset < 0:
        raise InputError(f"--dataset-offset: {config.dataset_offset}; expected 0 or more")


def _check_pattern(config: LoadConfig) -> None:
    pattern = config.pattern
    _only_with("--burst-size, --burst-every", config.burst_size or config.burst_every_s, pattern, "burst")
    _only_with("--steps, --step-duration", config.steps or config.step_s, pattern, "staircase")
    _only_with("--rate-series", config.rate_series, pattern, "series")
    _only_with("--rate-between", config.rate_between == "lines", pattern, "series")
    _only_with("--spacing", config.spacing, pattern, *CHANGING)
    _only_with("--rate A:B", config.rate_to is not None, pattern, "staircase", "ramp")
    if pattern in ("burst", "series"):
        _refuse("--rate", config.rate, f"--pattern {pattern}, which has rates of its own")
    if pattern == "burst" and (config.burst_size is None or config.burst_every_s is None):
        raise InputError("--burst-size, --burst-every: missing; expected both with --pattern burst")
    if pattern == "series" and not config.rate_series:
        raise InputError("--rate-series: missing; expected a file of seconds and rates with --pattern series")
    if pattern in ("staircase", "ramp") and config.rate_to is None:
        raise InputError(f"--rate: no range; expected A:B with --pattern {pattern}")
    if pattern == "staircase":
        _refuse("--duration", config.duration_s, "--pattern staircase, which lasts --steps times --step-duration")
        if config.steps is None or config.step_s is None:
            raise InputError("--steps, --step-duration: missing; expected both with --pattern staircase")
    if pattern == "ramp" and config.duration_s is None:
        raise InputError("--duration: missing; expected how long the ramp of --pattern ramp is")
    if (config.burstiness is not None) != (pattern == "gamma" or config.spacing == "gamma"):
        raise InputError("--burstiness: expected it with --pattern gamma or --spacing gamma, and only there")


def _check_staged(config: LoadConfig) -> None:
    """Refuse flags that change ``--pattern calibration``: see ``loadgen.plan.stages``."""
    if config.pattern != "calibration":
        return
    designed = "--pattern calibration, which says by itself what comes when"
    _refuse("--rate", config.rate, designed)
    _refuse("--parallel-sessions", config.parallel_sessions, f"{designed}; expected --parallel")
    _refuse("--think", config.think_s, designed)
    _refuse("--tool-latency", config.tool_latency_s, designed)
    _refuse("--group-size", None if config.group_size == 1 else config.group_size, designed)
    _refuse("--dataset", config.dataset_path, designed)
    for flag, value in (("--prefix-count", config.prefix_count), ("--dataset-offset", config.dataset_offset)):
        _refuse(flag, value or None, designed)
    _refuse("--turns", None if config.turns == ONE_TURN else config.turns, designed)
    prompts = config.prompt_tokens
    if prompts.shape != "uniform" or prompts.high < LEAST_RANGE * prompts.low:
        raise InputError(
            f"--prompt-tokens: {prompts}; expected LOW:HIGH with --pattern calibration, HIGH at least 8 LOW"
        )
    if config.parallel is None or config.parallel < 2:
        raise InputError("--parallel: expected 2 or more with --pattern calibration: it measures what several cost")
    if not config.fields.stream:
        raise InputError("--no-stream: with --pattern calibration, which times every token; expected streams")
    if config.run.resume or config.run.ray is not None or config.run.procs not in (None, 1):
        raise InputError("--resume, --ray, --procs: with --pattern calibration, which one process sends in one go")


def _check_bounds(config: LoadConfig) -> None:
    if not config.open_loop and config.pattern not in (*CLOSED_PATTERNS, "calibration"):
        raise InputError(f"--rate: missing; expected arrivals a second with --pattern {config.pattern}")
    if not config.open_loop and config.parallel is None and config.parallel_sessions is None:
        raise InputError(
            "--rate: missing; expected arrivals a second, or --parallel or --parallel-sessions for a closed loop"
        )
    if config.at_end == "cancel" and (config.ends_s is None or config.pattern == "calibration"):
        raise InputError("--at-end: cancel without a time; expected --duration, and a pattern other than calibration")
    if config.pattern == "calibration":
        return
    if config.ends_s is None and config.number is None and config.dataset_path is None:
        raise InputError("--duration, --number: both missing; expected a bound, or the run would never end")


def _check_groups(config: LoadConfig) -> None:
    if not 1 <= config.group_size <= MOST_GROUPED:
        raise InputError(f"--group-size: {config.group_size}; expected 1 to {MOST_GROUPED}")
    if config.group_gap_s is not None and (config.group_size == 1 or not config.open_loop):
        raise InputError("--group-gap: expected it with --group-size of 2 or more, and --rate")


def _check_shape(config: LoadConfig) -> None:
    if config.prefix_count < 0 or config.prefix_tokens < 0:
        raise InputError("--prefix-count, --prefix-tokens: negative; expected 0 or more")
    if (config.prefix_count > 0) != (config.prefix_tokens > 0):
        raise InputError(
            f"--prefix-count, --prefix-tokens: {config.prefix_count} prefixes of {config.prefix_tokens} tokens; "
            "expected both above 0, or neither"
        )
    if config.prefix_tokens > UNBOUNDED:
        raise InputError(f"--prefix-tokens: {config.prefix_tokens}; expected at most {UNBOUNDED:,.0f}")


def _check_dataset(config: LoadConfig) -> None:
    if config.dataset_path is None:
        if config.dataset != RANDOM:
            raise InputError(f"--dataset: {config.dataset} without a file; expected {config.dataset}:PATH")
        _refuse("--min-turns, --max-turns", config.min_turns or config.max_turns, "random sessions, which have turns")
        _refuse("--first-turn-length", config.first_turn_tokens, "random sessions; expected --prompt-tokens")
        if config.tool_role == "tool" and config.tool_latency_s is None:
            raise InputError(
                "--tool-role: tool without --tool-latency: random sessions have no tool outputs; expected both"
            )
        if config.tool_latency_s is not None and (config.single_turns or config.think_s is not None):
            raise InputError(
                "--tool-latency: expected it with --turns of 2 or more, and without --think: later turns of random "
                "sessions are then tool outputs"
            )
        return
    name, fewest, most = config.dataset, config.min_turns, config.max_turns
    if fewest is not None and most is not None and fewest > most:
        raise InputError(f"--min-turns, --max-turns: {fewest} and {most}; expected MIN to MAX")
    if config.turns != ONE_TURN:
        raise InputError(f"--turns: {config.turns} with --dataset {name}; expected --min-turns, --max-turns")
    if config.tool_latency_s is not None and not DATASETS[name].has_tools:
        raise InputError(f"--tool-latency: with --dataset {name}, which has no tool outputs; expected --think")
    _check_texts(config, DATASETS[name])


def _check_texts(config: LoadConfig, dataset: Dataset) -> None:
    lengths = config.first_turn_tokens or config.subsequent_turn_tokens
    if lengths is not None and not dataset.cuts_turns:
        raise InputError(f"--first-turn-length, --subsequent-turn-length: with --dataset {config.dataset}, uncut")
    if dataset.has_texts and config.sends_ids:
        raise InputError(f"--api: completions with --dataset {config.dataset}, which is texts; expected --api chat")
    if dataset.has_texts and config.prefix_count:
        raise InputError(f"--prefix-count: with --dataset {config.dataset}, which says all there is; expected neither")


def _check_text(config: LoadConfig) -> None:
    config.fields.check([config.api])
    if config.chat_template and config.api != "completions":
        raise InputError(f"--chat-template: with --api {config.api}, where the engine applies it; expected completions")
    if config.chat_template and config.tokenizer == "none":
        raise InputError("--chat-template: with --tokenizer none; expected a path, or engine")


def _only_with(flags: str, value: object, pattern: Pattern, *patterns: Pattern) -> None:
    if value and pattern not in patterns:
        raise InputError(f"{flags}: with --pattern {pattern}; expected --pattern {' or '.join(patterns)}")


def _refuse(flag: str, value: object, reason: str) -> None:
    if value is not None:
        raise InputError(f"{flag}: {value} with {reason}")


def _check_positive(flag: str, value: float | None) -> None:
    if value is not None and not (0 < value < math.inf):
        raise InputError(f"{flag}: {value:g}; expected a number above 0")
