"""Which token ids a request's prompt is, by the best source there is, and their block hashes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tap.byteblocks import BYTES_PER_TOKEN, ByteBlocks
from tap.chatmessages import UntokenizableError, plain_text, template_messages, template_tools
from tap.shape import RequestShape, token_ids
from tap.tokenizer import Tokenizer
from tracefile.blockhash import BlockHasher, HashKey
from tracefile.schema import BlockHash, HashAlgorithm, HashSource


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """A prompt's chain, or why there is none."""

    hashes: list[BlockHash] | None = None
    source: HashSource | None = None
    token_count: int | None = None
    """By our own count, before any look at the engine's. Null: not known, or estimated from it."""
    token_estimate: int | None = None
    """Where nobody counted: a quarter of the text's bytes."""
    token_ids: Sequence[int] | None = None
    """Held while the record is made, for the chain over the output."""
    unhashed: str | None = None
    """The reason for no hashes; it holds no content."""


@dataclass(frozen=True, slots=True)
class ChainStart:
    """What a chain begins with beside the key: two requests share blocks only if all three are equal."""

    model: str
    lora: str | None
    cache_salt: str | None


class PromptHasher:
    """Hashes prompts for one trace. ``tokenizer`` null: token-id prompts only; ``byte_blocks``: text as bytes."""

    def __init__(
        self,
        key: HashKey,
        algorithm: HashAlgorithm,
        block_size: int,
        *,
        tokenizer: Tokenizer | None = None,
        byte_blocks: ByteBlocks | None = None,
    ) -> None:
        self.block_size = block_size
        self._tokenizer = tokenizer
        self._byte_blocks = byte_blocks

        @lru_cache(maxsize=256)
        def hasher(start: ChainStart) -> BlockHasher:
            return BlockHasher(
                key, algorithm, block_size, model=start.model, lora=start.lora, cache_salt=start.cache_salt
            )

        self._hasher = hasher

    def hash_prompt(
        self, shape: RequestShape, start: ChainStart, engine_ids: Sequence[int] | None, usage_tokens: int | None
    ) -> HashedPrompt:
        """The chain of the request's prompt: from the engine's own ids, else ids as sent, else the text.

        ``usage_tokens``: the engine's count, null if it reported none; it scales byte blocks and nothing else.
        """
        try:
            if engine_ids is not None:
                return self._of_ids(start, engine_ids, "engine")
            prompt = single_prompt(shape)
            if not isinstance(prompt, str | None):
                return self._of_ids(start, prompt, "engine")
            if self._tokenizer is not None:
                return self._of_ids(start, self._tokenize(self._tokenizer, shape, prompt), "tokenizer")
            if self._byte_blocks is not None:
                return self._of_bytes(self._byte_blocks, start, shape, prompt, usage_tokens)
        except UntokenizableError as error:
            return HashedPrompt(unhashed=error.reason)
        return HashedPrompt(unhashed="text_without_tokenizer")

    def output_hashes(
        self, start: ChainStart, prompt: HashedPrompt, output_ids: Sequence[int]
    ) -> list[BlockHash] | None:
        """The chain over the full blocks that hold an output token whose KV was computed: all but the last one."""
        if prompt.token_ids is None or prompt.hashes is None or not output_ids:
            return None
        ids = prompt.token_ids[len(prompt.hashes) * self.block_size :]
        previous = prompt.hashes[-1] if prompt.hashes else None
        return self._hasher(start).extend(previous, [*ids, *output_ids[:-1]])

    def output_ids(self, text: str) -> Sequence[int] | None:
        """The ids a text would have if it were tokenized afresh; null without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.encode_text(text, add_special_tokens=False)

    def _of_ids(self, start: ChainStart, ids: Sequence[int], source: HashSource) -> HashedPrompt:
        return HashedPrompt(
            hashes=self._hasher(start).hash_blocks(ids), source=source, token_count=len(ids), token_ids=ids
        )

    def _of_bytes(
        self, blocks: ByteBlocks, start: ChainStart, shape: RequestShape, prompt: str | None, usage_tokens: int | None
    ) -> HashedPrompt:
        text = (chat_text(shape.body) if prompt is None else prompt).encode("utf-8", "surrogatepass")
        estimate = len(text) // BYTES_PER_TOKEN if usage_tokens is None else None
        tokens = usage_tokens if estimate is None else estimate
        hashes = blocks.hash_blocks(self._hasher(start), start, text, tokens or 0)
        return HashedPrompt(hashes=hashes, source="bytes", token_estimate=estimate)

    def _tokenize(self, tokenizer: Tokenizer, shape: RequestShape, prompt: str | None) -> Sequence[int]:
        if prompt is None:
            return tokenizer.encode_chat(shape.body)
        return tokenizer.encode_text(prompt, add_special_tokens=shape.body.get("add_special_tokens", True) is not False)


def single_prompt(shape: RequestShape) -> str | Sequence[int] | None:
    """A completion's prompt as text or ids; null for a chat. Raises UntokenizableError for what is neither."""
    if shape.body.get("truncate_prompt_tokens") is not None:
        raise UntokenizableError("truncated_by_request")
    if shape.endpoint == "/v1/chat/completions":
        return None
    if shape.body.get("prompt_embeds") is not None:
        raise UntokenizableError("prompt_embeds")
    prompt = shape.body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise UntokenizableError("batch")
        prompt = prompt[0]
    ids = token_ids(prompt)
    if ids is not None:
        return ids
    if not isinstance(prompt, str):
        raise UntokenizableError("malformed_prompt")
    return prompt


def chat_text(body: Mapping[str, Any]) -> str:
    """A chat request's prompt as one text that the next turn's begins with."""
    return plain_text(template_messages(body.get("messages")), template_tools(body.get("tools")))
