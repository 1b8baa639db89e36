"""Loads and replays of text on a real vLLM: the prompts that it saw are the planned ones, to the token, on each API."""

import os
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.__main__ import main as loadgen
from replay.__main__ import main as replay
from tests.jsonoutput import json_of
from tracefile.files.reading import load_trace

pytestmark = pytest.mark.vllm

SESSIONS = shlex.split(
    "--turns 3 --rate 3 --number 6 --prefix-count 2 --prefix-tokens 300 --prompt-tokens 40:90 --output-tokens 24"
)
BLOCK = 32


@pytest.fixture
def vllm() -> str:
    """With nothing cached: an earlier run of these tests had the same prompts."""
    url = os.environ.get("KVTAPE_VLLM")
    if not url:
        pytest.skip("KVTAPE_VLLM names no running vLLM; `make test-vllm` starts one")
    httpx.post(f"{url}/reset_prefix_cache", trust_env=False).raise_for_status()
    return url


def run(url: str, folder: Path, *flags: str) -> dict[str, Any]:
    trace = folder / "t.jsonl"
    arguments = ["--url", url, "-o", str(trace), "--overwrite"]
    result: dict[str, Any] = json_of(loadgen, [*arguments, *SESSIONS, *flags])
    return result


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_prompts_have_the_planned_tokens(vllm: str, tmp_path: Path, api: str) -> None:
    truth = run(vllm, tmp_path, "--api", api, "--seed", str(len(api)))["prompt_check"]
    counts = truth["counts"]
    assert counts["off_tokens"] == 0
    # A random-weight model's answers may be other tokens as text; nothing else may differ from the plan.
    assert counts["planned"] == 18
    assert counts["planned"] - counts["exact"] <= counts["outputs_changed"]
    assert counts["outputs"] == 12
    assert truth["verdict"].startswith("exact (")
    if not counts["outputs_changed"]:
        assert counts["shared_cached"] == counts["shared_tokens"] > 0


def test_prompts_hit_their_shared_prefix(vllm: str, tmp_path: Path) -> None:
    """One at a time, so that the second of two finds what the first left: the prefix and the template, in blocks."""
    shape = ["--turns", "1", "--number", "6", "--prefix-count", "1", "--rate", "1", "--seed", "77"]
    run(vllm, tmp_path, "--api", "chat", *shape)
    meta, records = load_trace(tmp_path / "t.jsonl")
    first, other = (record.block_hashes or [] for record in records[:2])
    shared = next(index for index, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1])
    shared_tokens = shared * (meta.block_size or 0)
    assert shared_tokens >= 300
    assert [record.cached_tokens for record in records][1:] == [shared_tokens // BLOCK * BLOCK] * 5


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_chat_replay_has_the_captured_hits(vllm: str, tmp_path: Path, api: str) -> None:
    run(vllm, tmp_path, "--api", "chat", "--seed", f"4{len(api)}")
    source = {record.request_id: record for record in load_trace(tmp_path / "t.jsonl")[1]}
    out = tmp_path / "r.jsonl"
    target = ["--url", vllm, "-o", str(out), "--api", api, "--replay-sessions"]
    truth = json_of(replay, [str(tmp_path / "t.jsonl"), *target])["run"]["prompt_check"]
    assert truth["verdict"].startswith("exact (")
    later = [record for record in load_trace(out)[1] if record.turn != 1]
    assert len(later) == 12
    for record in later:
        before = source[record.request_id]
        assert 0 <= (record.prompt_tokens or 0) - (before.prompt_tokens or 0) <= 10
    if not truth["counts"]["outputs_changed"]:
        same = [each for each in later if each.prompt_tokens == source[each.request_id].prompt_tokens]
        assert [each.cached_tokens for each in same] == [source[each.request_id].cached_tokens for each in same]
