"""Scenarios parsed from flags, and the load of each scenario."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest

from sim.forecast.captured import Captured, at_rate, plan, read_captured
from sim.forecast.scenarios import Scenario, add_scenario_flags, parse_base, scenarios_of
from sim.latency.modelfile import default_model
from sim.workload.arrivals import NOBODY
from tests.sim.oracles.arrival import objects
from tracefile.commandline.parser import Parser
from tracefile.files.writing import TraceWriter
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, Engine, Meta, Record, RequestId, Workload


def parsed(*flags: str) -> list[Scenario]:
    parser = Parser("sim what-if")
    add_scenario_flags(parser)
    return scenarios_of(parser.parse_args(flags))


def captured(records: list[Record], *, paced: bool) -> Captured:
    return Captured(Path("t.jsonl"), "digest", Meta(block_size=32), records, default_model().engine, paced)


def test_values_and_flags_give_rows() -> None:
    assert parsed() == []
    assert [scenario.name for scenario in parsed("--rate", "0.5,1,2", "--max-num-seqs", "8,16", "--cold-prompts")] == [
        "cold prompts, rate ×0.5, max-num-seqs 8",
        "cold prompts, rate ×0.5, max-num-seqs 16",
        "cold prompts, max-num-seqs 8",
        "cold prompts, max-num-seqs 16",
        "cold prompts, rate ×2, max-num-seqs 8",
        "cold prompts, rate ×2, max-num-seqs 16",
    ]
    assert [scenario.name for scenario in parsed("--no-prefix-caching")] == ["prefix caching off"]


def test_base_applies_to_every_scenario() -> None:
    base = parse_base("rate=0.1,num-gpu-blocks=29600,block-size=512,no-prefix-caching")
    assert base == Scenario({"num_gpu_blocks": 29_600, "block_size": 512, "enable_prefix_caching": False}, 0.1)
    parser = Parser("sim what-if")
    add_scenario_flags(parser)
    scenarios = scenarios_of(parser.parse_args(["--num-gpu-blocks", "29600,14800"]), base)
    assert [scenario.name_beside(base) for scenario in scenarios] == ["num-gpu-blocks 14800"]
    assert (scenarios[0].rate, scenarios[0].settings["block_size"]) == (0.1, 512)
    other = Scenario({}, events=("kill:0@1s",), cold_prompts=True)
    assert Scenario({}).name_beside(other) == "no cold-prompts, no event"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate=fast", "--base rate: 'fast'; expected a number above 0"),
        ("num-gpu-blocks", "--base num-gpu-blocks: ''; expected a whole number"),
        ("cache=4", "--base: 'cache=4'; expected some of cold-prompts, rate=X, num-gpu-blocks=N"),
    ],
)
def test_invalid_base_prints_a_single_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_base(text)
    assert str(refused.value).startswith(message)


def test_a_rate_divides_offsets_and_leaves_think_times(synthetic: ModuleType) -> None:
    records = synthetic.calibration(0, prompts=3, mixed=4)
    before = plan(captured(records, paced=True), Scenario({})).arrivals
    twice = at_rate(before, 2.0)
    roots = before.parents == NOBODY
    assert (twice.arrival_ms[roots] == before.arrival_ms[roots] / 2.0).all()
    np.testing.assert_array_equal(twice.think_ms, before.think_ms)
    shifted = replace(before, arrival_ms=before.arrival_ms + 600.0)
    assert at_rate(shifted, 4.0).arrival_ms.min() == 600.0


def test_block_size_keeps_the_memory(synthetic: ModuleType) -> None:
    there = captured(synthetic.calibration(0, prompts=2, mixed=0), paced=False)
    assert there.engine.usable_blocks == 4_095
    assert plan(there, Scenario({"block_size": 64})).engine.usable_blocks == 2_047
    both = Scenario({"num_gpu_blocks": 100, "block_size": 64})
    assert plan(there, both).engine.num_gpu_blocks == 100


def test_trace_settings_complete_the_model(tmp_path: Path, synthetic: ModuleType) -> None:
    path = tmp_path / "t.jsonl"
    with TraceWriter(path, Meta(block_size=32, engine=Engine(num_gpu_blocks=77, max_num_seqs=None))) as writer:
        for record in synthetic.calibration(0, prompts=2, mixed=2):
            writer.write(record)
    model = default_model()
    read = read_captured(path, model)
    assert read.engine == replace(model.engine, num_gpu_blocks=77)
    assert read.paced  # it has parents


def test_replay_trace_keeps_the_recorded_pacing(tmp_path: Path, synthetic: ModuleType) -> None:
    for pattern, cold, paced in (("replay", False, False), ("replay-sessions", True, True)):
        path = tmp_path / f"{pattern}.jsonl"
        with TraceWriter(path, Meta(block_size=32, workload=Workload(pattern=pattern, cold_prompts=cold))) as writer:
            for record in synthetic.calibration(seed=1, prompts=3, mixed=2):
                writer.write(record)
        read = read_captured(path, default_model())
        assert read.paced is paced
        hashes = [key for arrival in objects(plan(read, Scenario({})).arrivals) for key in arrival.hashes]
        assert (len(set(hashes)) == len(hashes)) is cold


def test_capture_with_windows_needs_groups(tmp_path: Path) -> None:
    path, groups = tmp_path / "t.jsonl", "full:32+window(256):32*5"
    facts = Engine(num_gpu_blocks=500, block_size=32, extra={"sliding_window": 256, "kv_cache_groups": 6})
    with TraceWriter(path, Meta(block_size=32, engine=facts)) as writer:
        keys = [BlockHash(1), BlockHash(2)]
        writer.write(Record(request_id=RequestId("a"), arrival_ms=0.0, prompt_tokens=64, block_hashes=keys))
    fitted = default_model()
    with pytest.raises(InputError, match=r"sliding_window: 256; expected a model of sim calibrate --kv-groups"):
        read_captured(path, fitted)
    known = msgspec.structs.replace(fitted, engine=replace(fitted.engine, kv_groups=groups, block_size=32))
    read = read_captured(path, known)
    assert (read.engine.kv_groups, read.engine.block_size, read.engine.num_gpu_blocks) == (groups, 32, 500)
    load = plan(read, Scenario({}, replicas=2))
    assert load.fleet is not None
    assert (len(load.fleet.names), load.engine.kv_groups) == (2, groups)
