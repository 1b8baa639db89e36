"""A replay from its settings to its exit code."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from engines.control import ControlClient, reset_prefix_cache
from engines.facts import EngineFacts
from engines.readiness import page_notes, readiness_notes, readiness_of, target_words, unreported
from engines.recognition import Recognised, find_dialect, recognition_notes
from engines.vllm import VLLM
from loadgen.core.bodies import cache_probe
from loadgen.core.request import origin_of
from loadgen.runs.driving import RunConfig, announce, run_job, tokenizer_words
from loadgen.runs.outcome import RunOutcome
from loadgen.runs.refusal import Asked, check_fields, field_notes, refusal
from loadgen.runs.resumption import HISTORY, last_header
from loadgen.runs.summary import Summary, end_run, summary_lines
from loadgen.text.enginetokenizer import find_tokenizer, path_of
from loadgen.text.prefixtruth import IDS, Examination, report_truth, truth_lines, truth_notes, truth_of
from loadgen.text.spoken import Api
from loadgen.text.targettext import NO_TARGET, TargetText, examine_conversations, learn_target
from loadgen.text.tokenizer import Tokenizer, TokenizerError
from replay.capture import captured_of, read_kept
from replay.config import ReplayConfig, advance_notes, require_adapters, require_hashes
from replay.expansion import Expansion
from replay.fidelity import Account, Fidelity, account_lines, account_of, fidelity_lines, fidelity_notes, fidelity_of
from replay.job import FOLLOWERS, ReplayJob
from replay.survey import Survey, survey_trace
from replay.text import TextTarget, open_text, orders, text_api_of, text_counts, text_lines, text_notes, words_for
from tracefile import HashInfo, InputError, Meta, Workload
from tracefile.commandline.printing import print_result

SAMPLED = 4
MOST_TURNS = 32
"""Turns of a session with templates learnt before the run; a local tokenizer learns more later."""


class ReplaySummary(msgspec.Struct, frozen=True):
    """Content of ``--json``: the run, the account of the trace's requests, and the fidelity to the capture."""

    run: Summary
    dialect: str
    account: Account
    fidelity: Fidelity


def run_replay(config: ReplayConfig) -> int:
    """Send the capture again, write its trace, print its summary; exit codes as loadgen's."""
    survey = survey_trace(config.source, config.selection)
    require_hashes(survey, config)
    if config.replay_sessions and not survey.links_known:
        print(
            f"warning: {survey.path}: no request names its parent; turns are inferred from block hashes, and requests "
            "without one are sent at their recorded times",
            file=sys.stderr,
        )
    with ControlClient(str(origin_of(config.url)), config.run.access) as control:
        model = control.resolve_model(config.model)
        found = find_dialect(control, config.dialect)
        require_adapters(survey, found, config)
        facts = control.facts()
        forms = asked_of(config, survey, found)
        for asked in forms:
            check_fields(control, asked)
        notes = [*advance_notes(survey, found.dialect, config), *field_notes(forms[0], 0)]
        if config.reset_cache:
            note = reset_prefix_cache(
                control, found.dialect, cache_probe(found.dialect, model, config.vocabulary, facts.engine.block_size)
            )
            notes += [note] if note else []
            facts = control.facts()
        text = prepare_replay_text(config, control, model, survey, facts.engine.block_size)
        ready = readiness_of(control, found.dialect, facts)
        notes += [*page_notes(facts), *readiness_notes(ready)]
        about_text = tokenizer_words(text.before.tokenizer, text.before.unknown)
        source = f"{survey.kept} requests of {config.source.name}, hashes of {survey.block_size}-token blocks"
        target = target_words(control.url, model, facts, ready, found.evidence)
        announce("replay", [*target, about_text, source, *config.words(), f"to {config.trace}"], notes, config.run)
        outcome = run_job(
            RunConfig(
                unreported=unreported(found.dialect),
                job=ReplayJob(config, survey, model, found.dialect.name, text.target),
                url=config.url,
                trace=config.trace,
                meta=msgspec.structs.replace(
                    replay_meta(config, survey, model, facts, found), tokenizer=text.before.tokenizer
                ),
                run=config.run,
                sessions=survey.kept,
                parallel=config.parallel,
                timeout_s=config.timeout_s,
                overwrite=config.overwrite,
            )
        )
        if outcome.stopped == "refused":
            raise InputError(refusal(control, model, forms[0], outcome.tally.errors))
        after = control.facts()
    return report(config, survey, outcome, found=found, facts=(facts, after), notes=notes, before=text.before)


def asked_of(config: ReplayConfig, survey: Survey, found: Recognised) -> list[Asked]:
    """Forms of the requests, one for each API; raises InputError for a field that one of these does not have."""
    captured = sorted({text_api_of(each) or "completions" for each in survey.endpoints}) or ["completions"]
    apis: Sequence[Api] = captured if config.api == "auto" else [config.api]
    config.fields.check(apis)
    return [Asked(api, config.fields, found.dialect, config.vocabulary, str(config.source)) for api in apis]


def report(
    config: ReplayConfig,
    survey: Survey,
    outcome: RunOutcome,
    *,
    found: Recognised,
    facts: tuple[EngineFacts, EngineFacts],
    notes: list[str],
    before: Examination,
) -> int:
    fidelity = fidelity_of(outcome.findings)
    account = account_of(
        survey,
        fidelity,
        rounds=config.repeat,
        sent=outcome.tally.started,
        stopped=outcome.stopped or ("a process died" if outcome.failures else None),
        earlier=sent_earlier(config),
    )
    notes = [*recognition_notes(found), *notes, *session_notes(outcome.findings, config)]
    notes += fidelity_notes(fidelity, cold=config.cold_prompts, output_substitution=config.output_substitution)
    in_words = before.tokenizer != IDS
    truth, counts = report_truth(before, truth_of(outcome.findings)), text_counts(outcome.findings)
    notes += [*truth_notes(truth), *text_notes(counts)]
    ending = end_run(
        outcome,
        config.trace,
        config.run,
        pattern=config.words()[0],
        facts=facts,
        notes=notes,
        prefix_truth=truth if in_words else None,
    )
    told = [*account_lines(account), *fidelity_lines(fidelity, cold=config.cold_prompts)]
    if in_words:
        told += [*truth_lines(truth), *text_lines(counts)]
    whole = ReplaySummary(ending.summary, found.dialect.name, account, fidelity)
    print_result(whole, summary_lines(ending.summary, told), as_json=config.as_json)
    return ending.exit_code()


def sent_earlier(config: ReplayConfig) -> int:
    """Requests sent to their end by the resumed run."""
    if not config.run.resume:
        return 0
    history = (last_header(config.trace).workload or Workload()).extra.get(HISTORY, [])
    return int(history[-1]["kept"]) if history else 0


def session_notes(findings: Mapping[str, int], config: ReplayConfig) -> list[str]:
    if config.replay_sessions and not findings.get(FOLLOWERS):
        return ["--replay-sessions: no request of the trace is known to continue another; all were open loop"]
    return []


def replay_meta(config: ReplayConfig, survey: Survey, model: str, facts: EngineFacts, found: Recognised) -> Meta:
    counters = {} if facts.counters is None else {"prefix_counters_before": msgspec.to_builtins(facts.counters)}
    engine = msgspec.structs.replace(facts.engine, gpus=config.run.gpus)
    if engine.name is None and found.certain:
        engine = msgspec.structs.replace(engine, name=found.dialect.name)
    # A cold run's hashes equal no other run's, whatever the capture's key was.
    hashes = HashInfo(algorithm="replay-cold") if config.cold_prompts else survey.meta.hash
    if hashes is not None:
        hashes = msgspec.structs.replace(hashes, branches=None)
    return Meta(
        source="replay",
        model=model,
        tokenizer="ids",
        block_size=survey.meta.block_size,
        hash=hashes,
        engine=engine,
        workload=Workload(
            pattern=config.pattern,
            nonce=config.nonce,
            speedup=None if config.speedup == 1.0 else config.speedup,
            cold_prompts=True if config.cold_prompts else None,
            source_digest=survey.source_digest,
            extra=shape_of(config, found),
        ),
        extra=counters,
    )


def shape_of(config: ReplayConfig, found: Recognised) -> dict[str, object]:
    """Flags that differ from their defaults, for readers of the trace."""
    told = {
        "api": None if config.api == "completions" else config.api,
        "dialect": found.dialect.name,
        "closed_loop": config.closed_loop or None,
        "parallel": config.parallel,
        "max_think_s": config.max_think_s,
        "start_s": config.start_s,
        "end_s": config.end_s,
        "limit": config.limit,
        "repeat": None if config.repeat == 1 else config.repeat,
        "output_substitution": None if config.output_substitution else False,
    }
    return {name: value for name, value in told.items() if value is not None} | config.fields.described()


@dataclass(frozen=True, slots=True)
class PreparedReplayText:
    """Text data for the shards, and the findings on the way."""

    target: TextTarget | None
    before: Examination


def prepare_replay_text(
    config: ReplayConfig, control: ControlClient, model: str, survey: Survey, block_size: int | None
) -> PreparedReplayText:
    """Ask the tokenizer of ``--tokenizer``; a replay in token ids asks none."""
    if config.api == "completions" or (config.api == "auto" and not any(map(text_api_of, survey.endpoints))):
        return PreparedReplayText(None, Examination(tokenizer=IDS))
    try:
        tokenizer = find_tokenizer(config.tokenizer, control, model)
    except TokenizerError as error:
        unknown = Examination(unknown=str(error))
        return PreparedReplayText(TextTarget(config.api, NO_TARGET, block_size), unknown)
    turns = MOST_TURNS if config.replay_sessions else 1
    text = learn_target(tokenizer, orders(turns), path_of(config.tokenizer))
    target = TextTarget(config.api, text, block_size)
    return PreparedReplayText(target, examine_capture(tokenizer, target, config, survey))


def examine_capture(tokenizer: Tokenizer, target: TextTarget, config: ReplayConfig, survey: Survey) -> Examination:
    text = target.text
    if text.unknown is not None:
        return Examination(tokenizer=text.tokenizer, unknown=text.unknown)
    maker = open_text(TextTarget(target.api, TargetText(text.words, text.gaps)), VLLM, survey.block_size)
    expansion = Expansion(survey.block_size, config.nonce, maker.vocabulary(), config.cold_prompts)
    kept = (captured_of(record, 0.0, survey.block_size) for record in read_kept(survey, config.selection))
    sample = list(islice((each for each in kept if maker.form_of(each) is not None), SAMPLED))
    conversations = [maker.prompt(each, words_for(each, expansion)).conversation for each in sample]
    return examine_conversations(tokenizer, maker.text_maker, conversations, (0, 1) if len(conversations) > 1 else None)
