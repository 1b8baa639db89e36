"""A model's own tokenizer and chat template, as vLLM applies them, in the recorder process only."""

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
"""Memory of an entry beside its ids, in ids of four bytes."""


class RecentIds:
    """Least-recently-used map that counts ids, not entries."""

    def __init__(self, max_ids: int) -> None:
        self._max_ids = max_ids
        self._held = 0
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        """Least recently used first."""

    def get(self, digest: bytes) -> Sequence[int] | None:
        ids = self._entries.get(digest)
        if ids is not None:
            self._entries.move_to_end(digest)
        return ids

    def put(self, digest: bytes, ids: Sequence[int]) -> Sequence[int]:
        packed = self._entries[digest] = array("I", ids)
        self._held += len(packed) + ENTRY_IDS
        while self._held > self._max_ids:
            self._held -= len(self._entries.popitem(last=False)[1]) + ENTRY_IDS
        return packed

    def check_integrity(self) -> None:
        assert self._held == sum(len(ids) + ENTRY_IDS for ids in self._entries.values())
        assert self._held <= self._max_ids


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
"""Encoder of a whole text, without special tokens around it."""


class AddedToken(msgspec.Struct, frozen=True):
    """Token that is found in the text before it is split."""

    id: int
    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool


class ModelStage(msgspec.Struct, frozen=True):
    """The model stage; only its dropout matters here, its vocabulary is not read."""

    dropout: float | None = None


class TokenizerStages(msgspec.Struct, frozen=True):
    """Fields of a ``tokenizer.json`` that tell whether a rule reaches across a cut."""

    model: ModelStage
    added_tokens: list[AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


class SegmentCache:
    """Encodes texts piece by piece, each piece once: a chat that sends its whole past again costs its new text only.

    A tokenizer first cuts a text at its added tokens (``<|im_end|>`` and the like), then normalises, splits and encodes
    each piece by itself. So a text's ids are its pieces' ids and the added tokens' between them, where
    nothing reaches across (``cutting_tokens``). The least recently used digests of pieces go first.
    """

    def __init__(self, groups: Sequence[Mapping[str, int]], encode: Encode, max_ids: int = MAX_IDS) -> None:
        """``groups``: added tokens at which texts are cut, each group within the pieces between those before it."""
        self._added = {content: number for group in groups for content, number in group.items()}
        # The longest token at a place: an alternative counts before those behind it.
        self._cuts = [re.compile("|".join(map(re.escape, sorted(group, key=len, reverse=True)))) for group in groups]
        self._encode = encode
        self._seed = secrets.randbits(64)
        self.recent = RecentIds(max_ids)
        self.encoded_chars = 0
        """Characters given to the encoder so far, so not saved by the cache."""

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in _pieces(text, self._cuts):
            ids += [self._added[piece]] if piece in self._added else self._ids_of(piece)
        return ids

    def _ids_of(self, piece: str) -> Sequence[int]:
        digest = xxhash.xxh3_128_digest(piece.encode("utf-8", "surrogatepass"), self._seed)
        known = self.recent.get(digest)
        if known is not None:
            return known
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
    """Return the tokens at which texts may be cut, of the text of a ``tokenizer.json``; null: none is exact.

    Across a cut reaches an added token that takes or needs the white space beside it (``lstrip``, ``rstrip``,
    ``single_word``), a pre-tokenizer that treats the first piece differently (``prepend_scheme: first``), and any
    unknown kind. Tokens matched in the normalised text are cut at only where there is no normaliser.
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
    """Text and conversations to token ids; both methods raise UntokenizableError."""

    def encode_text(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Return the ids of a text."""

    def encode_chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        """Return the ids of a chat request's prompt."""


MAX_TEXT_CHARS = 4 << 20
"""Longest text that is tokenized, a million tokens: a character costs a tokenizer up to 90 bytes and a microsecond."""


class TransformersTokenizer:
    """Completion prompts get special tokens, chats only those their template writes: vLLM's defaults."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encode: Callable[[str], Sequence[int]] = self._encode_whole
        self.segments: SegmentCache | None = None
        """Null: this tokenizer cannot be cut exactly, and encodes each text whole."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            self._use_backend(backend)

    def _use_backend(self, backend: Any) -> None:
        """Encode by the Rust tokenizer, without offsets: they double the time, and transformers adds its own."""
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
        return self._encode_whole(text, special=True) if add_special_tokens else self._encode(text)

    def _encode_whole(self, text: str, *, special: bool = False) -> Sequence[int]:
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
        except Exception as error:  # a template may raise any error; the engine would refuse the request too
            raise UntokenizableError("template_failed") from error
        return str(rendered)

    def _template(self, body: Mapping[str, Any], tools: list[dict[str, Any]] | None) -> str:
        if body.get("chat_template") is not None:
            # A stranger's program: engines refuse it by default, and it could run for ever here.
            raise UntokenizableError("client_chat_template")
        try:
            template = self._tokenizer.get_chat_template(None, tools=tools)
        except ValueError:
            raise UntokenizableError("no_chat_template") from None
        return str(template)


def _template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a template's arguments beside messages and tools: the request's own fields, then the client's."""
    arguments: dict[str, Any] = {
        "add_generation_prompt": body.get("add_generation_prompt", True) is not False,
        "continue_final_message": body.get("continue_final_message") is True,
    }
    if body.get("documents"):
        arguments["documents"] = body["documents"]
    effort = body.get("reasoning_effort")
    if effort is not None:
        arguments |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    own = body.get("chat_template_kwargs")
    if isinstance(own, dict):
        arguments |= {
            name: value
            for name, value in own.items()
            if name not in ("chat_template", "tokenize", "tools", "conversation", "return_dict", "return_tensors")
            and name not in ("add_generation_prompt", "continue_final_message", "documents")
        }
    return arguments
