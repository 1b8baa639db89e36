"""The block pool's rules, as in ``sim.vllm.pool``, block by block: for whoever asks what became of each."""

from sim.kernels.compiling import kernel
from sim.kernels.layout import Ints, Pool

NO_KEY = -1


@kernel
def lookup(pool: Pool, keys: Ints, into: Ints) -> int:
    """Write the blocks of the leading ``keys`` that are cached to ``into``, up to the first miss; how many."""
    if not pool.settings[0].enable_prefix_caching:
        return 0
    first_block = pool.first_block
    for position in range(len(keys)):
        block = first_block[keys[position]]
        if block == 0:
            return position
        into[position] = block
    return len(keys)


@kernel
def hold(pool: Pool, hits: Ints) -> None:
    """Hold hit blocks once more; idle ones leave the free queue."""
    blocks = pool.blocks
    for number in hits:
        block = blocks[number]
        if block.references == 0:
            blocks[block.previous_free].next_free = block.next_free
            blocks[block.next_free].previous_free = block.previous_free
            pool.counts[0].num_free -= 1
        block.references += 1


@kernel
def take(pool: Pool, into: Ints) -> None:
    """Fill ``into`` from the queue's head, evicting what the blocks cached. The caller has checked num_free."""
    blocks = pool.blocks
    number = blocks[0].next_free
    for position in range(len(into)):
        into[position] = number
        block = blocks[number]
        block.references = 1
        if block.key != NO_KEY:
            _forget(pool, number)
            pool.counts[0].evicted_blocks += 1
        number = block.next_free
    blocks[0].next_free = number
    blocks[number].previous_free = 0
    pool.counts[0].num_free -= len(into)


@kernel
def insert(pool: Pool, held: Ints, keys: Ints) -> None:
    """Make full blocks findable under ``keys``. Blocks of a key already cached stand in line."""
    if not pool.settings[0].enable_prefix_caching:
        return
    blocks = pool.blocks
    for position in range(len(held)):
        number, key = held[position], keys[position]
        blocks[number].key = key
        first = pool.first_block[key]
        if first == 0:
            pool.first_block[key] = number
        elif first != number:
            last = blocks[first].previous_twin
            blocks[last].next_twin = number
            blocks[number].previous_twin = last
            blocks[number].next_twin = first
            blocks[first].previous_twin = number


@kernel
def release(pool: Pool, held: Ints) -> None:
    """Let go of one request's blocks, given root to leaf; those that nobody holds any more become free."""
    blocks, append_all = pool.blocks, pool.settings[0].append_all
    head = blocks[0].references  # 0, and of the type of all the others
    for position in range(len(held) - 1, -1, -1):
        number = held[position]
        block = blocks[number]
        block.references -= 1
        if block.references > 0:
            continue
        if append_all or block.key != NO_KEY:
            _link_after(pool, blocks[0].previous_free, number)
        else:
            _link_after(pool, head, number)
            head = number


@kernel
def _link_after(pool: Pool, before: int, number: int) -> None:
    blocks = pool.blocks
    after = blocks[before].next_free
    blocks[before].next_free = number
    blocks[number].previous_free = before
    blocks[number].next_free = after
    blocks[after].previous_free = number
    pool.counts[0].num_free += 1


@kernel
def _forget(pool: Pool, number: int) -> None:
    blocks = pool.blocks
    block = blocks[number]
    key, following, previous = block.key, block.next_twin, block.previous_twin
    block.key = NO_KEY
    if following == number:
        pool.first_block[key] = 0
        return
    blocks[previous].next_twin = following
    blocks[following].previous_twin = previous
    block.next_twin = number
    block.previous_twin = number
    if pool.first_block[key] == number:
        pool.first_block[key] = following
