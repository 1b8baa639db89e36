"""Start of the tap: the chosen tokenizer, start line and notes."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from engines.facts import EngineFacts, read_facts
from tap.ipc.settings import Settings
from tap.supervisor.startup import probe_engine
from tracefile.records.encoding import encode_meta
from tracefile.records.schema import Meta

VLLM = read_facts(
    '{"version": "0.32.0"}',
    'vllm:cache_config_info{block_size="32",num_gpu_blocks="512"} 1\nvllm:num_requests_running 2\n',
    '{"data": [{"id": "tiny", "owned_by": "vllm", "max_model_len": 4096}]}',
)
LOADING: dict[str, list[int]] = {"loading": []}
LLAMA_CPP = read_facts("", "", '{"data": [{"id": "tiny", "owned_by": "llamacpp"}]}')


class Probed(NamedTuple):
    """Result of a probe."""

    settings: Settings
    line: str
    notes: Sequence[str]


def probed(
    lab: Any, facts: EngineFacts, tokens: dict[str, list[int]] | None, **settings: Any
) -> tuple[Probed, list[str]]:
    """Probe an upstream whose /tokenize accepts the fields in ``tokens``; return the result and its request lines."""
    requested = []

    async def script(request: Any) -> None:
        requested.append(b" ".join(request.head.split(b" ", 2)[:2]).decode())
        if request.target == b"/tokenize" and tokens == LOADING:
            request.write_json({"error": {"code": 503, "message": "Loading model"}}, status=b"503 X")
        elif request.target == b"/tokenize" and tokens is not None:
            question = json.loads(request.body)
            request.write_json({"tokens": next((ids for name, ids in tokens.items() if name in question), [])})
        else:
            request.write_json({}, status=b"404 Not Found")

    async def scenario() -> Probed:
        upstream = lab.upstream(script)
        async with upstream.serving():
            config = lab.config(
                upstream.port, **{"tokenizer": "auto", "engine_facts": True, "dialect": None} | settings
            )
            return Probed(*await probe_engine(config, facts, config.upstreams[0]))

    return asyncio.run(scenario()), requested


@pytest.mark.parametrize(
    ("facts", "tokens", "tokenizer", "reason"),
    [
        (VLLM, {"prompt": [7]}, "engine", ""),
        (LLAMA_CPP, {"content": [7]}, "engine", ""),
        # llama.cpp returns no tokens for vLLM's fields, as do servers that accept neither form.
        (VLLM, {"content": [7]}, "ids", " (the engine's /tokenize returns no tokens for a text)"),
        (LLAMA_CPP, LOADING, "engine", " (still loading)"),
    ],
)
def test_auto_tokenizer_is_engine_if_tokenize_works(
    lab: Any, facts: EngineFacts, tokens: dict[str, list[int]] | None, tokenizer: str, reason: str
) -> None:
    actual, _ = probed(lab, facts, tokens)
    assert actual.settings.tokenizer == tokenizer
    assert actual.line.endswith(f" · tokenizer {tokenizer}{reason}")
    assert any(note.startswith("--tokenizer ids: ") for note in actual.notes) == (tokenizer == "ids")


def test_named_tokenizer_is_not_probed(lab: Any) -> None:
    actual, requested = probed(lab, VLLM, None, tokenizer="ids")
    assert (actual.settings.tokenizer, requested) == ("ids", ["GET /v1/models", "GET /reset_prefix_cache"])
    assert not any(note.startswith("--tokenizer") for note in actual.notes)


@pytest.mark.parametrize("before", ["engine", "ids"])
def test_resumed_trace_keeps_its_tokenizer(lab: Any, before: str) -> None:
    lab.trace.write_bytes(encode_meta(Meta(source="tap", block_size=4, tokenizer=before)))
    actual, requested = probed(lab, VLLM, {"prompt": [7]}, resume=True)
    assert (actual.settings.tokenizer, "POST /tokenize" in requested) == (before, False)
