"""Prompts of a turn: token ids for ``/v1/completions``, a conversation for the other APIs."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from engines.dialect import Dialect
from engines.vllm import VLLM
from loadgen.core.bodies import body_of, encoded_fields
from loadgen.core.bodyfields import PLAIN, BodyFields
from loadgen.core.draws import TokenIds, tokens_of
from loadgen.core.job import Response
from loadgen.core.vocabulary import Vocabulary
from loadgen.text.api_messages import PATHS, SentMessage, TextApi, conversation_body
from loadgen.text.messages import PlannedMessage, SyntheticMessage
from loadgen.text.prompt_token_check import PromptTokenCounts
from loadgen.text.targettext import TextMaker
from tracefile.hashing.blockhash import BlockHasher
from tracefile.records.schema import BlockHash, HashSource


@dataclass(frozen=True, slots=True)
class Chain:
    """Block hashes of a request: full prompt blocks, and blocks that its output filled."""

    prompt: list[BlockHash]
    output: list[BlockHash] | None
    """Null: the generated token ids are unknown."""
    computed: TokenIds
    """Token ids of prompt and output, as far as known."""
    source: HashSource = "engine"
    """Source of the prompt's token ids: the engine, or a local tokenizer."""

    def blocks(self) -> list[BlockHash]:
        """Prompt and output blocks: prefix of a continuation."""
        return [*self.prompt, *(self.output or ())]


def continue_chain(hasher: BlockHasher, hashes: Sequence[BlockHash], token_ids: TokenIds) -> list[BlockHash]:
    """Hashes of all full blocks; ``hashes``: of the first blocks, already known."""
    tail = token_ids[len(hashes) * hasher.block_size :]
    return [*hashes, *hasher.extend(hashes[-1] if hashes else None, tail)]


def hash_request(
    hasher: BlockHasher, hashes: Sequence[BlockHash], prompt: TokenIds, output: Sequence[int] | None
) -> Chain:
    """Block hashes of a request that starts with blocks ``hashes``; the last generated token has no KV cache."""
    if output is None:
        return Chain(continue_chain(hasher, hashes, prompt), None, prompt)
    computed = np.concatenate([prompt, np.asarray(array("I", output[:-1]), dtype=np.uint32)])  # by buffer: faster
    chain = continue_chain(hasher, hashes, computed)
    full = len(prompt) // hasher.block_size
    return Chain(chain[:full], chain[full:], computed)


class Prompt(Protocol):
    """Prompt of a turn, as token ids or as messages."""

    @property
    def path(self) -> str: ...

    def body(self, model: str, max_tokens: int) -> bytes: ...

    def planned_tokens(self) -> int | None:
        """Planned prompt tokens; null: only the engine's tokenizer can count them."""

    def chain(self, hasher: BlockHasher, response: Response) -> Chain | None:
        """Block hashes of the request; extends the conversation's chain."""

    def after(self, response: Response, messages: Sequence[PlannedMessage], replacement_key: int) -> "Prompt":
        """Prompt of the next turn. ``replacement_key``: key of tokens that replace an output with unknown token ids."""


@dataclass(frozen=True, slots=True)
class TokenForm:
    """Settings common to all token-id prompts of a run."""

    vocabulary: Vocabulary
    dialect: Dialect = VLLM
    block_size: int = 16
    counts: PromptTokenCounts = field(default_factory=PromptTokenCounts)
    fields: BodyFields = PLAIN
    _encoded: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def encoded_fields(self, model: str, max_tokens: int) -> bytes:
        """All fields of a body but the prompt, cached by token limit: few requests differ in them."""
        if (model, max_tokens) not in self._encoded:
            stream, extra = self.fields.stream, self.fields.patch()
            fields = encoded_fields(model, max_tokens, stream=stream, extra=extra, dialect=self.dialect)
            self._encoded[model, max_tokens] = fields
        return self._encoded[model, max_tokens]

    def ids(self, planned: Sequence[PlannedMessage]) -> list[TokenIds]:
        synthetic = [message for message in planned if isinstance(message, SyntheticMessage)]
        assert len(synthetic) == len(planned)  # dataset texts are not sent as token ids
        return [tokens_of(message.key, message.tokens, self.vocabulary) for message in synthetic]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Prompt of token ids."""

    token_ids: TokenIds
    form: TokenForm
    hashes: list[BlockHash]
    """Hashes of its first blocks from earlier turns; one list for a conversation."""
    repeated: int = 0

    @property
    def path(self) -> str:
        return self.form.dialect.path

    def body(self, model: str, max_tokens: int) -> bytes:
        return body_of(self.token_ids, self.form.encoded_fields(model, max_tokens))

    def planned_tokens(self) -> int | None:
        return len(self.token_ids)

    def chain(self, hasher: BlockHasher, response: Response) -> Chain | None:
        self.form.counts.check_prompt(len(self.token_ids), response.record, after_output=False)
        if self.repeated:
            self.form.counts.check_cached(self.repeated, self.form.block_size, response.record)
        chain = hash_request(hasher, self.hashes, self.token_ids, response.token_ids)
        self.hashes[:] = chain.blocks()
        return chain

    def after(self, response: Response, messages: Sequence[PlannedMessage], replacement_key: int) -> Prompt:
        repeated = len(self.token_ids)
        if response.token_ids is None:
            generated = tokens_of(replacement_key, response.record.output_tokens or 0, self.form.vocabulary)
        else:
            generated = np.asarray(response.token_ids, dtype=np.uint32)
            repeated += max(0, len(generated) - 1)  # the last token has no KV cache when its request ends
        token_ids = np.concatenate([self.token_ids, generated, *self.form.ids(messages)])
        return TokenPrompt(token_ids, self.form, self.hashes, repeated)


@dataclass(frozen=True, slots=True)
class TextForm:
    """Settings common to all text prompts of a run: API, tokenizer, dialect, block size."""

    api: TextApi
    text_maker: TextMaker
    dialect: Dialect = VLLM
    block_size: int = 16
    fields: BodyFields = PLAIN


@dataclass(slots=True)
class ChatPrompt:
    """Prompt of messages; with a known tokenizer, a word is one token."""

    form: TextForm
    conversation: list[SentMessage]
    before: TokenIds | None = None
    """Tokens of the previous turn, prompt and output; null: a first turn, or unknown."""
    repeated: int | None = None
    """Repeated tokens by lengths alone; null: unknown."""
    output_changed: bool = False
    """True if the last output's text has other tokens than were generated."""
    _ids: TokenIds | None = None
    """The engine's token ids, after its response; null: unknown."""
    _reported: bool = False
    _resolved: bool = False

    @property
    def path(self) -> str:
        return PATHS[self.form.api]

    def body(self, model: str, max_tokens: int) -> bytes:
        fields, api = self.form.fields, self.form.api
        return conversation_body(
            api,
            model,
            self.conversation,
            max_tokens,
            stream=fields.stream,
            extra=fields.patch(),
            dialect=self.form.dialect,
        )

    def planned_tokens(self) -> int | None:
        return self.form.text_maker.length(self.conversation)

    def chain(self, hasher: BlockHasher, response: Response) -> Chain | None:
        self.resolve(response)
        if self._ids is None:
            return None
        chain = hash_request(hasher, (), self._ids, response.token_ids)
        return chain if self._reported else replace(chain, source="tokenizer")

    def after(self, response: Response, messages: Sequence[PlannedMessage], replacement_key: int) -> Prompt:
        del replacement_key  # the output is sent as text
        return self.continued(response, [self.form.text_maker.sent_message(message) for message in messages])

    def continued(self, response: Response, messages: Sequence[SentMessage]) -> "ChatPrompt":
        """Prompt of the next turn, with the output and ``messages``."""
        output = self.answered(response)
        before = None
        if self._ids is not None and response.token_ids is not None:
            before = np.concatenate([self._ids, np.asarray(response.token_ids[:-1], dtype=np.uint32)])
        generated = generated_length(response)
        changed = response.token_ids is None and generated is not None and output.length != generated
        conversation = [*self.conversation, output, *messages]
        return ChatPrompt(self.form, conversation, before, self._repeated(response, conversation), changed)

    def _repeated(self, response: Response, conversation: Sequence[SentMessage]) -> int | None:
        """Prompt and output tokens, if the template writes an old output like a new output."""
        prompt, output = response.record.prompt_tokens, response.record.output_tokens
        if prompt is None or not output:
            return None
        head = self.form.text_maker.length(conversation, len(self.conversation))
        return prompt + output - 1 if head == prompt else None

    def answered(self, response: Response) -> SentMessage:
        """Output as a message: generated token ids, else the ids of its text, else its length."""
        self.resolve(response)
        length = generated_length(response)
        if response.token_ids is not None:
            ids: TokenIds | None = np.asarray(response.token_ids[:length], dtype=np.uint32)
        else:
            ids = self.form.text_maker.encode(response.text)
            length = length if ids is None else len(ids)
        return SentMessage("assistant", response.text, None, ids, length)

    def resolve(self, response: Response) -> None:
        """Compare the planned tokens with the engine's report on this prompt; once."""
        if self._resolved:
            return
        self._resolved = True
        counts, record = self.form.text_maker.counts, response.record
        after_output = any(message.role == "assistant" for message in self.conversation)
        length, planned = self.planned_tokens(), self.form.text_maker.ids(self.conversation)
        longer = counts.check_prompt(length, record, after_output=after_output)
        reported = None if response.prompt_token_ids is None else np.asarray(response.prompt_token_ids, dtype=np.uint32)
        differs = longer != 0
        if reported is not None:
            differs = counts.check_ids(planned, reported, after_output=after_output) or differs
        by_usage = length is not None and record.tokens_source == "usage"
        comparable = by_usage or (reported is not None and planned is not None)
        if after_output and record.status == "ok" and comparable:
            counts.outputs += 1
            counts.outputs_changed += differs or self.output_changed
        if differs:
            self._replace_output(reported, longer)
        self._reported = reported is not None
        self._ids = reported if reported is not None else (None if differs else planned)
        if self.before is not None and self._ids is not None:
            shared = min(common_prefix(self.before, self._ids), len(self._ids) - 1)
            counts.check_cached(shared, self.form.block_size, record)
        elif self.repeated is not None and length is not None and not (differs or self.output_changed):
            counts.check_cached(self.repeated, self.form.block_size, record)

    def _replace_output(self, reported: TokenIds | None, longer: int) -> None:
        """Replace the last output by the engine's tokens, so that a difference is counted once."""
        outputs = [index for index, message in enumerate(self.conversation) if message.role == "assistant"]
        if not outputs:
            return
        output = self.conversation[outputs[-1]]
        length = None if output.length is None else max(0, output.length + longer)
        ids = None if reported is None else self._tokens_at(reported, outputs[-1])
        self.conversation[outputs[-1]] = replace(output, ids=ids, length=length if ids is None else len(ids))

    def _tokens_at(self, reported: TokenIds, index: int) -> TokenIds | None:
        """Tokens of message ``index`` in the engine's prompt; null: absent."""
        emptied = list(self.conversation)
        emptied[index] = replace(emptied[index], ids=np.zeros(0, dtype=np.uint32), length=0)
        around = self.form.text_maker.ids(emptied)
        head = self.form.text_maker.ids(self.conversation, index)
        if around is None or head is None or len(reported) < len(around):
            return None
        stop = len(reported) - (len(around) - len(head))
        fits = np.array_equal(reported[: len(head)], head) and np.array_equal(reported[stop:], around[len(head) :])
        return reported[len(head) : stop] if fits else None


def generated_length(response: Response) -> int | None:
    """Generated tokens that the template repeats, without the end token; null: unknown."""
    count = response.record.output_tokens if response.token_ids is None else len(response.token_ids)
    return None if count is None else max(0, count - (response.record.finish_reason == "stop"))


def common_prefix(first: TokenIds, second: TokenIds) -> int:
    size = min(len(first), len(second))
    different = np.flatnonzero(first[:size] != second[:size])
    return int(different[0]) if len(different) else size
