"""Words of one token each, in any row joined by spaces, also at the start of a message.

Tokenizers split a text at spaces first, so a property of two words holds for a row; ``prove`` checks random rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.core.draws import TokenIds, tokens_of
from loadgen.core.vocabulary import Vocabulary
from loadgen.text.tokenizer import Tokenizer, TokenizerError
from tracefile.hashing.splitmix64 import mix64

LEADER = "the"
"""Word before each candidate, to get its token after a space."""
MOST_WORDS = 2048
FEWEST_WORDS = 64
"""Minimum of words: with fewer, different prompts would share prefixes too often."""
FIRST_ID, LAST_ID, CHUNK = 256, 60_000, 4096
"""Searched range of token ids: after bytes and special tokens, before the rarest words."""
PROOF_ROWS, PROOF_LENGTH = 8, 256

COMMON = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water
room mother area money story fact month lot right study book eye job word business issue side kind head
house service friend father power hour game line end member law car city community name president team
minute idea kid body back parent face others level office door health person art war history party result
change morning reason research girl guy moment air teacher force education foot boy age policy music market
sense plan college interest death
""".split()  # noqa: SIM905 - a list of a hundred literals reads worse
"""Common English words: candidates for a tokenizer without /detokenize, and prompt words without a tokenizer."""


@dataclass(frozen=True, slots=True)
class Words:
    """Words by number, with their token ids; without a tokenizer the ids are empty."""

    texts: tuple[str, ...]
    starts: tuple[int, ...] = ()
    """Token ids of words at a start or without a space before."""
    follows: tuple[int, ...] = ()

    def numbers(self, key: int, count: int) -> TokenIds:
        return tokens_of(key, count, Vocabulary(0, len(self.texts)))

    def text(self, numbers: TokenIds) -> str:
        texts = self.texts
        return " ".join([texts[number] for number in numbers.tolist()])

    def ids(self, numbers: TokenIds, *, spaced: bool = False) -> TokenIds:
        """Token ids of a row of words; ``spaced``: the first word is also after a space."""
        ids = np.asarray(self.follows, dtype=np.uint32)[numbers]
        if len(ids) and not spaced:
            ids[0] = self.starts[int(numbers[0])]
        return ids


UNPROVEN = Words(tuple(COMMON))
"""Words without a known tokenizer: most vocabularies have a token for each, unverified."""


def find_words(tokenizer: Tokenizer) -> Words:
    """Words of one token each. Raises TokenizerError if the vocabulary has too few."""
    words: dict[str, tuple[int, int]] = {}
    for candidates in _candidates(tokenizer):
        words |= _single_token_words(tokenizer, [word for word in candidates if word not in words])
        if len(words) >= MOST_WORDS:
            break
    if len(words) < FEWEST_WORDS:
        raise TokenizerError(f"only {len(words)} words of its vocabulary are single tokens")
    texts = tuple(words)[:MOST_WORDS]
    return Words(texts, tuple(words[text][0] for text in texts), tuple(words[text][1] for text in texts))


def prove(tokenizer: Tokenizer, words: Words, seed: int) -> None:
    """Encode random rows of words. Raises TokenizerError unless each word is its one token."""
    for row in range(PROOF_ROWS):
        numbers = words.numbers(mix64(seed + row), PROOF_LENGTH)
        token_ids = tokenizer.encode(words.text(numbers))
        plain = np.array_equal(token_ids, words.ids(numbers))
        # Tokenizers that add a space before every text have one form of a word.
        if not plain and not np.array_equal(token_ids, words.ids(numbers, spaced=True)):
            raise TokenizerError("its words change in re-tokenization")


def _candidates(tokenizer: Tokenizer) -> Iterator[list[str]]:
    """Plain lower-case words, by chunks of token ids."""
    newline = tokenizer.encode("\n")
    yield COMMON
    if len(newline) != 1:
        return
    for first in range(FIRST_ID, LAST_ID, CHUNK):
        separated = np.full(2 * CHUNK, newline[0], dtype=np.int64)
        separated[::2] = np.arange(first, first + CHUNK)
        try:
            text = tokenizer.decode(separated.tolist())
        except TokenizerError:  # beyond the vocabulary, or no /detokenize
            return
        yield sorted({word for line in text.split("\n") if _is_plain(word := line.strip(" "))})


def _is_plain(word: str) -> bool:
    return 3 <= len(word) <= 12 and word.isascii() and word.isalpha() and word.islower()


def _single_token_words(tokenizer: Tokenizer, candidates: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Candidates with one token both at the start and after a space, with these tokens."""
    leader = tokenizer.encode(LEADER)
    starts = _lines(tokenizer, candidates)
    follows = _lines(tokenizer, [f"{LEADER} {word}" for word in candidates])
    return {
        word: (start[0], follow[-1])
        for word, start, follow in zip(candidates, starts, follows, strict=True)
        if len(start) == 1 and len(follow) == len(leader) + 1
    }


def _lines(tokenizer: Tokenizer, lines: Sequence[str]) -> list[list[int]]:
    """Token ids of each line, encoded together. Raises TokenizerError if line ends cannot be found."""
    if not lines:
        return []
    newline = tokenizer.encode("a\na")[1:-1]
    if len(newline) != 1:
        raise TokenizerError("its line ends are not separate tokens")
    ids: list[list[int]] = [[]]
    for token_id in tokenizer.encode("\n".join(lines)):
        if token_id == newline[0]:
            ids.append([])
        else:
            ids[-1].append(token_id)
    if len(ids) != len(lines):
        raise TokenizerError("its line ends are not separate tokens")
    return ids
