"""Prompts of a turn: token ids for ``/v1/completions``, a conversation for the other APIs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from engines.dialect import Dialect
from engines.vllm import VLLM
from loadgen.core.bodies import completions_body
from loadgen.core.bodyfields import PLAIN, BodyFields
from loadgen.core.draws import TokenIds, tokens_of
from loadgen.core.plan import Response
from loadgen.core.vocabulary import Vocabulary
from loadgen.text.messages import Piece, PlannedMessage, SyntheticMessage
from loadgen.text.prefixtruth import PrefixTruth, common_prefix
from loadgen.text.spoken import PATHS, Call, SentMessage, TextApi, conversation_body
from loadgen.text.targettext import TextMaker
from tracefile import BlockHash, BlockHasher, InputError
from tracefile.records.schema import HashSource


@dataclass(frozen=True, slots=True)
class Chain:
    """The hashes of one request: its prompt's full blocks and those its answer filled."""

    prompt: list[BlockHash]
    output: list[BlockHash] | None
    """Null: the generated ids are unknown."""
    computed: TokenIds
    """Ids of both, as far as known."""
    source: HashSource = "engine"
    """Source of the prompt's ids: the engine, or a local tokenizer."""

    def whole(self) -> list[BlockHash]:
        """Prompt and output blocks: start of a continuation's chain."""
        return [*self.prompt, *(self.output or ())]


def continue_chain(hasher: BlockHasher, known: Sequence[BlockHash], token_ids: TokenIds) -> list[BlockHash]:
    """Chain of all full blocks; ``known``: hashes of the first ones."""
    tail = token_ids[len(known) * hasher.block_size :]
    return [*known, *hasher.extend(known[-1] if known else None, tail)]


def hash_request(
    hasher: BlockHasher, known: Sequence[BlockHash], prompt: TokenIds, output: Sequence[int] | None
) -> Chain:
    """Chain of a request that begins with blocks of ``known`` hashes; the last generated token has no KV yet."""
    if output is None:
        return Chain(continue_chain(hasher, known, prompt), None, prompt)
    computed = np.concatenate([prompt, np.array(output[:-1], dtype=np.uint32)])
    chain = continue_chain(hasher, known, computed)
    full = len(prompt) // hasher.block_size
    return Chain(chain[:full], chain[full:], computed)


class Prompt(Protocol):
    """A turn's prompt."""

    @property
    def path(self) -> str: ...

    def body(self, model: str, max_tokens: int) -> bytes: ...

    def planned_tokens(self) -> int | None:
        """Null: only the engine's tokenizer knows."""

    def chain(self, hasher: BlockHasher, response: Response) -> Chain | None:
        """Hash from the end of the known chain, and extend what is known."""

    def after(self, response: Response, said: Sequence[PlannedMessage], stand_in: int) -> "Prompt":
        """The next turn's prompt. ``stand_in``: key of tokens that replace an output whose ids are unknown."""


def body_of_ids(model: str, token_ids: TokenIds, max_tokens: int, dialect: Dialect, fields: BodyFields) -> bytes:
    patch = fields.patch("completions")
    return completions_body(model, token_ids, max_tokens, stream=fields.stream, extra=patch, dialect=dialect)


def generated_length(response: Response) -> int | None:
    """Generated tokens that the template repeats, without the end token; null: unknown."""
    count = response.record.output_tokens if response.token_ids is None else len(response.token_ids)
    return None if count is None else max(0, count - (response.record.finish_reason == "stop"))


@dataclass(frozen=True, slots=True)
class TokenForm:
    """Common settings of all token-id prompts of a run."""

    vocabulary: Vocabulary
    dialect: Dialect = VLLM
    block_size: int = 16
    text_maker: TextMaker | None = None
    truth: PrefixTruth = field(default_factory=PrefixTruth)
    fields: BodyFields = PLAIN

    def ids(self, said: Sequence[PlannedMessage]) -> list[TokenIds]:
        """A tool's call comes before its result. Raises InputError."""
        found: list[TokenIds] = []
        for message in said:
            if isinstance(message, SyntheticMessage):
                found += [self.draw(piece) for piece in (*((message.call,) if message.call else ()), *message.pieces)]
                continue
            encoded = None if self.text_maker is None else self.text_maker.encode(message.text)
            if encoded is None:
                raise InputError("--tokenizer: missing; expected a path, to make ids of a text, or --api chat")
            found.append(encoded)
        return found

    def draw(self, piece: Piece) -> TokenIds:
        return tokens_of(piece.key, piece.tokens, self.vocabulary)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt of token ids."""

    token_ids: TokenIds
    form: TokenForm
    known: list[BlockHash]
    """Hashes of its first blocks from earlier turns; one list for a conversation."""
    repeated: int = 0

    @property
    def path(self) -> str:
        return self.form.dialect.path

    def body(self, model: str, max_tokens: int) -> bytes:
        return body_of_ids(model, self.token_ids, max_tokens, self.form.dialect, self.form.fields)

    def planned_tokens(self) -> int | None:
        return len(self.token_ids)

    def chain(self, hasher: BlockHasher, response: Response) -> Chain | None:
        self.form.truth.check_prompt(len(self.token_ids), response.record, after_output=False)
        if self.repeated:
            self.form.truth.check_cached(self.repeated, self.form.block_size, response.record)
        chain = hash_request(hasher, self.known, self.token_ids, response.token_ids)
        self.known[:] = chain.whole()
        return chain

    def after(self, response: Response, said: Sequence[PlannedMessage], stand_in: int) -> Prompt:
        repeated = len(self.token_ids)
        if response.token_ids is None:
            generated = tokens_of(stand_in, response.record.output_tokens or 0, self.form.vocabulary)
        else:
            generated = np.asarray(response.token_ids, dtype=np.uint32)
            repeated += max(0, len(generated) - 1)  # the last one has no KV yet when its request ends
        token_ids = np.concatenate([self.token_ids, generated, *self.form.ids(said)])
        return TokenPrompt(token_ids, self.form, self.known, repeated)


@dataclass(frozen=True, slots=True)
class TextForm:
    """Common settings of all conversations of a run."""

    api: TextApi
    text_maker: TextMaker
    dialect: Dialect = VLLM
    block_size: int = 16
    rendered: bool = False
    """True if the template is applied here and ids are sent (``--chat-template``)."""
    fields: BodyFields = PLAIN


@dataclass(slots=True)
class ChatPrompt:
    """A prompt of messages, their words one token each wherever the target's tokenizer was asked."""

    form: TextForm
    conversation: list[SentMessage]
    before: TokenIds | None = None
    """Tokens of the turn before, prompt and output; null: a first turn, or unknown."""
    repeated: int | None = None
    """Repeated tokens by lengths alone; null: unknown."""
    output_changed: bool = False
    """True if the last output's text is known to be other tokens than were generated."""
    _ids: TokenIds | None = None
    """The engine's ids, after its response; null: unknown."""
    _told: bool = False
    _settled: bool = False

    @property
    def path(self) -> str:
        return self.form.dialect.path if self.form.rendered else PATHS[self.form.api]

    def body(self, model: str, max_tokens: int) -> bytes:
        if not self.form.rendered:
            fields, api = self.form.fields, self.form.api
            return conversation_body(
                api,
                model,
                self.conversation,
                max_tokens,
                stream=fields.stream,
                extra=fields.patch(api),
                dialect=self.form.dialect,
            )
        token_ids = self.form.text_maker.ids(self.conversation)
        if token_ids is None:
            raise InputError("--chat-template: not every message's tokens are known; expected --tokenizer PATH")
        return body_of_ids(model, token_ids, max_tokens, self.form.dialect, self.form.fields)

    def planned_tokens(self) -> int | None:
        return self.form.text_maker.length(self.conversation)

    def chain(self, hasher: BlockHasher, response: Response) -> Chain | None:
        self.settle(response)
        if self._ids is None:
            return None
        chain = hash_request(hasher, (), self._ids, response.token_ids)
        return chain if self._told or self.form.rendered else replace(chain, source="tokenizer")

    def after(self, response: Response, said: Sequence[PlannedMessage], stand_in: int) -> Prompt:
        text_maker = self.form.text_maker
        calls = tuple(call for message in said if (call := text_maker.call(message)) is not None)
        return self.going_on(response, [text_maker.say(message) for message in said], stand_in, calls)

    def going_on(
        self, response: Response, said: Sequence[SentMessage], stand_in: int, calls: tuple[Call, ...] = ()
    ) -> "ChatPrompt":
        """The prompt after this one. ``stand_in``: key of tokens that replace an output of unknown ids."""
        spoken = self.answered(response, stand_in, calls)
        before = None
        if self._ids is not None and response.token_ids is not None:
            before = np.concatenate([self._ids, np.asarray(response.token_ids[:-1], dtype=np.uint32)])
        generated = generated_length(response)
        changed = response.token_ids is None and generated is not None and spoken.length != generated
        conversation = [*self.conversation, spoken, *said]
        return ChatPrompt(self.form, conversation, before, self._repeated(response, conversation), changed)

    def _repeated(self, response: Response, conversation: Sequence[SentMessage]) -> int | None:
        """Prompt and output tokens, if the template writes an old output like a new one."""
        prompt, output = response.record.prompt_tokens, response.record.output_tokens
        if prompt is None or not output:
            return None
        head = self.form.text_maker.head_length(conversation, len(self.conversation))
        return prompt + output - 1 if head == prompt else None

    def answered(self, response: Response, stand_in: int, calls: tuple[Call, ...] = ()) -> SentMessage:
        """The output as a message: generated ids, else the ids of its text, else its length."""
        self.settle(response)
        text_maker = self.form.text_maker
        length = generated_length(response)
        if response.token_ids is not None:
            ids: TokenIds | None = np.asarray(response.token_ids[:length], dtype=np.uint32)
        else:
            ids = text_maker.encode(response.text)
            length = length if ids is None else len(ids)
        numbers = None
        if ids is None and self.form.rendered:
            numbers = text_maker.numbers([Piece(stand_in, length or 0)])
        return SentMessage("assistant", response.text, numbers, ids, length, calls)

    def settle(self, response: Response) -> None:
        """Compare the plan with the engine's report on this prompt; once."""
        if self._settled:
            return
        self._settled = True
        truth, record = self.form.text_maker.truth, response.record
        after_output = any(message.role == "assistant" for message in self.conversation) and not self.form.rendered
        length, planned = self.planned_tokens(), self.form.text_maker.ids(self.conversation)
        longer = truth.check_prompt(length, record, after_output=after_output)
        told = None if response.prompt_token_ids is None else np.asarray(response.prompt_token_ids, dtype=np.uint32)
        differs = longer != 0
        if told is not None:
            differs = truth.check_ids(planned, told, after_output=after_output) or differs
        seen = (told is not None and planned is not None) or (length is not None and record.tokens_source == "usage")
        if after_output and record.status == "ok" and seen:
            truth.check_output(changed=differs or self.output_changed)
        if differs:
            self._take_other_output(told, longer)
        self._told = told is not None
        self._ids = told if told is not None else (None if differs else planned)
        if self.before is not None and self._ids is not None:
            shared = min(common_prefix(self.before, self._ids), len(self._ids) - 1)
            truth.check_cached(shared, self.form.block_size, record)
        elif self.repeated is not None and length is not None and not (differs or self.output_changed):
            truth.check_cached(self.repeated, self.form.block_size, record)

    def _take_other_output(self, told: TokenIds | None, longer: int) -> None:
        """Replace the last output by the engine's tokens, so that it is counted once."""
        places = [place for place, message in enumerate(self.conversation) if message.role == "assistant"]
        if not places:
            return
        at = places[-1]
        response = self.conversation[at]
        length = None if response.length is None else max(0, response.length + longer)
        ids = None if told is None else self._tokens_at(told, at)
        self.conversation[at] = replace(response, ids=ids, length=length if ids is None else len(ids))

    def _tokens_at(self, told: TokenIds, at: int) -> TokenIds | None:
        """Tokens of message ``at`` in the engine's prompt; null: not found."""
        nothing = np.zeros(0, dtype=np.uint32)
        emptied = list(self.conversation)
        emptied[at] = replace(emptied[at], ids=nothing, length=0)
        around = self.form.text_maker.ids(emptied)
        head = self.form.text_maker.head(self.conversation, at)
        if around is None or head is None or len(told) < len(around):
            return None
        tail = len(around) - len(head)
        fits = np.array_equal(told[: len(head)], head) and np.array_equal(told[len(told) - tail :], around[len(head) :])
        return told[len(head) : len(told) - tail] if fits else None
