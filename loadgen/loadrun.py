"""Run of a load from its settings to its exit code: the target asked, the load sent, its trace told of."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice

import msgspec
import numpy as np

from engines.control import ControlClient
from engines.dialect import Dialect
from engines.facts import EngineFacts
from engines.readiness import page_notes, readiness_notes, readiness_of, target_words, unreported
from engines.recognition import dialect_notes, find_dialect, recognition_notes
from loadgen.core.job import Job
from loadgen.core.request import SESSION_HEADER, origin_of
from loadgen.datasets import DATASETS
from loadgen.plan.config import LoadConfig
from loadgen.plan.loadjob import ELSEWHERE, ESTIMATED_LENGTHS, NOT_STARTED, PAUSED, LoadJob, load_name
from loadgen.plan.opening import opening_of, orders_of
from loadgen.plan.shapes import SessionShape
from loadgen.plan.workload import Workload as PlannedLoad
from loadgen.plan.workload import rate_profile
from loadgen.runs.driving import RunConfig, announce, run_job, tokenizer_words
from loadgen.runs.outcome import RunOutcome
from loadgen.runs.progress import TargetRate
from loadgen.runs.refusal import Asked, check_fields, field_notes, refusal
from loadgen.runs.resumption import AT_DEADLINE, nonce_for
from loadgen.runs.shardmessages import UNSENT
from loadgen.runs.summary import Ending, end_run, summary_lines
from loadgen.text.enginetokenizer import find_tokenizer, path_of
from loadgen.text.messages import Piece, SyntheticMessage, VerbatimMessage
from loadgen.text.prefixtruth import GIVEN, IDS, Examination, report_truth, truth_lines, truth_notes, truth_of
from loadgen.text.spoken import SentMessage
from loadgen.text.targettext import NO_TARGET, TargetText, TextMaker, examine_conversations, learn_target
from loadgen.text.tokenizer import Tokenizer, TokenizerError
from loadgen.text.words import UNPROVEN
from measure.wording import NOTHING_CACHED
from tracefile import InputError, Meta, Workload, load_key
from tracefile.commandline.printing import print_result

EMPTY = "--duration, --rate: no arrival in that time; expected a longer one or a higher rate"
_ALWAYS_TOLD = frozenset({"api", "rate", "duration_s", "number", "parallel", "prompt_tokens", "output_tokens", "turns"})
"""Flags that the trace's header has even where they were not given."""

_OWN_FIELDS = frozenset({"pattern", "seed", "fields"})


def run_load(config: LoadConfig) -> int:
    """Send the load, write its trace, print its summary; return the exit code."""
    if config.dataset_path is None or not DATASETS[config.dataset].has_texts:  # texts are the same in every run
        config = replace(config, nonce=nonce_for(config.nonce, config.trace, resume=config.run.resume))
    ending = send_load(config)
    summary = ending.summary
    told = () if summary.prefix_truth is None else truth_lines(summary.prefix_truth)
    print_result(summary, summary_lines(summary, told), as_json=config.as_json)
    return ending.exit_code()


def send_load(config: LoadConfig, place: Mapping[str, object] | None = None) -> Ending:
    """Send the load and write its trace. ``place``: its place in a sweep, for the header; null: announced here."""
    with ControlClient(str(origin_of(config.url)), config.run.access) as control:
        model = control.resolve_model(config.model)
        before = control.facts()
        text = prepare_load_text(config, control, model)
        found = find_dialect(control, config.dialect)
        asked = Asked(config.api, config.fields, found.dialect, config.vocabulary)
        check_fields(control, asked)
        job = load_job(config, found.dialect, model, before, text.target)
        ready = readiness_of(control, found.dialect, before)
        words = [
            *target_words(control.url, model, before, ready, found.evidence),
            tokenizer_words(text.before.tokenizer, text.before.unknown),
            f"hashes of {job.block_size}-token blocks",
            *config.words(),
            f"to {config.trace}",
        ]
        known = [*page_notes(before), *dialect_notes(found.dialect), *readiness_notes(ready)]
        if place is None:
            announce("loadgen", words, [*known, *field_notes(asked, 0)], config.run)
        meta = _meta(job, before, {} if place is None else {"sweep": place})
        outcome = run_job(replace(run_config(config, job, meta, found.dialect), empty=EMPTY))
        if outcome.stopped == "refused":
            raise InputError(refusal(control, model, asked, outcome.tally.errors))
        truth = report_truth(text.before, truth_of(outcome.findings))
        unread = outcome.tally.errors["unparseable"]
        known = [*recognition_notes(found), *known, *field_notes(asked, unread)]
        notes = [*known, *_notes(outcome, config), *truth_notes(truth)]
        facts = (before, control.facts())
    return end_run(
        outcome, config.trace, config.run, pattern=config.arrivals, facts=facts, notes=notes, prefix_truth=truth
    )


def run_config(config: LoadConfig, job: Job, meta: Meta, dialect: Dialect) -> RunConfig:
    return RunConfig(
        job=job,
        url=config.url,
        trace=config.trace,
        meta=meta,
        run=config.run,
        sessions=config.most_shards,
        parallel=config.requests_at_once,
        timeout_s=config.timeout_s,
        overwrite=config.overwrite,
        duration_s=config.ends_s,
        cancels=config.at_end == "cancel",
        target_rate=_target_rate(config),
        unreported=unreported(dialect),
    )


def _meta(job: LoadJob, facts: EngineFacts, more: Mapping[str, object]) -> Meta:
    """Return the header; ``more``: further fields of its workload."""
    config = job.config
    counters = {} if facts.counters is None else {"prefix_counters_before": msgspec.to_builtins(facts.counters)}
    return Meta(
        source="client",
        model=job.model,
        tokenizer=job.target.tokenizer or ("ids" if config.api == "completions" else None),
        block_size=job.block_size,
        hash=msgspec.structs.replace(job.hasher().info, branches=job.branches or None),
        engine=msgspec.structs.replace(facts.engine, gpus=config.run.gpus),
        workload=Workload(
            pattern=config.arrivals, seed=config.seed, nonce=config.nonce, extra=_shape(config) | dict(more)
        ),
        extra=counters,
    )


def _shape(config: LoadConfig) -> dict[str, object]:
    """Flags that made the load, for readers of the trace; flags left at their defaults are omitted."""
    given = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in ELSEWHERE}
    defaults = {each.name: each.default for each in fields(config)}
    elsewhere: dict[str, object] = {} if config.at_end == "finish" else {"at_end": config.at_end}
    if config.session_headers != (SESSION_HEADER,):
        elsewhere["session_headers"] = ", ".join(config.session_headers)
    told = {name: value for name, value in given.items() if name in _ALWAYS_TOLD or value != defaults[name]}
    return (
        {
            name: value if isinstance(value, float | int | None) else str(value)
            for name, value in told.items()
            if name not in _OWN_FIELDS
        }
        | config.fields.described()
        | elsewhere
    )


def load_job(config: LoadConfig, dialect: Dialect, model: str, facts: EngineFacts, target: TargetText) -> LoadJob:
    return LoadJob(
        config=config,
        model=model,
        load_id=load_name(config),
        key=load_key(),
        block_size=facts.hash_block_size,
        branches=facts.is_finer(facts.hash_block_size) and (config.run.procs == 1 or config.sends_ids),
        engine_block_size=facts.engine.block_size or facts.hash_block_size,
        target=target,
        dialect=dialect,
    )


def _target_rate(config: LoadConfig) -> TargetRate | None:
    """Requests a second as planned; null: bursts, or responses and pauses decide when the next is sent."""
    if not config.open_loop or not config.single_turns or config.pattern == "burst":
        return None
    rates = rate_profile(config)

    def at(second: float) -> float:
        piece = int(np.searchsorted(rates.starts_s, second, side="right")) - 1
        groups = float(rates.rates[piece] + rates.slopes[piece] * (second - rates.starts_s[piece]))
        return groups * config.group_size

    return at


def _notes(outcome: RunOutcome, config: LoadConfig) -> list[str]:
    notes = []
    if config.at_end == "cancel":
        aborted = outcome.tally.errors[AT_DEADLINE]
        paused, unsent = (outcome.findings.get(name, 0) for name in (PAUSED, UNSENT))
        notes.append(
            f"--at-end cancel: {aborted} requests in flight cancelled, {paused} sessions left before their next turn, "
            f"{unsent} due requests not sent"
        )
    if (late := outcome.findings.get(NOT_STARTED)) and outcome.stopped is None:
        notes.append(f"{late} sessions arrived but were not started: --parallel-sessions left no room before the end")
    if outcome.findings.get(ESTIMATED_LENGTHS):
        notes.append(
            "lengths taken from the dataset's texts are estimated at 4 bytes a token; --tokenizer PATH makes them "
            "exact, --output-tokens says them"
        )
    repeats = config.prefix_tokens or not config.single_turns
    if repeats and outcome.tally.cached_reported and not outcome.tally.cached_tokens:
        notes.append(f"cached tokens: {NOTHING_CACHED.format(outcome.tally.cached_reported)}")
    unknown = outcome.tally.without_output_hashes
    if config.api == "completions" and not config.single_turns and unknown:
        notes.append(
            f"the engine returned no token ids for {unknown} answers: the turns after them went on from stand-ins, "
            "whose blocks cannot be in its cache"
        )
    return notes


SAMPLED = 4
"""Sessions with proved prompts; more of the same shape would prove no more."""
SOUGHT = 200
"""Sessions searched for two of one prefix."""
MADE_UP_TOKENS = 24
"""Length of the answer that stands in a sampled second turn."""


@dataclass(frozen=True, slots=True)
class PreparedText:
    """Text data for the shards, and the findings on the way."""

    target: TargetText
    before: Examination


def prepare_text(
    source: str, control: ControlClient, model: str, sessions: Iterable[SessionShape], prefix_tokens: int
) -> PreparedText:
    first = list(islice(sessions, SOUGHT))
    try:
        tokenizer = find_tokenizer(source, control, model)
    except TokenizerError as error:
        return PreparedText(NO_TARGET, Examination(unknown=str(error)))
    target = learn_target(tokenizer, orders_of(first, prefix_tokens), path_of(source))
    return PreparedText(target, examine_sessions(tokenizer, target, first, prefix_tokens))


def prepare_load_text(config: LoadConfig, control: ControlClient, model: str) -> PreparedText:
    if config.sends_ids:
        return PreparedText(TargetText(UNPROVEN, {}, path=path_of(config.tokenizer)), Examination(tokenizer=IDS))
    prepared = prepare_text(config.tokenizer, control, model, PlannedLoad(config), config.prefix_tokens)
    unknown = prepared.before.unknown
    if config.chat_template and unknown == GIVEN and prepared.target.path is None:
        raise InputError("--chat-template: of a dataset's texts; expected the model's tokenizer, --tokenizer PATH")
    if config.chat_template and unknown not in (None, GIVEN):
        raise InputError(f"--chat-template: {unknown}; expected --tokenizer with a chat template")
    return prepared


def _has_texts(sessions: Iterable[SessionShape]) -> bool:
    return any(
        isinstance(said, VerbatimMessage) for session in sessions for turn in session.turns for said in turn.said
    )


def examine_sessions(
    tokenizer: Tokenizer, target: TargetText, sessions: Sequence[SessionShape], prefix_tokens: int
) -> Examination:
    if target.unknown is not None:
        return Examination(tokenizer=target.tokenizer, unknown=target.unknown)
    if _has_texts(sessions):
        return Examination(tokenizer=target.tokenizer, unknown=GIVEN)
    text_maker = TextMaker(target, tokenizer=tokenizer)
    sample, pair = _sample(sessions)
    conversations = [[text_maker.say(said) for said in opening_of(session, prefix_tokens)] for session in sample]
    later = [
        _continued(text_maker, conversation, session)
        for session, conversation in zip(sample, conversations, strict=True)
        if len(session.turns) > 1
    ]
    return examine_conversations(tokenizer, text_maker, [*conversations, *later], pair)


def _sample(sessions: Sequence[SessionShape]) -> tuple[list[SessionShape], tuple[int, int] | None]:
    """A few sessions, two of one prefix first if there are such; the places of these two."""
    of_prefix: dict[int, SessionShape] = {}
    for session in sessions:
        if session.prefix is None:
            continue
        other = of_prefix.setdefault(session.prefix, session)
        if other is not session:
            rest = [each for each in sessions if each is not other and each is not session]
            return [other, session, *rest[: SAMPLED - 2]], (0, 1)
    return list(sessions[:SAMPLED]), None


def _continued(text_maker: TextMaker, conversation: Sequence[SentMessage], session: SessionShape) -> list[SentMessage]:
    said = session.turns[1].messages()
    response = text_maker.say(SyntheticMessage("assistant", (Piece(session.turns[1].prompt_key + 1, MADE_UP_TOKENS),)))
    calls = tuple(call for message in said if (call := text_maker.call(message)) is not None)
    behind = SentMessage("assistant", response.text, response.numbers, length=response.length, calls=calls)
    return [*conversation, behind, *(text_maker.say(message) for message in said)]
