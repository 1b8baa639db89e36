"""Groups of requests by leading blocks, session or tenant, for tables of cache use."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from sim.workload.chain import is_private
from tracefile.records.arrays import IntArray
from tracefile.records.errors import InputError
from tracefile.records.schema import Record

By = Literal["prefix", "session", "tenant"]
"""``prefix``: hash of the prompt's n-th full block, or of its last one if it has fewer. ``session``: the session of the
record. ``tenant``: the value of one field of the record, chosen by the user."""
Namer = Callable[[Record, Sequence[int]], str]
"""Function from a record and its prompt's keys to the name of its group."""

UNKNOWN = "unknown"
TENANT_FIELDS = ("model", "lora", "endpoint", "upstream", "session_id", "priority")
"""Fields that may name a tenant, beside ``headers.NAME`` and ``extra.NAME``."""
_FIELDS = f"{', '.join(TENANT_FIELDS)}, headers.NAME or extra.NAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Grouping rule, and number of groups in a result."""

    by: By
    tenant_field: str = "model"
    prefix_blocks: int = 1
    most: int = 10
    """Number of groups shown, those with the most prompt tokens; the others are one."""

    def __post_init__(self) -> None:
        kind, dot, name = self.tenant_field.partition(".")
        if self.tenant_field not in TENANT_FIELDS and not (kind in ("headers", "extra") and dot and name):
            raise InputError(f"--tenant-field: {self.tenant_field!r}; expected {_FIELDS}")
        for flag, value in (("--prefix-blocks", self.prefix_blocks), ("--groups", self.most)):
            if value < 1:
                raise InputError(f"{flag}: {value}; expected 1 or more")


@dataclass(slots=True)
class Groups:
    """Groups of a trace's requests, numbered as they first come."""

    namer: Namer
    of_request: list[int] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    def add(self, record: Record, keys: Sequence[int]) -> None:
        self.of_request.append(self._numbers.setdefault(self.namer(record, keys), len(self._numbers)))

    def largest(self, tokens: IntArray, most: int) -> tuple[list[str], IntArray]:
        """Names of the ``most`` groups with the most of the requests' ``tokens``, the rest as one after them, and each
        request's place among these."""
        found = np.array(self.of_request, np.int64)
        order = np.argsort(-np.bincount(found, tokens, len(self._numbers)), kind="stable")
        names = list(self._numbers)
        shown = [names[number] for number in order[:most]]
        if len(names) > most:
            shown.append(f"{len(names) - most:,} others")
        place = np.empty(len(names), np.int64)
        place[order] = np.minimum(np.arange(len(names)), most)
        return shown, place[found]


def namer_of(grouping: Grouping) -> Namer:
    if grouping.by == "prefix":
        return _by_prefix(grouping.prefix_blocks)
    return _by_session if grouping.by == "session" else _by_field(grouping.tenant_field)


def add_group_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--by", choices=get_args(By), help="group requests by leading blocks, session or tenant")
    parser.add_argument(
        "--tenant-field",
        default="model",
        metavar="FIELD",
        help=f"field that names the tenant: {_FIELDS} (default model)",
    )
    parser.add_argument("--prefix-blocks", type=int, default=1, metavar="N", help="blocks of a prefix (default 1)")
    parser.add_argument("--groups", type=int, default=10, metavar="N", help="show the N largest groups (default 10)")


def grouping_of(arguments: argparse.Namespace) -> Grouping | None:
    if arguments.by is None:
        return None
    return Grouping(
        by=arguments.by,
        tenant_field=arguments.tenant_field,
        prefix_blocks=arguments.prefix_blocks,
        most=arguments.groups,
    )


def _by_prefix(blocks: int) -> Namer:
    def name(record: Record, keys: Sequence[int]) -> str:
        if not keys:
            return "shorter than a block"
        key = keys[min(blocks, len(keys)) - 1]
        return UNKNOWN if is_private(key) else str(key)

    return name


def _by_session(record: Record, keys: Sequence[int]) -> str:
    return record.session_id or UNKNOWN


def _by_field(tenant_field: str) -> Namer:
    kind, dot, key = tenant_field.partition(".")

    def name(record: Record, keys: Sequence[int]) -> str:
        value = (getattr(record, kind) or {}).get(key) if dot else getattr(record, kind)
        return UNKNOWN if value is None else str(value)

    return name
