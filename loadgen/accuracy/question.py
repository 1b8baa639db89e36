"""Questions of an evaluation: requests with the fields that lm-eval's own API models send, their answers and scores.

A generation ends where the model or a stop string ends it, so no field asks for an exact length. A scoring asks for the
log probabilities of a prompt: the context and the continuation whose likelihood is wanted.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from engines.dialect import COMPLETIONS_PATH, GREEDY, USAGE, Dialect
from engines.vllm import VLLM
from loadgen.core.bodyfields import merge_patch
from loadgen.core.draws import TokenIds
from loadgen.core.job import Shard
from loadgen.core.plan import Response, Send, nothing_more
from loadgen.core.request import PlannedRequest, request_headers
from loadgen.text.prompts import hash_request
from loadgen.text.spoken import PATHS
from measure.table import table_lines
from tracefile import BlockHasher, HashKey, Record, RequestId, keyed_id
from tracefile.records.decoding import NOT_JSON

SEED = 1234
"""lm-eval's own: an engine that draws its outputs from it draws the same here."""
MAX_TOKENS = 256
"""lm-eval's, of a task that says none."""
CHAT_STOPS = 4
"""Most stop strings of a chat in OpenAI's API."""

Likelihood = tuple[float, bool]
"""Sum of a continuation's log probabilities; True: each of its tokens is the likeliest."""
Answer = str | Likelihood
Prompt = Sequence[int] | str | list[dict[str, Any]]
"""Token ids, a text, or a chat's messages."""


@dataclass(frozen=True, slots=True)
class Question:
    """Request of an evaluation."""

    path: str
    body: bytes
    token_ids: TokenIds | None
    """Of the prompt; null: only the engine knows them."""
    max_tokens: int
    stream: bool
    stops: tuple[str, ...] = ()
    scored_from: int | None = None
    """First prompt token whose log probability counts; null: a generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionForm:
    """Common settings of all questions of a run."""

    model: str
    api: Literal["completions", "chat"] = "completions"
    dialect: Dialect = VLLM
    stream: bool = True
    extra: Mapping[str, Any] | None = None
    """The patch of ``--extra-body``."""
    max_model_len: int | None = None
    """Longer prompts lose their beginning, as in lm-eval. Null: no limit is known."""

    def generation(self, prompt: Prompt, options: Mapping[str, Any]) -> Question:
        """Return the request for an output; ``options``: a task's ``generation_kwargs``."""
        options = {name: value for name, value in options.items() if name != "do_sample"}
        usual = options.pop("max_gen_toks", MAX_TOKENS)
        max_tokens = int(options.pop("max_tokens", usual))
        stops = stop_strings(options.pop("until", None))
        token_ids = None
        if not isinstance(prompt, str) and self.api == "completions":
            token_ids = self._cut(prompt, max_tokens)
            prompt = token_ids.tolist()
        fields = {"model": self.model, "max_tokens": max_tokens, **GREEDY, "seed": SEED, "stream": self.stream}
        fields |= USAGE if self.stream else {}
        fields |= self._asks_ids()
        if stops:
            fields["stop"] = list(stops[:CHAT_STOPS] if self.api == "chat" else stops)
        path = COMPLETIONS_PATH if self.api == "completions" else PATHS["chat"]
        said = {"prompt" if self.api == "completions" else "messages": prompt}
        return Question(path, self._body(said, {**fields, **options}), token_ids, max_tokens, self.stream, stops)

    def scoring(self, context: Sequence[int], continuation: Sequence[int]) -> Question:
        """Return the request for the log probabilities of ``continuation``; its one output token is thrown away."""
        token_ids = self._cut([*context, *continuation], 1)
        fields = {"model": self.model, "max_tokens": 1, **GREEDY, "seed": SEED, "logprobs": 1, "echo": True}
        body = self._body({"prompt": token_ids.tolist()}, {**fields, "stream": False})
        start = max(1, len(token_ids) - len(continuation))
        return Question(COMPLETIONS_PATH, body, token_ids, 1, False, scored_from=start)

    def _asks_ids(self) -> dict[str, Any]:
        dialect, is_chat = self.dialect, self.api == "chat"
        asked = "return_token_ids" in (dialect.chat_constant if is_chat else dialect.constant)
        refused = is_chat and self.stream and "return_token_ids" in dialect.chat_stream_without
        return {"return_token_ids": True} if asked and not refused else {}

    def _cut(self, token_ids: Prompt, output_tokens: int) -> TokenIds:
        """Leave out the prompt's beginning where prompt and output exceed the context."""
        ids = np.asarray(token_ids, dtype=np.uint32)
        return ids if self.max_model_len is None else ids[-max(1, self.max_model_len - output_tokens) :]

    def _body(self, said: Mapping[str, Any], fields: Mapping[str, Any]) -> bytes:
        return msgspec.json.encode({**said, **merge_patch(fields, self.extra or {})})


def stop_strings(until: object) -> tuple[str, ...]:
    """Return the stop strings of a task's ``until``: one, several or none; empty ones are no stops."""
    found = [until] if isinstance(until, str) else until if isinstance(until, list | tuple) else []
    return tuple(str(stop) for stop in found if stop)


def read_answer(question: Question, response: Response) -> Answer | None:
    """Return the output's text before its first stop string, or the likelihood; null: the response has none."""
    if not response.ok:
        return None
    if question.scored_from is None:
        text = response.text
        for stop in question.stops:
            text = text.split(stop)[0]
        return text
    assert question.token_ids is not None  # a scoring is of token ids
    return likelihood(response.body, question.scored_from, len(question.token_ids))


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None


class _Echoed(msgspec.Struct):
    choices: list[_Choice]


_decode = msgspec.json.Decoder(_Echoed).decode


def likelihood(body: bytes, start: int, end: int) -> Likelihood | None:
    """Return the likelihood of the prompt's tokens ``start`` to ``end`` from an echoed completion; null: not told."""
    try:
        logprobs = _decode(body).choices[0].logprobs
    except (*NOT_JSON, IndexError):
        return None
    if logprobs is None or min(len(logprobs.token_logprobs), len(logprobs.top_logprobs)) < end:
        return None
    scored = list(zip(logprobs.token_logprobs[start:end], logprobs.top_logprobs[start:end], strict=True))
    known = [(value, top) for value, top in scored if value is not None and top]
    if len(known) < len(scored):
        return None
    return sum(value for value, _ in known), all(value == max(top.values()) for value, top in known)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyJob:
    """Questions for one engine."""

    questions: tuple[Question, ...]
    due_ms: tuple[float | None, ...]
    """By question; null: as soon as the limit on requests in flight has room."""
    model: str
    key: HashKey
    block_size: int
    cache_salt: str | None = None

    @property
    def load_id(self) -> str:
        digest = hashlib.sha256()
        for question in self.questions:
            digest.update(question_digest(question))
        return f"eval-{digest.hexdigest()[:12]}"

    def hasher(self) -> BlockHasher:
        return BlockHasher(self.key, block_size=self.block_size, model=self.model, cache_salt=self.cache_salt)

    def names(self) -> list[str]:
        """Return each question's name, sent as a header."""
        load_id = self.load_id
        return [f"{load_id}-{number}" for number in range(len(self.questions))]

    def request_id(self, name: str) -> RequestId:
        """Return the request id, as a tap with the same key file records it."""
        return RequestId(keyed_id(self.key, "request", name))

    def open(self, shard: Shard) -> "OpenAccuracy":
        places = [number for number in range(len(self.questions)) if shard.has(number)]
        return OpenAccuracy(self, places, self.names(), self.hasher())


def question_digest(question: Question) -> bytes:
    return hashlib.sha256(question.path.encode() + b"\0" + question.body).digest()


@dataclass(slots=True)
class OpenAccuracy:
    """Questions that one shard sends."""

    job: AccuracyJob
    places: list[int]
    names: list[str]
    hasher: BlockHasher
    answers: dict[int, Answer] = field(default_factory=dict)
    """By question, of responses that ended well."""

    def plan(self) -> Iterator[Send]:
        for place in self.places:
            describe = partial(self.describe, place)
            yield Send(self.job.due_ms[place], partial(self.request, place), nothing_more, describe)

    def planned(self) -> int:
        return len(self.places)

    def last_send_ms(self) -> float | None:
        return max((due for place in self.places if (due := self.job.due_ms[place]) is not None), default=None)

    def digest_share(self) -> int:
        return sum(int.from_bytes(question_digest(self.job.questions[place]), "big") for place in self.places)

    def resume(self, ended: Mapping[RequestId, bool]) -> Collection[RequestId]:
        raise AssertionError("answers are in memory alone, so no evaluation goes on")

    def findings(self) -> dict[str, int]:
        return {}

    def results(self) -> Mapping[int, Answer]:
        return self.answers

    def request(self, place: int) -> PlannedRequest:
        question = self.job.questions[place]
        return PlannedRequest(
            request_id=self.job.request_id(self.names[place]),
            path=question.path,
            headers=request_headers(self.names[place], None),
            body=question.body,
            model=self.job.model,
            max_tokens=question.max_tokens,
            prompt_tokens=None if question.token_ids is None else len(question.token_ids),
            stream=question.stream,
        )

    def describe(self, place: int, response: Response) -> Record:
        """Return the record with the prompt's hashes, and keep the answer, of which no record tells."""
        question, record = self.job.questions[place], response.record
        answer = read_answer(question, response)
        if answer is not None:
            self.answers[place] = answer
        scored = question.scored_from is not None
        record = msgspec.structs.replace(record, prompt_logprobs=scored or None)
        ids = question.token_ids
        if ids is None and response.prompt_token_ids is not None:
            ids = np.asarray(response.prompt_token_ids, dtype=np.uint32)
        if ids is None:
            return record
        # A scoring's one output token has no KV: no block holds it.
        output = [] if scored and response.ok else response.token_ids
        chain = hash_request(self.hasher, (), ids, output)
        return msgspec.structs.replace(
            record,
            block_hashes=chain.prompt,
            output_block_hashes=chain.output,
            hash_source="engine",
            output_hash_source=None if chain.output is None else "engine",
        )


class Score(msgspec.Struct, frozen=True):
    """Value of one metric of one task or group."""

    task: str
    metric: str
    filter: str
    value: float
    stderr: float | None
    """Null: lm-eval has none for it."""


class Accuracy(msgspec.Struct, frozen=True):
    """Scores of a run, as lm-eval computed them."""

    lm_eval: str
    """Its version."""
    results: str | None
    """File with lm-eval's own results. Null: nothing could be scored."""
    documents_left_out: dict[str, int]
    """By task: documents without an output for each of their requests."""
    scores: list[Score]


def scores_of(results: Mapping[str, Any]) -> list[Score]:
    """Return every metric of lm-eval's results, whose names are ``metric,filter``."""
    found = []
    for task, values in results["results"].items():
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            if metric.endswith("_stderr") or not kind or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{kind}")
            known = float(stderr) if isinstance(stderr, int | float) else None
            found.append(Score(task, metric, kind, float(value), known))
    return found


def accuracy_lines(accuracy: Accuracy) -> list[str]:
    """Return the lines of a summary: lm-eval's file, what it lacks, and a table of the scores."""
    lines = [f"{f'lm-eval {accuracy.lm_eval}':20}{accuracy.results or 'nothing was scored'}"]
    lines += [
        f"{'left out':20}{count} documents of {task}: not every output came"
        for task, count in accuracy.documents_left_out.items()
    ]
    rows = [
        [one.task, one.metric, one.filter, f"{one.value:.4f}", "-" if one.stderr is None else f"{one.stderr:.4f}"]
        for one in accuracy.scores
    ]
    return [*lines, *(table_lines(["task", "metric", "filter", "value", "stderr"], rows, "<<<") if rows else [])]
