"""A run says which share of the machine it offered: what ``loadgen selftest`` keeps, later runs are measured by."""

from pathlib import Path
from typing import Any

import pytest

from loadgen.__main__ import main
from loadgen.core.capacity import Capacity, save_capacity
from tests.jsonoutput import json_of

# 1 ms a request, 1 µs an event, nothing a prompt token: 1,000 requests/s are the machine.
SLOW = Capacity(
    machine="m",
    measured="2026-01-02",
    procs=1,
    requests_per_s=1 / 0.001016,
    events_per_s=256 / 0.001256,
    prompt_tokens_per_s=8192 / 0.001016,
    requests_per_core_s=1000.0,
    events_per_core_s=1000.0,
    at_rates=[],
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(engine: Any, folder: Path) -> dict[str, Any]:
    """A run of 20 requests of 16 tokens."""
    flags = ["--parallel", "4", "--number", "20", "--prompt-tokens", "20", "--overwrite"]
    found: dict[str, Any] = json_of(main, ["--url", engine.url, "-o", str(folder / "t.jsonl"), *flags])
    return found


def test_a_run_on_a_machine_without_a_selftest_says_nothing(engine: Any, tmp_path: Path) -> None:
    assert run(engine, tmp_path)["offered_share"] is None


def test_a_run_says_its_share(engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_capacity(SLOW)
    summary = run(engine, tmp_path)
    # However long it took: 20 ms for the requests, 320 µs for their tokens. Seconds are rounded to the ms.
    assert summary["offered_share"] * summary["seconds"] == pytest.approx(0.02032, rel=0.05)
    assert "of what this machine can send (loadgen selftest)" in capsys.readouterr().err


def test_a_run_beyond_the_machine_is_flagged(engine: Any, tmp_path: Path) -> None:
    slower = {"requests_per_s": 1.0, "events_per_s": 256.0, "prompt_tokens_per_s": 8192.0}
    save_capacity(Capacity(**{name: getattr(SLOW, name) for name in SLOW.__struct_fields__} | slower))
    summary = run(engine, tmp_path)
    assert summary["offered_share"] > 1
    (note,) = [note for note in summary["notes"] if note.startswith("client near its limit")]
    assert "offered more than this machine can send" in note
