"""Gates of what-ifs: by hand, and by the command's exit code."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from report.grid.points import Measure, Span
from sim.__main__ import main
from sim.forecast.limits import KEYS, evaluate, parse_limit
from sim.forecast.results import ForecastPoint
from sim.latency.modelfile import default_model, save_model
from tests.sim.forecast.conftest import write_shared
from tracefile.records.errors import InputError


def row(name: str, **measures: Measure) -> ForecastPoint:
    named = {key.replace("__", "."): measure for key, measure in measures.items()}
    return ForecastPoint(name=name, settings={}, members=9, measures=named)


def span(middle: float | None, low: float | None = None, high: float | None = None) -> Span:
    return Span(middle=middle, low=low, high=high)


HITS = Measure(value=span(0.40, 0.38, 0.42), difference=span(-0.02, -0.03, -0.005), ratio=span(0.95, 0.92, 0.99))
TTFT = Measure(value=span(900.0, 850.0, 990.0), difference=span(60.0, 20.0, 90.0), ratio=span(1.07, 1.02, 1.1))
LONG = Measure(value=span(None, 5000.0))


@pytest.mark.parametrize(
    ("gate", "passed", "sure"),
    [
        ("hit_rate>=35%", True, True),
        ("hit_rate>=39%", False, False),  # the lowest members are at 38 %
        ("hit_rate.difference>=-1%", False, False),
        ("hit_rate.difference>=-4%", True, True),
        ("hit_rate.ratio>=0.9", True, True),
        ("ttft.p95<=1s", True, True),
        ("ttft.p95<=800ms", False, True),
        ("ttft.p95.ratio<=1.05", False, False),
        ("ttft.p95.difference<=100ms", True, True),
        ("ttft.p99<=8s", False, False),  # half of the members serve too few, some are at 5 s
        ("turns2+.ttft.p50<=1s", False, True),  # no such number
    ],
)
def test_scenario_passes_if_members_agree(gate: str, passed: bool, sure: bool) -> None:
    measures = {"hit_rate": HITS, "ttft__all__p95": TTFT, "ttft__all__p99": LONG}
    (evaluation,) = evaluate([parse_limit("--gate", gate, KEYS)], [row("x", **measures)])
    assert (evaluation.passed, evaluation.sure) == (passed, sure)


def test_base_is_evaluated_without_scenarios() -> None:
    rows = [
        replace(row(name, hit_rate=Measure(value=span(middle))), kind=kind)
        for name, kind, middle in (("c", "capture", 0.9), ("b", "base", 0.4))
    ]
    gates = [
        parse_limit("--gate", text, KEYS)
        for text in ("hit_rate>=50%", "hit_rate.difference>=-1%", "hit_rate.ratio<=1.05")
    ]
    assert [(gate.point, gate.passed, gate.span) for gate in evaluate(gates, rows)] == [
        ("b", False, span(0.4)),
    ]


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        ("ttft<=1s", "no level; expected pNN with one of p50, p90, p95, p99"),
        ("ttft.p95<=5", "expected a duration"),
        ("ttft.p95.ratio<=1s", "expected a number"),
        ("ttft.p95.error<=1%", "'error'; expected difference or ratio"),
        ("hit_rate.p50>=1%", "hit_rate has no level"),
        ("turns2+.itl.p50<=1s", "itl has no cohort"),
        ("speed>=1", "no metric 'speed'"),
    ],
)
def test_gate_without_a_value_is_rejected(gate: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_limit("--gate", gate, KEYS)


def test_workflow_command_parses() -> None:
    text = (Path(__file__).parents[3] / "deploy" / "github" / "what-if.yml").read_text()
    for gate in ("hit_rate.difference>=-1%", "ttft.p95.ratio<=1.05"):
        assert f"--gate '{gate}'" in text
        parse_limit("--gate", gate, KEYS)
    # The base is the target branch: the first parent of the merge commit, which a checkout of depth 1 has not.
    assert '--base "num-gpu-blocks=$(git show HEAD^1:num-gpu-blocks)"' in text
    assert "fetch-depth: 2" in text


def test_exit_code_by_gates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shared(tmp_path / "t.jsonl", 30, 400.0)
    save_model(default_model(), tmp_path / "model.json")
    cold = ["what-if", str(tmp_path / "t.jsonl"), "--latency-model", str(tmp_path / "model.json"), "--cold-prompts"]
    assert main([*cold, "--members", "3", "--gate", "hit_rate>=0"]) == 0
    assert "gate passed: hit_rate>=0" in capsys.readouterr().out
    assert main([*cold, "--members", "3", "--gate", "hit_rate.difference>=-1%"]) == 1
    assert "gate FAILED: hit_rate.difference>=-1%" in capsys.readouterr().out
    assert main([*cold[:-1], "--members", "2", "--gate", "hit_rate>=100%"]) == 1
    assert "gate FAILED: hit_rate>=100%: " in capsys.readouterr().out
