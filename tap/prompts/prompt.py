"""Token ids of a request's prompt, by the best available source, and their block hashes."""

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
    """Return whether a chat holds images, audio or files: their ids are the engine's own."""
    messages = body.get("messages")
    contents = [one.get("content") for one in messages if isinstance(one, dict)] if isinstance(messages, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type", "text") not in TEXT_PARTS for part in parts)


class TextPrompt(NamedTuple):
    """Prompt that is a text."""

    text: str
    add_special_tokens: bool


class IdsPrompt(NamedTuple):
    """Prompt of token ids, as the client sent them."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Conversation for a template: the fields of a chat completion request."""

    body: Mapping[str, Any]
    otherwise: Mapping[str, Any] | None = None
    """The same for a template that refuses ``body``. Null: no other form."""


PromptForm = TextPrompt | IdsPrompt | ChatPrompt


def prompt_form(shape: RequestShape) -> PromptForm:
    """Return the prompt of a request; raises UntokenizableError if there is none, or more than one."""
    body = shape.body
    if body.get("truncate_prompt_tokens") is not None:
        raise UntokenizableError("truncated_by_request")
    match shape.endpoint:
        case "/v1/chat/completions":
            return ChatPrompt(body)
        case "/v1/completions" | "/completion":
            if body.get("prompt_embeds") is not None:
                raise UntokenizableError("prompt_embeds")
            return _single(body, body.get("prompt"))
        case "/v1/responses":
            return ChatPrompt(responses_chat(body))
        case "/v1/messages":
            otherwise = messages_chat(body, system_first=True) if has_inline_system(body) else None
            return ChatPrompt(messages_chat(body), otherwise)
        case "/v1/embeddings" if body.get("messages") is not None:
            # An embedding's chat has no generation prompt.
            return ChatPrompt({"add_generation_prompt": False, **body})
        case "/v1/embeddings":
            return _single(body, body.get("input"))
    raise UntokenizableError("other_endpoint")


def _single(body: Mapping[str, Any], prompt: object) -> TextPrompt | IdsPrompt:
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
    """Chain of a prompt, or the reason for none."""

    hashes: list[BlockHash] | None = None
    source: HashSource | None = None
    token_count: int | None = None
    """Our own count, independent of the engine's. Null: unknown, or estimated from it."""
    token_ids: Sequence[int] | None = None
    """Held for the chain over the output."""
    unhashed: str | None = None
    """Reason for no hashes; it holds no content."""


class ChainStart(NamedTuple):
    """Start of a chain beside the key: two requests share blocks only if all three are equal."""

    model: str
    lora: str | None
    cache_salt: str | None


class PromptHasher:
    """Hasher of a trace's prompts. Without ``tokenizer``: id prompts only."""

    def __init__(
        self,
        key: HashKey,
        algorithm: HashAlgorithm,
        block_size: int,
        *,
        tokenizer: Tokenizer | None = None,
        answers: bool = True,
        branches: BranchFinder | None = None,
        turn_to: Callable[[str], None] | None = None,
    ) -> None:
        """``turn_to`` is told the engine of the request whose prompt comes next. Null: not needed."""
        self.block_size = block_size
        self._tokenizer = tokenizer
        self._answers = answers
        """True: outputs are tokenized too where the engine did not send their ids."""
        self._branches = branches
        """Null: what prompts share is told to the block only."""
        self._turn_to = turn_to

        def new_hasher(start: ChainStart) -> BlockHasher:
            return BlockHasher(
                key, algorithm, block_size, model=start.model, lora=start.lora, cache_salt=start.cache_salt
            )

        self._new_hasher = new_hasher
        self._kept_hasher = lru_cache(maxsize=256)(new_hasher)

    def _hasher(self, start: ChainStart) -> BlockHasher:
        """Return the hasher of chains that begin so; one with a long salt is not kept, since its key would be."""
        is_long = start.cache_salt is not None and len(start.cache_salt) > MAX_NAME_CHARS
        return self._new_hasher(start) if is_long else self._kept_hasher(start)

    def served_by(self, upstream: str) -> None:
        if self._turn_to is not None and upstream:
            self._turn_to(upstream)

    def hash_prompt(self, shape: RequestShape, start: ChainStart, engine_ids: Sequence[int] | None) -> HashedPrompt:
        """Return the chain of the request's prompt: from the engine's own ids, else ids as sent, else the text."""
        try:
            form = prompt_form(shape)
        except UntokenizableError as error:
            # The engine may have sent the ids of a prompt that is not in the request; of a batch only the first.
            if engine_ids is None or error.reason == "batch":
                return HashedPrompt(unhashed=error.reason)
            return self._of_ids(start, engine_ids, "engine")
        try:
            if isinstance(form, ChatPrompt) and has_media(form.body):
                raise UntokenizableError("multimodal")  # the engine's ids of two images are the same
            if engine_ids is not None:
                return self._of_ids(start, engine_ids, "engine")
            return self._of_form(start, form)
        except UntokenizableError as error:
            return HashedPrompt(unhashed=error.reason)

    def output_hashes(
        self, start: ChainStart, prompt: HashedPrompt, output_ids: Sequence[int]
    ) -> list[BlockHash] | None:
        """Return the chain over the full blocks with an output token whose KV was computed: all but the last token."""
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
        """Return the branch of a chain over the prompt and the output, if its last token is left out; null: none."""
        if self._branches is None or prompt.token_ids is None:
            return None
        return self._branches.add(self._hasher(start).root, chain, prompt.token_ids, output_ids[:-1], request_id)

    def output_ids(self, text: str) -> Sequence[int] | None:
        if self._tokenizer is None or not self._answers:
            return None
        return self._tokenizer.encode_text(text, add_special_tokens=False)

    def _of_form(self, start: ChainStart, form: PromptForm) -> HashedPrompt:
        if isinstance(form, IdsPrompt):
            return self._of_ids(start, form.ids, "engine")
        if self._tokenizer is not None:
            return self._of_ids(start, _tokenize(self._tokenizer, form), "tokenizer")
        raise UntokenizableError("text_without_tokenizer")

    def _of_ids(self, start: ChainStart, ids: Sequence[int], source: HashSource) -> HashedPrompt:
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
    """Return the hasher by the words of ``--tokenizer``; ``engine`` is asked if that is ``engine``."""
    source: Tokenizer | None = engine
    if tokenizer not in ("engine", "ids"):
        source = TransformersTokenizer(load_tokenizer(Path(tokenizer)))
    return PromptHasher(
        key,
        algorithm,
        block_size,
        tokenizer=source,
        # A serving engine is not asked to tokenize its own output; --inject token-ids asks for the ids.
        answers=engine is None,
        branches=BranchFinder(block_size) if branches else None,
        turn_to=None if engine is None else engine.turn_to,
    )


def _tokenize(tokenizer: Tokenizer, form: TextPrompt | ChatPrompt) -> Sequence[int]:
    if isinstance(form, TextPrompt):
        return tokenizer.encode_text(form.text, add_special_tokens=form.add_special_tokens)
    try:
        return tokenizer.encode_chat(form.body)
    except UntokenizableError as error:
        if form.otherwise is None or error.reason != "template_failed":
            raise
        return tokenizer.encode_chat(form.otherwise)
