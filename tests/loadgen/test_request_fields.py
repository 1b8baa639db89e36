"""Requests as users send them: sampling, further fields, whole responses, session headers, and a run's hard end."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from loadgen.__main__ import main
from replay.__main__ import main as replay
from tracefile.files.reading import load_trace
from tracefile.hashing.blockhash import BlockHasher
from tracefile.hashing.hashkey import load_key
from tracefile.records.errors import InputError

FEW = ("--parallel", "2", "--number", "3", "--prompt-tokens", "40", "--output-tokens", "4")
PATCH = {"temperature": 0.7, "stop": ["t1", "t2"], "top_k": 5, "cache_salt": "tenant"}
PATCH |= {"stream_options": {"continuous_usage_stats": True}}
EXTRA = ("--extra-body", json.dumps(PATCH))


def to(engine: Any, trace: Path, *flags: str) -> list[str]:
    return ["--url", engine.url, "-o", str(trace), *flags]


def test_fields_of_a_load_and_of_its_replay(engine: Any, tmp_path: Path) -> None:
    assert main(to(engine, tmp_path / "t", *FEW, *EXTRA)) == 0
    assert replay([str(tmp_path / "t"), *to(engine, tmp_path / "r", *EXTRA)]) == 0
    assert len(engine.seen) == 6
    for body in engine.seen:
        assert (body["temperature"], body["stop"], body["top_k"]) == (0.7, ["t1", "t2"], 5)
        assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        assert (body["max_tokens"], body["ignore_eos"], "min_tokens" in body) == (4, True, False)
    for name in ("t", "r"):
        meta, records = load_trace(tmp_path / name)
        assert meta.workload is not None
        recorded: Any = meta.workload.extra["extra_body"]
        assert (recorded["temperature"], recorded["cache_salt"], recorded["stop"]) == (0.7, "…", ["…", "…"])
        assert "tenant" not in (tmp_path / name).read_text()
    # The salt is part of the engine's keys, so it is part of the chain.
    salted = BlockHasher(load_key(), model="scripted", cache_salt="tenant")
    _, records = load_trace(tmp_path / "t")
    assert {tuple(record.block_hashes or ()) for record in records} == {
        tuple(salted.hash_blocks(body["prompt"])) for body in engine.seen[:3]
    }


def test_session_header(engine: Any, tmp_path: Path) -> None:
    def config(*names: str) -> tuple[str, str]:
        setting = f"session-header = {json.dumps(names)}\n"
        (tmp_path / "c.toml").write_text(f"[loadgen]\n{setting}[replay]\n{setting}")
        return "--config", str(tmp_path / "c.toml")

    names = config("X-Dynamo-Session-ID", "x-other")
    assert main(to(engine, tmp_path / "t", *FEW, "--turns", "2", *names)) == 0
    for headers in engine.headers:
        assert headers["x-dynamo-session-id"] == headers["x-other"]
        assert "x-session-id" not in headers
    for name in ("Content-Type", "X Session"):
        with pytest.raises(InputError, match=f"--session-header: '{name}'; expected"):
            main(to(engine, tmp_path / "u", *FEW, *config(name)))
        with pytest.raises(InputError, match=f"--session-header: '{name}'; expected"):
            replay([str(tmp_path / "t"), *to(engine, tmp_path / "u", *config(name))])


@pytest.mark.vllm
@pytest.mark.skipif("KVTAPE_VLLM" not in os.environ, reason="no running vLLM; `make test-vllm` starts one")
@pytest.mark.parametrize("api", ["completions", "chat", "responses", "messages"])
def test_fields_on_a_real_vllm(tmp_path: Path, api: str) -> None:
    def flags(*more: str) -> list[str]:
        return ["--url", os.environ["KVTAPE_VLLM"], "-o", str(tmp_path / "t"), "--overwrite", *FEW, "--api", api, *more]

    shape = ("--extra-body", '{"temperature": 0.7, "top_p": 0.9, "top_k": 5}', "--no-stream")
    assert main(flags(*shape)) == 0
    ended = [(record.status, record.ttft_ms, record.output_tokens) for record in load_trace(tmp_path / "t")[1]]
    assert ended == [("ok", None, 4)] * 3
