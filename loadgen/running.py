"""Run of loadgen, from its config to its exit code."""

from dataclasses import fields

import msgspec
import numpy as np

from engines.control import ControlClient
from engines.dialect import Dialect
from engines.facts import EngineFacts
from engines.recognition import find_dialect, recognition_notes
from loadgen.core.request import origin_of
from loadgen.plan.config import LoadConfig
from loadgen.plan.loadjob import ELSEWHERE, ESTIMATED_LENGTHS, NOT_STARTED, LoadJob, load_name
from loadgen.plan.preparation import prepare_load_text
from loadgen.plan.workload import rate_profile
from loadgen.runs.driving import RunConfig, run_job
from loadgen.runs.outcome import RunOutcome, exit_code, refusal
from loadgen.runs.progress import TargetRate
from loadgen.runs.summary import print_summary, summarize, summary_lines
from loadgen.text.prefixtruth import report_truth, truth_lines, truth_notes, truth_of
from loadgen.text.targettext import TargetText
from tracefile import InputError, Meta, load_key
from tracefile import Workload as WorkloadMeta

HASHED_BLOCK_SIZE = 16
ALWAYS_TOLD = frozenset({"api", "rate", "duration_s", "number", "parallel", "prompt_tokens", "output_tokens", "turns"})
"""Flags that the trace's header has even where they were not given."""

OWN_FIELDS = frozenset({"pattern", "seed"})
"""Those that stand in the header by themselves."""

EMPTY = "--duration, --rate: no arrival in that time; expected a longer one or a higher rate"


def run_load(config: LoadConfig) -> int:
    """Send the load, write its trace, print its summary; 0, or 1 if nothing ended well, or 130 if cut short."""
    with ControlClient(str(origin_of(config.url))) as control:
        model = control.resolve_model(config.model)
        before = control.facts()
        text = prepare_load_text(config, control, model)
        found = find_dialect(control, config.dialect)
        job = load_job(config, found.dialect, model, before, text.target)
        outcome = run_job(
            RunConfig(
                job=job,
                url=config.url,
                trace=config.trace,
                meta=_meta(job, before),
                run=config.run,
                sessions=most_shards(config),
                parallel=config.requests_at_once,
                timeout_s=config.timeout_s,
                overwrite=config.overwrite,
                duration_s=config.ends_s,
                target_rate=target_rate(config),
                empty=EMPTY,
            )
        )
        if outcome.stopped == "refused":
            raise InputError(refusal(control, model, config.vocabulary))
        truth = report_truth(text.before, truth_of(outcome.findings))
        notes = [*recognition_notes(found), *_notes(outcome, config), *truth_notes(truth)]
        summary = summarize(outcome, pattern=config.pattern, facts=(before, control.facts()), notes=notes)
    summary = msgspec.structs.replace(summary, prefix_truth=truth)
    print_summary(summary, summary_lines(summary, truth_lines(truth)), as_json=config.as_json)
    return exit_code(outcome)


def load_job(config: LoadConfig, dialect: Dialect, model: str, facts: EngineFacts, target: TargetText) -> LoadJob:
    """The load, for an engine."""
    return LoadJob(
        config=config,
        model=model,
        load_id=load_name(config),
        key=load_key(),
        block_size=min(HASHED_BLOCK_SIZE, facts.engine.block_size or HASHED_BLOCK_SIZE),
        engine_block_size=facts.engine.block_size or HASHED_BLOCK_SIZE,
        target=target,
        dialect=dialect,
    )


def most_shards(config: LoadConfig) -> int | None:
    """Into how many shards the load can be cut so that each has sessions, now and then all at once; null: any."""
    if config.pattern == "calibration":
        return 1
    bounds = [bound for bound in (config.number, config.sessions_at_once) if bound is not None]
    return min(bounds, default=None)


def target_rate(config: LoadConfig) -> TargetRate | None:
    """Requests a second as planned; null: bursts, or answers and pauses say when the next is sent."""
    if not config.open_loop or not config.single_turns or config.pattern == "burst":
        return None
    rates = rate_profile(config)

    def at(second: float) -> float:
        piece = int(np.searchsorted(rates.starts_s, second, side="right")) - 1
        return float(rates.rates[piece] + rates.slopes[piece] * (second - rates.starts_s[piece]))

    return at


def _meta(job: LoadJob, facts: EngineFacts) -> Meta:
    """The trace's header, its clock and digest apart."""
    config = job.config
    counters = {} if facts.counters is None else {"prefix_counters_before": msgspec.to_builtins(facts.counters)}
    return Meta(
        source="client",
        model=job.model,
        tokenizer=job.target.tokenizer or ("ids" if config.api == "completions" else None),
        block_size=job.block_size,
        hash=job.hasher().info,
        engine=facts.engine,
        workload=WorkloadMeta(pattern=config.pattern, seed=config.seed, extra=_shape(config)),
        extra=counters,
    )


def _shape(config: LoadConfig) -> dict[str, object]:
    """The flags that made the load, to be read by people; those that were left as they are by default are not there."""
    given = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in ELSEWHERE}
    defaults = {each.name: each.default for each in fields(config)}
    told = {name: value for name, value in given.items() if name in ALWAYS_TOLD or value != defaults[name]}
    return {
        name: value if isinstance(value, float | int | None) else str(value)
        for name, value in told.items()
        if name not in OWN_FIELDS
    }


def _notes(outcome: RunOutcome, config: LoadConfig) -> list[str]:
    """Return the notes on deviations of the load from its plan."""
    notes = []
    if late := outcome.findings.get(NOT_STARTED):
        notes.append(f"{late} sessions arrived but were not started: --parallel-sessions left no room before the end")
    if outcome.findings.get(ESTIMATED_LENGTHS):
        notes.append(
            "lengths taken from the dataset's texts are estimated at 4 bytes a token; --tokenizer PATH makes them "
            "exact, --output-tokens says them"
        )
    unknown = outcome.tally.without_output_hashes
    if config.api == "completions" and not config.single_turns and unknown:
        notes.append(
            f"the engine returned no token ids for {unknown} answers: the turns after them went on from stand-ins, "
            "whose blocks cannot be in its cache"
        )
    return notes
