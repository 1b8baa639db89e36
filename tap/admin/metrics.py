"""Metrics of the tap for Prometheus."""

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client.core import Metric

from measure.exposition import Families
from measure.histogram import GAP_S, WAIT_S
from tap.admin.state import TapStats
from tap.ipc.messages import Progress, WorkerStats

TAP: Final = Families("kvtape_tap_")
WORKER_COUNTERS: Final = {
    "relayed": "Requests passed on, recorded or not.",
    "bytes_in": "Bytes of request bodies.",
    "bytes_out": "Bytes of response bodies.",
}
WORKER_GAUGES: Final = {
    "in_flight": "Recorded requests that have not ended.",
    "connections": "Open client connections.",
    "queue_bytes": "Copies in flight and on their way to the recorder.",
    "queue_limit_bytes": "Where copies are given up.",
    "loop_delay_s": "Worst event loop delay of the last second.",
}
UPSTREAM_COUNTERS: Final = {
    "requests": "Requests sent to the upstream.",
    "ejections": "Times that failures took the upstream out.",
    "prompt_bytes": "Starts of prompts that were hashed.",
    "known_bytes": "Those that were sent there before.",
}
NAMES: Final = {"bytes_in": "received_bytes", "bytes_out": "sent_bytes", "loop_delay_s": "loop_delay_seconds"}
"""Names of metrics that are not those of their fields."""


def tap_metrics(stats: TapStats) -> Iterator[Metric]:
    yield TAP.gauge("ready", "1 if /readyz says so.", [((), not stats.reasons_against())])
    recording = [((), not stats.reasons_not_recording())]
    yield TAP.gauge("recording", "1 if requests leave records, whether ready or not.", recording)
    up = [((origin,), reached) for origin, reached in sorted(stats.reachable.items())]
    yield TAP.gauge("upstream_up", "1 if the upstream took a connection lately.", up, ["upstream"])
    yield from _service_metrics(stats)
    yield from _worker_metrics(sorted(stats.worker_stats, key=lambda one: one.worker))
    serving = [((name,), name not in stats.ejected) for name in stats.upstreams]
    yield TAP.gauge("upstream_serving", "1 if the upstream gets new sessions.", serving, ["upstream"])
    yield from _recorder_metrics(stats.progress)


def _service_metrics(stats: TapStats) -> Iterator[Metric]:
    yield TAP.counter("offered", "Requests that were to be recorded.", [((), stats.offered)])
    dropped = [((reason,), count) for reason, count in sorted(stats.dropped.items())]
    yield TAP.counter("dropped", "Requests without a record, by reason.", dropped, ["reason"])
    yield TAP.gauge("workers", "Worker processes that there are to be.", [((), stats.workers)])
    yield TAP.gauge("workers_up", "Worker processes that take connections.", [((), stats.workers_up)])
    yield TAP.counter("worker_restarts", "Workers started again after they died.", [((), stats.worker_restarts)])
    yield TAP.gauge("recorder_up", "1 if the recorder process is up.", [((), stats.recorder_up)])
    yield TAP.counter("recorder_restarts", "Recorders started again after they died.", [((), stats.recorder_restarts)])


def _worker_metrics(workers: Sequence[WorkerStats]) -> Iterator[Metric]:
    for make, table in ((TAP.counter, WORKER_COUNTERS), (TAP.gauge, WORKER_GAUGES)):
        for field, text in table.items():
            rows = [((str(one.worker),), getattr(one, field)) for one in workers]
            yield make(NAMES.get(field, field), text, rows, ["worker"])
    upstreams = [((str(worker.worker), one.upstream), one) for worker in workers for one in worker.upstreams]
    labels = ["worker", "upstream"]
    for field, text in UPSTREAM_COUNTERS.items():
        yield TAP.counter(f"upstream_{field}", text, [(row, getattr(one, field)) for row, one in upstreams], labels)
    in_flight = [(row, one.in_flight) for row, one in upstreams]
    yield TAP.gauge("upstream_in_flight", "Requests that have not ended, recorded or not.", in_flight, labels)
    faults = [((str(one.worker), reason), count) for one in workers for reason, count in sorted(one.misrouted.items())]
    yield TAP.counter("misrouted", "Failures of the user's policy.", faults, ["worker", "reason"])


def _recorder_metrics(progress: Progress) -> Iterator[Metric]:
    numbers = progress.numbers
    requests = [((one.endpoint, one.status, str(one.http_status), one.upstream), one.count) for one in numbers.requests]
    labels = ["endpoint", "status", "http_status", "upstream"]
    yield TAP.counter("requests", "Records by API, outcome, HTTP status (0: none) and upstream.", requests, labels)
    yield TAP.histogram("ttft_seconds", "Arrival to the first token.", WAIT_S, [((), numbers.ttft)])
    yield TAP.histogram("itl_seconds", "Gap between reads that carry tokens.", GAP_S, [((), numbers.gaps)])
    written = progress.recorded + progress.dropped.get("trace_lost", 0)  # which never become fewer
    for name, text, count in (
        ("recorded", "Records written to files, those of trace_lost included.", written),
        ("hashed", "Records with block hashes.", progress.hashed),
        ("prompt_counts_checked", "Records whose prompt ids and usage are known.", progress.prompt_counts_checked),
        ("prompt_counts_matched", "Those where both say the same length.", progress.prompt_counts_matched),
        ("prompt_tokens", "Prompt tokens of records.", numbers.prompt_tokens),
        ("cached_tokens", "Those that the engine took from its cache.", numbers.cached_tokens),
        ("output_tokens", "Output tokens of records.", numbers.output_tokens),
        ("segments_deleted", "Old segments deleted by --keep.", progress.deleted),
        ("uploads", "Segments uploaded.", progress.uploaded),
        ("upload_failures", "Tries to upload a segment that failed.", progress.upload_failed),
    ):
        yield TAP.counter(name, text, [((), count)])
    unhashed = [((reason,), count) for reason, count in sorted(progress.unhashed.items())]
    yield TAP.counter("unhashed", "Records without block hashes.", unhashed, ["reason"])
    yield TAP.gauge("segments", "Files that the trace is made of.", [((), progress.segments - progress.deleted)])
    yield TAP.gauge("recorder_writing", "1 if the last flush reached the files.", [((), progress.writing)])
