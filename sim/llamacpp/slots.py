"""llama.cpp's prefix cache: each slot holds the tokens of its last request, a prompt cache those that were displaced.

The rules are those of ``get_available_slot``, ``launch_slot_with_task`` and ``server_prompt_cache`` in llama.cpp's
``tools/server`` (b11434), for full attention without context shift, ``--cache-reuse`` and ``id_slot``. A chain is a
prompt's or a slot's tokens, as block keys: equal keys mean equal tokens up to that block's end. With blocks of one
token the hits are exact; larger blocks round them down.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from sim.llamacpp.config import SlotConfig

WORTH_KEEPING: Final = 0.5
"""A slot that would lose more than the rest of its chain is saved first."""
WORTH_LOADING: Final = 0.25
"""A saved chain of which less would be used stays where it is."""


class Chain(NamedTuple):
    """Tokens by their block keys, the last block's maybe not full."""

    keys: list[int]
    tokens: int


EMPTY: Final = Chain([], 0)


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence of the KV cache, for one request at a time."""

    number: int
    chain: Chain = EMPTY
    """Tokens in the KV cache; of a busy slot nothing is asked."""
    last_used: int = 0
    """Number of its last release among all; 0: never used."""
    busy: bool = False


class SavedChains:
    """The prompt cache: chains of which none is contained in another.

    They are kept in the order of their keys, where those that share a prefix stand together: a chain shares most with
    its neighbors, and what it shares with the others falls off on both sides.
    """

    __slots__ = ("_added", "_ages", "_chains", "_common", "_shared", "_tokens", "tokens")

    def __init__(self, common: Callable[[Chain, Chain], int]) -> None:
        """``common``: tokens with which two chains begin."""
        self._common = common
        self._chains: list[Chain] = []
        self._added = 0
        self._ages, self._tokens, self._shared = np.zeros((3, 0), np.int64)
        """By chain: number of its addition, its tokens, and those it shares with the chain before it."""
        self.tokens = 0
        """Of all chains."""

    def contains(self, chain: Chain) -> bool:
        """Return whether a chain begins with ``chain``."""
        place = self._place(chain)
        return place < len(self._chains) and self._common(self._chains[place], chain) == chain.tokens

    def add(self, chain: Chain) -> None:
        """Add a chain that none contains, in the place of those that it contains."""
        place = self._place(chain)
        while place and self._common(self._chains[place - 1], chain) == self._chains[place - 1].tokens:
            place -= 1
            self._pop(place)
        self._chains.insert(place, chain)
        self._added += 1
        self.tokens += chain.tokens
        columns = np.array([self._ages, self._tokens, self._shared])
        self._ages, self._tokens, self._shared = np.insert(columns, place, [self._added, chain.tokens, 0], axis=1)
        self._compare(place)
        self._compare(place + 1)

    def pop_oldest(self) -> Chain:
        return self._pop(int(self._ages.argmin()))

    def pop_best(self, prompt: Chain, kept: float, common: int) -> Chain | None:
        """Remove and return the last of those, oldest first, that each help a prompt more than the one before, and
        waste less of themselves; ``kept``, ``common``: of what there is. Null: none does."""
        place = self._place(prompt)
        before, after = self._chains[place - 1 : place], self._chains[place : place + 1]
        left = [self._common(chain, prompt) for chain in before]
        right = [self._common(chain, prompt) for chain in after]
        shared = np.append(
            np.minimum.accumulate([*left, *self._shared[1:place][::-1]])[::-1],
            np.minimum.accumulate([*right, *self._shared[place + 1 :]]),
        )
        shares = shared / self._tokens
        helps = (shared > common) & (shares > kept) & (shared >= WORTH_LOADING * self._tokens)
        best = None
        while helps.any():
            best = int(np.where(helps, self._ages, self._added + 1).argmin())
            helps &= (self._ages > self._ages[best]) & (shared > shared[best]) & (shares > shares[best])
        return None if best is None else self._pop(best)

    def _place(self, chain: Chain) -> int:
        """Place of the first chain that does not come before ``chain``."""
        return bisect_left(self._chains, (chain.keys, chain.tokens), key=lambda one: (one.keys, one.tokens))

    def _pop(self, place: int) -> Chain:
        chain = self._chains.pop(place)
        self.tokens -= chain.tokens
        self._ages, self._tokens, self._shared = np.delete([self._ages, self._tokens, self._shared], place, axis=1)
        self._compare(place)
        return chain

    def _compare(self, place: int) -> None:
        if 0 < place < len(self._chains):
            self._shared[place] = self._common(self._chains[place - 1], self._chains[place])


class SlotCache:
    """Slots and prompt cache of one server. Requests ``start`` and ``end``; time is their order."""

    __slots__ = ("_config", "_ends", "_saved", "block_size", "evicted_tokens", "slots")

    def __init__(self, config: SlotConfig, block_size: int = 1) -> None:
        self._config = config
        self._ends = 0
        self.block_size = block_size
        self.slots = [Slot(number) for number in range(config.slots)]
        self._saved = SavedChains(self._common)
        self.evicted_tokens = 0
        """Tokens that were overwritten or dropped, and are in no other place."""

    def start(self, prompt: Chain) -> tuple[Slot, int] | None:
        """Give a prompt its slot; return the slot and the prompt's cached tokens, null if all slots are busy."""
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
        """Release a slot that holds ``computed``: its prompt and its output but the last token."""
        self._ends += 1
        slot.busy, slot.chain, slot.last_used = False, computed, self._ends

    def _most_similar(self, prompt: Chain) -> Slot | None:
        """The idle slot that holds most of a prompt, the first of equals; null: none holds more than the threshold."""
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
        """The idle slot that ended its work first, the last of those that had none; null: all are busy."""
        idle = [slot for slot in self.slots if not slot.busy]
        return min(reversed(idle), key=lambda slot: slot.last_used, default=None)

    def _save(self, chain: Chain) -> None:
        """Copy a chain to the prompt cache, in the place of those that it contains; drop the oldest if it is full."""
        bound = self._config.cache_ram_tokens
        if not chain.tokens or self._saved.contains(chain) or (bound is not None and chain.tokens > bound):
            return
        self._saved.add(chain)
        while bound is not None and self._saved.tokens > bound:
            self.evicted_tokens += self._saved.pop_oldest().tokens

    def _load(self, slot: Slot, prompt: Chain) -> None:
        """Move the saved chain that helps a prompt more than the slot's own, and wastes less of itself, to the slot."""
        common = self._common(slot.chain, prompt)
        kept = common / slot.chain.tokens if slot.chain.tokens else -1.0
        loaded = self._saved.pop_best(prompt, kept, common)
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

    def _common(self, one: Chain, other: Chain) -> int:
        """Tokens with which both begin."""
        keys, others = one.keys, other.keys
        blocks = range(min(len(keys), len(others)))
        agreed = bisect_left(blocks, True, key=lambda at: keys[at] != others[at])
        return min(agreed * self.block_size, one.tokens, other.tokens)
