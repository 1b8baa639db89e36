"""The fidelity matrix: what it captures, what it keeps, and one capture on the embedded engine."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from scripts.fidelity import capturing
from scripts.fidelity.capturing import capture_missing, missing_by_engine
from scripts.fidelity.coreclock import CoreClock, clocked, middle_mean
from scripts.fidelity.engines import EngineKind, engine_command
from scripts.fidelity.loads import LOADS, Capture, EngineSettings, captures
from scripts.fidelity.manifest import (
    Manifest,
    definition,
    index,
    manifest_path,
    off_pace,
    read_manifest,
    trace_path,
    write_manifest,
)
from scripts.fidelity.sizing import add_sized_loads
from scripts.matrix import selected
from tracefile import load_trace

SMALL_LOAD = "--pattern poisson --rate 8 --number 4 --seed 3 --prompt-tokens 64 --output-tokens 2"


def manifest_of(capture: Capture) -> Manifest:
    return Manifest(
        name=capture.name,
        shape=capture.shape,
        load=capture.load,
        way=capture.way,
        definition=definition(capture),
        command="loadgen --seed 1",
        engine_command="sim serve",
        engine_version="0",
        kvtape_commit="abc",
        machine="any",
        began_utc="2026-11-21T14:30:05+00:00",
        wall_s=1.4,
        load_average=0.5,
        others_share=0.5,
        stolen_share=0.01,
        probes_ms=[130.0, 110.4, 120.0],
        core_python_ms=0.514,
        core_matrix_ms=0.4,
        preemptions=2,
        requests=3,
        digest="0" * 64,
    )


def make(out: Path, capture: Capture) -> None:
    trace_path(out, capture).parent.mkdir(parents=True, exist_ok=True)
    trace_path(out, capture).touch()
    write_manifest(out, capture, manifest_of(capture))


def test_every_capture_is_made_once_and_after_what_it_replays() -> None:
    every = captures()
    assert len(set(every)) == len(every)
    assert {capture.load for capture in every if capture.shape == "128x2"} == LOADS["128x2"].keys()
    for place, capture in enumerate(every):
        warm = Capture(capture.shape, capture.load)
        assert capture == warm or warm in every[:place], f"{capture.name} comes before the load's warm capture"


def test_a_model_is_fitted_on_calibrations_alone_and_judged_by_other_seeds() -> None:
    for loads in LOADS.values():
        seeds = [flags.split("--seed ")[1].split()[0] for flags in loads.values()]
        assert len(set(seeds)) == len(seeds)
    assert {capture.way for capture in captures() if capture.is_calibration} == {"warm"}


def test_a_way_needs_its_own_engine() -> None:
    engines = {way: Capture("256x4", "burst", way).engine for way in ("warm", "again", "small", "uncached")}
    assert engines["warm"] == engines["again"] == EngineSettings(256, 4)
    assert engines["small"] == EngineSettings(256, 4, blocks=520)
    assert engines["uncached"] == EngineSettings(256, 4, prefix_caching=False)


def test_a_round_on_sglang_starts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model and settings are those of rounds on vLLM; it is an engine of its own all the same."""
    started: list[str] = []

    @contextlib.contextmanager
    def engine(kind: str, *_: object) -> Iterator[str]:
        started.append(kind)
        yield "http://engine"

    monkeypatch.setattr(capturing, "engine", engine)
    monkeypatch.setattr(capturing, "capture_each", lambda *_: None)
    wanted = [Capture("128x2-third", "burst"), Capture("128x2-sglang", "burst")]
    kinds: tuple[EngineKind, ...] = ("vllm", "sim")
    for asked in kinds:
        capture_missing(asked, tmp_path, wanted, wanted)
    assert started == ["vllm", "sglang", "sim", "sim"]
    command = engine_command("sglang", Capture("128x2-sglang", "burst", "uncached").engine)
    assert command.startswith("-m sglang.launch_server --model-path ~/.cache/kvtape/vllm/model-128x2 ")
    assert command.endswith(" --disable-radix-cache")


def test_what_is_whole_is_kept_and_the_rest_is_made_by_engine(tmp_path: Path) -> None:
    wanted = [
        Capture("128x2", "burst"),
        Capture("128x2", "burst", "again"),
        Capture("128x2", "burst", "uncached"),
        Capture("128x2", "staircase"),
    ]
    make(tmp_path, wanted[0])
    # Interrupted: a trace without its manifest.
    trace_path(tmp_path, wanted[3]).touch()
    runs = list(missing_by_engine(tmp_path, wanted))
    assert [[capture.name for capture in run] for _, run in runs] == [
        ["burst-again"],
        ["burst-uncached"],
        ["staircase"],
    ]
    assert [settings.prefix_caching for settings, _ in runs] == [True, False, True]


def test_another_definition_is_another_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = Capture("128x2", "burst")
    make(tmp_path, capture)
    assert read_manifest(tmp_path, capture) == manifest_of(capture)
    monkeypatch.setitem(LOADS["128x2"], "burst", LOADS["128x2"]["burst"] + " --number 3")
    assert read_manifest(tmp_path, capture) is None


def test_the_index_has_a_line_for_each_capture_that_there_is(tmp_path: Path) -> None:
    made, missing = Capture("128x2", "burst"), Capture("128x2", "staircase")
    make(tmp_path, made)
    assert index(tmp_path, [made, missing]).splitlines()[2:] == [
        "| 128x2/burst | 3 | 2 | 120 | 0.51 / 0.40 | 50% | 1.0% | 0.5 | 1 | 14:30:05 | `loadgen --seed 1` |"
    ]


def test_a_capture_on_a_machine_of_another_pace_is_named(tmp_path: Path) -> None:
    loads = ["session-fast", "session-short", "poisson-slow", "poisson-fast", "staircase", "burst"]
    made = [Capture("128x2", load) for load in loads]
    clocks = [0.42, 0.40, 0.31, 0.44, 0.43, None]
    for number, (capture, clock) in enumerate(zip(made, clocks, strict=True), 1):
        make(tmp_path, capture)
        manifest = msgspec.structs.replace(manifest_of(capture), core_python_ms=clock)
        write_manifest(tmp_path, capture, manifest)
        if number < 5:
            assert off_pace(tmp_path, made) == []  # too few to say
    [said] = off_pace(tmp_path, made)
    assert said.startswith(
        "128x2/poisson-slow: the engine's core was clocked at 0.31 ms, in the middle of its round at 0.42"
    )
    another = Capture("128x2-second", "burst")  # another day: its clock is no news for the first round
    make(tmp_path, another)
    write_manifest(tmp_path, another, msgspec.structs.replace(manifest_of(another), core_python_ms=0.2))
    assert off_pace(tmp_path, [*made, another]) == [said]


def test_captures_are_selected_by_what_their_names_are_like() -> None:
    found = [one.name for one in selected(["256x4"], ["256x4/session-fast*", "128x2/*", "*/poisson-slow"])]
    ways = ["", "-cold-replayed", "-uncached", "-small", "-again", "-replayed"]
    assert sorted(found) == sorted(["poisson-slow", *(f"session-fast{way}" for way in ways)])


def test_a_capture_and_its_cold_replay_on_the_embedded_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOADS["128x2"], "burst", SMALL_LOAD)
    monkeypatch.setenv("KVTAPE_KEY_FILE", str(tmp_path / "key"))
    wanted = [Capture("128x2", "burst"), Capture("128x2", "burst", "cold-replayed")]
    capture_missing("sim", tmp_path, wanted, wanted)
    found = [read_manifest(tmp_path, capture) for capture in wanted]
    assert [one and (one.requests, one.preemptions, len(one.probes_ms)) for one in found] == [(4, 0, 5), (4, 0, 5)]
    _, records = load_trace(trace_path(tmp_path, wanted[1]))
    assert {record.cached_tokens for record in records} == {0}
    made = [trace_path(tmp_path, capture).stat().st_mtime_ns for capture in wanted]
    with monkeypatch.context() as offline:
        # Nothing is missing, so no engine is started and nothing is sent.
        offline.setattr(httpx, "post", lambda *_, **__: pytest.fail("sent something"))
        capture_missing("sim", tmp_path, wanted, wanted)
    assert [trace_path(tmp_path, capture).stat().st_mtime_ns for capture in wanted] == made


def test_a_core_is_clocked_while_something_else_runs() -> None:
    with clocked(min(os.sched_getaffinity(0))) as core:
        assert core.python_ms is None
        time.sleep(1.5)
    assert core.python_ms is not None
    assert core.matrix_ms is not None
    assert 0.0 < core.python_ms < 1000.0
    assert 0.0 < core.matrix_ms < 1000.0


def test_without_a_core_of_its_own_nothing_is_clocked() -> None:
    with clocked(None) as core:
        pass
    assert core == CoreClock()


def test_hiccups_do_not_enter_a_clock() -> None:
    assert middle_mean([2.0, *[1.0] * 36, 1.5, 90.0, 0.1]) == pytest.approx(36.5 / 36, abs=1e-4)
    assert middle_mean([3.0]) == 3.0
    assert middle_mean([]) is None


def test_committed_captures_are_of_the_present_definition() -> None:
    """A rename of a load's flags must rename them in the manifests too, or the captures count as missing."""
    folder = Path(__file__).parents[2] / "data" / "captures"
    add_sized_loads(folder)
    made = [capture for capture in captures() if manifest_path(folder, capture).exists()]
    assert made
    assert [capture for capture in made if read_manifest(folder, capture) is None] == []
    assert index(folder, made) == (folder / "index.md").read_text()
