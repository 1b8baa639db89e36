"""Groups of requests by leading blocks, session or tenant, for tables of cache use."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from tracefile.commandline.configfile import refuse_without
from tracefile.records.arrays import IntArray, UInt64Array
from tracefile.records.errors import InputError
from tracefile.records.latenames import LateModule
from tracefile.records.schema import Record
from tracefile.sessions import NO_CHAINS, SessionIndex

if TYPE_CHECKING:
    import numpy as np

    from tracefile.records.batches import Batch
else:  # numpy, which the flags need not
    np = LateModule("numpy")


By = Literal["prefix", "session", "tenant"]
"""``prefix``: hash of the prompt's n-th full block, or of its last one if it has fewer. ``session``: the session of the
record, inferred if it has none. ``tenant``: the value of one field of the record, chosen by the user."""

UNKNOWN = "unknown"
SHORT = "shorter than a block"
TENANT_FIELDS = ("model", "lora", "endpoint", "upstream", "session_id", "priority")
"""Fields that may name a tenant, beside ``headers.NAME`` and ``extra.NAME``."""
_FIELDS = f"{', '.join(TENANT_FIELDS)}, headers.NAME or extra.NAME"
DOMINANT = 0.9
"""Part of the hits from which on one prefix says nothing of the others."""
SHARED = 0.5
"""Part of the hits that prefixes of two requests or more must keep."""
_DEPTHS_TRIED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Grouping rule, and number of groups in a result."""

    by: By
    tenant_field: str = "model"
    prefix_blocks: int | None = None
    """Null: the smallest depth that tells groups apart (``separating_depth``)."""
    most: int = 10
    """Number of groups shown; the others are one."""

    def __post_init__(self) -> None:
        kind, dot, name = self.tenant_field.partition(".")
        if self.tenant_field not in TENANT_FIELDS and not (kind in ("headers", "extra") and dot and name):
            raise InputError(f"--tenant-field: {self.tenant_field!r}; expected {_FIELDS}")
        for flag, value in (("--prefix-blocks", self.prefix_blocks), ("--groups", self.most)):
            if value is not None and value < 1:
                raise InputError(f"{flag}: {value}; expected 1 or more")


class PrefixChains(NamedTuple):
    """Known prompt blocks of requests."""

    keys: UInt64Array
    first: IntArray
    """Place of each request's first key."""
    known: IntArray
    """How many keys each has, of its prompt's full blocks."""
    blocks: IntArray
    """Full blocks of each prompt."""
    hits: IntArray
    """Hits of each in an unlimited cache: what a prefix can be worth."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of a trace's requests."""

    names: list[str]
    of_request: IntArray
    """Number of each request's group, below the number of ``names``."""
    examples: list[str]
    """By group: id of its first request."""
    shared_blocks: IntArray
    """By group: leading blocks that all its requests share."""
    session_of: IntArray
    """By request: number of its session; −1: it names none."""
    rule: str = ""
    """Words on how the groups were made; empty: as the flags ask."""

    def largest(self, weights: IntArray, most: int) -> tuple[list[int], IntArray]:
        """Numbers of the ``most`` groups with the most of the requests' ``weights``, and each request's place among
        these; all other groups are in the place after the last."""
        order = np.argsort(-np.bincount(self.of_request, weights, len(self.names)), kind="stable")
        place = np.empty(len(order), np.int64)
        place[order] = np.minimum(np.arange(len(order)), most)
        return order[:most].tolist(), place[self.of_request]

    def shown_names(self, numbers: Sequence[int]) -> list[str]:
        """Names of the groups ``numbers``, and that of the rest if there is one."""
        rest = len(self.names) - len(numbers)
        return [self.names[number] for number in numbers] + ([f"{rest:,} others"] if rest else [])


@dataclass(slots=True)
class Members:
    """Fields of a trace's requests that a grouping needs, batch by batch."""

    grouping: Grouping
    fine_block_size: int
    request_ids: list[str] = field(default_factory=list)
    sessions: list[str | None] = field(default_factory=list)
    tenants: list[str] = field(default_factory=list)
    later_turns: int = 0
    unnamed: int = 0
    """Requests whose session had to be inferred."""
    index: SessionIndex | None = None

    def add(self, batch: "Batch", rows: IntArray) -> None:
        ids, sessions = batch.words("request_id"), batch.words("session_id")
        self.request_ids += [ids[row] or "" for row in rows.tolist()]
        if self.grouping.by == "session":
            self.sessions += [self._session(record) for record in batch.records(rows)]
            return
        self.sessions += [sessions[row] for row in rows.tolist()]
        if self.grouping.by == "tenant":
            self.tenants += [_tenant(record, self.grouping.tenant_field) for record in batch.records(rows)]

    def _session(self, record: Record) -> str | None:
        if self.index is None:
            self.index = SessionIndex(self.fine_block_size)
        if record.session_id is None:
            self.unnamed += 1
            record = self.index.link(record)
        else:
            self.index.recall(record)
        self.later_turns += (record.turn or 1) > 1
        return record.session_id

    def groups(self, prompts: PrefixChains, order: IntArray, block_size: int) -> Groups:
        """Group all requests that were added; ``order``: place in the file of each of ``prompts``."""
        places = order.tolist()
        ids, sessions = [self.request_ids[place] for place in places], [self.sessions[place] for place in places]
        if self.grouping.by == "prefix":
            depth = self.grouping.prefix_blocks or separating_depth(prompts)
            of_request, names = _by_prefix(prompts, depth)
            text = f"prefixes of {depth:,} block{'s' if depth > 1 else ''} ({depth * block_size:,} tokens)"
            asked = self.grouping.prefix_blocks is not None
            rule = text if asked else f"{text}, the first depth that tells them apart; --prefix-blocks N for another"
        else:
            tenants = self.grouping.by == "tenant"
            words = [self.tenants[place] for place in places] if tenants else [name or UNKNOWN for name in sessions]
            of_request, names = _numbered(words)
            rule = self._session_rule() if self.grouping.by == "session" else ""
        first = np.unique(of_request, return_index=True)[1]
        session_of, _ = _numbered([name or "" for name in sessions])
        named = np.array([name is not None for name in sessions], bool)
        return Groups(
            names,
            of_request,
            [ids[place] for place in first.tolist()],
            shared_blocks(prompts, of_request, first),
            np.where(named, session_of, -1),
            rule,
        )

    def _session_rule(self) -> str:
        """Words on sessions that the trace does not name."""
        if not self.unnamed:
            return ""
        told = f"sessions inferred from prefixes for {self.unnamed:,} of {len(self.sessions):,} requests"
        return told if self.later_turns else f"{told}: {NO_CHAINS}"


_NAME_WIDTH = 24


def short_names(names: Sequence[str]) -> list[str]:
    """Names of groups for a table: 8 hex digits of a hash, both ends of a long word; in full where two are equal."""
    short = [_short_name(name) for name in names]
    return [name if short.count(word) > 1 else word for name, word in zip(names, short, strict=True)]


def _short_name(name: str) -> str:
    if name.isdigit() and len(name) > 10:
        return f"{int(name):016x}"[:8]
    half = _NAME_WIDTH // 2
    return name if len(name) <= _NAME_WIDTH else f"{name[: half - 1]}…{name[-half:]}"


def separating_depth(prompts: PrefixChains) -> int:
    """Return the smallest depth, in blocks, at which no prefix has over ``DOMINANT`` of the hits.

    Prefixes of two requests or more must keep ``SHARED`` of the hits; else the deepest depth that keeps them.
    """
    whole, depth, found = prompts.hits.sum(), 1, 1
    for _ in range(_DEPTHS_TRIED if whole else 0):
        numbers, names = _by_prefix(prompts, depth)
        hits = np.bincount(numbers, prompts.hits, len(names))
        if hits[np.bincount(numbers) > 1].sum() < SHARED * whole:
            break
        found, largest = depth, int(np.argmax(hits))
        if hits[largest] <= DOMINANT * whole:
            break
        inside = np.flatnonzero((numbers == largest) & (prompts.known > depth))
        if not len(inside):
            break
        depth = max(int(_common(prompts, inside, np.full(len(inside), inside[0])).min()), depth) + 1
    return found


def shared_blocks(prompts: PrefixChains, of_request: IntArray, first: IntArray) -> IntArray:
    """Count the leading blocks that all requests of each group share. ``first``: a request of each."""
    shared = prompts.known[first].copy()
    np.minimum.at(shared, of_request, _common(prompts, np.arange(len(of_request)), first[of_request]))
    return shared


def _common(prompts: PrefixChains, one: IntArray, other: IntArray) -> IntArray:
    """Leading blocks that requests share, pair by pair: chained hashes agree up to a place and never again."""
    low, high = np.zeros(len(one), np.int64), np.minimum(prompts.known[one], prompts.known[other])
    while (low < high).any():
        middle = (low + high + 1) // 2
        place = np.maximum(middle - 1, 0)
        agree = (middle > low) & (
            prompts.keys.take(prompts.first[one] + place, mode="clip")
            == prompts.keys.take(prompts.first[other] + place, mode="clip")
        )
        low, high = np.where(agree, middle, low), np.where(agree, high, np.maximum(middle - 1, low))
    return low


def _by_prefix(prompts: PrefixChains, depth: int) -> tuple[IntArray, list[str]]:
    """Number of each request's group by the block at ``depth``, or by its last known one, and the groups' names."""
    place = np.minimum(depth, prompts.known) - 1
    known = place >= 0
    keys, of_known = np.unique(prompts.keys[(prompts.first + place)[known]], return_inverse=True)
    numbers = np.where(prompts.blocks > 0, len(keys), len(keys) + 1)
    numbers[known] = of_known
    return _compact(numbers, [*map(str, keys.tolist()), UNKNOWN, SHORT])


def _compact(numbers: IntArray, names: list[str]) -> tuple[IntArray, list[str]]:
    """Number the groups that occur, as they first come."""
    used, first, places = np.unique(numbers, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    renumbered = np.empty(len(used), np.int64)
    renumbered[order] = np.arange(len(used))
    return renumbered[places], [names[number] for number in used[order].tolist()]


def _numbered(words: Sequence[str]) -> tuple[IntArray, list[str]]:
    numbers: dict[str, int] = {}
    found = np.array([numbers.setdefault(word, len(numbers)) for word in words], np.int64)
    return found, list(numbers)


def add_group_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--by", choices=get_args(By), help="group requests by leading blocks, session or tenant")
    parser.add_argument(
        "--tenant-field", metavar="FIELD", help=f"field that names the tenant: {_FIELDS} (default model)"
    )
    parser.add_argument("--prefix-blocks", type=int, help="blocks of a prefix (default: as few as tell groups apart)")
    parser.add_argument("--groups", type=int, help="show the N largest groups (default 10)")


def grouping_of(arguments: argparse.Namespace) -> Grouping | None:
    """Return the grouping asked for; None: none. Raises InputError for a flag of another grouping."""
    for by, name in (("tenant", "tenant_field"), ("prefix", "prefix_blocks")):
        if arguments.by != by:
            refuse_without(f"--by {by}", arguments, (name,))
    if arguments.by is None:
        refuse_without("--by", arguments, ("groups",))
        return None
    given = {
        "tenant_field": arguments.tenant_field,
        "prefix_blocks": arguments.prefix_blocks,
        "most": arguments.groups,
    }
    return Grouping(by=arguments.by, **{name: value for name, value in given.items() if value is not None})


def _tenant(record: Record, tenant_field: str) -> str:
    kind, dot, key = tenant_field.partition(".")
    value = (getattr(record, kind) or {}).get(key) if dot else getattr(record, kind)
    return UNKNOWN if value is None else str(value)
