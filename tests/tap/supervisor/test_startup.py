"""The tap's first questions to its engine: the tokenizer that it chooses, and what it says of it."""

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
    """The probe of an upstream whose /tokenize knows the fields in ``tokens``; and the lines that it was asked."""
    asked = []

    async def script(request: Any) -> None:
        asked.append(b" ".join(request.head.split(b" ", 2)[:2]).decode())
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

    return asyncio.run(scenario()), asked


@pytest.mark.parametrize(
    ("facts", "tokens", "tokenizer", "reason"),
    [
        (VLLM, {"prompt": [7]}, "engine", ""),
        (LLAMA_CPP, {"content": [7]}, "engine", ""),
        # llama.cpp answers vLLM's question with no tokens, as do servers that know neither.
        (VLLM, {"content": [7]}, "ids", " (the engine's /tokenize returns no tokens for a text)"),
        (LLAMA_CPP, LOADING, "engine", " (still loading)"),
    ],
)
def test_auto_tokenizer_is_engine_if_tokenize_works(
    lab: Any, facts: EngineFacts, tokens: dict[str, list[int]] | None, tokenizer: str, reason: str
) -> None:
    found, _ = probed(lab, facts, tokens)
    assert found.settings.tokenizer == tokenizer
    assert found.line.endswith(f" · tokenizer {tokenizer}{reason}")
    assert any(note.startswith("--tokenizer ids: ") for note in found.notes) == (tokenizer == "ids")


def test_named_tokenizer_is_not_probed(lab: Any) -> None:
    found, asked = probed(lab, VLLM, None, tokenizer="ids")
    assert (found.settings.tokenizer, asked) == ("ids", ["GET /v1/models", "GET /reset_prefix_cache"])
    assert not any(note.startswith("--tokenizer") for note in found.notes)


@pytest.mark.parametrize("before", ["engine", "ids"])
def test_a_resumed_trace_keeps_its_tokenizer(lab: Any, before: str) -> None:
    lab.trace.write_bytes(encode_meta(Meta(source="tap", block_size=4, tokenizer=before)))
    found, asked = probed(lab, VLLM, {"prompt": [7]}, resume=True)
    assert (found.settings.tokenizer, "POST /tokenize" in asked) == (before, False)
