"""Token ids by segment, so that a chat which sends its whole past again costs its new text only.

A tokenizer first cuts a text at its added tokens (``<|im_end|>`` and the like), then normalises, splits and encodes
each piece by itself. So a text's ids are its pieces' ids and the added tokens' between them, and a piece seen before
need not be encoded again. That holds exactly where nothing reaches across the cut, which is read off the tokenizer:

- an added token that takes the white space beside it (``lstrip``, ``rstrip``) or depends on it
  (``single_word``) reaches across, as does a pre-tokenizer that treats the text's first piece as another
  (``prepend_scheme: first``), and any kind that is not known here: such a tokenizer encodes every text whole;
- tokens that are matched in the normalised text (``normalized``) are cut at only where the normaliser changes nothing;
  elsewhere they stay within a piece, where the encoder finds them.

Digests of pieces and their ids are kept in memory, up to a bound; the least recently used go first.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import xxhash

from tap.prompts.recentids import RecentIds

MAX_IDS = 8_000_000
"""Ids kept, four bytes each."""

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


class Cut(NamedTuple):
    """Places at which texts may be cut."""

    patterns: tuple[re.Pattern[str], ...]
    """Applied in order, each to the rest of the previous, as the encoder matches its added tokens."""
    ids: dict[str, int]
    """Ids of the added tokens at the cuts."""


class SegmentCache:
    """Encodes texts piece by piece, each piece once."""

    def __init__(self, cut: Cut, encode: Encode, max_ids: int = MAX_IDS) -> None:
        self._cut, self._encode = cut, encode
        self._seed = secrets.randbits(64)
        self.recent = RecentIds(max_ids)
        self.encoded_chars = 0
        """Characters given to the encoder so far, so not saved by the cache."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, the same as if it were encoded whole."""
        ids: list[int] = []
        for piece in pieces(text, self._cut.patterns):
            added = self._cut.ids.get(piece)
            if added is not None:
                ids.append(added)
            else:
                ids += self._ids_of(piece)
        return ids

    def _ids_of(self, piece: str) -> Sequence[int]:
        digest = xxhash.xxh3_128_digest(piece.encode("utf-8", "surrogatepass"), self._seed)
        known = self.recent.get(digest)
        if known is not None:
            return known
        self.encoded_chars += len(piece)
        return self.recent.put(digest, self._encode(piece))


def pieces(text: str, patterns: Sequence[re.Pattern[str]]) -> Iterator[str]:
    """Split the text, in order, into added tokens and the non-empty text between them."""
    if not patterns:
        if text:
            yield text
        return
    at = 0
    for match in patterns[0].finditer(text):
        yield from pieces(text[at : match.start()], patterns[1:])
        yield match.group()
        at = match.end()
    yield from pieces(text[at:], patterns[1:])


def find_cut(tokenizer_json: str | bytes) -> Cut | None:
    """Return the exact cuts of a tokenizer (the text of its ``tokenizer.json``); null: none."""
    tokenizer = msgspec.json.decode(tokenizer_json, type=TokenizerStages)
    normalizers = list(_steps(tokenizer.normalizer, "normalizers"))
    pre_tokenizers = list(_steps(tokenizer.pre_tokenizer, "pretokenizers"))
    if not all(step.get("type") in _LOCAL_NORMALIZERS for step in normalizers):
        return None
    if tokenizer.model.dropout or not all(_is_local_pre_tokenizer(step) for step in pre_tokenizers):
        return None
    added = [token for token in tokenizer.added_tokens if token.content]
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return None
    raw = {token.content: token.id for token in added if not token.normalized}
    normalized = {token.content: token.id for token in added if token.normalized and not normalizers}
    groups = [group for group in (raw, normalized) if group]
    return Cut(tuple(literals_pattern(group) for group in groups), raw | normalized)


def _steps(stage: Mapping[str, Any] | None, inner: str) -> Iterator[Mapping[str, Any]]:
    """Return the steps of a stage that may be a sequence."""
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


def literals_pattern(literals: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for the longest of some literals at the leftmost place, sharing common beginnings."""
    root: dict[str, Any] = {}
    for literal in literals:
        node = root
        for char in literal:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_alternatives(root))


def _alternatives(node: Mapping[str, Any]) -> str:
    branches = [re.escape(char) + _alternatives(below) for char, below in node.items() if char]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return f"{joined}?" if "" in node else joined
