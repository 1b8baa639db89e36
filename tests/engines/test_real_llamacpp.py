"""The tap, loads, replays and the simulator on a real llama.cpp: ``make test-engines``."""

import json
import os
import shlex
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.__main__ import main as loadgen
from replay.__main__ import main as replay
from scripts import llama_engine
from sim.__main__ import main as sim
from tests.e2e.conftest import running_tap
from tests.jsonoutput import json_of
from tracefile.files.reading import load_trace
from tracefile.records.errors import InputError
from wire.url import parse_url

pytestmark = pytest.mark.engines

LOAD = shlex.split(
    "--turns 3 --number 8 --prefix-count 2 --prefix-tokens 200 --prompt-tokens 20:60 --output-tokens 8:16 --seed 5"
)
REQUESTS = 24
SEQUENTIAL = ["--parallel", "1"]
BLOCK_SIZES = [["--block-size", "16"], ["--block-size", "1"]]
"""Both report token-exact hits; hash chains of 16-token blocks have branch positions."""


@pytest.fixture
def llamacpp() -> str:
    """With nothing cached: an earlier run of these tests had the same prompts."""
    url = os.environ.get("KVTAPE_LLAMACPP")
    if not url:
        pytest.skip("KVTAPE_LLAMACPP names no running llama.cpp; `make test-engines` starts one")
    for slot in httpx.get(f"{url}/slots", trust_env=False).json():
        httpx.post(f"{url}/slots/{slot['id']}?action=erase", trust_env=False).raise_for_status()
    return url


def capture(url: str, trace: Path, *flags: str, tap: tuple[str, ...] = ("--tokenizer", "ids")) -> dict[str, Any]:
    """Send the load through a tap; return the tap's account."""
    with running_tap(url, trace, *tap) as through:
        summary = json_of(loadgen, ["--url", through, "-o", str(trace.with_suffix(".load")), *LOAD, *flags])
    assert summary["statuses"] == {"ok": REQUESTS}
    account: dict[str, Any] = json.loads(Path(f"{trace}.summary.json").read_text())
    return account


def replayed(trace: Path, url: str, *flags: str) -> dict[str, Any]:
    """Send the trace's requests sequentially, in capture order; return the fidelity."""
    out = trace.with_suffix(".replayed")
    order = ["--replay-sessions", "--closed-loop", "--parallel", "1"]
    actual = json_of(replay, [str(trace), "--url", url, "-o", str(out), "--overwrite", *order, *flags])
    fidelity: dict[str, Any] = actual["fidelity"]
    return fidelity


def simulated(trace: Path) -> dict[str, Any]:
    """Return simulated prefix hits of the trace's requests, with the server's slots."""
    slots = ["--engine", "llamacpp", "--no-kv-unified", "--cache-ram-tokens", "0"]
    counts: dict[str, Any] = json_of(sim, ["pool", str(trace), *slots])
    return counts


@pytest.mark.parametrize("blocks", BLOCK_SIZES, ids=" ".join)
def test_load_is_recorded_and_replays_as_captured(llamacpp: str, tmp_path: Path, blocks: list[str]) -> None:
    trace = tmp_path / "t.jsonl"
    account = capture(llamacpp, trace, *SEQUENTIAL, tap=("--tokenizer", "ids", *blocks))
    assert (account["offered"], account["recorded"], account["hashed"]) == (REQUESTS, REQUESTS, REQUESTS)
    assert account["prompt_counts_matched"] == account["prompt_counts_checked"] == REQUESTS
    assert simulated(trace)["as_reported"] == REQUESTS
    for reset in (["--reset-cache"], []):  # without a reset the prompts are new ones all the same
        again = replayed(trace, llamacpp, *reset)
        assert (again["prompt_exact"], again["output_exact"], again["cached_exact"]) == (REQUESTS, REQUESTS, REQUESTS)
        assert (again["missed_blocks"], again["without_ids"]) == (0, 0)
    assert replayed(trace, llamacpp, "--cold-prompts")["cached_nonzero"] == 0


def test_slot_reuse_equals_the_simulator_with_more_requests_than_slots(llamacpp: str, tmp_path: Path) -> None:
    """Two ends within milliseconds may be seen in another order than the engine had them; most are not so close."""
    trace = tmp_path / "t.jsonl"
    capture(llamacpp, trace, "--rate", "40")
    counts = simulated(trace)
    assert counts["compared"] == REQUESTS
    assert counts["as_reported"] > REQUESTS // 2


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_conversations_are_recorded_and_hashed(llamacpp: str, tmp_path: Path, api: str) -> None:
    account = capture(llamacpp, tmp_path / "t.jsonl", "--api", api, *SEQUENTIAL, tap=("--tokenizer", "engine"))
    assert (account["recorded"], account["hashed"]) == (REQUESTS, REQUESTS)
    assert account["prompt_counts_matched"] == account["prompt_counts_checked"] > 0
    assert {record.status for record in load_trace(tmp_path / "t.jsonl")[1]} == {"ok"}


def test_requests_right_after_a_stream_are_recorded_once(llamacpp: str, tmp_path: Path) -> None:
    """It closes a connection after each stream, unsaid: a request on that connection would be lost."""
    trace = tmp_path / "t.jsonl"
    body = json.dumps({"prompt": [1, 2, 3], "n_predict": 2, "stream": True, "ignore_eos": True})
    request = f"POST /completion HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    with running_tap(llamacpp, trace, "--tokenizer", "ids") as through:
        origin = parse_url(through)
        with socket.create_connection((origin.host, origin.port)) as client:
            for _ in range(60):
                client.sendall(request)
                reported = b""
                while not reported.endswith(b"\r\n0\r\n\r\n"):
                    reported += client.recv(1 << 16) or pytest.fail(f"cut after {reported!r}")
    assert [record.status for record in load_trace(trace)[1]] == ["ok"] * 60


def test_reset_is_refused_if_the_host_cache_survives(tmp_path: Path) -> None:
    """Slots are erased; the prompt cache, which is on unless it is switched off, keeps what they lost before."""
    if not llama_engine.HOME.is_installed():
        pytest.skip("python -m scripts.llama_engine install")
    for flags, expected in ([], "start it with --cache-ram 0"), (["--no-slot-save-path"], "--slot-save-path DIR"):
        with llama_engine.running_llama(tmp_path / "log", extra=flags) as url:
            capture(url, tmp_path / "t.jsonl", *SEQUENTIAL)
            with pytest.raises(InputError, match=expected):
                replayed(tmp_path / "t.jsonl", url, "--reset-cache")
        for file in tmp_path.iterdir():
            file.unlink()
