"""The fidelity rig: loads sized to an engine, the budget, wheels in pieces, one round on the embedded engine."""

import math
from pathlib import Path

import pytest

from scripts.fidelity import capturing
from scripts.fidelity.__main__ import main
from scripts.fidelity.capturing import read_manifest
from scripts.fidelity.loads import (
    SCHEDULER,
    Capture,
    Probe,
    Round,
    capture_named,
    sized_round,
)

PROBE = Probe(short_ms=20.0, long_ms=20.0 + 0.04 * (8192 - 64), output_ms=0.5)
"""An accelerator: 25,000 prompt tokens a second, a step of 8 ms for 16 outputs."""
SMALL_LOAD = "--pattern poisson --rate 8 --number 4 --seed 3 --prompt-tokens 64 --output-tokens 2"


def test_loads_are_below_saturation_of_the_cold_engine() -> None:
    loads = sized_round(PROBE, ("--max-num-seqs", "256", "--max-num-batched-tokens", "8192"), 700_000, 40_960).loads
    # Cold, a turn takes 20 + 10,600 × 0.04 + 40 × 0.5 = 464 ms, a single request 131 ms: 0.6 of the engine is
    # 1.29 turns or 0.26 sessions, 4.6 singles a second, and 37 at once every 8 s.
    assert PROBE.service_ms(10_600, 40) == pytest.approx(464.0)
    assert "--prompt-tokens 64:24000 --parallel 64 --number 443" in loads["calibration-1"]
    assert "--rate 0.26 --duration 60s" in loads["session-fast"]
    assert "--rate 4.6 --number 330" in loads["poisson-long"]
    assert "0:3700,0.01:0,8:3700,8.01:0" in loads["burst"]
    assert len({flags.split("--seed ")[1] for flags in loads.values()}) == 6, "no gate has a calibration's seed"
    # Two of the longest prompts fit into a small cache; a small engine gets no more at once than it takes.
    small = sized_round(PROBE, SCHEDULER, 20_000, 16_384).loads
    assert "--prompt-tokens 64:8000 --parallel 32" in small["calibration-2"]
    assert "0:3200,0.01:0" in small["burst"]


def test_captures_follow_the_captures_that_they_replay() -> None:
    every = Round(loads={}).captures()
    assert len(every) == len(set(every)) == 21
    for index, capture in enumerate(every):
        warm = Capture(capture.load)
        assert capture == warm or warm in every[:index]
        assert capture_named(capture.name) == capture
    assert capture_named("session-fast-cold-replayed") == Capture("session-fast", "cold-replayed")
    assert {capture.way for capture in every if capture.load.startswith("calibration")} == {"warm"}


def test_interrupted_round_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVTAPE_KEY_FILE", str(tmp_path / "key"))
    order = ("warm: burst", "cold-replayed: burst", "uncached: burst")
    monkeypatch.setattr(capturing, "sized_round", lambda *_: Round(loads={"burst": SMALL_LOAD}, order=order))
    # Room for the captures of the first engine, on a machine of any speed; not for another start.
    monkeypatch.setattr(capturing, "START_S", math.inf)
    flags = ["capture", str(tmp_path / "r"), "--engine", "sim", "--budget"]
    assert main([*flags, "10m"]) == 0
    assert "1 captures are missing: run the command again" in capsys.readouterr().out
    made = [read_manifest(tmp_path / "r", Capture("burst", way)) for way in ("warm", "cold-replayed")]
    assert [capture and capture.requests for capture in made] == [4, 4]
    monkeypatch.setattr(capturing, "engine", lambda *_, **__: pytest.fail("started an engine"))
    assert main([*flags, "1s"]) == 0
