"""KV events of a real vLLM: the router follows its cache as blocks are stored, evicted and reset."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from scripts.proxybench.processes import free_port
from scripts.vllm_engine import ModelShape, running_vllm
from tests.conftest import running_sim_server
from tests.e2e.conftest import running_tap
from tests.waiting import wait_until
from tracefile import load_trace

pytestmark = pytest.mark.vllm

BLOCKS, BLOCK = 96, 32
TOKENS = 1000
CONFIG = {"enable_kv_cache_events": True, "publisher": "zmq"}


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A vLLM of its own, with a pool of three prompts: its URL, and addresses of its events and their replay."""
    if not os.environ.get("KVTAPE_VLLM"):
        pytest.skip("KVTAPE_VLLM names no running vLLM; `make test-vllm` starts one")
    events, replay = free_port(), free_port()
    config = CONFIG | {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
    flags = ["--kv-events-config", json.dumps(config), "--num-gpu-blocks-override", str(BLOCKS)]
    with running_vllm(ModelShape(), tmp_path / "vllm.log", extra=[*flags, "--max-model-len", "2048"]) as url:
        yield url, f"tcp://127.0.0.1:{events},tcp://127.0.0.1:{replay}"


def send(url: str, first_id: int) -> None:
    """A prompt of ids from ``first_id`` on."""
    body = {"model": "tiny", "prompt": list(range(first_id, first_id + TOKENS)), "max_tokens": 1}
    httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status()


@pytest.mark.timeout(300)
def test_a_prompt_is_routed_by_what_the_engine_says_it_holds(vllm: tuple[str, str], tmp_path: Path) -> None:
    engine, events = vllm
    admin = f"127.0.0.1:{free_port()}"

    def told(name: str) -> float:
        lines = httpx.get(f"http://{admin}/metrics", trust_env=False).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"kvtape_tap_{name}"))

    def quiet() -> bool:
        """All events have come: no batch within more than a push of the counts."""
        before = told("kv_batches_total")
        time.sleep(2.5)
        return told("kv_batches_total") == before > 0

    trace = tmp_path / "t.jsonl"
    flags = ["--route", "prefix", "--kv-events", f"{engine}={events}", "--tokenizer", "ids", "--admin", admin]
    with (
        running_sim_server("--model", "tiny", "--block-size", "32") as other,
        running_tap(engine, trace, "--upstream", other, *flags) as tap,
    ):
        wait_until(lambda: told("kv_events_up") == 1)
        send(tap, 60_000)  # by turn: to vLLM
        send(engine, 1_000)  # past the tap
        wait_until(quiet)
        assert told("kv_blocks") == 2 * (TOKENS // BLOCK)
        send(tap, 1_000)  # of unknown blocks, and by turn: to the other
        wait_until(lambda: told("recorded_total") == 2)
        send(tap, 1_000)  # stored: both have it, vLLM by its own word
        for first in (10_000, 20_000, 30_000):
            send(engine, first)
        wait_until(quiet)
        send(tap, 1_000)  # removed: the other alone has it
        send(engine, 1_000)
        wait_until(quiet)
        send(tap, 1_000)  # stored again
        httpx.post(f"{engine}/reset_prefix_cache", trust_env=False).raise_for_status()
        send(engine, 50_000)  # vLLM publishes with its steps: an idle one tells of a reset with its next request
        wait_until(lambda: told("kv_blocks") == TOKENS // BLOCK)
        send(tap, 1_000)  # cleared
        assert (told("kv_gaps_total"), told("kv_faults_total"), told("kv_unplaced_total")) == (0, 0, 0)
    records = load_trace(trace)[1]
    assert [record.upstream == engine for record in records] == [True, False, True, False, True, False]
    assert [record.cached_tokens for record in records if record.upstream == engine] == [0, 992, 992]
