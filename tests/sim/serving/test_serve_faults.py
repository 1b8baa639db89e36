"""Faults on purpose: drawn by request, seen by clients, counted in /metrics."""

import json
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

from sim.serving.engine.faults import Faults, parse_faults
from tracefile.records.errors import InputError

StartSimServer = Callable[..., AbstractContextManager[str]]
ASK: dict[str, Any] = {"prompt": "once upon a time", "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(start_sim_server: StartSimServer) -> Iterator[httpx.Client]:
    """An engine that obeys X-Fault headers and never sleeps."""
    with (
        start_sim_server("--speed", "max", "--fault-control", "--no-noise") as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        yield http


def complete(
    client: httpx.Client, fault: str, *, stream: bool = False, request_id: str | None = None
) -> httpx.Response:
    headers = {"X-Fault": fault} | ({} if request_id is None else {"X-Request-Id": request_id})
    return client.post("/v1/completions", json=ASK | {"stream": stream}, headers=headers)


def read_all(sock: socket.socket) -> None:
    """Read to the end."""
    while sock.recv(65536):
        pass


def injected(client: httpx.Client) -> dict[str, float]:
    found = re.findall(r'^kvtape_sim:faults_total{kind="(.*)"} (.*)$', client.get("/metrics").text, re.MULTILINE)
    return {kind: float(count) for kind, count in found}


def texts(stream: str) -> str:
    events = [line[6:] for line in stream.splitlines() if line.startswith('data: {"id":"cmpl')]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_refusals_are_in_the_apis_own_shape(client: httpx.Client) -> None:
    limited = complete(client, "429=3")
    assert (limited.status_code, limited.headers["retry-after"]) == (429, "3")
    assert limited.json()["error"]["code"] == 429
    failed = client.post("/v1/chat/completions", json={}, headers={"X-Fault": "500"})
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == 500
    assert "retry-after" not in failed.headers
    assert complete(client, "").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_stalls_and_a_slow_first_byte_change_nothing_but_the_time(client: httpx.Client, stream: bool) -> None:
    def said(response: httpx.Response) -> str:
        return texts(response.text) if stream else response.json()["choices"][0]["text"]

    usual = said(complete(client, "", stream=stream))
    assert len(usual) == 20 * 4
    before = injected(client)
    for fault in ("stall=30", "slow-first-byte=30", "stall=10-20,slow-first-byte=exp10", "latency=500"):
        response = complete(client, fault, stream=stream)
        assert said(response) == usual
    assert response.status_code == 200
    after = injected(client)
    assert {kind: after[kind] - before.get(kind, 0.0) for kind in ("stall", "slow-first-byte", "latency")} == {
        "stall": 2.0,
        "slow-first-byte": 2.0,
        "latency": 1.0,
    }


@pytest.mark.parametrize("stream", [True, False])
def test_truncated_answers_end_without_their_end(client: httpx.Client, stream: bool) -> None:
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
        complete(client, "truncate", stream=stream)


@pytest.mark.parametrize("stream", [True, False])
def test_resets_reach_the_client_as_resets(client: httpx.Client, stream: bool) -> None:
    url = client.base_url
    with socket.create_connection((url.host, url.port or 0), timeout=30) as sock:
        body = json.dumps(ASK | {"stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Fault: reset\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        with pytest.raises(ConnectionResetError):
            read_all(sock)
    # The request's blocks are free at once.
    assert re.search(r"^vllm:num_requests_running\S* 0\.0$", client.get("/metrics").text, re.MULTILINE)


def test_garbage_stands_between_the_events(client: httpx.Client) -> None:
    raw = complete(client, "garbage", stream=True).content
    with pytest.raises(UnicodeDecodeError):
        raw.decode()
    stream = raw.decode(errors="replace")
    assert len(texts(stream)) == 20 * 4
    assert stream.endswith("data: [DONE]\n\n")


def test_latency_is_time_of_the_engines_clock(client: httpx.Client) -> None:
    def ttft_sum() -> float:
        found = re.search(r"^vllm:time_to_first_token_seconds_sum\S* (.*)$", client.get("/metrics").text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    sums = [ttft_sum()]
    for fault in ("", "latency=5000"):
        client.post("/reset_prefix_cache")
        complete(client, fault)
        sums.append(ttft_sum())
    assert (sums[2] - sums[1]) - (sums[1] - sums[0]) == pytest.approx(5.0)


def test_the_control_endpoint_changes_what_goes_wrong(client: httpx.Client) -> None:
    assert client.get("/faults").json()["faults"] == []
    told = client.put("/faults", json={"faults": ["503=7:1", "latency=10:0.5"]}).json()
    assert told["faults"] == ["503=7:1", "latency=10:0.5"]
    assert client.post("/v1/completions", json=ASK).headers["retry-after"] == "7"
    bad = client.put("/faults", json={"faults": ["noise"]})
    assert bad.status_code == 400
    assert "noise: expected KIND" in bad.json()["error"]["message"]
    assert client.put("/faults", json={"faults": []}).status_code == 200
    assert client.post("/v1/completions", json=ASK).status_code == 200
    assert "expected KIND" in complete(client, "noise").json()["error"]["message"]


def test_nobody_injects_what_the_server_was_not_told_to_allow(start_sim_server: StartSimServer) -> None:
    with start_sim_server("--speed", "max", "--fault", "429:0.5") as url, httpx.Client(base_url=url) as client:
        answers = [complete(client, "500") for _ in range(40)]
        assert {answer.status_code for answer in answers} == {200, 429}
        assert client.get("/faults").status_code == 404
        # The same ids, the same fates: whatever came in between.
        named = [complete(client, "", request_id=f"r{number}").status_code for number in range(20)]
        again = [complete(client, "", request_id=f"r{number}").status_code for number in range(20)]
        assert named == again
        refused = [*(answer.status_code for answer in answers), *named, *again].count(429)
        assert injected(client) == {"429": refused}


def test_whatever_goes_wrong_nothing_is_left_behind(start_sim_server: StartSimServer) -> None:
    kinds = ("429", "500", "latency=5", "slow-first-byte=3", "stall=0-9", "garbage", "truncate", "reset")
    faults = [flag for kind in kinds for flag in ("--fault", f"{kind}:0.15")]
    engine = (
        "--speed",
        "max",
        "--num-gpu-blocks",
        "300",
        "--block-size",
        "16",
        "--engines",
        "2",
        "--route",
        "least-loaded",
    )

    with (
        start_sim_server(*engine, *faults) as url,
        httpx.Client(base_url=url, timeout=30) as client,
        ThreadPoolExecutor(16) as pool,
    ):

        def one(number: int) -> str:
            body = ASK | {"stream": number % 2 == 0, "max_tokens": 100, "n": 1 + number % 3, "prompt": [number] * 40}
            try:
                answer = client.post("/v1/completions", json=body)
            except httpx.HTTPError as error:
                return type(error).__name__
            return str(answer.status_code)

        outcomes = set(pool.map(one, range(200)))
        assert {"200", "429", "500", "RemoteProtocolError"} <= outcomes
        metrics = client.get("/metrics").text
        counts = re.findall(r"^vllm:(?:num_requests_\w+|kv_cache_usage_perc){\S* (\S+)$", metrics, re.MULTILINE)
        assert counts == ["0.0"] * 6
        assert client.post("/reset_prefix_cache").json() == {"success": True}
        assert set(injected(client)) == {kind.partition("=")[0] for kind in kinds}


def test_rates_are_kept_and_draws_belong_to_the_request() -> None:
    faults = Faults(parse_faults(["429:0.1", "latency=10-20:0.5", "reset:0.25"], "--fault"), seed=5)
    drawn = [faults.draw(None, None) for _ in range(4000)]
    refused = [injection for injection in drawn if injection and injection.refusal]
    # A refusal is all that happens to its request.
    assert not any(injection.extra_ms or injection.ending for injection in refused)
    assert len(refused) == pytest.approx(400, rel=0.2)
    extras = [injection.extra_ms for injection in drawn if injection and injection.extra_ms]
    assert len(extras) == pytest.approx(0.9 * 2000, rel=0.1)
    assert min(extras) >= 10
    assert max(extras) <= 20
    assert faults.injected["429"] == len(refused)
    again = Faults(faults.rules, seed=5)
    assert [again.draw(None, None) for _ in range(4000)] == drawn
    assert Faults(faults.rules, seed=6).draw("a", None) == Faults(faults.rules, seed=6).draw("a", None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("399", "expected KIND"),
        ("stal=3", "expected KIND"),
        ("stall=", "neither a number"),
        ("stall=-3", "neither a number"),
        ("stall=9-3", "goes down"),
        ("stall=exp3-9", "neither a number"),
        ("reset=3", "reset takes no value"),
        ("reset:2", "a share from 0 to 1"),
        ("reset:often", "a share from 0 to 1"),
        ("reset:0.1:0.2", "expected KIND"),
    ],
)
def test_bad_faults_are_named(text: str, says: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_faults([text], "--fault")
    assert says in str(refused.value)
    assert str(refused.value).startswith(f"--fault {text}: ")
