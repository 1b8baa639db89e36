"""The fidelity rig: loads sized to an engine, the budget, wheels in pieces, one round on the embedded engine."""

import json
import math
import time
from pathlib import Path

import msgspec
import pytest

from scripts import vllm_engine
from scripts.fidelity import capturing
from scripts.fidelity.__main__ import main
from scripts.fidelity.capturing import Bench, Manifest, read_manifest, trace_path
from scripts.fidelity.judging import Cell, tables
from scripts.fidelity.loads import (
    SCHEDULER,
    Capture,
    Probe,
    Round,
    capture_named,
    read_round,
    sessions_in_a_round,
    sized_round,
    write_round,
)
from scripts.gpu_engine import server_command
from scripts.vllm_engine import ModelShape

PROBE = Probe(short_ms=20.0, long_ms=20.0 + 0.04 * (8192 - 64), output_ms=0.5)
"""An accelerator: 25,000 prompt tokens a second, a step of 8 ms for 16 outputs."""
SMALL_LOAD = "--pattern poisson --rate 8 --number 4 --seed 3 --prompt-tokens 64 --output-tokens 2"
MANIFEST = Manifest(
    command="loadgen --seed 1",
    engine_version="0",
    kvtape_commit="abc",
    machine="any",
    began_utc="2026-11-21T14:30:05+00:00",
    wall_s=40.0,
    load_average=0.5,
    others_share=0.5,
    preemptions=2,
    requests=3,
)


def test_loads_are_sized_to_what_the_cold_engine_can_do() -> None:
    found = sized_round(PROBE, ("--max-num-seqs", "256", "--max-num-batched-tokens", "8192"), 700_000, 40_960).loads
    # Cold, a turn takes 20 + 10,600 × 0.04 + 40 × 0.5 = 464 ms, a single request 131 ms: 0.6 of the engine is
    # 1.29 turns or 0.26 sessions, 4.6 singles a second, and 37 at once every 8 s.
    assert PROBE.service_ms(10_600, 40) == pytest.approx(464.0)
    assert "--prompt-tokens 64:24000 --parallel 64 --number 443" in found["calibration-1"]
    assert "--rate 0.26 --duration 60s" in found["session-fast"]
    assert "--rate 4.6 --number 330" in found["poisson-long"]
    assert "0:3700,0.01:0,8:3700,8.01:0" in found["burst"]
    assert len({flags.split("--seed ")[1] for flags in found.values()}) == 6, "no gate has a calibration's seed"
    # Two of the longest prompts fit into a small cache; a small engine gets no more at once than it takes.
    small = sized_round(PROBE, SCHEDULER, 20_000, 16_384).loads
    assert "--prompt-tokens 64:8000 --parallel 32" in small["calibration-2"]
    assert "0:3200,0.01:0" in small["burst"]


def test_a_calibration_has_each_stage_once() -> None:
    """As docs/load.md and the demo have it: 78 sessions of 8 at once, 130 of 16."""
    assert [sessions_in_a_round(f"--prompt-tokens 64:10000 --parallel {at_once}") for at_once in (8, 16)] == [78, 130]


def test_captures_come_after_those_that_they_replay_and_are_known_by_their_names() -> None:
    every = Round(loads={}).captures()
    assert len(every) == len(set(every)) == 21
    for place, capture in enumerate(every):
        warm = Capture(capture.load)
        assert capture == warm or warm in every[:place]
        assert capture_named(capture.name) == capture
    assert capture_named("session-fast-cold-replayed") == Capture("session-fast", "cold-replayed")
    assert {capture.way for capture in every if capture.load.startswith("calibration")} == {"warm"}


def test_no_capture_begins_that_the_budget_has_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, clock = sized_round(PROBE, SCHEDULER, 700_000, 40_960), [1000.0]
    write_round(tmp_path, made)
    assert read_round(tmp_path) == made
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def capture(self: Bench, capture: Capture) -> Manifest:
        trace_path(self.folder, capture).touch()
        clock[0] += 40.0
        return MANIFEST

    monkeypatch.setattr(Bench, "capture", capture)
    # An unknown load is expected to take 95 s: the fourth begins at 120. Then loads are known to take 45: at 160, the
    # fifth would be over at 205; the sixth, at 245, not by 215.
    Bench("sim", "http://engine", tmp_path, made).capture_each(made.captures()[:15], 1215.0)
    done = [capture.name for capture in made.captures() if read_manifest(tmp_path, capture)]
    assert done == ["calibration-1", "session-fast", "poisson-long", "burst", "session-fast-cold-replayed"]


def test_the_default_model_has_the_shape_of_qwen3_8b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape = ModelShape(4096, 36)
    vllm_engine.make_model(shape)
    config = json.loads((shape.directory / "config.json").read_text())
    sizes = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
    assert [config[name] for name in sizes] == [32, 8, 128, 12288, 151936]
    assert config["tie_word_embeddings"] is False
    command = server_command(shape, 8000, ["--no-enable-prefix-caching"])
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert command[-1] == "--no-enable-prefix-caching"
    assert "--enforce-eager" not in command


def test_a_round_on_the_embedded_engine_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVTAPE_KEY_FILE", str(tmp_path / "key"))
    order = ("warm: burst", "cold-replayed: burst", "uncached: burst")
    monkeypatch.setattr(capturing, "sized_round", lambda *_: Round(loads={"burst": SMALL_LOAD}, order=order))
    # Room for the captures of the first engine, on a machine of any speed; not for another start.
    monkeypatch.setattr(capturing, "START_S", math.inf)
    flags = ["capture", str(tmp_path / "r"), "--engine", "sim", "--budget"]
    assert main([*flags, "10m"]) == 0
    assert "1 captures are left: the same command goes on" in capsys.readouterr().out
    made = [read_manifest(tmp_path / "r", Capture("burst", way)) for way in ("warm", "cold-replayed")]
    assert [one and one.requests for one in made] == [4, 4]
    monkeypatch.setattr(capturing, "engine", lambda *_, **__: pytest.fail("started an engine"))
    assert main([*flags, "1s"]) == 0


def test_the_table_has_goals_and_a_row_a_cell() -> None:
    cell = Cell(
        round="128x2",
        gate="burst",
        cohort="all",
        n=120,
        cached_exact=1.0,
        saturated=False,
        errors={"p50": -0.04, "p90": 0.2, "p99": None},
        inside={"p50": True, "p90": False, "p99": None},
    )
    other = msgspec.structs.replace(cell, saturated=True, cohort="turn1", errors=dict.fromkeys(cell.errors, 9.0))
    goals, rows = tables([cell, other]).split("\n\n")
    assert "| p50 | 4.0% | 4.0% | 1 of 1 | yes |" in goals
    assert "| p90 | 20.0% | 20.0% | 0 of 1 | NO |" in goals
    assert "| 128x2 burst |  | 120 | 100.0% |  | -4.0% ✓ | +20.0% ✗ | – |" in rows
    assert "saturated | +900.0% ✓" in rows


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--model", "big"], "--model big: expected HIDDENxLAYERS"), (["--budget", "25"], "--budget: '25' has no unit")],
)
def test_bad_flags_are_named(flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["capture", str(tmp_path), *flags])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
