"""The admin port's answers, in this process: what they say, what they cost, what they never hold."""

import asyncio
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from measure.histogram import WAIT_S, add_value, empty_counts
from tap.admin.app import SHARED_S, make_app
from tap.admin.health import probe_once, takes_connections
from tap.admin.state import KEPT_SAMPLES, LiveState
from tap.ipc.exchange import AdminSetup
from tests.tap.admin.told import recorder_stats, service_stats, worker_stats

UPSTREAM = "http://127.0.0.1:9"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> LiveState:
    return LiveState(AdminSetup(listen_fd=0, feed_socket="", trace="/data/captured.jsonl", names=["tap.example.com"]))


@pytest.fixture
def client(state: LiveState, clock: Clock) -> Iterator[TestClient]:
    with TestClient(make_app(state, clock), base_url="http://127.0.0.1:9001") as client:
        yield client


def make_well(state: LiveState, now_s: float) -> None:
    state.take(service_stats(UPSTREAM), now_s)
    state.take(worker_stats(), now_s)
    state.take(recorder_stats(), now_s)
    state.reachable = {UPSTREAM: True}


def test_alive_is_not_ready(client: TestClient) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["ready"] is False
    assert answer.json()["reasons"] == ["the tap has not reported yet", "no upstream has been tried yet"]


def test_ready_when_it_can_serve_and_what_speaks_against_it(client: TestClient, state: LiveState, clock: Clock) -> None:
    make_well(state, clock.now_s)
    assert client.get("/readyz").status_code == 200
    assert client.get("/readyz").json() == {"ready": True, "reasons": [], "not_recording": []}
    state.reachable = {UPSTREAM: False}
    assert client.get("/readyz").json()["reasons"] == ["no upstream takes connections"]
    state.reachable = {UPSTREAM: False, "http://other": True}
    assert client.get("/readyz").status_code == 200  # one of them is enough
    state.take(service_stats(UPSTREAM, workers_up=0, draining=True), clock.now_s)
    state.reachable = {UPSTREAM: True}
    assert client.get("/readyz").json()["reasons"] == ["the tap is draining", "no worker is up"]


def test_a_tap_that_cannot_record_serves_and_says_so(client: TestClient, state: LiveState, clock: Clock) -> None:
    make_well(state, clock.now_s)
    state.take(recorder_stats(writing=False), clock.now_s)
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["not_recording"]) == (200, ["the recorder cannot write the trace"])
    clock.now_s += 60
    assert client.get("/readyz").json()["not_recording"] == ["the recorder has been silent for 60 s"]
    state.take(service_stats(UPSTREAM, recorder_up=False), clock.now_s)
    assert client.get("/readyz").json()["not_recording"] == ["the recorder is down"]


def test_however_many_ask_it_is_made_once_a_second(client: TestClient, state: LiveState, clock: Clock) -> None:
    before = client.get("/live.json").content
    make_well(state, clock.now_s)
    assert client.get("/live.json").content == before
    clock.now_s += SHARED_S
    after = client.get("/live.json").content
    assert after != before
    assert {client.get("/live.json").content for _ in range(20)} == {after}


def test_a_snapshot_says_what_was_fed(client: TestClient, state: LiveState, clock: Clock) -> None:
    make_well(state, clock.now_s)
    live = client.get("/live.json").json()
    assert (live["trace"], live["status"], live["reasons"]) == ("captured.jsonl", "ready", [])
    assert live["engine"] == f"vllm 0.32.0 · cache of 64.0k tokens · {UPSTREAM}"
    assert [fact["value"] for fact in live["drops"]] == ["6", "2"]


def test_growth_is_told_per_second_and_a_restart_takes_nothing_back(
    client: TestClient, state: LiveState, clock: Clock
) -> None:
    make_well(state, clock.now_s)
    for relayed in (1_000, 1_040, 1_080, 30):  # the worker starts over before the last second
        state.take(worker_stats(relayed=relayed), clock.now_s)
        state.tick(clock.now_s)
        clock.now_s += 1
    tile = client.get("/live.json").json()["tiles"][0]
    assert (tile["id"], tile["line"], tile["value"]) == ("requests", [40.0, 40.0, 30.0], "36.7")


def test_ttft_and_cached_tokens_are_those_of_the_last_minutes(
    client: TestClient, state: LiveState, clock: Clock
) -> None:
    def tiles() -> dict[str, tuple[str, str]]:
        return {tile["id"]: (tile["value"], tile["detail"]) for tile in client.get("/live.json").json()["tiles"]}

    make_well(state, clock.now_s)  # what its recorder has counted so far is older than this process
    state.tick(clock.now_s)
    assert tiles()["ttft"] == ("–", "no first token in the last 5 minutes")
    assert tiles()["cached"] == ("–", "the engine reports none")
    ttft = empty_counts(WAIT_S)
    for value_s in (0.03, 0.07, 0.4, 0.09, 0.09, 0.1, 5.0):  # four are new
        add_value(ttft, WAIT_S, value_s)
    state.take(recorder_stats(ttft=ttft, prompt_tokens=2_004_000, cached_tokens=1_503_000), clock.now_s)
    clock.now_s += 1
    state.tick(clock.now_s)
    assert tiles()["ttft"] == ("≤ 100 ms", "p90 ≤ 6 s, last 5 minutes")
    assert tiles()["cached"] == ("75.0 %", "as the engine reports, last 5 minutes")
    for _ in range(KEPT_SAMPLES):
        clock.now_s += 1
        state.take(worker_stats(), clock.now_s)
        state.tick(clock.now_s)
    assert tiles()["ttft"] == ("–", "no first token in the last 5 minutes")


def test_a_worker_that_fell_silent_is_not_told_of_any_more(client: TestClient, state: LiveState, clock: Clock) -> None:
    make_well(state, clock.now_s)
    clock.now_s += 8
    state.take(worker_stats(1, in_flight=2), clock.now_s)
    state.tick(clock.now_s)
    assert client.get("/live.json").json()["tiles"][1]["value"] == "9"
    clock.now_s += 8
    state.tick(clock.now_s)
    assert client.get("/live.json").json()["tiles"][1]["value"] == "2"


def test_headers_allow_nothing_from_outside(client: TestClient) -> None:
    for path in ("/", "/live.json", "/metrics", "/page.css", "/page.js", "/readyz", "/healthz"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
    assert client.get("/docs").status_code == 404
    assert client.get("/openapi.json").status_code == 404
    assert client.post("/metrics").status_code == 405


def test_a_hostile_trace_name_stays_text(clock: Clock) -> None:
    name = "</script><script>alert(1)</script>.jsonl"
    state = LiveState(AdminSetup(listen_fd=0, feed_socket="", trace=f"a/{name}"))
    with TestClient(make_app(state, clock)) as client:
        page = client.get("/").text
    assert "<script>alert" not in page
    assert page.count("</script>") == 2


def test_an_upstream_is_probed_by_connecting_only(free_port: int) -> None:
    asyncio.run(probe_a_listener(free_port))


async def probe_a_listener(free_port: int) -> None:
    heard: list[bytes] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base"
    assert await takes_connections(url)
    assert not await takes_connections(f"http://127.0.0.1:{free_port}")
    assert not await takes_connections("nonsense")
    state = LiveState(AdminSetup(listen_fd=0, feed_socket="", trace="t"))
    await probe_once(state, [url, f"http://127.0.0.1:{free_port}"])
    assert list(state.reachable.values()) == [True, False]
    server.close()
    assert set(heard) <= {b""}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9001", 200),
        ("[::1]:9001", 200),
        ("10.2.3.4", 200),
        ("localhost:9001", 200),
        ("tap:9001", 200),
        ("tap.monitoring.svc:9001", 200),
        ("tap.monitoring.svc.cluster.local.", 200),
        ("Tap.Example.Com:9001", 200),
        ("evil.example.com", 403),
        ("127.0.0.1.evil.example.com", 403),
        ("evil.example.com:9001", 403),
        ("tap.example.com.evil.org", 403),
    ],
)
@pytest.mark.parametrize("path", ["/", "/metrics", "/live.json", "/page.js"])
def test_only_hosts_that_no_stranger_can_own_are_known(client: TestClient, host: str, status: int, path: str) -> None:
    answer = client.get(path, headers={"Host": host})
    assert answer.status_code == status
    assert (b"--admin-name" in answer.content) == (status == 403)
    assert client.get("/healthz", headers={"Host": host}).status_code == 200, "a probe's name does not matter"


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://127.0.0.1:9001", 200), ("http://127.0.0.1:8001", 403), ("https://evil.example.com", 403), ("null", 403)],
)
def test_other_sites_are_refused(client: TestClient, origin: str, status: int) -> None:
    assert client.get("/live.json", headers={"Origin": origin}).status_code == status
