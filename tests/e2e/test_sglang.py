"""The whole way on a real SGLang: load through the tap, replay, and the rules of its radix cache beside both."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import RunTap
from tracefile.files.reading import load_trace

URL = os.environ.get("KVTAPE_SGLANG_URL", "")
REQUESTS = 36
LOAD = (
    *("--pattern", "multiturn", "--turns", "3", "--number", "12", "--parallel", "1", "--seed", "5"),
    *("--prefix-count", "2", "--prefix-tokens", "1000", "--prompt-tokens", "50:150", "--output-tokens", "20:60"),
)

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not URL, reason="KVTAPE_SGLANG_URL does not name a running SGLang"),
    pytest.mark.timeout(300),
]


def reported(folder: Path, *words: str) -> Any:
    """The JSON that a command of ours tells; it must end well."""
    environment = os.environ | {"KVTAPE_KEY_FILE": str(folder / "key")}
    done = subprocess.run(
        [sys.executable, "-m", *words, "--json"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="module")
def page_size() -> int:
    result: int = httpx.get(f"{URL}/server_info").json()["page_size"]
    return result


def test_capture_is_exact_to_the_token(folder: Path, run_tap: RunTap, page_size: int) -> None:
    httpx.post(f"{URL}/flush_cache").raise_for_status()
    with run_tap(URL, folder / "tap.jsonl", "--tokenizer", "ids") as url:
        run = reported(folder, "loadgen", "--url", url, "-o", str(folder / "load.jsonl"), *LOAD)
    assert run["statuses"] == {"ok": REQUESTS}
    for name in ("tap", "load"):
        meta, records = load_trace(folder / f"{name}.jsonl")
        assert meta.engine is not None
        assert (meta.block_size, meta.engine.name, meta.engine.block_size) == (16, "sglang", page_size)
        assert meta.hash is not None
        assert meta.hash.branches == (True if page_size < 16 else None)
        assert len(records) == REQUESTS
        pool = ("--engine", "sglang", "--page-size", str(page_size))
        result = reported(folder, "sim", "pool", str(folder / f"{name}.jsonl"), *pool)
        assert result["compared"] == result["as_reported"] == REQUESTS


@pytest.mark.parametrize(("name", "flags"), [("tap", ["--reset-cache"]), ("load", [])])
def test_replay_has_the_captured_hits(folder: Path, name: str, flags: list[str]) -> None:
    replayed = reported(
        *(folder, "replay", str(folder / f"{name}.jsonl"), "--url", URL),
        *("-o", str(folder / "replay.jsonl"), "--overwrite", "--replay-sessions", *flags),
    )
    assert replayed["fidelity"]["cached_exact"] == REQUESTS


def test_cold_prompts_have_no_hits(folder: Path) -> None:
    out = folder / "cold.jsonl"
    reported(
        *(folder, "replay", str(folder / "tap.jsonl"), "--url", URL),
        *("-o", str(out), "--overwrite", "--replay-sessions", "--cold-prompts"),
    )
    assert {record.cached_tokens for record in load_trace(out)[1]} == {0}
