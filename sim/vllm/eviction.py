"""Eviction policies of ``--evict``: their names and settings, and the order of idle blocks as one plain function.

Under every policy but vLLM's own, a key has one block, and a block goes only after those that follow it in a chain. A
policy is one of two kinds. By level: an idle block has a level (``level_of``); of the lowest level the least recently
used goes first. By queue: blocks stand where they were first freed, and a block that is held or that another depends on
is passed over like one that was used (``sim.kernels.blocks``).

``workload`` learns while it runs. A block's level is what its last request added to what was seen before, in blocks: a
new session adds many, a tool's output few. Of the least recently used block of each level, the one goes whose return is
the least likely at its idle age.
"""

from functools import cache
from typing import NamedTuple

from tracefile.commandline.durations import duration
from tracefile.records.errors import InputError

POLICIES = (
    "vllm", "lru", "lfu", "slru", "arc", "ttl", "tail", "workload", "belady", "fifo", "sieve", "s3-fifo"
)  # fmt: skip
"""By their number in compiled code."""
VLLM, LRU, LFU, SLRU, ARC, TTL, TAIL, WORKLOAD, BELADY, FIFO, SIEVE, S3_FIFO = range(len(POLICIES))
ADDED, AGES = 8, 24
"""Levels of ``workload``, by powers of two of blocks added; and classes of idle time, by powers of two."""
LEVELS = {LFU: 256, SLRU: 2, ARC: 5, TAIL: 2, WORKLOAD: ADDED + 1, S3_FIFO: 4}
"""Levels, or queues with those of keys that were evicted; 1 of policies not named. Belady: one for each request."""
REMEMBERING = (ARC, S3_FIFO, WORKLOAD)
"""Policies that keep keys of evicted blocks."""
_SETTINGS = {"ttl": {"after": "5m"}, "tail": {"threshold": "8192", "next": "512"}}
"""Settings of policies, as given by default."""
EVICT_HELP = (
    f"eviction policy: {', '.join(POLICIES)}; settings follow, as in ttl:after=5m or tail:threshold=8192:next=512"
)


class Eviction(NamedTuple):
    """A policy with its setting."""

    policy: int
    limit: int = 0
    """``ttl``: ms; ``tail``: tokens at a prompt's end whose prefill costs no more than the target."""


@cache
def parse_evict(text: str, flag: str = "--evict") -> Eviction:
    """Read ``NAME[:SETTING=VALUE]…``. Raises InputError."""
    name, *words = text.split(":")
    if name not in POLICIES:
        raise InputError(f"{flag}: {text!r}; expected one of {', '.join(POLICIES)}")
    values = dict(_SETTINGS.get(name, {}))
    for word in words:
        setting, _, value = word.partition("=")
        if setting not in values:
            known = ", ".join(values) or f"{name} alone, which has none"
            raise InputError(f"{flag}: {text!r}: setting {setting!r}; expected {known}")
        values[setting] = value
    try:
        limit = {
            "ttl": lambda: round(1e3 * duration(values["after"])),
            "tail": lambda: int(values["threshold"]) - int(values["next"]),
        }.get(name, int)()
    except Exception as error:
        raise InputError(f"{flag}: {text!r}: {error}") from None
    return Eviction(POLICIES.index(name), limit)


def level_of(policy: int, hits: int, worth: int, tokens_beyond: int) -> int:
    """Level of an idle block: the lowest goes first. No block has a higher level than the one before it in its chain,
    but under ``workload``, whose levels have no order.

    ``hits``: since it was cached; ``worth``: of its next use, or the blocks that its request added; ``tokens_beyond``:
    before it, more than a next prompt of that chain needs for its TTFT target.
    """
    if policy == LFU:
        return min(hits, 255)
    if policy in (SLRU, ARC):
        return min(hits, 1)
    if policy == TAIL:
        return 0 if tokens_beyond >= 0 else 1
    if policy == BELADY:
        return worth
    level = 0
    while policy == WORKLOAD and level < ADDED - 1 and worth + 1 >= 2 << level:
        level += 1
    return level


def age_class(idle_ms: float) -> int:
    """Class of an idle time: the first ends at 32 ms, each further one at twice as much, the last never."""
    age, end_ms = 0, 32.0
    while age < AGES - 1 and idle_ms >= end_ms:
        age, end_ms = age + 1, 2.0 * end_ms
    return age


def return_rate(returned: int, reached: int, age: int) -> float:
    """Rate of returns of a level: of blocks that ``reached`` an age, so many ``returned`` by the end of class ``age``.

    One more block that returned keeps levels that nothing is known of from being evicted first.
    """
    return (returned + 1) / ((reached + 1) * 2.0**age)
