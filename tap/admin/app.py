"""Pages of the admin port, made at most once a second and shared by all readers: health, metrics, a live page."""

import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from importlib.resources import files
from ipaddress import ip_address
from typing import Final, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup
from prometheus_client.core import Metric

from measure.exposition import MEDIA_TYPE, Families, Row, exposition
from measure.histogram import GAP_S, OVERHEAD_S, WAIT_S, HistogramCounts
from tap.admin.health import reasons_against, reasons_not_recording
from tap.admin.state import LiveState
from tap.admin.view import Snapshot, snapshot
from tap.ipc.exchange import Progress
from tap.ipc.feed import CacheFeedStats, RecorderStats, WorkerStats

TAP: Final = Families("kvtape_tap_")


def tap_metrics(state: LiveState, now_s: float) -> Iterator[Metric]:
    workers = sorted(state.workers.items())
    recorder = state.recorder
    yield from _worker_metrics(workers)
    yield from _service_metrics(state, now_s)
    yield from _upstream_metrics(state)
    overheads: list[tuple[Sequence[str], HistogramCounts]] = [((part,), one) for part, one in state.overheads().items()]
    text = "Time spent in the tap, response parts of a sample."
    yield TAP.histogram("overhead_seconds", text, OVERHEAD_S, overheads, ["part"])
    if recorder is not None:
        yield from _recorder_metrics(recorder)


def _service_metrics(state: LiveState, now_s: float) -> Iterator[Metric]:
    yield TAP.gauge("ready", "1 if /readyz says so.", [((), float(not reasons_against(state)))])
    recording = not reasons_not_recording(state, now_s)
    yield TAP.gauge("recording", "1 if requests leave records, whether ready or not.", [((), float(recording))])
    up = [((origin,), float(reached)) for origin, reached in sorted(state.reachable.items())]
    yield TAP.gauge("upstream_up", "1 if the upstream took a connection lately.", up, ["upstream"])
    service = state.service
    if service is None:
        return
    yield TAP.counter("offered", "Requests that were to be recorded.", [((), service.offered)])
    dropped = [((reason,), count) for reason, count in sorted(service.dropped.items())]
    yield TAP.counter("dropped", "Requests without a record, by reason.", dropped, ["reason"])
    yield TAP.gauge("workers", "Worker processes that there are to be.", [((), service.workers)])
    yield TAP.gauge("workers_up", "Worker processes that take connections.", [((), service.workers_up)])
    yield TAP.counter("worker_restarts", "Workers started again after they died.", [((), service.worker_restarts)])
    yield TAP.gauge("recorder_up", "1 if the recorder process is up.", [((), float(service.recorder_up))])
    restarts = [((), float(service.recorder_restarts))]
    yield TAP.counter("recorder_restarts", "Recorders started again after they died.", restarts)


def _worker_metrics(workers: Sequence[tuple[int, WorkerStats]]) -> Iterator[Metric]:
    for name, text, counts in (
        ("relayed", "Requests passed on, recorded or not.", [one.relayed for _, one in workers]),
        ("received_bytes", "Bytes of request bodies.", [one.bytes_in for _, one in workers]),
        ("sent_bytes", "Bytes of response bodies.", [one.bytes_out for _, one in workers]),
    ):
        yield TAP.counter(name, text, _by_worker(workers, counts), ["worker"])
    for name, text, values in (
        ("in_flight", "Recorded requests that have not ended.", [one.in_flight for _, one in workers]),
        ("connections", "Open client connections.", [one.connections for _, one in workers]),
        ("queue_bytes", "Copies in flight and on their way to the recorder.", [one.queue_bytes for _, one in workers]),
        ("queue_limit_bytes", "Where copies are given up.", [one.queue_limit_bytes for _, one in workers]),
        ("loop_delay_seconds", "Worst event loop delay of the last second.", [one.loop_delay_s for _, one in workers]),
    ):
        yield TAP.gauge(name, text, _by_worker(workers, values), ["worker"])


def _upstream_metrics(state: LiveState) -> Iterator[Metric]:
    rows = [
        ((str(number), one.upstream), one)
        for number, worker in sorted(state.workers.items())
        for one in worker.upstreams
    ]
    labels = ["worker", "upstream"]
    for name, text, counts in (
        ("upstream_requests", "Requests sent to the upstream.", [one.requests for _, one in rows]),
        ("upstream_ejections", "Times that failures took the upstream out.", [one.ejections for _, one in rows]),
        ("upstream_prompt_bytes", "Starts of prompts that were hashed.", [one.prompt_bytes for _, one in rows]),
        ("upstream_known_bytes", "Those that were sent there before.", [one.known_bytes for _, one in rows]),
    ):
        values = [(labels_of, float(count)) for (labels_of, _), count in zip(rows, counts, strict=True)]
        yield TAP.counter(name, text, values, labels)
    in_flight = [(labels_of, float(one.in_flight)) for labels_of, one in rows]
    yield TAP.gauge("upstream_in_flight", "Requests that have not ended, recorded or not.", in_flight, labels)
    reasons = state.reasons_against_upstreams()
    serving = [((name,), float(reason is None)) for name, reason in reasons.items()]
    yield TAP.gauge("upstream_serving", "1 if the upstream gets new sessions.", serving, ["upstream"])
    faults = [
        ((str(number), reason), float(count))
        for number, worker in sorted(state.workers.items())
        for reason, count in sorted(worker.misrouted.items())
    ]
    yield TAP.counter("misrouted", "Failures of the user's policy.", faults, ["worker", "reason"])


def _recorder_metrics(recorder: RecorderStats) -> Iterator[Metric]:
    progress = recorder.progress
    requests = [
        ((one.endpoint, one.status, str(one.http_status), one.upstream), one.count) for one in recorder.requests
    ]
    labels = ["endpoint", "status", "http_status", "upstream"]
    yield TAP.counter("requests", "Records by API, outcome, HTTP status (0: none) and upstream.", requests, labels)
    yield TAP.histogram("ttft_seconds", "Arrival to the first token.", WAIT_S, [((), recorder.ttft)])
    yield TAP.histogram("itl_seconds", "Gap between reads that carry tokens.", GAP_S, [((), recorder.gaps)])
    for name, text, count in (
        ("recorded", "Records written to files, those of trace_lost included.", _written(progress)),
        ("sampled_out", "Requests of sessions that --sample leaves out.", progress.sampled_out),
        ("hashed", "Records with block hashes.", progress.hashed),
        ("prompt_counts_checked", "Records whose prompt ids and usage are known.", progress.prompt_counts_checked),
        ("prompt_counts_matched", "Those where both say the same length.", progress.prompt_counts_matched),
        ("prompt_tokens", "Prompt tokens of records.", recorder.prompt_tokens),
        ("cached_tokens", "Those that the engine took from its cache.", recorder.cached_tokens),
        ("output_tokens", "Output tokens of records.", recorder.output_tokens),
        ("segments_deleted", "Old segments deleted by --keep.", progress.deleted),
        ("uploads", "Segments uploaded.", progress.uploaded),
        ("upload_failures", "Tries to upload a segment that failed.", progress.upload_failed),
    ):
        yield TAP.counter(name, text, [((), count)])
    unhashed = [((reason,), count) for reason, count in sorted(progress.unhashed.items())]
    yield TAP.counter("unhashed", "Records without block hashes.", unhashed, ["reason"])
    yield TAP.gauge("segments", "Files that the trace is made of.", [((), progress.segments - progress.deleted)])
    if recorder.cache_feeds:
        yield from _cache_feed_metrics(recorder.cache_feeds)
    yield TAP.gauge("recorder_writing", "1 if the last flush reached the files.", [((), float(recorder.writing))])


def _written(progress: Progress) -> int:
    """Return the records that reached a file, which never become fewer."""
    return progress.recorded + progress.dropped.get("trace_lost", 0)


def _cache_feed_metrics(feeds: Sequence[CacheFeedStats]) -> Iterator[Metric]:
    """Yield metrics of upstreams' KV events."""
    gauges = (
        ("kv_events_up", "1 if the upstream's KV events come in.", "connected"),
        ("kv_blocks", "KV blocks that the upstream holds by its events.", "blocks"),
    )
    counters = (
        ("kv_batches", "Batches of KV events.", "batches"),
        ("kv_gaps", "Missed batches that were not repeated: the cache counted as lost.", "gaps"),
        ("kv_faults", "Batches and events that could not be read.", "faults"),
        ("kv_unplaced", "Blocks that have no hash of ours: salt, media, unknown block before.", "unplaced"),
    )
    for name, text, field in gauges:
        yield TAP.gauge(name, text, [((one.upstream,), float(getattr(one, field))) for one in feeds], ["upstream"])
    for name, text, field in counters:
        yield TAP.counter(name, text, [((one.upstream,), getattr(one, field)) for one in feeds], ["upstream"])
    lags = [((one.upstream,), one.lag_s) for one in feeds if one.lag_s is not None]
    yield TAP.gauge("kv_lag_seconds", "From the engine's clock to the taking in of its events.", lags, ["upstream"])


def _by_worker(workers: Sequence[tuple[int, WorkerStats]], values: Sequence[float]) -> list[Row]:
    return [((str(number),), value) for (number, _), value in zip(workers, values, strict=True)]


SHARED_S: Final = 1.0
JSON_TYPE: Final = "application/json"
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Clock = Callable[[], float]
T = TypeVar("T")


def make_app(state: LiveState, clock: Clock = time.monotonic) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.middleware("http")(_only_for(frozenset(state.setup.names)))
    latest = shared(lambda: snapshot(state, clock()), clock)
    live = shared(lambda: msgspec.json.encode(latest()), clock)
    metrics = shared(lambda: exposition(tap_metrics(state, clock())), clock)
    template = _page_template()
    page = shared(lambda: _page(template, latest()), clock)

    @app.get("/healthz")
    async def healthz() -> Response:
        return _json({"status": "ok"})

    @app.get("/readyz")
    async def readyz() -> Response:
        reasons = reasons_against(state)
        facts = {"ready": not reasons, "reasons": reasons, "not_recording": reasons_not_recording(state, clock())}
        return _json(facts, 503 if reasons else 200)

    @app.get("/metrics")
    async def metrics_text() -> Response:
        return _answer(metrics(), MEDIA_TYPE)

    @app.get("/live.json")
    async def live_json() -> Response:
        return _answer(live(), JSON_TYPE)

    @app.get("/")
    async def index() -> Response:
        return _answer(page(), "text/html")

    for name, kind in (("page.css", "text/css"), ("page.js", "text/javascript")):
        app.add_route(f"/{name}", _asset_route(_asset(name).encode(), kind), include_in_schema=False)
    return app


Next = Callable[[Request], Awaitable[Response]]


def _only_for(names: frozenset[str]) -> Callable[[Request, Next], Awaitable[Response]]:
    """Return the check of a request's Host and Origin; probes tell nothing and are free of it."""

    async def check(request: Request, respond: Next) -> Response:
        reason = None if request.scope["path"] in ("/healthz", "/readyz") else refusal(request, names)
        return await respond(request) if reason is None else _answer(f"{reason}\n".encode(), "text/plain", 403)

    return check


PRIVATE_DOMAINS: Final = ("localhost", "svc", "cluster.local", "internal")


def refusal(request: Request, names: Collection[str]) -> str | None:
    """Return the reason against a request, by its Host and Origin; null: none. ``names``: hosts that are ours.

    A page of a stranger can point its own name at this address (DNS rebinding) and then read what it finds. It cannot
    own an address, nor a name that public DNS does not have.
    """
    host = request.headers.get("host", "")
    if host and not _is_ours(_host_name(host), names):
        return "Host: unknown name; expected an IP address, localhost, or a name given by --admin-name"
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return "Origin: another site; expected requests of these pages themselves"
    return None


def _host_name(host: str) -> str:
    """Return a Host header's name or address, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")


def _is_ours(name: str, names: Collection[str]) -> bool:
    try:
        return bool(ip_address(name))
    except ValueError:
        pass
    domains = tuple(f".{domain}" for domain in PRIVATE_DOMAINS)
    return "." not in name or name in names or name.endswith(domains)


def shared(make: Callable[[], T], clock: Clock) -> Callable[[], T]:
    """Return ``make``, called at most once every ``SHARED_S``."""
    made: list[tuple[float, T]] = []

    def latest() -> T:
        if not made or clock() - made[0][0] >= SHARED_S:
            made[:] = [(clock(), make())]
        return made[0][1]

    return latest


def _asset_route(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def asset(request: Request) -> Response:
        return _answer(content, kind)

    return asset


def _json(value: object, status: int = 200) -> Response:
    return _answer(msgspec.json.encode(value), JSON_TYPE, status)


def _answer(content: bytes, kind: str, status: int = 200) -> Response:
    return Response(content, status, HEADERS, kind)


def _page(template: Template, live: Snapshot) -> bytes:
    """Return the page with its first snapshot, escaped so that no text can end the script tag."""
    first = msgspec.json.encode(live).decode().replace("<", "\\u003c")
    return template.render(live=live, first=Markup(first)).encode()


def _page_template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_asset("page.html.jinja"))


def _asset(name: str) -> str:
    return (files("tap.admin") / name).read_text(encoding="utf-8")
