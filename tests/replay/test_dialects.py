"""Each engine is told in its own words, over real sockets, and refuses any other; its answers are understood."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engines.control import ControlClient, reset_prefix_cache
from engines.detection import DIALECTS, find_dialect
from engines.dialect import DialectName
from engines.llamacpp import LLAMA_CPP
from engines.sglang import SGLANG
from engines.trtllm import TENSORRT_LLM
from loadgen.core.bodies import cache_probe
from loadgen.core.vocabulary import ORDINARY
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash

WITH_IDS: list[DialectName] = ["vllm", "sglang", "llamacpp", "trtllm"]
BLOCK = 16


@pytest.fixture
def start(strict_engines: ModuleType) -> Iterator[Callable[[str], Any]]:
    """Starts engines by their dialect's name, stopped when the test is over."""
    with contextlib.ExitStack() as engines:
        yield lambda name: engines.enter_context(strict_engines.ENGINES[name]().serving())


def hashes(*values: int) -> list[BlockHash]:
    return [BlockHash(value) for value in values]


@pytest.fixture
def session(tmp_path: Path, traces: ModuleType) -> Path:
    """Three turns in blocks of 16: 40 tokens and 30 of answer, 80 and 17, 100 and 3."""
    turns = [
        ("one", 40, 30, hashes(1, 2), hashes(3, 4)),
        ("two", 80, 17, hashes(1, 2, 3, 4, 5), hashes(6)),
        ("three", 100, 3, hashes(1, 2, 3, 4, 5, 6), []),
    ]
    parents = [None, "one", "two"]
    records = [
        traces.request(
            name,
            parent_id=parent,
            arrival_ms=10.0 * index,
            prompt_tokens=prompt,
            output_tokens=output,
            block_hashes=blocks,
            output_block_hashes=generated,
        )
        for index, (parent, (name, prompt, output, blocks, generated)) in enumerate(zip(parents, turns, strict=True))
    ]
    return Path(traces.written(tmp_path / "session.jsonl", records, BLOCK))


@pytest.mark.parametrize("name", WITH_IDS)
def test_session_replay_hits_as_captured_with_token_ids(
    name: DialectName, start: Callable[[str], Any], session: Path, traces: ModuleType, runner: ModuleType
) -> None:
    engine = start(name)
    job = traces.opened(session, dialect=name, replay_sessions=True)
    played = runner.play(job.plan(), runner.posted(engine.url))
    assert engine.refusals == []
    # 40 + 29 tokens have their KV when the first turn has ended: four blocks. Then 80 + 16: six.
    assert [record.cached_tokens for record in played.records] == [0, 64, 96]
    findings = job.findings()
    assert findings["answered"] == findings["prompt_exact"] == findings["output_exact"] == 3
    assert (findings["substituted_blocks"], findings["missed_blocks"], findings["without_ids"]) == (5, 0, 0)
    assert [record.output_block_hashes for record in played.records] == [[3, 4], [6], []]


def test_openai_dialect_has_no_guarantees(
    start: Callable[[str], Any], session: Path, traces: ModuleType, runner: ModuleType
) -> None:
    engine = start("openai")
    job = traces.opened(session, dialect="openai", replay_sessions=True)
    played = runner.play(job.plan(), runner.posted(engine.url))
    assert engine.refusals == []
    # Answers end early and their ids are not told: only the prompt's own blocks are found again.
    assert [record.cached_tokens for record in played.records] == [0, 32, 80]
    findings = job.findings()
    assert (findings["output_exact"], findings["without_ids"]) == (0, 2)


@pytest.mark.parametrize("name", WITH_IDS)
def test_request_fields_by_dialect(
    name: DialectName, start: Callable[[str], Any], traces: ModuleType, runner: ModuleType, tmp_path: Path
) -> None:
    source = traces.written(
        tmp_path / "shapes.jsonl",
        [
            traces.request("whole", stream=False),
            traces.request("two", n=2, output_tokens=6),
            traces.request("two-whole", n=2, output_tokens=6, stream=False),
            traces.request("soon", priority=1),
        ],
    )
    engine = start(name)
    job = traces.opened(source, dialect=name)
    runner.play(job.plan(), runner.posted(engine.url))
    assert (engine.refusals, job.findings()["output_exact"]) == ([], 4)
    choices = [body.get(DIALECTS[name].choices) for body in engine.seen]
    assert choices == [None, 2, 2, None]
    assert [body["stream"] for body in engine.seen] == [False, True, False, True]
    # Their scales are others': a number of vLLM's says nothing to llama.cpp or TensorRT-LLM.
    priorities = [body.get("priority") for body in engine.seen]
    assert priorities == [None, None, None, 1 if name in {"vllm", "sglang"} else None]


ADAPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("law-v2", {"model": "law-v2"}),
    "sglang": ("law-v2", {"model": "m:law-v2"}),
    "llamacpp": ("7", {"model": "m", "lora": [{"id": 7, "scale": 1.0}]}),
    "trtllm": (
        "law:7:/adapters/law",
        {"model": "m", "lora_request": {"lora_name": "law", "lora_int_id": 7, "lora_path": "/adapters/law"}},
    ),
}


@pytest.mark.parametrize("name", WITH_IDS)
def test_adapters_by_dialect(
    name: DialectName, start: Callable[[str], Any], traces: ModuleType, runner: ModuleType, tmp_path: Path
) -> None:
    engine = start(name)
    records = [traces.request("a", lora="law"), traces.request("b", lora="bare"), traces.request("c")]
    source = traces.written(tmp_path / "lora.jsonl", records)
    adapter, fields = ADAPTED[name]
    played = runner.play(
        traces.opened(source, dialect=name, loras={"law": adapter, "bare": ""}).plan(), runner.posted(engine.url)
    )
    assert engine.refusals == []
    models = [{key: body[key] for key in ("model", "lora", "lora_request") if key in body} for body in engine.seen]
    assert models == [fields, {"model": "m"}, {"model": "m"}]
    assert [record.lora for record in played.records] == ["law", "bare", None]


@pytest.mark.parametrize(
    ("name", "set_up", "message"),
    [
        (
            "vllm",
            {"busy": True},
            "POST /reset_prefix_cache failed; expected an engine without requests in flight",
        ),
        (
            "llamacpp",
            {"saves": False},
            "/slots/0?action=erase gave HTTP 501; expected a llama.cpp started with --slot-save",
        ),
        (
            "llamacpp",
            {"remembers": True},
            "32 tokens still cached after llamacpp's reset; expected none (llama.cpp also caches",
        ),
    ],
)
def test_failed_reset_is_an_error(
    name: DialectName, set_up: dict[str, bool], message: str, start: Callable[[str], Any]
) -> None:
    engine = start(name)
    for attribute, value in set_up.items():
        setattr(engine, attribute, value)
    with ControlClient(engine.url) as control, pytest.raises(InputError) as error:
        reset_prefix_cache(control, DIALECTS[name], cache_probe(DIALECTS[name], "m", ORDINARY, BLOCK))
    assert message in str(error.value)
    if "gave HTTP" in message:  # no prompt was left in a cache that nothing empties
        assert engine.seen == []


@pytest.mark.parametrize(
    ("answers", "expected", "evidence"),
    [
        ({"/metrics": '# HELP x\nsglang:num_running_reqs{a="b"} 1.0\n'}, SGLANG, "its metrics are sglang:…"),
        ({"/props": '{"build_info": "b1"}'}, LLAMA_CPP, "it has /props with build_info"),
        ({"/v1/models": '{"data": [{"owned_by": "tensorrt_llm"}]}'}, TENSORRT_LLM, "by owned_by in /v1/models"),
        ({"/v1/models": "not JSON", "/props": "[]", "/metrics": "\x00\n\n"}, None, "no evidence of another engine"),
    ],
)
def test_engine_is_detected_by_its_responses(answers: dict[str, str], expected: Any, evidence: str) -> None:
    class Control(ControlClient):
        def __init__(self) -> None:
            """No connection."""

        def text(self, path: str) -> str:
            return answers.get(path, "")

    recognition = find_dialect(Control(), "auto")
    assert (recognition.certain, recognition.evidence) == (expected is not None, evidence)
    assert expected is None or recognition.dialect is expected
