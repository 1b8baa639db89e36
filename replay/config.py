"""Settings of a replay, checked by themselves, against the trace and the target, before anything is sent."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engines.detection import dialect_notes
from engines.dialect import Dialect
from loadgen.core.settings import RunSettings, check_positive
from loadgen.text.api_messages import Api
from measure.number_format import rounded_hits
from replay.survey import Selection, Survey
from tracefile.records.errors import InputError

ReplayApi = Literal[Api, "auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig(RunSettings):
    """Settings of a run: the captured trace, its times and sharing, the target, and the trace to write."""

    source: Path
    nonce: str
    """Seed that keeps this run's tokens apart from other runs'."""
    api: ReplayApi = "completions"
    """Completions take the tokens themselves; the others take words of the target's tokenizer. ``auto``: each request
    goes to the API that it was captured on."""
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
    start_s: float | None = None
    end_s: float | None = None
    reset_cache: bool = False
    loras: Mapping[str, str] = field(default_factory=dict)
    """Target's adapter by captured adapter; "": the base model."""

    def __post_init__(self) -> None:
        RunSettings.__post_init__(self)
        check_positive("--speedup", self.speedup)
        check_positive("--parallel", self.parallel)
        for flag, value in {"--start": self.start_s, "--end": self.end_s}.items():
            if value is not None and not math.isfinite(value):
                raise InputError(f"{flag}: {value:g}; expected seconds on the trace's clock")
        if self.start_s is not None and self.end_s is not None and self.end_s <= self.start_s:
            raise InputError(f"--end: {self.end_s:g}s, --start: {self.start_s:g}s; expected an end after the start")
        if self.closed_loop and self.parallel is None:
            raise InputError("--closed-loop: without --parallel; expected how many at a time")
        if self.closed_loop and self.speedup != 1.0 and not self.replay_sessions:
            raise InputError("--speedup: with --closed-loop, which keeps no times; expected one of the two")
        if not self.nonce:
            raise InputError("--nonce: empty; expected a word")

    @property
    def selection(self) -> Selection:
        return Selection(self.start_s, self.end_s)

    @property
    def pattern(self) -> str:
        return "replay-sessions" if self.replay_sessions else "replay"

    def words(self) -> list[str]:
        """Return the parts of a start line about the replay."""
        words = [f"closed loop, {self.pattern}" if self.closed_loop else self.pattern]
        words += [] if self.parallel is None else [f"at most {self.parallel} in flight"]
        words += ["cold prompts"] if self.cold_prompts else []
        return [*words, *self.fields.words(), f"nonce {self.nonce}"]


def parse_loras(pairs: list[str]) -> dict[str, str]:
    loras: dict[str, str] = {}
    for pair in pairs:
        captured, equals, target = pair.partition("=")
        if not equals or not captured:
            raise InputError(f"--lora-map: {pair!r}; expected CAPTURED=TARGET")
        loras[captured] = target
    return loras


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


def require_adapters(survey: Survey, dialect: Dialect, config: ReplayConfig) -> None:
    """Raise InputError for an adapter that the engine does not know by its captured name."""
    for lora in sorted(survey.loras):
        if dialect.lora_needs_map and lora not in config.loras:
            raise InputError(f"--lora-map: nothing for {lora!r}; expected {lora}=… as {dialect.name} knows it")
        adapter = config.loras.get(lora, lora)
        if adapter:
            dialect.lora("", adapter)
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
    if survey.beyond_limit:
        notes.append(f"{survey.beyond_limit} answers of the trace are longer than their own max_tokens; kept as long")
    exact = survey.meta.hash is not None and survey.meta.hash.branches and config.api == "completions"
    if survey.hits_inside_blocks and not config.cold_prompts and not exact:
        notes.append(rounded_hits(survey.hits_inside_blocks, survey.block_size))
    return notes
