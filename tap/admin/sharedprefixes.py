"""Prefixes that the live traffic shares most, by the hash of their last block, in bounded memory.

Only branch points are kept: the places where a request diverges from the requests before it. A system prompt of a
thousand blocks is one such point, reached again by each new conversation. The point not passed for longest is removed
first, so a prefix of at least one request in ``capacity`` is never lost. Requests count from the discovery of a point
on, with the two that showed it: never too many. A conversation's own past, which only its later turns have, is no
shared prefix.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tap.admin.window import Window

CAPACITY: Final = 4_096
TOP: Final = 8
NESTED_SHARE: Final = 0.9
"""A prefix is not shown if nearly all of its requests share a longer one."""


@dataclass(slots=True)
class Passes:
    """Requests with a prefix, in one minute."""

    requests: int = 0
    openings: int = 0
    """Requests among them that began a conversation, as far as known."""


@dataclass(slots=True)
class BranchPoint:
    """A prefix shared by requests up to this block, where some diverge."""

    hash: int
    blocks: int
    window: Window[Passes] = field(default_factory=lambda: Window(Passes))
    within: int | None = None
    """Hash of the nearest point above. Null: unknown."""

    def passed(self, requests: int, opening: bool, now_s: float) -> None:
        """Count requests with the prefix, one of which may have begun a conversation."""
        minute = self.window.bucket(now_s)
        minute.requests += requests
        minute.openings += opening

    def requests(self, now_s: float) -> int:
        """Return the recent requests with it, at least; 0 if none began a conversation."""
        minutes = self.window.buckets(now_s)
        return sum(minute.requests for minute in minutes) if any(minute.openings for minute in minutes) else 0


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A shared prefix, for a line of the page."""

    hash: int
    blocks: int
    requests: int


class SharedPrefixes:
    """Takes requests in order, and finds the prefixes with most of the recent tokens."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._points: OrderedDict[int, BranchPoint] = OrderedDict()

    def __len__(self) -> int:
        return len(self._points)

    def take(self, hashes: Sequence[int], seen_blocks: int, now_s: float, *, opening: bool) -> None:
        """Count one request, whose ``seen_blocks`` leading blocks an earlier one had.

        ``opening``: it is no later turn of a conversation, as far as is known.
        """
        points = self._points
        within = None
        for block in [block for block in hashes if block in points]:
            points[block].passed(1, opening, now_s)
            points[block].within = within
            points.move_to_end(block)
            within = block
        if seen_blocks and hashes[seen_blocks - 1] not in points:
            self._discover(BranchPoint(hashes[seen_blocks - 1], seen_blocks), opening, now_s)

    def top(self, now_s: float, count: int = TOP) -> list[SharedPrefix]:
        """The prefixes that hold most tokens of recent requests, the most first; none twice in two lengths."""
        requests = {block: point.requests(now_s) for block, point in self._points.items()}
        goes_on = {
            point.within
            for block, point in self._points.items()
            if point.within is not None and requests[block] >= NESTED_SHARE * requests.get(point.within, 0)
        }
        told = [
            SharedPrefix(block, point.blocks, requests[block])
            for block, point in self._points.items()
            if requests[block] >= 2 and block not in goes_on
        ]
        return sorted(told, key=lambda prefix: (-prefix.blocks * prefix.requests, prefix.hash))[:count]

    def _discover(self, point: BranchPoint, opening: bool, now_s: float) -> None:
        point.passed(2, opening, now_s)
        self._points[point.hash] = point
        if len(self._points) > self._capacity:
            self._points.popitem(last=False)
