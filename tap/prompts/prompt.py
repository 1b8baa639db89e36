"""Token ids of a request's prompt, by the best available source, and their block hashes."""

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from engines.tokenizer import load_tokenizer
from tap.prompts.chatmessages import (
    UntokenizableError,
    has_inline_system,
    messages_chat,
    plain_text,
    responses_chat,
    template_messages,
    template_tools,
)
from tap.prompts.enginetokenizer import EngineTokenizer
from tap.prompts.media import MediaSizes, ids_with_media, media_messages, messages_before
from tap.prompts.shape import MAX_NAME_CHARS, RequestShape, token_ids
from tap.prompts.tokenizer import Tokenizer, TransformersTokenizer
from tracefile.hashing.blockhash import BlockHasher, HashKey
from tracefile.hashing.branches import Branch, BranchFinder
from tracefile.records.schema import BlockHash, HashAlgorithm, HashSource, RequestId

BYTES_PER_TOKEN = 4
"""Ratio of English and code under a vocabulary of 100,000, for engines that report no usage."""
MAX_BLOCKS = 1_000_000
MAX_LENGTHS = 16
"""Block lengths remembered after a block: unrelated prompts differ in them at the very start."""

_Node = Hashable
"""Hash of a block, or the start of a chain."""


class ByteBlocks:
    """Block hashes without a tokenizer: blocks of UTF-8 bytes, as many as the prompt has token blocks.

    Text seen first is cut evenly: block i ends at byte ``i · block_size · bytes / tokens``, rounded to half a block
    size. Boundaries, once cut, stay: a later prompt follows the known blocks as far as its bytes equal theirs, and only
    its remainder is cut anew. So equal prefixes have equal hashes whatever the lengths of the prompts; where sharing
    ends is true to the mean bytes per token only. The least recently followed blocks are forgotten, leaves first.
    """

    def __init__(self, block_size: int, max_blocks: int = MAX_BLOCKS) -> None:
        self._block_size = block_size
        self._quantum = max(1, block_size // 2)
        self._max_blocks = max_blocks
        self._lengths: dict[_Node, tuple[int, ...]] = {}
        """Lengths in bytes of the blocks known after a node, the latest first. Least recently used nodes first."""

    def hash_blocks(self, hasher: BlockHasher, start: Hashable, text: bytes, tokens: int) -> list[BlockHash]:
        """Return the ``tokens // block_size`` hashes, fewer if ``text`` has fewer bytes than tokens."""
        count = min(tokens, len(text)) // self._block_size
        chain, position = self._follow(hasher, start, text, count)
        boundaries = self._boundaries(len(text), tokens, position, len(chain), count)
        for end in boundaries:
            node: _Node = chain[-1] if chain else start
            self._remember(node, end - position)
            chain.append(self._hash(hasher, chain, text[position:end]))
            position = end
        self._touch([start, *chain])
        return chain

    def _follow(self, hasher: BlockHasher, start: _Node, text: bytes, count: int) -> tuple[list[BlockHash], int]:
        chain: list[BlockHash] = []
        position = 0
        while len(chain) < count:
            node = chain[-1] if chain else start
            for length in self._lengths.get(node, ()):
                if position + length > len(text):
                    continue
                found = self._hash(hasher, chain, text[position : position + length])
                if found in self._lengths:
                    chain.append(found)
                    position += length
                    break
            else:
                break
        return chain, position

    def _boundaries(self, size: int, tokens: int, position: int, done: int, count: int) -> list[int]:
        left_bytes, left_tokens = size - position, tokens - done * self._block_size
        ends = []
        previous = position
        for index in range(1, count - done + 1):
            exact = position + index * self._block_size * left_bytes // max(left_tokens, 1)
            rounded = position + (exact - position) // self._quantum * self._quantum
            end = rounded if previous < rounded <= size else min(previous + 1, size)
            if end <= previous:
                break
            ends.append(end)
            previous = end
        return ends

    def _hash(self, hasher: BlockHasher, chain: list[BlockHash], block: bytes) -> BlockHash:
        digest = hashlib.shake_128(block).digest(4 * self._block_size)
        ids = memoryview(digest).cast("I").tolist()
        return hasher.extend(chain[-1] if chain else None, ids)[0]

    def _remember(self, node: _Node, length: int) -> None:
        known = self._lengths.get(node, ())
        self._lengths[node] = (length, *(other for other in known if other != length))[:MAX_LENGTHS]

    def _touch(self, path: list[_Node]) -> None:
        """Make the path the latest used, its start last, so that a leaf is forgotten first."""
        for node in reversed(path):
            self._lengths[node] = self._lengths.pop(node, ())
        while len(self._lengths) > self._max_blocks:
            del self._lengths[next(iter(self._lengths))]

    def check_integrity(self) -> None:
        assert len(self._lengths) <= self._max_blocks
        for lengths in self._lengths.values():
            assert len(lengths) <= MAX_LENGTHS
            assert len(set(lengths)) == len(lengths)
            assert all(length > 0 for length in lengths)


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
    token_estimate: int | None = None
    """Estimate without any count: a quarter of the text's bytes."""
    token_ids: Sequence[int] | None = None
    """Held for the chain over the output."""
    solved: bool = False
    """The count was fitted to the engine's, and checks nothing."""
    unhashed: str | None = None
    """Reason for no hashes; it holds no content."""


class ChainStart(NamedTuple):
    """Start of a chain beside the key: two requests share blocks only if all three are equal."""

    model: str
    lora: str | None
    cache_salt: str | None


class PromptHasher:
    """Hasher of a trace's prompts. Without ``tokenizer`` and ``byte_blocks`` (text as bytes): id prompts only."""

    def __init__(
        self,
        key: HashKey,
        algorithm: HashAlgorithm,
        block_size: int,
        *,
        tokenizer: Tokenizer | None = None,
        byte_blocks: ByteBlocks | None = None,
        answers: bool = True,
        branches: BranchFinder | None = None,
        turn_to: Callable[[str], None] | None = None,
    ) -> None:
        """``turn_to`` is told the engine of the request whose prompt comes next. Null: not needed."""
        self.block_size = block_size
        self._tokenizer = tokenizer
        self._byte_blocks = byte_blocks
        self._media_sizes = MediaSizes()
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

    def hash_prompt(
        self, shape: RequestShape, start: ChainStart, engine_ids: Sequence[int] | None, usage_tokens: int | None
    ) -> HashedPrompt:
        """Return the chain of the request's prompt: from the engine's own ids, else ids as sent, else the text.

        ``usage_tokens``: the engine's count, null if not reported; it scales byte blocks and gives the length of media.
        """
        try:
            form = prompt_form(shape)
        except UntokenizableError as error:
            # The engine may have sent the ids of a prompt that is not in the request; of a batch only the first.
            if engine_ids is None or error.reason == "batch":
                return HashedPrompt(unhashed=error.reason)
            return self._of_ids(start, engine_ids, "engine")
        try:
            holders = media_messages(form.body) if isinstance(form, ChatPrompt) else []
            if isinstance(form, ChatPrompt) and holders:
                return self._with_media(start, form, holders, usage_tokens)
            if engine_ids is not None:
                return self._of_ids(start, engine_ids, "engine")
            return self._of_form(start, form, usage_tokens)
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

    def _of_form(self, start: ChainStart, form: PromptForm, usage_tokens: int | None) -> HashedPrompt:
        if isinstance(form, IdsPrompt):
            return self._of_ids(start, form.ids, "engine")
        if self._tokenizer is not None:
            return self._of_ids(start, _tokenize(self._tokenizer, form), "tokenizer")
        if self._byte_blocks is not None:
            return self._of_bytes(self._byte_blocks, start, _text(form), usage_tokens)
        raise UntokenizableError("text_without_tokenizer")

    def _of_ids(self, start: ChainStart, ids: Sequence[int], source: HashSource) -> HashedPrompt:
        return HashedPrompt(
            hashes=self._hasher(start).hash_blocks(ids), source=source, token_count=len(ids), token_ids=ids
        )

    def _of_bytes(self, blocks: ByteBlocks, start: ChainStart, text: str, usage_tokens: int | None) -> HashedPrompt:
        data = text.encode("utf-8", "surrogatepass")
        estimate = len(data) // BYTES_PER_TOKEN if usage_tokens is None else None
        tokens = usage_tokens if estimate is None else estimate
        hasher = self._hasher(start)
        hashes = blocks.hash_blocks(hasher, hasher.root, data, tokens or 0)
        return HashedPrompt(hashes=hashes, source="bytes", token_estimate=estimate)

    def _with_media(
        self, start: ChainStart, form: ChatPrompt, holders: Sequence[int], usage_tokens: int | None
    ) -> HashedPrompt:
        if self._tokenizer is not None:
            found = ids_with_media(self._tokenizer, self._media_sizes, form.body, holders, usage_tokens)
            made = self._of_ids(start, found.ids, "tokenizer")
            return made._replace(solved=found.solved) if found.whole else HashedPrompt(made.hashes, made.source)
        if self._byte_blocks is None:
            raise UntokenizableError("multimodal")
        text = _text(ChatPrompt(messages_before(form.body, holders[0]))) if holders[0] else ""
        return HashedPrompt(self._of_bytes(self._byte_blocks, start, text, None).hashes, "bytes")


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
    if tokenizer not in ("engine", "ids", "bytes"):
        source = TransformersTokenizer(load_tokenizer(Path(tokenizer)))
    return PromptHasher(
        key,
        algorithm,
        block_size,
        tokenizer=source,
        byte_blocks=ByteBlocks(block_size) if tokenizer == "bytes" else None,
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


def _text(form: TextPrompt | ChatPrompt) -> str:
    return form.text if isinstance(form, TextPrompt) else chat_text(form.body)


def chat_text(body: Mapping[str, Any]) -> str:
    return plain_text(template_messages(body.get("messages")), template_tools(body.get("tools")))
