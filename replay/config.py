"""Settings of a replay, checked alone, against the trace and against the engine before the first request."""

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
    """Settings of a replay: captured trace, request times, prefix sharing, target engine, output trace."""

    source: Path
    nonce: str
    """Seed of the prompt tokens; runs with different nonces share no prefix."""
    api: ReplayApi = "completions"
    """``completions`` sends token ids, other APIs send words. ``auto``: each request's captured API."""
    replay_sessions: bool = False
    """Follow-up turns wait for the end of their parent instead of their recorded time."""
    closed_loop: bool = False
    """First turns are sent in recorded order as soon as one of ``parallel`` slots is free."""
    parallel: int | None = None
    """Limit of requests in flight (closed loop with sessions: of open sessions); null: no limit."""
    cold_prompts: bool = False
    output_substitution: bool = True
    """Output tokens of this run replace recorded output blocks in later prompts."""
    speedup: float = 1.0
    """Divisor of arrival times and think times."""
    start_s: float | None = None
    end_s: float | None = None
    reset_cache: bool = False
    loras: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapter of the target by captured adapter; "": base model."""

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
            raise InputError("--closed-loop: without --parallel; expected --parallel N, the requests in flight")
        if self.closed_loop and self.speedup != 1.0 and not self.replay_sessions:
            raise InputError("--speedup: with --closed-loop, which ignores times; expected only one of the flags")
        if not self.nonce:
            raise InputError("--nonce: empty; expected a word")

    @property
    def selection(self) -> Selection:
        return Selection(self.start_s, self.end_s)

    @property
    def pattern(self) -> str:
        return "replay-sessions" if self.replay_sessions else "replay"

    def words(self) -> list[str]:
        """Return the parts of the start line that describe the replay."""
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
    """Raise InputError if the replay needs block hashes and the trace has none."""
    if survey.has_hashes:
        return
    if config.replay_sessions:
        raise InputError(f"{survey.path}: block_hashes: none; expected a trace with hashes for --replay-sessions")
    if not config.cold_prompts:
        raise InputError(
            f"{survey.path}: block_hashes: none; expected a trace with hashes, or --cold-prompts (no shared prefixes)"
        )


def require_adapters(survey: Survey, dialect: Dialect, config: ReplayConfig) -> None:
    """Raise InputError for a captured LoRA adapter without a name on the target engine."""
    for lora in sorted(survey.loras):
        if dialect.lora_needs_map and lora not in config.loras:
            raise InputError(f"--lora-map: no entry for {lora!r}; expected {lora}=NAME, its name on {dialect.name}")
        adapter = config.loras.get(lora, lora)
        if adapter:
            dialect.lora("", adapter)
    unused = sorted(set(config.loras) - survey.loras)
    if unused:
        expected = f"expected one of {', '.join(sorted(survey.loras))}" if survey.loras else "the trace has no adapters"
        raise InputError(f"--lora-map: {unused[0]!r} is not in the trace; {expected}")


def advance_notes(survey: Survey, dialect: Dialect, config: ReplayConfig) -> list[str]:
    notes = dialect_notes(dialect)
    if survey.has_parent_ids and not config.replay_sessions and not config.closed_loop:
        notes.append("turns are sent at recorded times; --replay-sessions sends each after the previous turn's end")
    if config.speedup != 1.0:
        notes.append(
            f"--speedup {config.speedup:g}: arrivals and think times shrink, latencies do not: "
            "prefix hits differ from the capture"
        )
    if survey.beyond_limit:
        notes.append(f"{survey.beyond_limit} captured outputs exceed their max_tokens; replayed at full length")
    exact = survey.meta.hash is not None and survey.meta.hash.branches and config.api == "completions"
    if survey.hits_inside_blocks and not config.cold_prompts and not exact:
        notes.append(rounded_hits(survey.hits_inside_blocks, survey.block_size))
    return notes
