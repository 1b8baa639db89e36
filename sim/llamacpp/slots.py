"""llama.cpp's prefix cache: each slot has the tokens of its last request; a prompt cache has displaced sequences.

Follows ``get_available_slot``, ``launch_slot_with_task`` and ``server_prompt_cache`` in llama.cpp's ``tools/server``
(b11434), for full attention without context shift, ``--cache-reuse`` and ``id_slot``. A chain is the token sequence of
a prompt or of a slot, as block keys: equal keys mean equal tokens up to the end of the block. With blocks of one token
prefix hits are exact; larger blocks round them down.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from sim.llamacpp.config import SlotConfig

WORTH_KEEPING: Final = 0.5
"""Share of a slot's tokens: if the prompt reuses less, the slot is saved to the prompt cache first."""
WORTH_LOADING: Final = 0.25
"""Share of a saved chain: if the prompt reuses less, the chain is not loaded."""


class Chain(NamedTuple):
    """Token sequence by block keys; the last block may be partial."""

    keys: list[int]
    tokens: int


EMPTY: Final = Chain([], 0)


@dataclass(slots=True, eq=False)
class Slot:
    """Slot (``server_slot``): a sequence of the KV cache, for one request at a time."""

    number: int
    chain: Chain = EMPTY
    """Cached tokens; empty while the slot is busy."""
    last_used: int = 0
    """Sequence number of the last release; 0: never used."""
    busy: bool = False


class SavedChains:
    """Prompt cache (``server_prompt_cache``): saved chains, none a prefix of another.

    Sorted by keys, so that chains with a common prefix are adjacent: a chain shares its longest prefix with a neighbor,
    and shared prefixes get shorter on both sides.
    """

    __slots__ = ("_added", "_ages", "_chains", "_common", "_shared", "_tokens", "tokens")

    def __init__(self, common: Callable[[Chain, Chain], int]) -> None:
        """``common``: length of the common prefix of two chains, in tokens."""
        self._common = common
        self._chains: list[Chain] = []
        self._added = 0
        self._ages, self._tokens, self._shared = np.zeros((3, 0), np.int64)
        """Rows by chain: sequence number of its insertion, tokens, tokens shared with the previous chain."""
        self.tokens = 0
        """Tokens of all saved chains."""

    def contains(self, chain: Chain) -> bool:
        """Return whether ``chain`` is a prefix of a saved chain."""
        index = self._index(chain)
        return index < len(self._chains) and self._common(self._chains[index], chain) == chain.tokens

    def add(self, chain: Chain) -> None:
        """Insert a chain that is no prefix of a saved chain; remove the saved prefixes of the chain."""
        index = self._index(chain)
        while index and self._common(self._chains[index - 1], chain) == self._chains[index - 1].tokens:
            index -= 1
            self._pop(index)
        self._chains.insert(index, chain)
        self._added += 1
        self.tokens += chain.tokens
        columns = np.array([self._ages, self._tokens, self._shared])
        self._ages, self._tokens, self._shared = np.insert(columns, index, [self._added, chain.tokens, 0], axis=1)
        self._compare(index)
        self._compare(index + 1)

    def pop_oldest(self) -> Chain:
        return self._pop(int(self._ages.argmin()))

    def pop_best(self, prompt: Chain, slot_share: float, common: int) -> Chain | None:
        """Pop the best saved chain for a prompt, by llama.cpp's scan from the oldest: each candidate must share more
        tokens with the prompt, and a larger share of its own, than the candidate before. ``slot_share``, ``common``:
        values of the slot. Null: no chain is better."""
        index = self._index(prompt)
        before, after = self._chains[index - 1 : index], self._chains[index : index + 1]
        left = [self._common(chain, prompt) for chain in before]
        right = [self._common(chain, prompt) for chain in after]
        shared = np.append(
            np.minimum.accumulate([*left, *self._shared[1:index][::-1]])[::-1],
            np.minimum.accumulate([*right, *self._shared[index + 1 :]]),
        )
        shares = shared / self._tokens
        helps = (shared > common) & (shares > slot_share) & (shared >= WORTH_LOADING * self._tokens)
        best = None
        while helps.any():
            best = int(np.where(helps, self._ages, self._added + 1).argmin())
            helps &= (self._ages > self._ages[best]) & (shared > shared[best]) & (shares > shares[best])
        return None if best is None else self._pop(best)

    def _index(self, chain: Chain) -> int:
        """Return the index of the first saved chain that is not before ``chain``."""
        return bisect_left(self._chains, (chain.keys, chain.tokens), key=lambda saved: (saved.keys, saved.tokens))

    def _pop(self, index: int) -> Chain:
        chain = self._chains.pop(index)
        self.tokens -= chain.tokens
        self._ages, self._tokens, self._shared = np.delete([self._ages, self._tokens, self._shared], index, axis=1)
        self._compare(index)
        return chain

    def _compare(self, index: int) -> None:
        if 0 < index < len(self._chains):
            self._shared[index] = self._common(self._chains[index - 1], self._chains[index])


class SlotCache:
    """Slots and prompt cache of a server. Requests ``start`` and ``end``; time is the order of the calls."""

    __slots__ = ("_config", "_ends", "_saved", "block_size", "evicted_tokens", "slots")

    def __init__(self, config: SlotConfig, block_size: int = 1) -> None:
        self._config = config
        self._ends = 0
        self.block_size = block_size
        self.slots = [Slot(number) for number in range(config.slots)]
        self._saved = SavedChains(self._common)
        self.evicted_tokens = 0
        """Tokens overwritten or dropped without a copy in the prompt cache."""

    def start(self, prompt: Chain) -> tuple[Slot, int] | None:
        """Assign a slot to a prompt; return the slot and the prefix hit in tokens. Null: all slots are busy."""
        slot = self._most_similar(prompt)
        displaces = slot is None or self._common(slot.chain, prompt) < WORTH_KEEPING * slot.chain.tokens
        slot = slot or self._least_recently_used()
        if slot is None:
            return None
        if displaces and self._config.cache_ram_tokens != 0:
            self._save(slot.chain)
            self._load(slot, prompt)
        common = self._common(slot.chain, prompt)
        hits = min(common, prompt.tokens - 1)  # the last token is computed for its logits
        if common < slot.chain.tokens and not self._saved.contains(slot.chain):
            self.evicted_tokens += slot.chain.tokens - common
        slot.busy = True
        slot.chain = EMPTY
        if self._config.saves_idle_slots:
            self._save_idle_slots()
        return slot, hits

    def end(self, slot: Slot, computed: Chain) -> None:
        """Release a slot with ``computed`` tokens: prompt and output, without the last token."""
        self._ends += 1
        slot.busy, slot.chain, slot.last_used = False, computed, self._ends

    def _most_similar(self, prompt: Chain) -> Slot | None:
        """Return the idle slot with the longest prefix hit, the first at ties; null: no slot exceeds the threshold."""
        best, most = None, 0
        threshold = self._config.slot_prompt_similarity
        if threshold == 0.0:
            return None
        for slot in self.slots:
            common = 0 if slot.busy else self._common(slot.chain, prompt)
            if common > most and common / prompt.tokens > threshold:
                best, most = slot, common
        return best

    def _least_recently_used(self) -> Slot | None:
        """Return the least recently used idle slot, the last of the unused slots; null: all slots are busy."""
        idle = [slot for slot in self.slots if not slot.busy]
        return min(reversed(idle), key=lambda slot: slot.last_used, default=None)

    def _save(self, chain: Chain) -> None:
        """Save a chain to the prompt cache; evict the oldest chains beyond its size."""
        bound = self._config.cache_ram_tokens
        if not chain.tokens or self._saved.contains(chain) or (bound is not None and chain.tokens > bound):
            return
        self._saved.add(chain)
        while bound is not None and self._saved.tokens > bound:
            self.evicted_tokens += self._saved.pop_oldest().tokens

    def _load(self, slot: Slot, prompt: Chain) -> None:
        """Load the best saved chain for a prompt into the slot, if it is better than the slot's chain."""
        common = self._common(slot.chain, prompt)
        slot_share = common / slot.chain.tokens if slot.chain.tokens else -1.0
        loaded = self._saved.pop_best(prompt, slot_share, common)
        if loaded is not None:
            if not self._saved.contains(slot.chain):
                self.evicted_tokens += slot.chain.tokens
            slot.chain = loaded

    def _save_idle_slots(self) -> None:
        for slot in self.slots:
            if slot.busy:
                continue
            self._save(slot.chain)
            if self._config.kv_unified:
                if not self._saved.contains(slot.chain):
                    self.evicted_tokens += slot.chain.tokens
                slot.chain = EMPTY

    def _common(self, first: Chain, second: Chain) -> int:
        """Return the length of the common prefix of two chains, in tokens."""
        keys, other_keys = first.keys, second.keys
        blocks = range(min(len(keys), len(other_keys)))
        matching = bisect_left(blocks, True, key=lambda at: keys[at] != other_keys[at])
        return min(matching * self.block_size, first.tokens, second.tokens)
