"""An evaluation as a job: its questions sent once each, and the answers kept in memory for the parent."""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from loadgen.accuracy.question import Answer, Question, read_answer
from loadgen.core.job import Shard
from loadgen.core.plan import Response, Send, nothing_more
from loadgen.core.request import PlannedRequest, request_headers
from loadgen.text.prompts import hash_request
from tracefile import BlockHasher, HashKey, Record, RequestId, keyed_id


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
        """Name by which equal questions are known."""
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
