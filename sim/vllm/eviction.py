"""Eviction policies of ``--evict``: their names and settings, and the order of idle blocks as one plain function.

Under every policy but vLLM's own, a key has one block, and a block goes only after those that follow it in a chain. An
idle block has a level (``level_of``); of the lowest level the least recently used goes first.
"""

from functools import cache
from typing import NamedTuple

from tracefile.commandline.durations import duration
from tracefile.records.errors import InputError

POLICIES = ("vllm", "lfu", "slru", "ttl", "belady")
"""By their number in compiled code."""
VLLM, LFU, SLRU, TTL, BELADY = range(len(POLICIES))
LEVELS = {LFU: 256, SLRU: 2}
"""Levels; 1 of policies not named. Belady: one for each request."""
EVICT_HELP = f"eviction policy: {', '.join(POLICIES)}; a setting follows, as in ttl:after=5m"


class Eviction(NamedTuple):
    """A policy with its setting."""

    policy: int
    limit: int = 0
    """``ttl``: ms."""


@cache
def parse_evict(text: str, flag: str = "--evict") -> Eviction:
    """Read ``NAME`` or ``ttl:after=TIME``. Raises InputError."""
    name, *words = text.split(":")
    if name not in POLICIES:
        raise InputError(f"{flag}: {text!r}; expected one of {', '.join(POLICIES)}")
    after = "5m"
    for word in words:
        setting, _, after = word.partition("=")
        if (name, setting) != ("ttl", "after"):
            known = "after" if name == "ttl" else f"{name} alone, which has none"
            raise InputError(f"{flag}: {text!r}: setting {setting!r}; expected {known}")
    try:
        limit_ms = round(1e3 * duration(after)) if name == "ttl" else 0
    except Exception as error:
        raise InputError(f"{flag}: {text!r}: {error}") from None
    return Eviction(POLICIES.index(name), limit_ms)


def level_of(policy: int, hits: int, worth: int) -> int:
    """Level of an idle block: the lowest goes first. No block has a higher level than the one before it in its chain.

    ``hits``: since it was cached; ``worth``: of its next use, for Belady's policy.
    """
    if policy == LFU:
        return min(hits, 255)
    if policy == SLRU:
        return min(hits, 1)
    return worth if policy == BELADY else 0
