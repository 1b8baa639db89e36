"""Keys of a prompt's start: chained hashes of the first bytes of a request's body, before anybody parses it."""

import re
from collections.abc import Iterator, Sequence

import xxhash

PIECE_BYTES = 512
BYTES_PER_TOKEN = 4
"""Estimate for prompts whose tokens are not known yet."""
PIECE_TOKENS = PIECE_BYTES / BYTES_PER_TOKEN
_PROMPT = re.compile(rb'"(?:messages|prompt|input|system)"\s*:')
"""Members of a body that begin a prompt: settings before them differ between requests that share a prefix."""
_MODEL = re.compile(rb'"model"\s*:\s*"([^"]*)"')
MODEL_WITHIN_BYTES = 1024


def prompt_start(reads: Sequence[bytes], most_bytes: int) -> list[int]:
    """Return a key for each whole piece of the prompt in the first bytes of a body.

    A key depends on the model and on all of the prompt before it. The last one may hold members behind the prompt.
    """
    data = b"".join(_first_reads(reads, most_bytes))[:most_bytes]
    prompt = _PROMPT.search(data)
    model = _MODEL.search(data, 0, MODEL_WITHIN_BYTES)
    key = 0 if model is None else xxhash.xxh3_64_intdigest(model[1])
    keys = []
    for at in range(0 if prompt is None else prompt.start(), len(data) - PIECE_BYTES + 1, PIECE_BYTES):
        key = xxhash.xxh3_64_intdigest(data[at : at + PIECE_BYTES], key)
        keys.append(key)
    return keys


def model_name(reads: Sequence[bytes], most_bytes: int) -> str | None:
    """Return the model's name as the first bytes of a body have it; null: it is not there, or has escapes.

    Clients put it before the prompt or behind it. Quotes within a text are escaped, so none is taken for a member.
    The first ``"model"`` is taken, nested or not.
    """
    found = _MODEL.search(b"".join(_first_reads(reads, most_bytes)), 0, most_bytes)
    return None if found is None or b"\\" in found[1] else found[1].decode("utf-8", "replace")


def _first_reads(reads: Sequence[bytes], most_bytes: int) -> Iterator[bytes]:
    """Yield the reads that the first bytes are in: a large body is not joined for its start."""
    for read in reads:
        yield read
        most_bytes -= len(read)
        if most_bytes <= 0:
            return
