"""Endpoint of a request by its path: the requests to be recorded, and their names.

Four endpoints are read in full, other POSTs to ``/v1/…`` recorded by their shape. A gateway's prefix is removed, and
words that may be ids become ``*``: ``/v1/responses/*/cancel``.
"""

import re
from functools import lru_cache

from tap.ipc.exchange import Endpoint
from wire.answer import GENERATING

_GENERATING = (
    (b"/chat/completions", "/v1/chat/completions"),
    (b"/completions", "/v1/completions"),
    (b"/v1/responses", "/v1/responses"),
    (b"/v1/messages", "/v1/messages"),
)
_UNRECORDED = frozenset(
    {"tokenize", "detokenize", "count_tokens", "load_lora_adapter", "unload_lora_adapter", "files", "uploads"}
)
"""Words in paths without inference: counting, administration, storage."""
_WORD = re.compile(r"[a-z][a-z_-]{0,31}")
MAX_WORDS = 5
SHAPE_BYTES = 1 << 20
"""Most bytes copied of a body on an endpoint that generates no tokens: audio and batches are large, and tell little."""


def recorded_endpoint(target: bytes) -> Endpoint | None:
    return _endpoint_of(target.partition(b"?")[0])


@lru_cache(maxsize=256)
def _endpoint_of(path: bytes) -> Endpoint | None:
    for ending, endpoint in _GENERATING:
        if path.endswith(ending):
            return endpoint
    _, version, rest = path.rpartition(b"/v1/")
    words = [word if _WORD.fullmatch(word) else "*" for word in rest.decode("latin-1").strip("/").split("/")]
    if not version or len(words) > MAX_WORDS or words == ["*"] or _UNRECORDED.intersection(words):
        return None
    return "/v1/" + "/".join(words)


def copied_bytes(endpoint: Endpoint, limit: int) -> int:
    """Return the most bytes to copy of a body; ``limit`` is for endpoints that generate tokens."""
    return limit if endpoint in GENERATING else min(limit, SHAPE_BYTES)
