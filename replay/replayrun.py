"""A replay from its settings to its exit code."""

import sys
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from engines.control import ControlClient, reset_prefix_cache
from engines.detection import recognition_notes
from engines.dialect import Dialect
from engines.facts import EngineFacts
from engines.readiness import Target, inspect_engine, unreported
from loadgen.core.bodies import cache_probe
from loadgen.core.request import origin_of
from loadgen.runs.coordinator import RunConfig, announce, run_job, tokenizer_words
from loadgen.runs.outcome import RunOutcome
from loadgen.runs.preflight_errors import refusal
from loadgen.runs.summary import Summary, end_run, summary_lines
from loadgen.text.prompt_token_check import IDS, check_lines, check_notes, report_check
from loadgen.text.targettext import NO_TARGET, learn_target
from loadgen.text.tokenizer import TokenizerError, find_tokenizer, path_of
from replay.config import ReplayConfig, advance_notes, require_adapters, require_hashes
from replay.fidelity import Account, Fidelity, account_lines, account_of, fidelity_lines, fidelity_notes, fidelity_of
from replay.job import FOLLOWERS, ReplayJob
from replay.survey import Survey, survey_trace
from replay.text import TextTarget, orders, text_api_of, text_counts, text_lines, text_notes
from tracefile.commandline.printing import print_result
from tracefile.records.errors import InputError
from tracefile.records.schema import HashInfo, Meta, Workload

MOST_TURNS = 32
"""Turns of a session for which chat templates are learnt before the run; a local tokenizer learns more later."""


class ReplaySummary(msgspec.Struct, frozen=True):
    """``--json`` output: run summary (latency, throughput), account of requests, fidelity to the capture."""

    run: Summary
    dialect: str
    account: Account
    fidelity: Fidelity


def run_replay(config: ReplayConfig) -> int:
    """Replay the capture, write its trace, print the summary. Exit codes: as of loadgen."""
    survey = survey_trace(config.source, config.selection)
    require_hashes(survey, config)
    if config.replay_sessions and not survey.has_parent_ids:
        print(
            f"warning: {survey.path}: no parent_id; turns are inferred from block hashes, requests without an inferred "
            "parent are sent at their recorded times",
            file=sys.stderr,
        )
    with ControlClient(str(origin_of(config.url)), config.access) as control:
        model = control.resolve_model(config.model)
        engine = inspect_engine(control, model, config.dialect)
        require_adapters(survey, engine.dialect, config)
        notes = advance_notes(survey, engine.dialect, config)
        if config.reset_cache:
            probe = cache_probe(engine.dialect, model, config.vocabulary, engine.block_size)
            note = reset_prefix_cache(control, engine.dialect, probe)
            notes += [note] if note else []
            engine = replace(engine, facts=control.facts())
        text = learn_replay_text(config, control, model, survey, engine.block_size)
        notes += engine.notes()
        about_text = tokenizer_words(*prompts_of(text))
        source = f"{survey.selected} requests of {config.source.name}, hashes of {survey.block_size}-token blocks"
        announce("replay", [*engine.words(), about_text, source, *config.words(), f"to {config.trace}"], notes)
        outcome = run_job(
            RunConfig(
                settings=config,
                job=ReplayJob(config, survey, model, engine.dialect.name, text),
                meta=msgspec.structs.replace(replay_meta(config, survey, engine), tokenizer=prompts_of(text)[0]),
                sessions=survey.selected,
                parallel=config.parallel,
                unreported=unreported(engine.dialect),
            )
        )
        if outcome.stopped == "refused":
            raise InputError(refusal(control, model, config, outcome.tally.errors, str(config.source)))
        after = control.facts()
    return report(config, survey, outcome, engine=engine, after=after, notes=notes, text=text)


def prompts_of(text: TextTarget | None) -> tuple[str | None, str | None]:
    """Return the tokenizer of the prompts, and the reason why it cannot verify their token counts."""
    return (IDS, None) if text is None else (text.text.tokenizer, text.text.unknown)


def report(
    config: ReplayConfig,
    survey: Survey,
    outcome: RunOutcome,
    *,
    engine: Target,
    after: EngineFacts,
    notes: list[str],
    text: TextTarget | None,
) -> int:
    fidelity = fidelity_of(outcome.findings)
    account = account_of(
        survey,
        fidelity,
        sent=outcome.tally.started,
        stopped=outcome.stopped or ("a process died" if outcome.failures else None),
    )
    notes = [*recognition_notes(engine.recognised), *notes, *session_notes(outcome.findings, config)]
    notes += fidelity_notes(fidelity, cold=config.cold_prompts, output_substitution=config.output_substitution)
    check, counts = report_check(*prompts_of(text), outcome.findings), text_counts(outcome.findings)
    notes += [*(() if text is None else check_notes(check)), *text_notes(counts)]
    ended = end_run(
        outcome,
        config,
        pattern=config.words()[0],
        facts=(engine.facts, after),
        notes=notes,
        prompt_check=None if text is None else check,
    )
    lines = [*account_lines(account), *fidelity_lines(fidelity, cold=config.cold_prompts)]
    if text is not None:
        lines += [*check_lines(check), *text_lines(counts)]
    summary = ReplaySummary(ended.summary, engine.dialect.name, account, fidelity)
    print_result(summary, summary_lines(ended.summary, lines), as_json=config.as_json)
    return ended.exit_code()


def session_notes(findings: Mapping[str, int], config: ReplayConfig) -> list[str]:
    if config.replay_sessions and not findings.get(FOLLOWERS):
        return ["--replay-sessions: no request of the trace continues another; all were sent at recorded times"]
    return []


def replay_meta(config: ReplayConfig, survey: Survey, target: Target) -> Meta:
    facts, recognition = target.facts, target.recognised
    counters = {} if facts.counters is None else {"prefix_counters_before": msgspec.to_builtins(facts.counters)}
    engine = msgspec.structs.replace(facts.engine, gpus=config.gpus)
    if engine.name is None and recognition.certain:
        engine = msgspec.structs.replace(engine, name=recognition.dialect.name)
    # Block hashes of a cold run match no other run, whatever the key of the capture.
    hashes = HashInfo(algorithm="replay-cold") if config.cold_prompts else survey.meta.hash
    if hashes is not None:
        hashes = msgspec.structs.replace(hashes, branches=None)
    return Meta(
        source="replay",
        model=target.model,
        tokenizer=IDS,
        block_size=survey.meta.block_size,
        hash=hashes,
        engine=engine,
        workload=Workload(
            pattern=config.pattern,
            nonce=config.nonce,
            speedup=None if config.speedup == 1.0 else config.speedup,
            cold_prompts=True if config.cold_prompts else None,
            source_digest=survey.source_digest,
            extra=shape_of(config, recognition.dialect),
        ),
        extra=counters,
    )


def shape_of(config: ReplayConfig, dialect: Dialect) -> dict[str, object]:
    """Flags that differ from their defaults, for the trace header."""
    flags = {
        "api": None if config.api == "completions" else config.api,
        "dialect": dialect.name,
        "closed_loop": config.closed_loop or None,
        "parallel": config.parallel,
        "start_s": config.start_s,
        "end_s": config.end_s,
        "output_substitution": None if config.output_substitution else False,
    }
    return {name: value for name, value in flags.items() if value is not None} | config.fields.described()


def learn_replay_text(
    config: ReplayConfig, control: ControlClient, model: str, survey: Survey, block_size: int | None
) -> TextTarget | None:
    """Learn chat templates and words from the tokenizer of ``--tokenizer``; null: prompts are token ids."""
    if config.api == "completions" or (config.api == "auto" and not any(map(text_api_of, survey.endpoints))):
        return None
    try:
        tokenizer = find_tokenizer(config.tokenizer, control, model)
    except TokenizerError as error:
        return TextTarget(config.api, replace(NO_TARGET, unknown=str(error)), block_size)
    turns = MOST_TURNS if config.replay_sessions else 1
    return TextTarget(config.api, learn_target(tokenizer, orders(turns), path_of(config.tokenizer)), block_size)
