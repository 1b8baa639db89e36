"""Conversations of a trace, and the leading blocks that each prompt shares with other conversations.

Named sessions are taken as they are. Elsewhere a request continues the conversation whose latest request's chain it
extends whole, if those blocks are nobody else's: published traces have neither names nor ends, which
``tracefile.sessions`` would need.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from tracefile.records.schema import Record, SessionId


@dataclass(slots=True)
class Conversations:
    """Conversations of records taken in order of arrival."""

    of_record: list[int] = field(default_factory=list)
    """By record: its conversation, numbered as they come."""
    _chains: list[list[int]] = field(default_factory=list)
    _owners: dict[int, int] = field(default_factory=dict)
    """By hash: the conversation that had it first."""
    _shared: set[int] = field(default_factory=set)
    """Hashes that a second one has; with a block, those before it."""
    _ends: list[tuple[int, ...]] = field(default_factory=list)
    """By conversation: lengths of its latest request's chain, without the answer and with it."""
    _named: dict[SessionId, int] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        prompt: list[int] = list(record.block_hashes or ())
        chain = prompt + list(record.output_block_hashes or ())
        known = bisect_left(chain, True, key=lambda block: block not in self._owners)
        here = self._conversation(record, chain, known)
        self._ends[here] = (len(prompt), len(chain))
        self._mark_shared(chain[:known], here)
        for block in chain[known:]:
            self._owners.setdefault(block, here)
        self._chains.append(chain)
        self.of_record.append(here)

    def shared_blocks(self) -> list[int]:
        """Leading blocks that another conversation has too, by record; final after the last record."""
        return [bisect_left(chain, True, key=lambda block: block not in self._shared) for chain in self._chains]

    def _conversation(self, record: Record, chain: Sequence[int], known: int) -> int:
        if record.session_id is not None:
            if record.session_id not in self._named:
                self._named[record.session_id] = self._new()
            return self._named[record.session_id]
        if known and chain[known - 1] not in self._shared:
            owner = self._owners[chain[known - 1]]
            if known in self._ends[owner]:
                return owner
        return self._new()

    def _new(self) -> int:
        self._ends.append(())
        return len(self._ends) - 1

    def _mark_shared(self, blocks: Sequence[int], here: int) -> None:
        is_shared = False
        for block in reversed(blocks):
            if block in self._shared:
                return
            is_shared = is_shared or self._owners[block] != here
            if is_shared:
                self._shared.add(block)
