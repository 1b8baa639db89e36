"""Resumption of a killed run: its records are kept by whole sessions, other sessions are sent again.

A session is over after its last or a failed turn. The records of other sessions are dropped: their context was in
memory. The trace keeps its zero, so the pause between the runs is in it. The plan's time continues at the last
recorded event; earlier requests without a record are due at once.
"""

import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loadgen.core.job import WHOLE, Job, add_shares
from loadgen.runs.merging import merge_parts, parts_of, record_lines
from tracefile import InputError, Meta, RequestId
from tracefile import Workload as WorkloadMeta
from tracefile.records.decoding import decode_meta, is_header, parse_object
from tracefile.records.encoding import encode_meta
from tracefile.records.schema import Status
from tracefile.storage.appending import new_whole_file
from tracefile.storage.lines import LineReader
from tracefile.storage.mending import mend
from wire.errors import LossKind

HISTORY = "resumed"
"""Field of the header's workload: a list with one entry for each resumption."""


class Outline(msgspec.Struct, frozen=True):
    """Fields of a record that resuming needs."""

    request_id: RequestId
    status: Status = "ok"
    error: str | None = None
    arrival_ms: float | None = None
    e2e_ms: float | None = None


ABORTED: Status = "client_abort"
AT_DEADLINE: LossKind = "deadline"
"""Error of requests that ``--at-end cancel`` aborted: they are not sent again."""

_outline = msgspec.json.Decoder(Outline)


@dataclass(frozen=True, slots=True)
class Resumed:
    """Point from which a run continues."""

    meta: Meta
    """Header to continue: the earlier zero, and this resumption in its history."""
    kept: int
    dropped: int
    from_ms: float


def resume_trace(trace: Path, parts: Sequence[Path], job: Job, meta: Meta) -> Resumed | None:
    """Prepare a killed run's trace; null: nothing was left. Raises InputError for another workload's trace."""
    left = [path for path in (trace, *parts) if path.exists() and path.stat().st_size]
    headers = {path: last_header(path) for path in left if mend(path).meta is not None}
    if not headers:
        return None
    opened = job.open(WHOLE)
    digest = add_shares([opened.digest_share()])
    for path, header in headers.items():
        _check_same(path, header, digest)
    earlier = max(headers.values(), key=lambda header: len(_history(header)))
    if parts:
        merge_parts(trace, list(headers), earlier)
    found = Found.of(trace)
    _check_clock(trace, earlier, found.until_ms)
    over = set(opened.resume(found.ended))
    if found.lines > len(over):
        _keep(trace, over, earlier)
    history = _history(earlier)
    shift_ms = history[-1]["shift_ms"] if history else 0.0
    from_ms = max(0.0, found.until_ms - shift_ms)
    return Resumed(_continued(meta, earlier, digest), len(over), found.requests - len(over), from_ms)


def nonce_for(given: str | None, trace: Path, *, resume: bool) -> str | None:
    """Return the nonce of a run: the given one, else that of the run it resumes (null: it had none), else a new one."""
    if given is None and resume:
        for path in (trace, *parts_of(trace)):
            if path.exists() and (header := mend(path).meta) is not None:
                return _workload(header).nonce
    return given or secrets.token_hex(8)


def resumed_at(resumed: Resumed, t0_unix_ns: int) -> Meta:
    workload = _workload(resumed.meta)
    shift_ms = round((t0_unix_ns - (resumed.meta.epoch_unix_ns or 0)) / 1e6, 3)
    this = {
        "from_ms": round(resumed.from_ms, 3),
        "shift_ms": shift_ms,
        "kept": resumed.kept,
        "dropped": resumed.dropped,
    }
    extra = workload.extra | {HISTORY: [*_history(resumed.meta), this]}
    workload = msgspec.structs.replace(workload, extra=extra)
    return msgspec.structs.replace(resumed.meta, workload=workload)


@dataclass(frozen=True, slots=True)
class Found:
    """Content of a trace."""

    ended: dict[RequestId, bool]
    """True: ended well. Aborted requests are sent again, and not here."""
    requests: int
    lines: int
    """More than requests if a merge was killed before it had removed the parts."""
    until_ms: float
    """Time of its last event, on its clock."""

    @classmethod
    def of(cls, trace: Path) -> "Found":
        ended: dict[RequestId, bool] = {}
        aborted: set[RequestId] = set()
        lines, until_ms = 0, 0.0
        for outline in map(_outline.decode, record_lines(trace)):
            lines += 1
            if outline.status == ABORTED and outline.error != AT_DEADLINE:
                aborted.add(outline.request_id)
            else:
                ended[outline.request_id] = outline.status == "ok"
            until_ms = max(until_ms, (outline.arrival_ms or 0.0) + (outline.e2e_ms or 0.0))
        return cls(ended, len(aborted | ended.keys()), lines, until_ms)


def ended_requests(trace: Path) -> dict[RequestId, bool]:
    """Requests that ended by themselves; True: ended well."""
    return Found.of(trace).ended


def _check_same(path: Path, header: Meta, digest: str) -> None:
    found = _workload(header).digest
    if found != digest:
        raise InputError(
            f"--resume: {path}: is of workload {(found or 'unknown')[:12]}; expected {digest[:12]}, "
            "the same flags, seed and data as the run that is to go on"
        )


def _check_clock(trace: Path, earlier: Meta, until_ms: float) -> None:
    """Raise InputError if the wall clock is behind the trace's end: further times would be before its zero."""
    ahead_s = ((earlier.epoch_unix_ns or 0) + until_ms * 1e6 - time.time_ns()) / 1e9
    if ahead_s > 0:
        raise InputError(
            f"--resume: {trace}: its last record is {ahead_s:,.0f} s ahead of the clock; expected a clock not set back"
        )


def _keep(trace: Path, over: Collection[RequestId], meta: Meta) -> None:
    file = new_whole_file(trace, overwrite=True)
    try:
        file.take(encode_meta(meta))
        for line in _lines_of(trace, over):
            file.take(line + b"\n")
            if file.failing:
                file.drain()
        file.finish()
    finally:
        file.abandon()


def _lines_of(trace: Path, over: Collection[RequestId]) -> Iterator[bytes]:
    wanted = set(over)
    for line in record_lines(trace):
        outline = _outline.decode(line)
        if outline.request_id in wanted and outline.status != ABORTED:
            wanted.remove(outline.request_id)
            yield line


def _continued(meta: Meta, earlier: Meta, digest: str) -> Meta:
    history = _history(earlier)
    extra = _workload(meta).extra | ({HISTORY: history} if history else {})
    workload = msgspec.structs.replace(_workload(meta), digest=digest, extra=extra)
    return msgspec.structs.replace(meta, epoch_unix_ns=earlier.epoch_unix_ns, workload=workload)


def last_header(path: Path) -> Meta:
    with LineReader(path) as lines:
        *_, last = (line for line in lines if is_header(line))
    return decode_meta(parse_object(last, str(path))["meta"], str(path))


def _history(meta: Meta) -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = _workload(meta).extra.get(HISTORY, [])
    return history


def _workload(meta: Meta) -> WorkloadMeta:
    return meta.workload or WorkloadMeta()
