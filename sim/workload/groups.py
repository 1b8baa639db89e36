"""Groups of requests by session or tenant, for tables of cache use."""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from tracefile.commandline.configfile import refuse_without
from tracefile.records.arrays import IntArray
from tracefile.records.errors import InputError
from tracefile.records.latenames import LateModule
from tracefile.records.schema import Record
from tracefile.sessions import NO_CHAINS, SessionIndex

if TYPE_CHECKING:
    import numpy as np

    from tracefile.records.batches import Batch
else:  # numpy, which the flags need not
    np = LateModule("numpy")


By = Literal["session", "tenant"]
"""``session``: the session of the record, inferred if it has none. ``tenant``: the value of one field of the record,
chosen by the user."""

UNKNOWN = "unknown"
TENANT_FIELDS = ("model", "lora", "endpoint", "upstream", "session_id", "priority")
"""Fields that may name a tenant, beside ``headers.NAME`` and ``extra.NAME``."""
_FIELDS = f"{', '.join(TENANT_FIELDS)}, headers.NAME or extra.NAME"
_NAME_WIDTH = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Grouping rule, and number of groups in a result."""

    by: By
    tenant_field: str = "model"
    most: int = 10
    """Number of groups shown; the others are one."""

    def __post_init__(self) -> None:
        kind, dot, name = self.tenant_field.partition(".")
        if self.tenant_field not in TENANT_FIELDS and not (kind in ("headers", "extra") and dot and name):
            raise InputError(f"--tenant-field: {self.tenant_field!r}; expected {_FIELDS}")
        if self.most < 1:
            raise InputError(f"--groups: {self.most}; expected 1 or more")


@dataclass(slots=True)
class Members:
    """Group of each of a trace's requests, batch by batch."""

    grouping: Grouping
    fine_block_size: int
    names: list[str] = field(default_factory=list)
    later_turns: int = 0
    unnamed: int = 0
    """Requests whose session had to be inferred."""
    index: SessionIndex | None = None

    def add(self, batch: "Batch", rows: IntArray) -> None:
        named = self._session if self.grouping.by == "session" else self._tenant
        self.names += map(named, batch.records(rows))

    def _session(self, record: Record) -> str:
        if self.index is None:
            self.index = SessionIndex(self.fine_block_size)
        if record.session_id is None:
            self.unnamed += 1
            record = self.index.link(record)
        else:
            self.index.recall(record)
        self.later_turns += (record.turn or 1) > 1
        return record.session_id or UNKNOWN

    def _tenant(self, record: Record) -> str:
        kind, dot, key = self.grouping.tenant_field.partition(".")
        value = (getattr(record, kind) or {}).get(key) if dot else getattr(record, kind)
        return UNKNOWN if value is None else str(value)

    def largest(self, weights: IntArray) -> tuple[list[str], IntArray]:
        """Return the names of the groups with the most of the requests' ``weights``, one for all others, and each
        request's place among these."""
        total = Counter[str]()
        for name, weight in zip(self.names, weights.tolist(), strict=True):
            total[name] += weight
        shown = [name for name, _ in total.most_common(self.grouping.most)]
        rest, places = len(total) - len(shown), {name: place for place, name in enumerate(shown)}
        of_request = np.array([places.get(name, len(shown)) for name in self.names], np.int64)
        return shown + ([f"{rest:,} others"] if rest else []), of_request

    @property
    def rule(self) -> str:
        """Words on sessions that the trace does not name; empty: it names all."""
        if not self.unnamed:
            return ""
        told = f"sessions inferred from prefixes for {self.unnamed:,} of {len(self.names):,} requests"
        return told if self.later_turns else f"{told}: {NO_CHAINS}"


def short_names(names: Sequence[str]) -> list[str]:
    """Names of groups for a table: both ends of a long word; in full where two are equal."""
    short = [_short_name(name) for name in names]
    return [name if short.count(word) > 1 else word for name, word in zip(names, short, strict=True)]


def _short_name(name: str) -> str:
    half = _NAME_WIDTH // 2
    return name if len(name) <= _NAME_WIDTH else f"{name[: half - 1]}…{name[-half:]}"


def add_group_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--by", choices=get_args(By), help="group requests by session or tenant")
    parser.add_argument(
        "--tenant-field", metavar="FIELD", help=f"field that names the tenant: {_FIELDS} (default model)"
    )
    parser.add_argument("--groups", type=int, help="show the N largest groups (default 10)")


def grouping_of(arguments: argparse.Namespace) -> Grouping | None:
    """Return the grouping asked for; None: none. Raises InputError for a flag of another grouping."""
    if arguments.by != "tenant":
        refuse_without("--by tenant", arguments, ("tenant_field",))
    if arguments.by is None:
        refuse_without("--by", arguments, ("groups",))
        return None
    given = {"tenant_field": arguments.tenant_field, "most": arguments.groups}
    return Grouping(by=arguments.by, **{name: value for name, value in given.items() if value is not None})
