"""guidellm's reports (``benchmarks.json``, 0.8): one object, every benchmark of a run with every request of it.

Source: vllm-project/guidellm, ``GenerativeBenchmarksReport``. Times are Unix seconds. A report keeps prompts and
outputs as texts; they are dropped on sight.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tracefile.importers.wallclock import elapsed
from tracefile.records.decoding import decode_row
from tracefile.records.schema import Count, Meta, Ordinal, Record, RequestId, Seconds, SessionId, Status

EXPECTED = "a guidellm report: benchmarks, each with requests"
STATUS_OF_LIST: dict[str, Status] = {"successful": "ok", "incomplete": "client_abort", "errored": "error"}


class GuidellmTimings(msgspec.Struct, kw_only=True):
    """Moments of a request, in Unix seconds."""

    targeted_start: Seconds | None = None
    resolve_start: Seconds | None = None
    request_start: Seconds | None = None
    first_token_iteration: Seconds | None = None
    request_end: Seconds | None = None
    resolve_end: Seconds | None = None


class GuidellmInfo(msgspec.Struct, kw_only=True):
    """Place of a request in its run."""

    timings: GuidellmTimings
    conversation_id: str | None = None
    turn_index: Count | None = None


class GuidellmUsage(msgspec.Struct, kw_only=True):
    """Tokens of one side."""

    text_tokens: Count | None = None
    total_tokens: Count | None = None
    cached_tokens: Count | None = None

    def tokens(self) -> int | None:
        return self.text_tokens if self.total_tokens is None else self.total_tokens


class GuidellmRequest(msgspec.Struct, kw_only=True):
    """Request with its measurements."""

    request_id: str
    info: GuidellmInfo
    input_metrics: GuidellmUsage
    output_metrics: GuidellmUsage


class GuidellmBenchmark(msgspec.Struct, kw_only=True):
    """Requests of a benchmark by how they ended."""

    requests: dict[str, list[GuidellmRequest] | None]


class GuidellmReport(msgspec.Struct, kw_only=True):
    """Whole file."""

    benchmarks: list[GuidellmBenchmark]


def is_guidellm(found: dict[str, Any]) -> bool:
    """Return whether a file's object is a report."""
    benchmarks = found.get("benchmarks")
    return isinstance(benchmarks, list) and all(isinstance(item, dict) and "requests" in item for item in benchmarks)


class GuidellmDecoder:
    """Reports as records in order of arrival; t = 0 is the first arrival. Of several benchmarks, ids tell which."""

    def __init__(self) -> None:
        self.meta = Meta(source="client")
        self.warnings: Sequence[str] = ()

    def decode_all(self, line: bytes, where: str) -> list[Record]:
        report = decode_row(msgspec.json.Decoder(GuidellmReport).decode, line, where, EXPECTED)
        several = len(report.benchmarks) > 1
        records = [
            record
            for number, benchmark in enumerate(report.benchmarks, start=1)
            for record in _records(benchmark, f"b{number}." if several else "")
        ]
        known = [record.arrival_ms for record in records if record.arrival_ms is not None]
        zero_ms = min(known, default=0.0)
        for record in records:
            record.arrival_ms = None if record.arrival_ms is None else record.arrival_ms - zero_ms
            record.scheduled_ms = None if record.scheduled_ms is None else record.scheduled_ms - zero_ms
        self.meta = Meta(source="client", epoch_unix_ns=round(zero_ms * 1e6) if known else None)
        return sorted(records, key=lambda record: record.arrival_ms or 0.0)


def _records(benchmark: GuidellmBenchmark, prefix: str) -> Iterator[Record]:
    """Records of a benchmark, on the clock of 1970."""
    for name, status in STATUS_OF_LIST.items():
        for request in benchmark.requests.get(name) or ():
            yield _record(request, status, prefix)


def _record(request: GuidellmRequest, status: Status, prefix: str) -> Record:
    times = request.info.timings
    start_s = times.request_start if times.request_start is not None else times.resolve_start
    end_s = times.request_end if times.request_end is not None else times.resolve_end
    session = request.info.conversation_id
    turn: Ordinal | None = None if request.info.turn_index is None else request.info.turn_index + 1
    return Record(
        request_id=RequestId(prefix + request.request_id),
        session_id=None if session is None else SessionId(prefix + session),
        session_source=None if session is None else "explicit",
        turn=turn if session is not None else None,
        arrival_ms=_ms(start_s),
        scheduled_ms=_ms(times.targeted_start),
        ttft_ms=_between_ms(start_s, times.first_token_iteration),
        e2e_ms=_between_ms(start_s, end_s),
        status=status,
        prompt_tokens=request.input_metrics.tokens(),
        output_tokens=request.output_metrics.tokens(),
        cached_tokens=request.input_metrics.cached_tokens,
        tokens_source="usage",
    )


def _ms(at_s: float | None) -> float | None:
    return None if at_s is None else at_s * 1000


def _between_ms(start_s: float | None, end_s: float | None) -> float | None:
    taken_s = elapsed(start_s, end_s)
    return None if taken_s is None else round(taken_s * 1000, 3)
