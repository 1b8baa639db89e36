"""The block pool with one request at a time, remembering for every key who evicted it: why a block was not there."""

from typing import NamedTuple

from sim.kernels.compiling import entry, kernel
from sim.kernels.layout import SOURCES, Ints, Pool, Records, record
from sim.kernels.pool import NO_KEY, hold, insert, lookup, release, take

ASK = record(f"first_key num_keys prompt_blocks most_hits held hits {SOURCES}")
"""A request: its keys are ``num_keys`` from ``first_key`` on, the first ``prompt_blocks`` of them its prompt's."""
NEVER, CACHED = -1, -2
"""What became of a key before it was asked for; else the number of the request that evicted it last."""


class Asking(NamedTuple):
    """The pool, and who asks it for what."""

    pool: Pool
    requests: Records
    keys: Ints
    evictor: Ints
    """By key: the request that evicted it last; NEVER: none did, or it was never there."""
    found: Ints
    """Beside ``keys``: what each request found at its arrival."""
    held: Ints
    """Room for the blocks of the largest request."""


@entry
def ask_all(asking: Asking) -> None:
    """Run every request: what it finds, its hits, and whose blocks it takes."""
    pool, held, keys = asking.pool, asking.held, asking.keys
    for number in range(len(asking.requests)):
        request = asking.requests[number]
        first = request.first_key
        for place in range(first, first + request.prompt_blocks):
            key = keys[place]
            asking.found[place] = CACHED if pool.first_block[key] != 0 else asking.evictor[key]
        hits = lookup(pool, keys[first : first + request.most_hits], held)
        hold(pool, held[:hits])
        _note_evictions(asking, request.held - hits, number)
        take(pool, held[hits : request.held])
        insert(pool, held[hits : request.num_keys], keys[first + hits : first + request.num_keys])
        release(pool, held[: request.held])
        request.hits = hits


@kernel
def _note_evictions(asking: Asking, count: int, number: int) -> None:
    """Of the ``count`` blocks at the queue's head, which are taken next."""
    blocks = asking.pool.blocks
    block = blocks[0].next_free
    for _ in range(count):
        if blocks[block].key != NO_KEY:
            asking.evictor[blocks[block].key] = number
        block = blocks[block].next_free
