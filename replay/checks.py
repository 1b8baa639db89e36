"""Checks of a trace against the target and the flags, and notes on what a replay changes, before anything is sent."""

from engines.dialect import Dialect
from engines.recognition import Recognised, dialect_notes
from measure.wording import rounded_hits
from replay.config import ReplayConfig
from replay.survey import Survey
from tracefile import InputError


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
        raise InputError(f"--lora-map: {unused[0]!r} is not in the trace; expected one of {sorted(survey.loras)}")


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
