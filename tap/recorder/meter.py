"""Numbers and records that the recorder sends to the admin process."""

from collections.abc import Callable
from operator import attrgetter

from measure.histogram import GAP_S, OVERHEAD_S, WAIT_S, HistogramCounts, add_value, add_values, empty_counts
from tap.ipc.exchange import Progress, encode_frame
from tap.ipc.feed import (
    PUSH_INTERVAL_S,
    CacheFeedStats,
    FeedSender,
    RecorderStats,
    RecordFeed,
    RequestCount,
    SeenRecord,
)
from tracefile.records.schema import Record, Status

FEED_RECORDS = 64
"""Records in a frame, which leaves after ``FEED_INTERVAL_S`` at the latest."""
FLUSH_RECORDS = 8
FEED_INTERVAL_S = 0.25
MAX_KINDS = 1_000
"""Kinds of requests counted apart; a bound, since paths may vary endlessly."""

_seen_fields = attrgetter(*SeenRecord.__struct_fields__)
_WAIT_MS = tuple(bound * 1e3 for bound in WAIT_S)
_GAP_MS = tuple(bound * 1e3 for bound in GAP_S)


class RecordMeter:
    """Counts of records for ``/metrics``, and the feed of records to the admin process."""

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
        self._batch: list[Record] = []
        self._feed_skipped = 0
        self._fed_at = self._pushed_at = float("-inf")

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
        batch = self._batch
        batch.append(record)
        if not len(batch) % FLUSH_RECORDS:
            self._sender.flush()
            if len(batch) == FEED_RECORDS:
                self._feed()

    def push_if_due(self, now_s: float, progress: Callable[[], Progress], *, writing: bool) -> None:
        self._sender.flush()
        if now_s - self._fed_at >= FEED_INTERVAL_S:
            self._feed()
            self._fed_at = now_s
        if now_s - self._pushed_at >= PUSH_INTERVAL_S:
            self._sender.offer(encode_frame(self.stats(progress(), writing=writing)))
            self._pushed_at = now_s

    def stats(self, progress: Progress, *, writing: bool) -> RecorderStats:
        return RecorderStats(
            pid=self._pid,
            progress=progress,
            writing=writing,
            feed_skipped=self._feed_skipped,
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
        self._feed()
        self._sender.offer(encode_frame(self.stats(progress, writing=True)))
        self._sender.close()

    def _feed(self) -> None:
        """Send the batch if the other side keeps up; else skip it without encoding."""
        batch, self._batch = self._batch, []
        if batch and self._sender.keeping_up:
            records = [SeenRecord(*_seen_fields(record)) for record in batch]
            if self._sender.offer(encode_frame(RecordFeed(records))):
                return
        self._feed_skipped += len(batch)
