"""A model's tokenizer and chat template, applied as in vLLM, in the recorder process only."""

import re
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import xxhash

from tap.prompts.chatmessages import UntokenizableError, template_messages, template_tools

ENTRY_IDS = 50
"""Memory overhead of an entry, in token ids of four bytes."""


class RecentIds:
    """LRU cache of token ids by digest of the text, bounded by the number of token ids."""

    def __init__(self, max_ids: int) -> None:
        self._max_ids = max_ids
        self._num_ids = 0
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        """Least recently used first."""

    def get(self, digest: bytes) -> Sequence[int] | None:
        ids = self._entries.get(digest)
        if ids is not None:
            self._entries.move_to_end(digest)
        return ids

    def put(self, digest: bytes, ids: Sequence[int]) -> Sequence[int]:
        packed = self._entries[digest] = array("I", ids)
        self._num_ids += len(packed) + ENTRY_IDS
        while self._num_ids > self._max_ids:
            self._num_ids -= len(self._entries.popitem(last=False)[1]) + ENTRY_IDS
        return packed

    def check_integrity(self) -> None:
        assert self._num_ids == sum(len(ids) + ENTRY_IDS for ids in self._entries.values())
        assert self._num_ids <= self._max_ids


MAX_IDS = 8_000_000

_LOCAL_NORMALIZERS = frozenset(
    {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Replace", "Prepend", "Strip", "Nmt", "Precompiled"}
    | {"BertNormalizer", "ByteLevel"}
)
_LOCAL_PRE_TOKENIZERS = frozenset(
    {"ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Metaspace"}
    | {"CharDelimiterSplit", "UnicodeScripts", "FixedLength"}
)

Encode = Callable[[str], Sequence[int]]
"""Encoder of a text without added special tokens."""


class AddedToken(msgspec.Struct, frozen=True):
    """Added token, matched in the text before the pre-tokenizer splits it."""

    id: int
    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool


class ModelStage(msgspec.Struct, frozen=True):
    """Model stage of a tokenizer; only its dropout is read."""

    dropout: float | None = None


class TokenizerStages(msgspec.Struct, frozen=True):
    """Fields of a ``tokenizer.json`` that decide whether tokenization is independent on both sides of a cut."""

    model: ModelStage
    added_tokens: list[AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


class SegmentCache:
    """Tokenizes texts by segment and caches the token ids: a chat that repeats its history costs only the new text.

    A tokenizer splits a text at added tokens (such as ``<|im_end|>``), then normalises, pre-tokenizes and encodes each
    segment separately. So the token ids of a text are the ids of its segments and of the added tokens between them, if
    no rule crosses a cut (``cutting_tokens``). The least recently used segments are evicted first.
    """

    def __init__(self, groups: Sequence[Mapping[str, int]], encode: Encode, max_ids: int = MAX_IDS) -> None:
        """``groups``: added tokens at which texts are cut; each group cuts the segments of the previous group."""
        self._added = {content: number for group in groups for content, number in group.items()}
        # Longest token first: a regex takes the first alternative that matches.
        self._cuts = [re.compile("|".join(map(re.escape, sorted(group, key=len, reverse=True)))) for group in groups]
        self._encode = encode
        self._seed = secrets.randbits(64)
        self.recent = RecentIds(max_ids)
        self.encoded_chars = 0
        """Characters that were encoded, not served from the cache."""

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in _pieces(text, self._cuts):
            ids += [self._added[piece]] if piece in self._added else self._ids_of(piece)
        return ids

    def _ids_of(self, piece: str) -> Sequence[int]:
        digest = xxhash.xxh3_128_digest(piece.encode("utf-8", "surrogatepass"), self._seed)
        ids = self.recent.get(digest)
        if ids is not None:
            return ids
        self.encoded_chars += len(piece)
        return self.recent.put(digest, self._encode(piece))


def _pieces(text: str, cuts: Sequence[re.Pattern[str]]) -> Iterator[str]:
    if not cuts:
        if text:
            yield text
        return
    at = 0
    for match in cuts[0].finditer(text):
        yield from _pieces(text[at : match.start()], cuts[1:])
        yield match.group()
        at = match.end()
    yield from _pieces(text[at:], cuts[1:])


def cutting_tokens(tokenizer_json: str | bytes) -> list[dict[str, int]] | None:
    """Return the added tokens at which texts can be cut exactly, of a ``tokenizer.json``; None: no exact cut.

    Rules that cross a cut: an added token that consumes or requires adjacent white space (``lstrip``, ``rstrip``,
    ``single_word``), a pre-tokenizer that treats the first segment differently (``prepend_scheme: first``), and any
    unknown kind. Tokens matched in the normalised text are used only without a normaliser.
    """
    tokenizer = msgspec.json.decode(tokenizer_json, type=TokenizerStages)
    normalizers = list(_steps(tokenizer.normalizer, "normalizers"))
    if tokenizer.model.dropout or not all(step.get("type") in _LOCAL_NORMALIZERS for step in normalizers):
        return None
    if not all(map(_is_local_pre_tokenizer, _steps(tokenizer.pre_tokenizer, "pretokenizers"))):
        return None
    added = [token for token in tokenizer.added_tokens if token.content]
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return None
    raw = {token.content: token.id for token in added if not token.normalized}
    normalized = {token.content: token.id for token in added if token.normalized and not normalizers}
    return [group for group in (raw, normalized) if group]


def _steps(stage: Mapping[str, Any] | None, inner: str) -> Iterator[Mapping[str, Any]]:
    if stage is None:
        return
    if stage.get("type") != "Sequence":
        yield stage
        return
    for step in stage[inner]:
        yield from _steps(step, inner)


def _is_local_pre_tokenizer(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Metaspace":
        return step.get("prepend_scheme") in ("always", "never")
    return step.get("type") in _LOCAL_PRE_TOKENIZERS


class Tokenizer(Protocol):
    """Converts texts and chats to token ids; both methods raise UntokenizableError."""

    def encode_text(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Return the token ids of a text."""

    def encode_chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        """Return the token ids of a chat's rendered prompt."""


MAX_TEXT_CHARS = 4 << 20
"""Longest tokenized text, a million tokens: a character costs a tokenizer up to 90 bytes and 1 µs."""


class TransformersTokenizer:
    """Transformers tokenizer with vLLM's defaults: special tokens are added to completion prompts, not to chats."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encode: Callable[[str], Sequence[int]] = self._encode_uncached
        self.segments: SegmentCache | None = None
        """None: the tokenizer has no exact cuts, and each text is tokenized without the cache."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            self._use_backend(backend)

    def _use_backend(self, backend: Any) -> None:
        """Tokenize by the Rust backend without offsets, which double the time; transformers adds overhead, too."""
        backend.no_truncation()
        backend.no_padding()

        def encode(text: str) -> Sequence[int]:
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return ids

        added = cutting_tokens(backend.to_str())
        self.segments = None if added is None else SegmentCache(added, encode)
        self._encode = encode if self.segments is None else self.segments.encode

    def encode_text(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        if len(text) > MAX_TEXT_CHARS:
            raise UntokenizableError("prompt_too_long")
        return self._encode_uncached(text, special=True) if add_special_tokens else self._encode(text)

    def _encode_uncached(self, text: str, *, special: bool = False) -> Sequence[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def encode_chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        return self.encode_text(self.render(body), add_special_tokens=body.get("add_special_tokens") is True)

    def render(self, body: Mapping[str, Any]) -> str:
        tools = template_tools(body.get("tools"))
        template = self._template(body, tools)
        messages = template_messages(body.get("messages"), template)
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, tokenize=False, **_template_arguments(body)
            )
        except Exception as error:  # a template may raise any error; the engine would refuse the request, too
            raise UntokenizableError("template_failed") from error
        return str(rendered)

    def _template(self, body: Mapping[str, Any], tools: list[dict[str, Any]] | None) -> str:
        if body.get("chat_template") is not None:
            # Untrusted code: engines refuse a client's template by default, and it could run for ever here.
            raise UntokenizableError("client_chat_template")
        try:
            template = self._tokenizer.get_chat_template(None, tools=tools)
        except ValueError:
            raise UntokenizableError("no_chat_template") from None
        return str(template)


def _template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat template's arguments except messages and tools: request fields, then ``chat_template_kwargs``."""
    arguments: dict[str, Any] = {
        "add_generation_prompt": body.get("add_generation_prompt", True) is not False,
        "continue_final_message": body.get("continue_final_message") is True,
    }
    if body.get("documents"):
        arguments["documents"] = body["documents"]
    effort = body.get("reasoning_effort")
    if effort is not None:
        arguments |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    template_kwargs = body.get("chat_template_kwargs")
    if isinstance(template_kwargs, dict):
        arguments |= {
            name: value
            for name, value in template_kwargs.items()
            if name not in ("chat_template", "tokenize", "tools", "conversation", "return_dict", "return_tensors")
            and name not in ("add_generation_prompt", "continue_final_message", "documents")
        }
    return arguments
