"""Captures sized to an engine: the loads, the budget, wheels in pieces, and one round on the embedded engine."""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from scripts import gpu_capture, vllm_engine
from scripts.fidelity import capturing, sizing
from scripts.fidelity.loads import LOADS, ORDER, SCHEDULER, SCHEDULERS, Capture, Rates, captures, one_round
from scripts.fidelity.manifest import Manifest, read_manifest, trace_path
from scripts.fidelity.sizing import (
    Probe,
    SizedLoads,
    add_sized_loads,
    keep_sized_loads,
    probe_engine,
    sessions_in_a_round,
    sized_loads,
)
from scripts.gpu_engine import server_command
from scripts.job import Workspace
from scripts.matrix import selected
from scripts.vllm_engine import ModelShape
from scripts.wheels import whole_wheels
from tests.scripts.test_matrix_captures import SMALL_LOAD, manifest_of

SHAPE = "4096x36"
PROBE = Probe(short_ms=20.0, long_ms=20.0 + 0.04 * (8192 - 64), output_ms=0.5)
"""An accelerator: 25,000 prompt tokens a second, a step of 8 ms for 16 outputs."""


SIM_SHAPE = "128x2-sized"


@pytest.fixture(autouse=True)
def _matrix_as_it_was() -> Iterator[None]:
    yield
    for shape in (SHAPE, SIM_SHAPE):
        LOADS.pop(shape, None)
        ORDER.pop(shape, None)
        SCHEDULERS.pop(shape, None)


def test_loads_are_sized_to_what_the_cold_engine_can_do() -> None:
    found = sized_loads(PROBE, ("--max-num-seqs", "256", "--max-num-batched-tokens", "8192"), 700_000, 40_960)
    # Cold, a turn takes 20 + 10,600 × 0.04 + 40 × 0.5 = 464 ms, a single request 131 ms: 0.6 of the engine is
    # 1.29 turns or 0.26 sessions, 4.6 singles a second, and 37 at once every 8 s.
    assert PROBE.service_ms(10_600, 40) == pytest.approx(464.0)
    assert list(found.loads) == [
        *("calibration-1", "calibration-2", "calibration-3"),
        *("session-fast", "poisson-long", "burst"),
    ]
    assert "--prompt-tokens 64:24000 --parallel 64 --number 443" in found.loads["calibration-1"]
    assert "--rate 0.26 --duration 60s" in found.loads["session-fast"]
    assert "--rate 4.6 --number 330" in found.loads["poisson-long"]
    assert "--rate-series 0:3700,0.01:0,8:3700,8.01:0" in found.loads["burst"]
    # Two of the longest prompts fit into a small cache; a small engine gets no more at once than it takes.
    small = sized_loads(PROBE, SCHEDULER, 20_000, 16_384)
    assert "--prompt-tokens 64:8000 --parallel 32" in small.loads["calibration-2"]
    assert "--rate-series 0:3200,0.01:0" in small.loads["burst"]


def test_a_calibration_has_each_stage_once() -> None:
    """As docs/load.md and the demo have it: 78 sessions of 8 at once, 130 of 16."""
    assert [sessions_in_a_round(f"--prompt-tokens 64:10000 --parallel {at_once}") for at_once in (8, 16)] == [78, 130]


def test_a_round_of_the_matrix_itself_is_of_the_usual_rates() -> None:
    assert one_round(100, Rates()) == LOADS["128x2-second"]


def test_sized_loads_are_part_of_the_matrix_that_judges_them(tmp_path: Path) -> None:
    assert SHAPE not in LOADS
    keep_sized_loads(tmp_path, SHAPE, sized_loads(PROBE, ("--max-num-seqs", "256"), 700_000, 40_960))
    made = LOADS[SHAPE]
    del LOADS[SHAPE]
    add_sized_loads(tmp_path)
    assert LOADS[SHAPE] == made
    assert SCHEDULERS[SHAPE] == ("--max-num-seqs", "256")
    every = selected([SHAPE], ["*"])
    assert len(every) == len(set(every)) == 21
    # Three captures of each gate, warm and cold, after the calibration and the warm capture that they need.
    ways = [capture.way for capture in every if capture.load == "burst"]
    assert ways == ["warm", "cold-replayed", "again", "again-2", "uncached", "uncached-again"]
    assert [capture.load for capture in every[:4]] == ["calibration-1", "session-fast", "poisson-long", "burst"]
    assert {capture.engine for capture in every[:15]} == {Capture(SHAPE, "burst").engine}  # one start of the engine


def test_no_capture_begins_that_the_budget_has_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_sized_loads(tmp_path, SHAPE, sized_loads(PROBE, SCHEDULER, 700_000, 40_960))
    every, clock = captures([SHAPE]), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    class Bench(capturing.Bench):
        def capture(self, capture: Capture) -> Manifest:
            trace_path(self.out, capture).touch()
            clock[0] += 40.0
            return msgspec.structs.replace(manifest_of(capture), wall_s=40.0)

    bench = Bench("sim", "http://engine", tmp_path, Workspace(tmp_path / "work"))
    # An unknown load is expected to take 95 s: the fourth begins at 120. Then loads are known to take 45: at 160, the
    # fifth would be over at 205; the sixth, at 245, not by 215.
    capturing.capture_each(bench, every[:15], every, 1215.0)
    made = [capture.name for capture in every if read_manifest(tmp_path, capture)]
    assert made == ["calibration-1", "session-fast", "poisson-long", "burst", "session-fast-cold-replayed"]
    assert (tmp_path / "index.md").read_text().count(SHAPE) == 5


def test_wheels_in_pieces_are_put_together_once(tmp_path: Path) -> None:
    folder, joined = tmp_path / "wheels", tmp_path / "joined"
    folder.mkdir()
    for name, text in {"b-1.whl.01": "cd", "b-1.whl.00": "ab", "a-1.whl": "x", "notes.txt": "-"}.items():
        (folder / name).write_text(text)
    found = whole_wheels(folder, joined)
    assert [path.name for path in found] == ["a-1.whl", "b-1.whl"]
    assert found[1].read_text() == "abcd"
    stamp = found[1].stat().st_mtime_ns
    assert whole_wheels(folder, joined)[1].stat().st_mtime_ns == stamp


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
    probed: list[Probe] = []

    def probe(url: str) -> Probe:
        probed.append(probe_engine(url))
        return probed[-1]

    monkeypatch.setenv("KVTAPE_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setattr(capturing, "probe_engine", probe)
    monkeypatch.setattr(sizing, "one_round", lambda *_: {"burst": SMALL_LOAD, "session-short": ""})
    monkeypatch.setattr(sizing, "SIZED_ORDER", ("warm: burst", "uncached: burst"))
    flags = ["--engine", "sim", "--shape", SIM_SHAPE, "--out", str(tmp_path)]
    # Room for the first capture, on a machine of any speed; not for another start of the engine.
    monkeypatch.setattr(capturing, "START_S", math.inf)
    assert gpu_capture.main([*flags, "--budget", "5m"]) == 0
    assert "1 captures are left: the same command goes on" in capsys.readouterr().out
    made = read_manifest(tmp_path, Capture(SIM_SHAPE, "burst"))
    assert made is not None
    assert made.requests == 4
    (found,) = probed
    assert 0.0 < found.short_ms < found.long_ms
    assert found.output_ms > 0.0
    assert SizedLoads(probe=found, loads={"burst": SMALL_LOAD}, order=sizing.SIZED_ORDER, scheduler=SCHEDULER) == (
        msgspec.json.decode((tmp_path / SIM_SHAPE / "loads.json").read_bytes(), type=SizedLoads)
    )
    monkeypatch.setattr(capturing, "engine", lambda *_: pytest.fail("started an engine"))
    assert gpu_capture.main([*flags, "--budget", "1s"]) == 0
    assert len(probed) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--shape", "big"], "--shape big: expected HIDDENxLAYERS"), (["--budget", "25"], "--budget: '25' has no unit")],
)
def test_bad_flags_are_named(flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_capture.main(["--out", str(tmp_path), *flags])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
