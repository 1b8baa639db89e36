"""Token ids of a request's prompt from the best available source, and their block hashes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from engines.tokenizer import load_tokenizer
from tap.prompts.chatmessages import (
    TEXT_PARTS,
    UntokenizableError,
    has_inline_system,
    messages_chat,
    responses_chat,
)
from tap.prompts.enginetokenizer import EngineTokenizer
from tap.prompts.shape import MAX_NAME_CHARS, RequestShape, token_ids
from tap.prompts.tokenizer import Tokenizer, TransformersTokenizer
from tracefile.hashing.blockhash import BlockHasher, HashKey
from tracefile.hashing.branches import Branch, BranchFinder
from tracefile.records.schema import BlockHash, HashAlgorithm, HashSource, RequestId


def has_media(body: Mapping[str, Any]) -> bool:
    """Return whether a chat has images, audio or files, whose token ids only the engine can compute."""
    messages = body.get("messages")
    chat = [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    contents = [message.get("content") for message in chat]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type", "text") not in TEXT_PARTS for part in parts)


class TextPrompt(NamedTuple):
    """Prompt as text, to be tokenized."""

    text: str
    add_special_tokens: bool


class IdsPrompt(NamedTuple):
    """Prompt as token ids of the client."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Prompt as a chat: the fields of a chat completion request, for the chat template."""

    body: Mapping[str, Any]
    fallback_body: Mapping[str, Any] | None = None
    """Alternative for a chat template that refuses ``body``. None: no alternative."""


PromptForm = TextPrompt | IdsPrompt | ChatPrompt


def prompt_form(shape: RequestShape) -> PromptForm:
    """Return the prompt of a request; raises UntokenizableError without a prompt, or for a batch of prompts."""
    body = shape.body
    if body.get("truncate_prompt_tokens") is not None:
        raise UntokenizableError("truncated_by_request")
    match shape.endpoint:
        case "/v1/chat/completions":
            return ChatPrompt(body)
        case "/v1/completions" | "/completion":
            if body.get("prompt_embeds") is not None:
                raise UntokenizableError("prompt_embeds")
            return _single_prompt(body, body.get("prompt"))
        case "/v1/responses":
            return ChatPrompt(responses_chat(body))
        case "/v1/messages":
            fallback_body = messages_chat(body, system_first=True) if has_inline_system(body) else None
            return ChatPrompt(messages_chat(body), fallback_body)
        case "/v1/embeddings" if body.get("messages") is not None:
            # A chat for embeddings has no generation prompt.
            return ChatPrompt({"add_generation_prompt": False, **body})
        case "/v1/embeddings":
            return _single_prompt(body, body.get("input"))
    raise UntokenizableError("other_endpoint")


def _single_prompt(body: Mapping[str, Any], prompt: object) -> TextPrompt | IdsPrompt:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise UntokenizableError("batch")
        prompt = prompt[0]
    ids = token_ids(prompt)
    if ids is not None:
        return IdsPrompt(ids)
    if not isinstance(prompt, str):
        raise UntokenizableError("malformed_prompt")
    return TextPrompt(prompt, body.get("add_special_tokens", True) is not False)


class HashedPrompt(NamedTuple):
    """Block hashes of a prompt, or the reason for their absence."""

    hashes: list[BlockHash] | None = None
    source: HashSource | None = None
    token_count: int | None = None
    """Prompt tokens by the tap's tokenization, independent of the engine's usage. None: unknown."""
    token_ids: Sequence[int] | None = None
    """Prompt token ids, kept for the hash chain over the output."""
    unhashed: str | None = None
    """Reason for missing hashes; holds no content."""


class ChainStart(NamedTuple):
    """Root of a hash chain: requests share blocks only if model, LoRA adapter and cache salt are equal."""

    model: str
    lora: str | None
    cache_salt: str | None


class PromptHasher:
    """Computes the block hashes of prompts and outputs. Without ``tokenizer``: prompts of token ids only."""

    def __init__(
        self,
        key: HashKey,
        algorithm: HashAlgorithm,
        block_size: int,
        *,
        tokenizer: Tokenizer | None = None,
        tokenizes_outputs: bool = True,
        branches: BranchFinder | None = None,
        switch_engine: Callable[[str], None] | None = None,
    ) -> None:
        """``switch_engine``: called with the engine that served the next prompt. None: not needed."""
        self.block_size = block_size
        self._tokenizer = tokenizer
        self._tokenizes_outputs = tokenizes_outputs
        """True: output text is tokenized if the engine did not send output token ids."""
        self._branches = branches
        """Finder of token-exact branch points. None: shared prefixes are known to the block only."""
        self._switch_engine = switch_engine

        def new_hasher(start: ChainStart) -> BlockHasher:
            return BlockHasher(
                key, algorithm, block_size, model=start.model, lora=start.lora, cache_salt=start.cache_salt
            )

        self._new_hasher = new_hasher
        self._cached_hasher = lru_cache(maxsize=256)(new_hasher)

    def _hasher(self, start: ChainStart) -> BlockHasher:
        """Return the block hasher of a chain root. Roots with a long salt are not cached, to bound memory."""
        is_long = start.cache_salt is not None and len(start.cache_salt) > MAX_NAME_CHARS
        return self._new_hasher(start) if is_long else self._cached_hasher(start)

    def served_by(self, upstream: str) -> None:
        if self._switch_engine is not None and upstream:
            self._switch_engine(upstream)

    def hash_prompt(self, shape: RequestShape, start: ChainStart, engine_ids: Sequence[int] | None) -> HashedPrompt:
        """Return the block hashes of a prompt, from the engine's token ids, else the client's ids, else the text."""
        try:
            form = prompt_form(shape)
        except UntokenizableError as error:
            # The engine may return token ids of a prompt that is not in the request; of a batch only the first.
            if engine_ids is None or error.reason == "batch":
                return HashedPrompt(unhashed=error.reason)
            return self._hash_ids(start, engine_ids, "engine")
        try:
            if isinstance(form, ChatPrompt) and has_media(form.body):
                raise UntokenizableError("multimodal")  # placeholder ids are equal for different images
            if engine_ids is not None:
                return self._hash_ids(start, engine_ids, "engine")
            return self._hash_form(start, form)
        except UntokenizableError as error:
            return HashedPrompt(unhashed=error.reason)

    def output_hashes(
        self, start: ChainStart, prompt: HashedPrompt, output_ids: Sequence[int]
    ) -> list[BlockHash] | None:
        """Return the hashes of full blocks with output tokens, without the last token, whose KV is never computed."""
        if prompt.token_ids is None or prompt.hashes is None or not output_ids:
            return None
        ids = prompt.token_ids[len(prompt.hashes) * self.block_size :]
        previous = prompt.hashes[-1] if prompt.hashes else None
        return self._hasher(start).extend(previous, [*ids, *output_ids[:-1]])

    def branch(
        self,
        start: ChainStart,
        prompt: HashedPrompt,
        chain: Sequence[BlockHash],
        output_ids: Sequence[int],
        request_id: RequestId,
    ) -> Branch | None:
        """Return the branch point of the chain over prompt and output, without the last token; None: no branch."""
        if self._branches is None or prompt.token_ids is None:
            return None
        return self._branches.add(self._hasher(start).root, chain, prompt.token_ids, output_ids[:-1], request_id)

    def output_ids(self, text: str) -> Sequence[int] | None:
        if self._tokenizer is None or not self._tokenizes_outputs:
            return None
        return self._tokenizer.encode_text(text, add_special_tokens=False)

    def _hash_form(self, start: ChainStart, form: PromptForm) -> HashedPrompt:
        if isinstance(form, IdsPrompt):
            return self._hash_ids(start, form.ids, "engine")
        if self._tokenizer is not None:
            return self._hash_ids(start, _tokenize(self._tokenizer, form), "tokenizer")
        raise UntokenizableError("text_without_tokenizer")

    def _hash_ids(self, start: ChainStart, ids: Sequence[int], source: HashSource) -> HashedPrompt:
        return HashedPrompt(
            hashes=self._hasher(start).hash_blocks(ids), source=source, token_count=len(ids), token_ids=ids
        )


def prompt_hasher(
    key: HashKey,
    tokenizer: str,
    algorithm: HashAlgorithm,
    block_size: int,
    *,
    branches: bool,
    engine: EngineTokenizer | None = None,
) -> PromptHasher:
    """Return the prompt hasher for a value of ``--tokenizer``; ``engine``: tokenizer of the value ``engine``."""
    source: Tokenizer | None = engine
    if tokenizer not in ("engine", "ids"):
        source = TransformersTokenizer(load_tokenizer(Path(tokenizer)))
    return PromptHasher(
        key,
        algorithm,
        block_size,
        tokenizer=source,
        # A serving engine does not tokenize its own output: --inject token-ids requests the output token ids.
        tokenizes_outputs=engine is None,
        branches=BranchFinder(block_size) if branches else None,
        switch_engine=None if engine is None else engine.switch_engine,
    )


def _tokenize(tokenizer: Tokenizer, form: TextPrompt | ChatPrompt) -> Sequence[int]:
    if isinstance(form, TextPrompt):
        return tokenizer.encode_text(form.text, add_special_tokens=form.add_special_tokens)
    try:
        return tokenizer.encode_chat(form.body)
    except UntokenizableError as error:
        if form.fallback_body is None or error.reason != "template_failed":
            raise
        return tokenizer.encode_chat(form.fallback_body)
