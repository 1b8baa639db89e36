"""Fleets in ``sim what-if`` and ``sim search``."""

import json
from pathlib import Path
from typing import Any

import pytest

from sim.__main__ import main
from sim.forecast.captured import plan, read_captured
from sim.forecast.scenarios import AS_CAPTURED, Scenario, parse_base
from sim.latency.modelfile import default_model, load_model, save_model
from tracefile.files.writing import TraceWriter
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, Meta, Record, RequestId

MEMBERS = ["--members", "3"]


def write_trace(path: Path, upstreams: int) -> None:
    """Sixty requests on four prompts, in an order that has nothing to do with the engines, so near that they queue."""
    with TraceWriter(path, Meta(block_size=32)) as writer:
        for number in range(60):
            writer.write(
                Record(
                    request_id=RequestId(f"s{number}"),
                    arrival_ms=number * 60.0,
                    e2e_ms=60.0,
                    prompt_tokens=960,
                    output_tokens=3,
                    upstream=f"http://engine-{number % upstreams}:80" if upstreams else None,
                    block_hashes=[BlockHash(number * number % 7 * 100 + block) for block in range(30)],
                )
            )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fleets")
    write_trace(path / "one.jsonl", 0)
    write_trace(path / "three.jsonl", 3)
    save_model(default_model(), path / "model.json")
    return path


def what_if(folder: Path, trace: str, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, object]:
    model = ["--latency-model", str(folder / "model.json")]
    assert main(["what-if", str(folder / trace), *model, *MEMBERS, "--json", *flags]) == 0
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


def test_replicas_and_routes_are_scenarios_with_effects(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = what_if(folder, "one.jsonl", capsys, "--replicas", "2,3", "--route", "round-robin,prefix")["points"]
    assert isinstance(rows, list)
    assert [row["name"] for row in rows if row["kind"] == "scenario"] == [
        f"{count} replicas, {route}" for count in (2, 3) for route in ("round-robin", "prefix")
    ]
    in_turn, aware = rows[-2:]
    assert aware["measures"]["hit_rate"]["value"]["middle"] > in_turn["measures"]["hit_rate"]["value"]["middle"]
    assert in_turn["measures"]["hit_rate"]["difference"]["middle"] < 0.0  # beside the capture's one engine
    assert aware["measures"]["hit_rate"]["difference"]["middle"] == 0.0


def scenario_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the base and the scenarios."""
    return [row for row in result["points"] if row["kind"] in ("base", "scenario")]


def middles(row: dict[str, Any], *names: str) -> list[float]:
    return [row["measures"][name]["value"]["middle"] for name in names]


def test_capture_of_several_engines_is_forecast(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = what_if(folder, "three.jsonl", capsys, "--route", "session")["points"]
    assert isinstance(rows, list)
    assert [row["name"] for row in rows] == ["measured", "forecast of the capture", "session"]
    assert rows[1]["measures"]["hit_rate"]["value"] != rows[2]["measures"]["hit_rate"]["value"]


def test_capture_of_several_engines_is_validated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A single engine has about three times the utilization of each of three; the busiest is reported."""
    busy = []
    for trace in ("one.jsonl", "three.jsonl"):
        flags = ["--latency-model", str(folder / "model.json"), *MEMBERS, "--json", "--no-default-gates"]
        assert main(["validate", str(folder / trace), *flags]) == 0
        printed = capsys.readouterr()
        busy.append(json.loads(printed.out)["forecasts"]["predicted"]["utilization"])
    assert "three.jsonl: requests of 3 upstreams; expected a capture of one engine" in printed.err
    assert busy[1] < 0.6 * busy[0]


def test_single_replica_equals_a_single_engine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = what_if(folder, "one.jsonl", capsys, "--replicas", "1,2")
    rows = result["points"]
    assert isinstance(rows, list)
    same = next(row for row in rows if row["name"] == "1 replica")
    base = next(row for row in rows if row["kind"] == "capture")
    assert {name: measure["value"] for name, measure in same["measures"].items()} == {
        name: measure["value"] for name, measure in base["measures"].items()
    }


def test_fleet_of_a_scenario(folder: Path) -> None:
    three = read_captured(folder / "three.jsonl", load_model(folder / "model.json"))
    fleets = [
        plan(three, scenario).fleet
        for scenario in (AS_CAPTURED, Scenario({}, replicas=1), parse_base("replicas=2,route=prefix:lag=250ms"))
    ]
    assert fleets[0] is not None
    assert fleets[0].names == tuple(f"http://engine-{number}:80" for number in range(3))
    assert fleets[1] is None
    assert fleets[2] is not None
    assert (fleets[2].names, fleets[2].route) == (("0", "1"), "prefix:lag=250ms")


def test_search_for_the_fewest_replicas(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--latency-model", str(folder / "model.json"), "--members", "3", "--json"]
    flags = ["--minimize", "replicas", "--target", "ttft.p90<=100ms", "--between", "1,5", "--route", "prefix"]
    assert main(["search", str(folder / "one.jsonl"), *model, *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    held = {point["settings"]["replicas"]: point["meets"] for point in result["points"]}
    (chosen,) = (point["settings"]["replicas"] for point in result["points"] if "chosen" in point["marks"])
    assert chosen == min(value for value, holds in held.items() if holds)
    assert chosen - 1 not in held or not held[chosen - 1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replicas", "2,x"], "--replicas: x; expected a whole number"),
        (["--replicas", "2", "--route", "prefix,best"], "unknown policy"),
        (["--replicas", "2", "--event", "kill:engine=7:at=1s"], "engine=7; expected 0 to 1"),
        (["--route", "captured"], "names no upstream"),
        (["--route", "session"], "--route: without --replicas; expected both"),
    ],
)
def test_impossible_fleets(folder: Path, flags: list[str], message: str) -> None:
    command = ["what-if", str(folder / "one.jsonl"), "--latency-model", str(folder / "model.json"), *MEMBERS]
    with pytest.raises(InputError) as caught:
        main([*command, *flags])
    assert message in str(caught.value)
