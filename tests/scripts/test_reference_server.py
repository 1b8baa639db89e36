"""The reference server: it answers as it was asked, and what it tells of that is true."""

import http.client
import json
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from scripts.reference_server import Pace, Served, ServerProcess, reference_server, token_ids
from wire.answer import parse_answer

PACED = Pace(ttft_low_ms=1.0, ttft_high_ms=4.0, gap_ms=0.5, tokens_per_write=2, prompt_tokens=7)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with reference_server(PACED, tmp_path_factory.mktemp("server") / "log") as running:
        yield running


def ask(server: ServerProcess, request_id: str | None, tokens: int, *, path: str = "/v1/completions") -> bytes:
    """The body of an answer, de-chunked by the standard library."""
    client = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=10)
    headers = {} if request_id is None else {"X-Request-ID": request_id}
    client.request("POST", path, json.dumps({"prompt": [5, 6], "max_tokens": tokens}), headers)
    answer = client.getresponse().read()
    client.close()
    return answer


def served(server: ServerProcess, request_id: str) -> Served:
    (served,) = [entry for entry in server.log().served if entry.request_id == request_id]
    return served


def test_response_has_the_requested_tokens(server: ServerProcess) -> None:
    completion = parse_answer("/v1/completions", [(1, ask(server, "known", 5))], stream=True)
    assert completion.token_ids == list(token_ids(5)) == [1000, 1001, 1002, 1003, 1004]
    assert (completion.prompt_tokens, completion.output_tokens) == (7, 5)
    assert (completion.done, completion.finish_reason, completion.text) == (True, "length", " t0 t1 t2 t3 t4")


def test_server_times_are_between_client_times(server: ServerProcess) -> None:
    before_ns = time.perf_counter_ns()
    ask(server, "between", 5)
    after_ns = time.perf_counter_ns()
    truth = served(server, "between")
    times_ns = [before_ns, truth.received_ns, *truth.writes_ns, after_ns]
    assert times_ns == sorted(times_ns)
    assert truth.last_write_ns == truth.writes_ns[-1]
    # One event, then two writes of two.
    assert (truth.tokens, truth.writes) == (5, 3)


def test_ttft_is_a_function_of_the_request_id(server: ServerProcess) -> None:
    for name in ("a", "b", "c"):
        ask(server, name, 1)
        truth = served(server, name)
        assert truth.due_ns - truth.received_ns == PACED.ttft_ns(name)
        # It is never early, and no test can say how late it may be.
        assert truth.writes_ns[0] >= truth.due_ns
    drawn = [PACED.ttft_ns(str(number)) for number in range(500)]
    assert 1_000_000 <= min(drawn) < 1_050_000
    assert 3_950_000 < max(drawn) <= 4_000_000


def test_writes_are_on_clock_ticks() -> None:
    assert [Pace(tick_ms=1.0).on_tick(due_ns) for due_ns in (2_000_000, 2_000_001)] == [2_000_000, 3_000_000]
    assert Pace().on_tick(2_000_001) == 2_000_001
