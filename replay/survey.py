"""Survey of a captured trace before the first request: requests to send, and requests left out.

The trace is read once and no record is kept in memory. An invalid record is an InputError with line and field.
"""

import math
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from measure.number_format import count, duration
from tracefile.analysis.checking import Rule, check_hashes, check_signs
from tracefile.files.digest import trace_digest
from tracefile.files.reading import TraceReader, open_trace
from tracefile.records.errors import InputError
from tracefile.records.schema import MOST_TOKENS, Meta, Record, RequestId
from wire.answer import GENERATING

HTTP_ERROR = 400
MOST_CHOICES = 1 << 10
LONGEST_MS = 366 * 24 * 3600 * 1000.0
"""Longest trace: beyond it, a clock was misread and the run would never end."""

BEFORE = "before --start"
AFTER = "after --end"

RULES: tuple[Rule, ...] = (check_signs, check_hashes)


@dataclass(frozen=True, slots=True)
class Selection:
    """Arrival window of ``--start`` and ``--end``."""

    start_s: float | None = None
    """On the trace's clock; null: from its beginning. Earlier requests are left out, their follow-ups are not: their
    prefix is cached only as far as other prompts put it there."""
    end_s: float | None = None
    """End, exclusive; null: the trace's end."""

    def skip_reason(self, record: Record) -> str | None:
        arrival_ms = record.arrival_ms or 0.0
        if self.start_s is not None and arrival_ms < self.start_s * 1000:
            return BEFORE
        if self.end_s is not None and arrival_ms >= self.end_s * 1000:
            return AFTER
        return None


ALL = Selection()


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Facts of a trace before any request is sent."""

    path: str
    meta: Meta
    source_digest: str
    total: int
    selected: int
    left_out: Counter[str]
    first_ms: float
    """First selected arrival, on the trace's clock."""
    has_hashes: bool
    has_parent_ids: bool
    loras: frozenset[str]
    endpoints: frozenset[str]
    beyond_limit: int
    hits_inside_blocks: int
    """Requests with cached tokens that end inside a block: a replay cannot hit them to the token."""

    @property
    def block_size(self) -> int:
        return self.meta.block_size or 1


def survey_trace(path: str | os.PathLike[str], selection: Selection = ALL) -> Survey:
    """Survey a trace. Raises InputError with the line of an invalid record."""
    with open_trace(path) as reader:
        builder = SurveyBuilder(reader.meta.block_size)
        for record in reader.results():
            if isinstance(record, InputError):
                raise record  # values out of bounds too: replay only recorded requests
            builder.add(record, reader, selection)
        for warning in reader.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        builder.check_parents(reader)
        return builder.survey(reader, trace_digest(path))


class SurveyBuilder:
    """Survey during the read: ids and lines of all requests, no records."""

    def __init__(self, block_size: int | None) -> None:
        self._block_size = block_size
        self._lines: dict[RequestId, int] = {}
        self._parents: dict[RequestId, RequestId] = {}
        self._selected = 0
        self._first_ms = math.inf
        self._latest_ms: float | None = None
        """Latest of all arrivals, selected or not."""
        self.left_out: Counter[str] = Counter()
        self._hashed = False
        self._linked = False
        self._loras: set[str] = set()
        self._endpoints: set[str] = set()
        self._beyond_limit = 0
        self._hits_inside_blocks = 0

    def add(self, record: Record, reader: TraceReader, selection: Selection) -> None:
        where = reader.where()
        if record.request_id in self._lines:
            before = reader.where(self._lines[record.request_id])
            raise InputError(f"{where}: request_id: duplicate of line {before.rpartition(':')[2]}; expected unique ids")
        self._lines[record.request_id] = reader.line
        check_record(record, self._block_size, where)
        if record.parent_id is not None:
            self._parents[record.request_id] = record.parent_id
        if record.arrival_ms is not None:
            self._latest_ms = max(record.arrival_ms, self._latest_ms or 0.0)
        reason = skip_reason(record, self._block_size) or selection.skip_reason(record)
        if reason is not None:
            self.left_out[reason] += 1
            return
        self._selected += 1
        self._first_ms = min(self._first_ms, record.arrival_ms or 0.0)
        self._hashed = self._hashed or record.block_hashes is not None
        self._linked = self._linked or record.parent_id is not None
        if record.lora is not None:
            self._loras.add(record.lora)
        if record.endpoint is not None:
            self._endpoints.add(record.endpoint)
        if record.max_tokens is not None and (record.output_tokens or 0) > record.max_tokens * (record.n or 1):
            self._beyond_limit += 1
        self._hits_inside_blocks += bool((record.cached_tokens or 0) % (self._block_size or 1))

    def check_parents(self, reader: TraceReader) -> None:
        ancestor = find_cycle(self._parents)
        if ancestor is not None:
            where = reader.where(self._lines[ancestor])
            raise InputError(f"{where}: parent_id: a cycle; expected parents before children")
        unknown = [child for child, parent in self._parents.items() if parent not in self._lines]
        if unknown:
            print(
                f"warning: {reader.where(self._lines[unknown[0]])}: parent_id: not in the trace; {len(unknown)} such "
                "requests are sent as first turns",
                file=sys.stderr,
            )

    def survey(self, reader: TraceReader, source_digest: str) -> Survey:
        """Raises InputError if no request is left to send."""
        if not self._selected:
            raise InputError(f"{reader.path}: no request to send; {self._empty_reasons()}")
        return Survey(
            path=reader.path,
            meta=reader.meta,
            source_digest=source_digest,
            total=len(self._lines),
            selected=self._selected,
            left_out=self.left_out,
            first_ms=self._first_ms,
            has_hashes=self._hashed,
            has_parent_ids=self._linked,
            loras=frozenset(self._loras),
            endpoints=frozenset(self._endpoints),
            beyond_limit=self._beyond_limit,
            hits_inside_blocks=self._hits_inside_blocks,
        )

    def _empty_reasons(self) -> str:
        """Reasons of an empty selection; with ``--start`` or ``--end`` also the last arrival."""
        reasons = ", ".join(f"{count(number)} {reason}" for reason, number in self.left_out.items())
        if self._latest_ms is None or not any(reason in self.left_out for reason in (BEFORE, AFTER)):
            return reasons or "the trace has no records"
        return f"{reasons}; last arrival at {duration(self._latest_ms)} on the trace's clock"


def skip_reason(record: Record, block_size: int | None) -> str | None:
    """Reason why a request cannot be replayed; null: it can. Refused requests cost no prefill and no decode."""
    if record.endpoint is not None and record.endpoint not in GENERATING:
        return "no generation: embeddings, scores, audio"
    if record.status == "error" and record.ttft_ms is None and not record.output_tokens:
        refused = record.http_status is not None and record.http_status >= HTTP_ERROR
        return "refused in the capture" if refused else "never reached the engine in the capture"
    if record.arrival_ms is None:
        return "no arrival time"
    if record.prompt_tokens is None and not (record.block_hashes and block_size):
        return "no prompt length"
    return None


def check_record(record: Record, block_size: int | None, where: str) -> None:
    for field, what in chain.from_iterable(rule(record, block_size) for rule in RULES):
        raise InputError(f"{where}: {field}: {what}")
    if record.prompt_tokens == 0:
        raise InputError(f"{where}: prompt_tokens: 0; expected 1 or more")
    if record.n is not None and record.n > MOST_CHOICES:
        raise InputError(f"{where}: n: {record.n}; expected at most {MOST_CHOICES}")
    if record.prompt_tokens is None and len(record.block_hashes or ()) * (block_size or 1) > MOST_TOKENS:
        raise InputError(f"{where}: block_hashes: more than {MOST_TOKENS} prompt tokens; expected a shorter prompt")
    if record.itl_tokens and not 0 <= min(record.itl_tokens) <= max(record.itl_tokens) <= MOST_TOKENS:
        raise InputError(f"{where}: itl_tokens: {min(record.itl_tokens)}; expected 0 to {MOST_TOKENS}")
    if record.arrival_ms is not None and record.arrival_ms + (record.e2e_ms or 0.0) > LONGEST_MS:
        raise InputError(
            f"{where}: arrival_ms: {record.arrival_ms:g}; expected an end within a year of the trace's zero"
        )
    if not record.request_id.isascii() or not record.request_id.isprintable() or not record.request_id:
        raise InputError(f"{where}: request_id: {record.request_id!r}; expected printable ASCII, as headers carry it")
    if record.session_id is not None and not (record.session_id.isascii() and record.session_id.isprintable()):
        raise InputError(f"{where}: session_id: {record.session_id!r}; expected printable ASCII, as headers carry it")


def find_cycle(parents: Mapping[RequestId, RequestId]) -> RequestId | None:
    """Return a request that is its own ancestor; null: none."""
    acyclic: set[RequestId] = set()
    for start in parents:
        path: dict[RequestId, None] = {}
        current: RequestId | None = start
        while current is not None and current not in acyclic:
            if current in path:
                return current
            path[current] = None
            current = parents.get(current)
        acyclic.update(path)
    return None
