"""lm-eval-harness: its tasks loaded, their requests handed over in one batch, their scores computed.

The package is imported here alone, and on demand: it takes seconds. Nothing here sends a request.
"""

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from loadgen.accuracy.question import Answer, Likelihood, Question, QuestionForm
from loadgen.plan.lmeval import LmEval
from loadgen.text.enginetokenizer import EngineTokenizer
from loadgen.text.tokenizer import LocalTokenizer, TokenizerError
from tracefile import InputError
from tracefile.records.extras import lacking

os.environ.setdefault("TQDM_DISABLE", "1")  # its bars would write over the run's own panel
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # which would tell that there is no torch
try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise InputError(f"--lm-eval ({error.name}): {lacking('lm_eval')}") from None

logging.getLogger("lm_eval").setLevel(logging.ERROR)

GENERATION = "generate_until"
ROLLING = "loglikelihood_rolling"
TASK_FILES = (".yaml", ".yml")
USUAL_MODEL_LEN = 2048
"""lm-eval's, for windows over a long text on an engine that does not tell its own."""
UNKNOWN: Likelihood = (0.0, False)
"""In the place of an answer that did not come; its document is left out."""

TextTokenizer = LocalTokenizer | EngineTokenizer
Send = Callable[[Sequence[Question]], Mapping[int, Answer]]
"""Sends all questions; returns the answers by number."""


@dataclass(frozen=True, slots=True)
class Part:
    """Question of a document: the join of lm-eval's results with the trace."""

    task: str
    doc_id: int
    idx: int
    """Of the document's requests, such as the choices of one question."""
    number: int
    """Of the question."""


@dataclass(slots=True)
class Tasks:
    """Loaded tasks."""

    manager: Any
    found: dict[str, Any]

    @property
    def by_name(self) -> dict[str, Any]:
        tasks: dict[str, Any] = self.found["tasks"]
        return tasks

    @property
    def scored(self) -> list[str]:
        """Names of the tasks that need log probabilities of prompts."""
        return [name for name, task in self.by_name.items() if task.OUTPUT_TYPE != GENERATION]


def version() -> str:
    return str(lm_eval.__version__)


def load_tasks(asked: LmEval) -> Tasks:
    """Load the tasks and their data. Raises InputError for an unknown one, and for data that cannot be had."""
    known = {name for name in asked.tasks if _is_file(name)}
    manager = TaskManager(include_path=_folder(asked), include_defaults=False)
    if not known.union(manager.all_tasks).issuperset(asked.tasks):
        manager = TaskManager(include_path=_folder(asked))  # reads thousands of files
    for name in asked.tasks:
        if name not in known and name not in manager.all_tasks:
            near = get_close_matches(name, manager.all_tasks, n=3)
            expected = f"expected {', '.join(near)}, or another name or task file" if near else "expected a task of it"
            raise InputError(f"--lm-eval: {name}: no task of lm-eval {lm_eval.__version__}; {expected}")
    try:
        found = manager.load(list(asked.tasks))
    except Exception as error:  # data sets of any kind, from files or the network
        reason = type(error).__name__
        raise InputError(
            f"--lm-eval: {', '.join(asked.tasks)}: the data cannot be loaded ({reason}); expected its files, or the "
            "Hugging Face Hub within reach or its data in the cache (HF_HOME)"
        ) from error
    return Tasks(manager, found)


def _folder(asked: LmEval) -> str | None:
    if asked.include_path is None:
        return None
    if not asked.include_path.is_dir():
        raise InputError(f"--include-path: {asked.include_path}: no folder; expected one with task files")
    return str(asked.include_path)


def _is_file(name: str) -> bool:
    if not name.endswith(TASK_FILES):
        return False
    if not Path(name).is_file():
        raise InputError(f"--lm-eval: {name}: no such file; expected a task file, or a task's name")
    return True


class SentModel(TemplateLM):  # type: ignore[misc]
    """The model as lm-eval sees it. The first call sends the requests of all tasks, so that they are one load."""

    def __init__(self, tasks: Tasks, form: QuestionForm, tokenizer: TextTokenizer | None, send: Send) -> None:
        super().__init__()
        self._tasks, self._form, self._tokens, self._send = tasks, form, tokenizer, send
        self._results: dict[str, list[Any]] | None = None
        self._encoded: dict[str, list[int]] = {}
        self._first: int | None = None
        self.parts: list[Part] = []
        self.left_out: dict[str, int] = {}
        """Documents without all answers, by task."""

    # What lm-eval calls.

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return self._take(GENERATION, requests)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Likelihood]:
        return self._take("loglikelihood", requests)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        return self._take(ROLLING, requests)

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[Likelihood]:
        raise AssertionError("texts are encoded here")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        assert self._tokens is not None  # asked for before
        if string not in self._encoded:
            try:
                self._encoded[string] = self._tokens.encode(string)
            except TokenizerError as error:
                raise InputError(f"--tokenizer: {error}; expected one that encodes every text") from None
        return self._encoded[string]

    @property
    def eot_token_id(self) -> int:
        """Return the token before a text without context."""
        if self._first is None and self._tokens is not None:
            self._first = self._tokens.first_id()
        if self._first is None:
            raise InputError(
                "--tokenizer: a task scores texts without a context, which begin with the model's first or end token; "
                "expected the path of a tokenizer that has one"
            )
        return self._first

    @property
    def tokenizer_name(self) -> str:
        return "" if self._tokens is None else self._tokens.name

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return nothing: the engine or the tokenizer has the template."""
        return ""

    def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """Return the chat as JSON, for the engine to render, or rendered."""
        if self._form.api == "chat":
            return json.dumps(chat_history, ensure_ascii=False)
        assert self._tokens is not None  # asked for before
        try:
            return self._tokens.render_chat(chat_history, generation_prompt=add_generation_prompt)
        except TokenizerError as error:
            raise InputError(f"--chat-template: {error}; expected --tokenizer PATH with a chat template") from None

    # Requests and answers.

    def _take(self, kind: str, requests: list[Any]) -> list[Any]:
        if self._results is None:
            self._results = self._send_all()
        results = self._results[kind]
        assert len(results) == len(requests)
        return results

    def _send_all(self) -> dict[str, list[Any]]:
        """Send every task's requests; return the results by kind, in lm-eval's order."""
        questions: list[Question] = []
        asked: list[tuple[str, Any, range]] = []
        for name, task in self._tasks.by_name.items():
            for instance in task.instances:
                for _ in range(instance.repeats):
                    first = len(questions)
                    questions += self._questions(instance.request_type, instance.args)
                    asked.append((name, instance, range(first, len(questions))))
                    self.parts += [Part(name, instance.doc_id, instance.idx, n) for n in asked[-1][2]]
        answers = self._send(questions)
        results: dict[str, list[Any]] = {}
        failed: dict[str, set[int]] = {}
        for name, instance, numbers in asked:
            told = [answers.get(number) for number in numbers]
            if None in told:
                failed.setdefault(name, set()).add(instance.doc_id)
            results.setdefault(instance.request_type, []).append(_result(instance.request_type, told))
        for name, documents in failed.items():
            leave_out(name, self._tasks.by_name[name], documents)
            self.left_out[name] = len(documents)
        return results

    def _questions(self, kind: str, args: tuple[Any, ...]) -> list[Question]:
        if kind == GENERATION:
            return [self._generation(*args)]
        if kind == ROLLING:
            return [self._form.scoring(*window) for window in self._windows(args[0])]
        context, continuation = args
        if context:
            return [self._form.scoring(*self._encode_pair(context, continuation))]
        ids, first = self.tok_encode(continuation), self.prefix_token_id
        return [self._form.scoring(ids[:1], ids[1:]) if ids[:1] == [first] else self._form.scoring([first], ids)]

    def _generation(self, context: str, options: Mapping[str, Any]) -> Question:
        if self._form.api == "chat":
            return self._form.generation(json.loads(context), options)
        return self._form.generation(context if self._tokens is None else self.tok_encode(context), options)

    def _windows(self, text: str) -> Iterable[tuple[list[int], list[int]]]:
        longest = (self._form.max_model_len or USUAL_MODEL_LEN) - 2  # as lm-eval's API models have it
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=longest, context_len=1
        )
        return map(make_disjoint_window, windows)


def _result(kind: str, told: Sequence[Answer | None]) -> Any:
    if None in told:
        return "" if kind == GENERATION else 0.0 if kind == ROLLING else UNKNOWN
    return sum(answer[0] for answer in told if answer is not None) if kind == ROLLING else told[0]


def leave_out(name: str, task: Any, documents: set[int]) -> None:
    """Take documents out of a task's scores. Raises InputError if none is left."""
    kept = [instance for instance in task.instances if instance.doc_id not in documents]
    if not kept:
        raise InputError(f"--lm-eval: {name}: no document has all its outputs; nothing to score")
    task._instances = kept
    iterator = task.doc_iterator

    def remaining(**settings: Any) -> Iterable[tuple[int, Any]]:
        return ((number, doc) for number, doc in iterator(**settings) if number not in documents)

    task.doc_iterator = remaining


def evaluate(model: SentModel, tasks: Tasks, asked: LmEval, *, named: Mapping[str, str], chats: bool) -> dict[str, Any]:
    """Run the evaluation; return lm-eval's results. ``named``: the model and its place; ``chats``: tasks as chats."""
    tasks.manager.load = lambda _: tasks.found
    tracker = EvaluationTracker()
    results: dict[str, Any] = simple_evaluate(
        model=model,
        model_args=dict(named),
        tasks=list(asked.tasks),
        num_fewshot=asked.num_fewshot,
        limit=asked.limit,
        log_samples=asked.log_samples,
        apply_chat_template=chats,
        fewshot_as_multiturn=chats,
        task_manager=tasks.manager,
        evaluation_tracker=tracker,
    )
    results["config"]["model"] = "kvtape"
    results["tracker"] = tracker
    return results


def save(results: dict[str, Any], folder: Path) -> Path:
    """Write lm-eval's files into ``folder``; return the path of its results. Raises InputError if it could not."""
    tracker, samples = results.pop("tracker"), results.pop("samples", None)
    tracker.output_path = str(folder / "results.json")
    tracker.save_results_aggregated(results=results, samples=samples)
    written = folder / f"results_{getattr(tracker, 'date_id', '')}.json"
    if not written.is_file():
        raise InputError(f"{folder}: lm-eval's results could not be written; expected a folder to write into")
    for name, found in (samples or {}).items():
        tracker.save_results_samples(task_name=name, samples=found)
        (folder / f"samples_{name}_{tracker.date_id}.jsonl").chmod(0o600)  # texts
    return written
