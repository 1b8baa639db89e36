"""Inspection of an engine before a run, and its start line and notes."""

from collections.abc import Mapping
from typing import Any

import pytest

from engines.detection import DIALECTS, Recognised
from engines.dialect import Dialect, Response
from engines.facts import EngineFacts, read_facts
from engines.llamacpp import LLAMA_CPP
from engines.readiness import Target, probe_cache
from engines.sglang import SGLANG
from engines.trtllm import TENSORRT_LLM
from engines.vllm import VLLM

OPENAI = DIALECTS["openai"]


class Answers:
    """A control that answers from a table, and keeps what it was asked."""

    def __init__(self, answers: Mapping[str, tuple[int, str]]) -> None:
        self.answers = answers
        self.requested: list[str] = []

    def text(self, path: str) -> str:
        status, text = self._answer("GET", path)
        return text if status == 200 else ""

    def status(self, path: str) -> int | None:
        return self._answer("GET", path)[0] or None

    def post(self, path: str, body: bytes = b"") -> Response:
        status, text = self._answer("POST", path)
        return Response(status, text.encode())

    def _answer(self, method: str, path: str) -> tuple[int, str]:
        self.requested.append(f"{method} {path}")
        return self.answers.get(f"{method} {path}", (404, ""))


def requested(control: Any, dialect: Dialect, facts: EngineFacts) -> Target:
    return probe_cache(control, target(dialect, facts))


def target(dialect: Dialect, facts: EngineFacts, reports_cached: bool | None = None) -> Target:
    return Target("http://h:1", "tiny", Recognised(dialect, ""), facts, reports_cached)


NO_ACTION = "POST /slots/0?action=none"


@pytest.mark.parametrize(
    ("dialect", "answers", "reports_cached", "has_reset"),
    [
        # vLLM has its reset only for POST, in development mode; its flag for cached tokens is not reported.
        (VLLM, {"GET /reset_prefix_cache": (405, "")}, None, True),
        (VLLM, {}, None, False),
        (VLLM, {"GET /reset_prefix_cache": (0, "")}, None, None),
        (VLLM, {"GET /v1/models": (200, '{"data": [{"id": "s", "owned_by": "kvtape"}]}')}, True, False),
        (SGLANG, {"GET /server_info": (200, '{"enable_cache_report": true}')}, True, True),
        (SGLANG, {"GET /server_info": (200, '{"enable_cache_report": false}')}, False, True),
        (SGLANG, {"GET /server_info": (200, "[]")}, None, True),
        # Without --slot-save-path every action is refused as unsupported, else an unknown action as invalid.
        (LLAMA_CPP, {NO_ACTION: (400, "")}, True, True),
        (LLAMA_CPP, {NO_ACTION: (501, "")}, True, False),
        (TENSORRT_LLM, {}, None, False),
        (OPENAI, {}, None, None),
    ],
)
def test_probe_cache_of_each_engine(
    dialect: Dialect, answers: dict[str, tuple[int, str]], reports_cached: bool | None, has_reset: bool | None
) -> None:
    control = Answers(answers)
    actual = requested(control, dialect, read_facts("", "", ""))
    assert (actual.reports_cached, actual.has_reset) == (reports_cached, has_reset)
    # No generation, and no reset: vLLM's is a POST, SGLang's a GET too, llama.cpp's an action of its own.
    assert set(control.requested) <= {"GET /reset_prefix_cache", "GET /v1/models", "GET /server_info", NO_ACTION}


def test_notes_on_a_busy_engine_or_a_disabled_prefix_cache() -> None:
    metrics = """vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_running{engine="1"} 1.0
vllm:num_requests_waiting 4.0
vllm:cache_config_info{block_size="32",enable_prefix_caching="False"} 1.0
"""
    actual = requested(Answers({}), VLLM, read_facts("", metrics, ""))
    assert actual.notes() == [
        "the engine is not idle: 3 requests running, 4 waiting before the first; times and hits will not be this "
        "load's alone",
        "the engine's prefix cache is off: no request can hit it",
    ]
    idle = read_facts("", "", '{"data": [{"id": "tiny"}]}')
    assert target(VLLM, idle).notes() == []
    assert target(SGLANG, idle, reports_cached=False).notes() == [
        "the engine reports no cached tokens: hits stay unknown; start sglang with --enable-cache-report"
    ]
