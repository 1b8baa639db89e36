"""Settings of a replay, checked by themselves, against the trace and the target, before anything is sent."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engines.dialect import Dialect
from engines.recognition import AUTO, CHOICES, Recognised, dialect_notes
from loadgen.core.bodyfields import PLAIN, BodyFields
from loadgen.core.request import SESSION_HEADER
from loadgen.core.runflags import ONE_PROCESS, RunFlags
from loadgen.core.vocabulary import ORDINARY, Vocabulary
from loadgen.text.spoken import Api
from measure.wording import rounded_hits
from replay.survey import Selection, Survey
from tracefile import InputError

ReplayApi = Literal[Api, "auto"]
MOST_ROUNDS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """Settings of a run: the captured trace, its times and sharing, the target, and the trace to write."""

    source: Path
    url: str
    trace: Path
    nonce: str
    """Seed that keeps this run's tokens apart from other runs'."""
    run: RunFlags = ONE_PROCESS
    model: str = "auto"
    api: ReplayApi = "completions"
    """Completions take the tokens themselves; the others take words of the target's tokenizer. ``auto``: each request
    goes to the API that it was captured on."""
    tokenizer: str = "auto"
    """Path, ``engine`` or ``none``; ``auto``: the engine's if it has /tokenize."""
    dialect: str = AUTO
    replay_sessions: bool = False
    """Follow-ups wait for the parent's end instead of the recorded time."""
    closed_loop: bool = False
    """Roots are sent as slots of ``parallel`` get free, in recorded order."""
    parallel: int | None = None
    """Most requests in flight (closed loop with sessions: most sessions); null: no limit."""
    cold_prompts: bool = False
    output_substitution: bool = True
    """Real outputs replace recorded ones in later prompts."""
    speedup: float = 1.0
    """Divisor of arrival offsets and think times."""
    max_think_s: float | None = None
    start_s: float | None = None
    end_s: float | None = None
    limit: int | None = None
    repeat: int = 1
    """Rounds of the trace, each with its own nonce."""
    reset_cache: bool = False
    fields: BodyFields = PLAIN
    """Fields of every body beside those of the capture."""
    session_headers: tuple[str, ...] = (SESSION_HEADER,)
    loras: Mapping[str, str] = field(default_factory=dict)
    """Target's adapter by captured adapter; "": the base model."""
    vocabulary: Vocabulary = ORDINARY
    timeout_s: float | None = 600.0
    overwrite: bool = False
    as_json: bool = False
    """Print the summary as one JSON object on stdout, its lines on stderr."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_window()
        if self.dialect not in CHOICES:
            raise InputError(f"--dialect: {self.dialect!r}; expected one of {', '.join(CHOICES)}")
        if self.closed_loop and self.parallel is None:
            raise InputError("--closed-loop: without --parallel; expected how many at a time")
        if self.closed_loop and self.speedup != 1.0 and not self.replay_sessions:
            raise InputError("--speedup: with --closed-loop, which keeps no times; expected one of the two")
        if self.max_think_s is not None and not self.replay_sessions:
            raise InputError("--max-think: without --replay-sessions, which alone waits for pauses; expected both")
        if not self.nonce:
            raise InputError("--nonce: empty; expected a word")

    @property
    def selection(self) -> Selection:
        return Selection(self.start_s, self.end_s, self.limit)

    @property
    def pattern(self) -> str:
        return "replay-sessions" if self.replay_sessions else "replay"

    def words(self) -> list[str]:
        """Return the parts of a start line about the replay."""
        words = [f"closed loop, {self.pattern}" if self.closed_loop else self.pattern]
        words += [] if self.parallel is None else [f"at most {self.parallel} in flight"]
        words += ["cold prompts"] if self.cold_prompts else []
        return [*words, *self.fields.words(), f"nonce {self.nonce}"]

    def _check_numbers(self) -> None:
        for flag, value in {
            "--speedup": self.speedup,
            "--limit": self.limit,
            "--parallel": self.parallel,
            "--repeat": self.repeat,
            "--timeout": self.timeout_s,
        }.items():
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{flag}: {value:g}; expected a number above 0")
        if self.max_think_s is not None and not 0 <= self.max_think_s < math.inf:
            raise InputError(f"--max-think: {self.max_think_s:g}; expected 0 or more")
        if self.repeat > MOST_ROUNDS:
            raise InputError(f"--repeat: {self.repeat}; expected at most {MOST_ROUNDS}")

    def _check_window(self) -> None:
        for flag, value in {"--start": self.start_s, "--end": self.end_s}.items():
            if value is not None and not math.isfinite(value):
                raise InputError(f"{flag}: {value:g}; expected seconds on the trace's clock")
        if self.start_s is not None and self.end_s is not None and self.end_s <= self.start_s:
            raise InputError(f"--end: {self.end_s:g}s, --start: {self.start_s:g}s; expected an end after the start")


def parse_loras(pairs: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        captured, equals, target = pair.partition("=")
        if not equals or not captured:
            raise InputError(f"--lora-map: {pair!r}; expected CAPTURED=TARGET")
        found[captured] = target
    return found


def require_hashes(survey: Survey, config: ReplayConfig) -> None:
    """Raise InputError if the run needs the trace's block hashes and there are none."""
    if survey.has_hashes:
        return
    if config.replay_sessions:
        raise InputError(f"{survey.path}: block_hashes: none; expected a trace with hashes for --replay-sessions")
    if not config.cold_prompts:
        raise InputError(
            f"{survey.path}: block_hashes: none; expected a trace with hashes, or --cold-prompts to share nothing"
        )


def require_adapters(survey: Survey, found: Recognised, config: ReplayConfig) -> None:
    """Raise InputError for an adapter that the engine does not know by its captured name."""
    for lora in sorted(survey.loras):
        if found.dialect.lora_needs_map and lora not in config.loras:
            raise InputError(f"--lora-map: nothing for {lora!r}; expected {lora}=… as {found.dialect.name} knows it")
        adapter = config.loras.get(lora, lora)
        if adapter:
            found.dialect.lora("", adapter)
    unused = sorted(set(config.loras) - survey.loras)
    if unused:
        known = f"expected one of {', '.join(sorted(survey.loras))}" if survey.loras else "it names no adapters"
        raise InputError(f"--lora-map: {unused[0]!r} is not in the trace; {known}")


def advance_notes(survey: Survey, dialect: Dialect, config: ReplayConfig) -> list[str]:
    notes = dialect_notes(dialect)
    if survey.links_known and not config.replay_sessions and not config.closed_loop:
        notes.append("turns are sent at recorded times; --replay-sessions sends each after the turn before it ends")
    if config.speedup != 1.0:
        notes.append(
            f"--speedup {config.speedup:g}: arrivals and pauses are that much closer, answers are not: "
            "what is still cached when a prefix comes again differs from the capture"
        )
    if config.repeat > 1 and survey.span_ms == 0.0 and not config.closed_loop:
        notes.append(f"--repeat {config.repeat}: the trace has no duration, so all its rounds are sent at once")
    if survey.beyond_limit:
        notes.append(f"{survey.beyond_limit} answers of the trace are longer than their own max_tokens; kept as long")
    exact = survey.meta.hash is not None and survey.meta.hash.branches and config.api == "completions"
    if survey.hits_inside_blocks and not config.cold_prompts and not exact:
        notes.append(rounded_hits(survey.hits_inside_blocks, survey.block_size))
    return notes
