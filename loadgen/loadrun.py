"""Run of a load from its settings to its exit code: query the engine, send the load, describe its trace."""

import secrets
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import islice

import msgspec

from engines.control import ControlClient
from engines.detection import dialect_notes, recognition_notes
from engines.dialect import Dialect
from engines.facts import EngineFacts
from engines.readiness import inspect_engine, unreported
from loadgen.core.job import Job
from loadgen.core.request import SESSION_HEADER, origin_of
from loadgen.plan.config import LoadConfig
from loadgen.plan.first_prompts import orders_of
from loadgen.plan.loadjob import ESTIMATED_LENGTHS, NOT_IN_NAME, LoadJob, load_name
from loadgen.plan.workload import Workload as PlannedLoad
from loadgen.runs.coordinator import RunConfig, announce, run_job, tokenizer_words
from loadgen.runs.outcome import RunOutcome
from loadgen.runs.preflight_errors import refusal
from loadgen.runs.summary import RunResult, end_run, summary_lines
from loadgen.text.prompt_token_check import DATASET_TEXTS, IDS, check_lines, check_notes, report_check
from loadgen.text.targettext import NO_TARGET, TargetText, learn_target
from loadgen.text.tokenizer import TokenizerError, find_tokenizer, path_of
from loadgen.text.words import UNPROVEN
from measure.number_format import NOTHING_CACHED
from tracefile.commandline.printing import print_result
from tracefile.hashing.hashkey import load_key
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Workload

EMPTY = "--duration, --rate: no arrival in that time; expected a longer time or a higher rate"
_ALWAYS_SHOWN = frozenset(
    {"api", "rate", "duration_s", "number", "parallel", "prompt_tokens", "output_tokens", "turns"}
)
"""Flags that the trace header always contains."""
_NOT_SHOWN = frozenset({"pattern", "seed", "fields"})
SAMPLED = 200
"""Sessions whose orders of roles (chat template tokens) are learnt before the run."""


def run_load(config: LoadConfig) -> int:
    """Send the load, write its trace, print its summary (latency, throughput); return the exit code."""
    if not config.has_texts:  # texts are the same in every run
        config = replace(config, nonce=config.nonce or secrets.token_hex(8))
    result = send_load(config)
    summary = result.summary
    lines = () if summary.prompt_check is None else check_lines(summary.prompt_check)
    print_result(summary, summary_lines(summary, lines), as_json=config.as_json)
    return result.exit_code()


def send_load(config: LoadConfig, position: Mapping[str, object] | None = None) -> RunResult:
    """Send the load and write its trace. ``position``: in a sweep, for the header; null: print the start line here."""
    with ControlClient(str(origin_of(config.url)), config.access) as control:
        model = control.resolve_model(config.model)
        engine = inspect_engine(control, model, config.dialect)
        target = learn_load_text(config, control, model)
        unknown = target.unknown if config.api != "completions" else None
        tokenizer = IDS if config.api == "completions" else target.tokenizer
        job = load_job(config, engine.dialect, model, engine.facts, target)
        engine_notes = [*engine.notes(), *dialect_notes(engine.dialect), *stream_notes(config)]
        if position is None:
            words = [
                *engine.words(),
                tokenizer_words(tokenizer, unknown),
                f"hashes of {job.block_size}-token blocks",
                *config.words(),
                f"to {config.trace}",
            ]
            announce("loadgen", words, engine_notes)
        meta = _meta(job, engine.facts, {} if position is None else {"sweep": position})
        outcome = run_job(run_config(config, job, meta, engine.dialect))
        if outcome.stopped == "refused":
            lengths = "--prompt-tokens, --output-tokens"
            raise InputError(refusal(control, model, config, outcome.tally.errors, lengths))
        report = report_check(tokenizer, unknown, outcome.findings)
        notes = [*recognition_notes(engine.recognised), *engine_notes, *_notes(outcome, config), *check_notes(report)]
        facts = (engine.facts, control.facts())
    return end_run(outcome, config, pattern=config.arrivals, facts=facts, notes=notes, prompt_check=report)


def run_config(config: LoadConfig, job: Job, meta: Meta, dialect: Dialect) -> RunConfig:
    return RunConfig(
        settings=config,
        job=job,
        meta=meta,
        sessions=config.most_workers,
        parallel=config.parallel,
        ends_s=config.ends_s,
        empty=EMPTY,
        unreported=unreported(dialect),
    )


def _meta(job: LoadJob, facts: EngineFacts, more: Mapping[str, object]) -> Meta:
    """Return the trace header; ``more``: further fields of its workload."""
    config = job.config
    counters = {} if facts.counters is None else {"prefix_counters_before": msgspec.to_builtins(facts.counters)}
    return Meta(
        source="client",
        model=job.model,
        tokenizer=job.target.tokenizer or (IDS if config.api == "completions" else None),
        block_size=job.block_size,
        hash=msgspec.structs.replace(job.hasher().info, branches=job.branches or None),
        engine=msgspec.structs.replace(facts.engine, gpus=config.gpus),
        workload=Workload(
            pattern=config.arrivals, seed=config.seed, nonce=config.nonce, extra=_shape(config) | dict(more)
        ),
        extra=counters,
    )


def _shape(config: LoadConfig) -> dict[str, object]:
    """Flags of the load for the trace header, without defaults."""
    shown: dict[str, object] = {}
    for setting in fields(config):
        name, value = setting.name, getattr(config, setting.name)
        if name in NOT_IN_NAME | _NOT_SHOWN or (value == setting.default and name not in _ALWAYS_SHOWN):
            continue
        shown[name] = value if isinstance(value, float | int | None) else str(value)
    if config.session_headers != (SESSION_HEADER,):
        shown["session_headers"] = ", ".join(config.session_headers)
    return shown | config.fields.described()


def load_job(config: LoadConfig, dialect: Dialect, model: str, facts: EngineFacts, target: TargetText) -> LoadJob:
    return LoadJob(
        config=config,
        model=model,
        load_id=load_name(config),
        key=load_key(),
        block_size=facts.hash_block_size,
        branches=facts.is_finer(facts.hash_block_size) and (config.procs == 1 or config.api == "completions"),
        engine_block_size=facts.engine.block_size or facts.hash_block_size,
        target=target,
        dialect=dialect,
    )


def stream_notes(config: LoadConfig) -> list[str]:
    return [] if config.fields.stream else ["--no-stream: no TTFT and no ITL"]


def _notes(outcome: RunOutcome, config: LoadConfig) -> list[str]:
    notes = []
    if outcome.findings.get(ESTIMATED_LENGTHS):
        notes.append(
            "output tokens of the dataset's texts are estimated at 4 bytes a token; --tokenizer PATH counts them, "
            "--output-tokens sets them"
        )
    repeats = config.prefix_tokens or not config.single_turns
    if repeats and outcome.tally.cached_reported and not outcome.tally.cached_tokens:
        notes.append(f"cached tokens: {NOTHING_CACHED.format(outcome.tally.cached_reported)}")
    without_ids = outcome.tally.without_output_hashes
    if config.api == "completions" and not config.single_turns and without_ids:
        notes.append(
            f"the engine returned no token ids for {without_ids} outputs: later turns contain replacement tokens, "
            "whose blocks cannot hit"
        )
    return notes


def learn_load_text(config: LoadConfig, control: ControlClient, model: str) -> TargetText:
    """Learn words and chat template from the tokenizer of ``--tokenizer``; token-id prompts need none."""
    if config.api == "completions":
        return TargetText(UNPROVEN, {}, path=path_of(config.tokenizer))
    try:
        tokenizer = find_tokenizer(config.tokenizer, control, model)
    except TokenizerError as error:
        return replace(NO_TARGET, unknown=str(error))
    orders = orders_of(islice(PlannedLoad(config), SAMPLED), config.prefix_tokens)
    target = learn_target(tokenizer, orders, path_of(config.tokenizer))
    return replace(target, unknown=target.unknown or (DATASET_TEXTS if config.has_texts else None))
