"""Numbers that the recorder sends to the admin process."""

from collections.abc import Callable

from measure.histogram import GAP_S, OVERHEAD_S, WAIT_S, HistogramCounts, add_value, add_values, empty_counts
from tap.ipc.exchange import Progress, encode_frame
from tap.ipc.feed import (
    PUSH_INTERVAL_S,
    CacheFeedStats,
    FeedSender,
    RecorderStats,
    RequestCount,
)
from tracefile.records.schema import Record, Status

MAX_KINDS = 1_000
"""Kinds of requests counted apart; a bound, since paths may vary endlessly."""

_WAIT_MS = tuple(bound * 1e3 for bound in WAIT_S)
_GAP_MS = tuple(bound * 1e3 for bound in GAP_S)


class RecordMeter:
    """Counts of records for the admin process."""

    def __init__(
        self, socket_path: str, pid: int, cache_feeds: Callable[[], list[CacheFeedStats]] = lambda: []
    ) -> None:
        self._pid, self._cache_feeds = pid, cache_feeds
        self._sender = FeedSender(socket_path)
        self._kinds: dict[tuple[str, Status, int, str], int] = {}
        self._ttft_ms = empty_counts(WAIT_S)
        self._gaps_ms = empty_counts(GAP_S)
        self._head_s = empty_counts(OVERHEAD_S)
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._pushed_at = float("-inf")

    def observe(self, record: Record, head_ns: int | None) -> None:
        """Count a record, sampled out or not; ``head_ns``: from its head's arrival to the write upstream."""
        kinds = self._kinds
        kind = (record.endpoint or "", record.status, record.http_status or 0, record.upstream or "")
        if kind not in kinds and len(kinds) >= MAX_KINDS:
            kind = ("other", *kind[1:])
        kinds[kind] = kinds.get(kind, 0) + 1
        if record.ttft_ms is not None:
            add_value(self._ttft_ms, _WAIT_MS, record.ttft_ms)
        if head_ns is not None:
            add_value(self._head_s, OVERHEAD_S, head_ns / 1e9)
        if record.itl_ms:
            add_values(self._gaps_ms, _GAP_MS, record.itl_ms)
        self._prompt_tokens += record.prompt_tokens or 0
        self._cached_tokens += record.cached_tokens or 0
        self._output_tokens += record.output_tokens or 0

    def push_if_due(self, now_s: float, progress: Callable[[], Progress], *, writing: bool) -> None:
        self._sender.flush()
        if now_s - self._pushed_at >= PUSH_INTERVAL_S:
            self._sender.offer(encode_frame(self.stats(progress(), writing=writing)))
            self._pushed_at = now_s

    def stats(self, progress: Progress, *, writing: bool) -> RecorderStats:
        return RecorderStats(
            pid=self._pid,
            progress=progress,
            writing=writing,
            requests=[RequestCount(*kind, count) for kind, count in self._kinds.items()],
            ttft=HistogramCounts(self._ttft_ms.counts, self._ttft_ms.total / 1e3),
            gaps=HistogramCounts(self._gaps_ms.counts, self._gaps_ms.total / 1e3),
            request_head=self._head_s,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            cache_feeds=self._cache_feeds(),
        )

    def close(self, progress: Progress) -> None:
        self._sender.offer(encode_frame(self.stats(progress, writing=True)))
        self._sender.close()
