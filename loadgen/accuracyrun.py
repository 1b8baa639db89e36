"""Run of ``--lm-eval``: its tasks sent as a load, their scores told beside the load's metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from engines.control import ControlClient
from engines.dialect import Dialect
from engines.facts import EngineFacts
from engines.readiness import page_notes, readiness_notes, readiness_of, target_words
from engines.recognition import find_dialect, recognition_notes
from loadgen.accuracy.harness import (
    SentModel,
    Tasks,
    TextTokenizer,
    evaluate,
    load_tasks,
    save,
    version,
)
from loadgen.accuracy.question import (
    Accuracy,
    AccuracyJob,
    Answer,
    Question,
    QuestionForm,
    accuracy_lines,
    likelihood,
    scores_of,
)
from loadgen.core.request import origin_of
from loadgen.loadrun import run_config
from loadgen.plan.config import LoadConfig
from loadgen.plan.lmeval import LmEval
from loadgen.plan.workload import CLOSED, arrivals_us
from loadgen.runs.driving import announce, run_job, tokenizer_words
from loadgen.runs.outcome import RunOutcome
from loadgen.runs.refusal import Asked, check_fields
from loadgen.runs.summary import Summary, end_run, summary_lines
from loadgen.text.enginetokenizer import find_tokenizer
from loadgen.text.tokenizer import LocalTokenizer, TokenizerError
from tracefile import InputError, Meta, Workload, load_key
from tracefile.commandline.printing import print_result
from tracefile.files.digest import trace_digest


class AccuracySummary(Summary, frozen=True, kw_only=True):
    """Content of ``--json``: the summary of any load, and the scores."""

    accuracy: Accuracy


@dataclass(slots=True, kw_only=True)
class Sending:
    """Sends an evaluation's questions as one load, and keeps what came of it."""

    config: LoadConfig
    asked: LmEval
    tasks: Tasks
    model: str
    dialect: Dialect
    facts: EngineFacts
    control: ControlClient
    words: Sequence[str]
    job: AccuracyJob | None = field(default=None, init=False)
    outcome: RunOutcome | None = field(default=None, init=False)

    def __call__(self, questions: Sequence[Question]) -> Mapping[int, Answer]:
        self._check_logprobs(questions)
        config = replace(self.config, number=len(questions))
        due_us = chain.from_iterable(chunk.tolist() for chunk in arrivals_us(config))
        salt = config.fields.extra.get("cache_salt")
        self.job = job = AccuracyJob(
            questions=tuple(questions),
            due_ms=tuple(None if due == CLOSED else due / 1000 for due in due_us),
            model=self.model,
            key=load_key(),
            block_size=self.facts.hash_block_size,
            cache_salt=salt if isinstance(salt, str) else None,
        )
        requests = f"{len(questions)} requests of lm-eval {version()}: {', '.join(self.tasks.by_name)}"
        announce("loadgen", [*self.words, requests, *config.words(), f"to {config.trace}"], [], config.run)
        self.outcome = outcome = run_job(run_config(config, job, self._meta(job), self.dialect))
        if outcome.stopped == "refused":
            kinds = ", ".join(sorted(outcome.tally.errors))
            raise InputError(
                f"--lm-eval: the engine refuses all of these requests ({kinds}); expected an engine that takes them: "
                "their context, stop strings and generation_kwargs"
            )
        return outcome.results

    def _check_logprobs(self, questions: Sequence[Question]) -> None:
        """Ask for a short prompt's log probabilities, where tasks need them. Raises InputError if none come."""
        first = next((question for question in questions if question.scored_from is not None), None)
        if first is None or first.token_ids is None:
            return
        ids = first.token_ids[:2].tolist()
        probe = QuestionForm(model=self.model, dialect=self.dialect, stream=False).scoring(ids, ids)
        response = self.control.post(probe.path, probe.body)
        if not response.is_success or likelihood(response.content, 1, 2 * len(ids)) is None:
            told = response.refusal or f"HTTP {response.status}"
            raise InputError(
                f"--lm-eval: {', '.join(self.tasks.scored)}: scored by log probabilities of prompts, which "
                f"{probe.path} does not give for echo and logprobs ({told}); expected vLLM or SGLang, or tasks of "
                "generate_until"
            )

    def _meta(self, job: AccuracyJob) -> Meta:
        config, asked = self.config, self.asked
        tasks = {
            "tasks": list(self.tasks.by_name),
            "version": version(),
            "num_fewshot": asked.num_fewshot,
            "limit": asked.limit,
        }
        shape = {"api": config.api, "rate": config.rate, "parallel": config.parallel, **config.fields.described()}
        return Meta(
            source="client",
            model=self.model,
            block_size=job.block_size,
            hash=job.hasher().info,
            engine=msgspec.structs.replace(self.facts.engine, gpus=config.run.gpus),
            workload=Workload(pattern=config.arrivals, seed=config.seed, extra={"lm_eval": tasks, **shape}),
        )


def run_accuracy(config: LoadConfig, asked: LmEval) -> int:
    """Send the tasks, write trace and results, print metrics and scores; return the exit code.

    It is that of a load, or 1 if a document is left out of the scores.
    """
    tasks = load_tasks(asked)
    if tasks.scored and config.api == "chat":
        raise InputError(
            f"--api: chat with {', '.join(tasks.scored)}: scored by log probabilities of prompts, which chats do not "
            "have; expected --api completions, or tasks of generate_until"
        )
    with ControlClient(str(origin_of(config.url)), config.run.access) as control:
        model = control.resolve_model(config.model)
        before = control.facts()
        found = find_dialect(control, config.dialect)
        check_fields(control, Asked(config.api, config.fields, found.dialect, config.vocabulary))
        tokenizer, unknown = _tokenizer(config, control, model, tasks)
        ready = readiness_of(control, found.dialect, before)
        sending = Sending(
            config=config,
            asked=asked,
            tasks=tasks,
            model=model,
            dialect=found.dialect,
            facts=before,
            control=control,
            words=[
                *target_words(control.url, model, before, ready, found.evidence),
                tokenizer_words(None if tokenizer is None else tokenizer.name, unknown),
            ],
        )
        form = QuestionForm(
            model=model,
            api="chat" if config.api == "chat" else "completions",
            dialect=found.dialect,
            stream=config.fields.stream,
            extra=config.fields.extra,
            max_model_len=before.engine.max_model_len,
        )
        lm = SentModel(tasks, form, tokenizer, sending)
        results, lacking = _evaluated(lm, sending, chats=config.api == "chat" or config.chat_template)
        notes = [*recognition_notes(found), *page_notes(before), *readiness_notes(ready)]
        facts = (before, control.facts())
    return _report(config, sending, lm, results, notes=[*notes, *lacking], facts=facts)


def _tokenizer(
    config: LoadConfig, control: ControlClient, model: str, tasks: Tasks
) -> tuple[TextTokenizer | None, str | None]:
    """Return the tokenizer, or the reason why there is none: the engine then encodes the prompts."""
    if config.api == "chat":
        return None, "the engine applies its chat template"
    tokenizer: TextTokenizer | None = None
    unknown: str | None = None
    try:
        tokenizer = find_tokenizer(config.tokenizer, control, model)
    except TokenizerError as error:
        if tasks.scored:
            raise InputError(
                f"--tokenizer: {error}; expected a path: {', '.join(tasks.scored)} need to know where a context ends"
            ) from None
        unknown = str(error)
    if config.chat_template and not isinstance(tokenizer, LocalTokenizer):
        raise InputError("--chat-template: with --lm-eval; expected --tokenizer PATH, or --api chat")
    return tokenizer, unknown


def _evaluated(lm: SentModel, sending: Sending, *, chats: bool) -> tuple[dict[str, Any] | None, list[str]]:
    """Return lm-eval's results, or the reason why there are none though requests were sent."""
    named = {"model": sending.model, "base_url": sending.control.url}
    try:
        return evaluate(lm, sending.tasks, sending.asked, named=named, chats=chats), []
    except InputError as error:
        if sending.outcome is None or sending.outcome.stopped == "refused":
            raise
        return None, [str(error)]


def _report(
    config: LoadConfig,
    sending: Sending,
    lm: SentModel,
    results: dict[str, Any] | None,
    *,
    notes: list[str],
    facts: tuple[EngineFacts, EngineFacts],
) -> int:
    outcome = sending.outcome
    assert outcome is not None  # requests were sent
    if sending.tasks.scored:
        notes.append(
            "requests for log probabilities come whole (no TTFT, no ITL), and vLLM and SGLang compute all of "
            "their prompts: they read nothing from the prefix cache"
        )
    ending = end_run(outcome, config.trace, config.run, pattern=config.arrivals, facts=facts, notes=notes)
    accuracy = Accuracy(
        lm_eval=version(),
        results=None if results is None else str(_save(results, sending, lm)),
        documents_left_out=lm.left_out,
        scores=[] if results is None else scores_of(results),
    )
    whole = AccuracySummary(**msgspec.structs.asdict(ending.summary), accuracy=accuracy)
    print_result(whole, summary_lines(whole, accuracy_lines(accuracy)), as_json=config.as_json)
    return ending.exit_code() or int(bool(lm.left_out) or results is None)


def _save(results: dict[str, Any], sending: Sending, lm: SentModel) -> Path:
    """Write lm-eval's results beside the trace, with the join of their documents and the trace's requests."""
    job, outcome, trace = sending.job, sending.outcome, sending.config.trace
    assert job is not None  # requests were sent
    assert outcome is not None
    names = job.names()
    results["kvtape"] = {
        "trace": trace.name,
        "trace_digest": trace_digest(trace),
        "workload_digest": outcome.digest,
        "documents_left_out": lm.left_out,
        "requests": [[one.task, one.doc_id, one.idx, job.request_id(names[one.number])] for one in lm.parts],
    }
    return save(results, trace.parent)
