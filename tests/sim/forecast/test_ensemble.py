"""Ensembles: each member is a run of the simulator by itself, and the spread is that of the model."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from sim.engine.simulatedrequest import OUTCOMES
from sim.forecast.ensemble import forecast, interval, members
from sim.latency.modelfile import Model, default_model, save_model
from sim.latency.stepcost import DECODES, RECEIVED, STEPS
from sim.workload.arrivals import Arrivals, plan_arrivals
from tests.sim.forecast.conftest import write_shared
from tests.sim.oracles.arrival import objects
from tests.sim.oracles.simulation import simulate
from tracefile.records.schema import Meta, Record, RequestId
from wire.process import module_command, module_environment


@pytest.fixture(scope="module")
def arrivals(synthetic: ModuleType) -> Arrivals:
    records: list[Record] = synthetic.calibration(seed=3, prompts=6, mixed=30)
    impatient = Record(
        request_id=RequestId("impatient"),
        arrival_ms=21_000.0,
        prompt_tokens=9_000,
        output_tokens=0,
        max_tokens=9,
        status="client_abort",
        e2e_ms=20.0,
        block_hashes=[],
    )
    refused = Record(
        request_id=RequestId("refused"),
        arrival_ms=22_000.0,
        prompt_tokens=90,
        status="error",
        http_status=429,
        e2e_ms=2.0,
    )
    return plan_arrivals(Meta(block_size=32), [*records, impatient, refused], 32, replay_sessions=True)


def drawn_model() -> Model:
    model = default_model()
    row = [parameter.value for parameter in model.parameters.values()]
    return msgspec.structs.replace(model, draws=[[value * share for value in row] for share in (0.9, 1.0, 1.3)])


def test_member_equals_a_single_run(arrivals: Arrivals) -> None:
    model = drawn_model()
    drawn = members(model, 4, seed=5)
    ensemble = forecast(arrivals, model.engine, drawn, seed=None)
    assert ensemble.members == 4
    for number, member in enumerate(drawn):
        alone = simulate(objects(arrivals), model.engine, member)
        for position, request_run in enumerate(alone.runs):
            assert OUTCOMES[ensemble.outcome[number, position]] == request_run.outcome
            assert ensemble.arrival_ms[number, position] == request_run.arrival_ms
            assert nan_or(ensemble.ttft_ms[number, position]) == request_run.ttft_ms
            assert nan_or(ensemble.e2e_ms[number, position]) == request_run.e2e_ms
            assert ensemble.output_tokens[number, position] == len(request_run.token_steps)
            cached = None if request_run.request is None else request_run.request.cached_tokens
            assert ensemble.cached_tokens[number, position] == (-1 if cached is None else cached)
        assert ensemble.gaps_ms[number].tolist() == [gap for request_run in alone.runs for gap in request_run.itl_ms]
    assert [OUTCOMES[code] for code in ensemble.outcome[0, -2:]] == ["aborted", "as_recorded"]
    assert math.isnan(ensemble.ttft_ms[0, -2])


def nan_or(value: float) -> float | None:
    return None if math.isnan(value) else value


def test_draws_are_used_evenly() -> None:
    model = drawn_model()
    t0 = model.parameters["t0_ms"].value
    shares = [member.costs[STEPS] / t0 for member in members(model, 6, seed=0)]
    assert sorted(round(share, 9) for share in shares) == [0.9, 0.9, 1.0, 1.0, 1.3, 1.3]


def test_drift_is_a_constant_speed_per_member() -> None:
    model = msgspec.structs.replace(default_model(), drift_log_sd=0.1)
    drawn = members(model, 101, seed=0)
    speeds = np.array([member.costs[STEPS] / model.costs[STEPS] for member in drawn])
    assert np.median(speeds) == pytest.approx(1.0)  # the quantiles at i of 102 are symmetric
    assert np.log(speeds).std() == pytest.approx(0.1, rel=0.05)
    for member, speed in zip(drawn, speeds, strict=True):
        assert member.costs[RECEIVED] == pytest.approx(model.costs[RECEIVED] * speed)
        assert member.costs[DECODES] == pytest.approx(model.costs[DECODES] * speed)


def test_drift_from_few_captures_has_heavier_tails() -> None:
    model = msgspec.structs.replace(default_model(), drift_log_sd=0.1, drift_freedom=5)
    drawn = members(model, 201, seed=0)
    logs = np.sort(np.log([member.costs[STEPS] / model.costs[STEPS] for member in drawn]))
    # Student's t of 5 degrees of freedom is beyond 2.015 in a twentieth of cases, the normal beyond 1.645.
    assert logs[191] == pytest.approx(0.2015, rel=0.02)
    assert np.median(logs) == pytest.approx(0.0)


def test_scenarios_share_random_numbers(arrivals: Arrivals) -> None:
    """Nothing is shared in the isolated prompts' first turns: with caching off they come out the same, member by
    member."""
    drawn = members(drawn_model(), 3, seed=1)
    config = default_model().engine
    cached = forecast(arrivals, config, drawn, seed=7)
    uncached = forecast(arrivals, replace(config, enable_prefix_caching=False), drawn, seed=7)
    first = arrivals.ids.index("cold 0")
    np.testing.assert_array_equal(cached.ttft_ms[:, first], uncached.ttft_ms[:, first])
    assert (cached.cached_tokens.sum(axis=1) > 0).all()
    assert (uncached.cached_tokens.max(axis=1) == 0).all()


def test_gaps_are_thinned(arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    config, drawn = default_model().engine, [default_model()]
    complete = forecast(arrivals, config, drawn, seed=7).gaps_ms[0]
    monkeypatch.setattr("sim.forecast.ensemble.MOST_GAPS", 100)
    thinned = forecast(arrivals, config, drawn, seed=7).gaps_ms[0]
    step = -(-len(complete) // 100)
    np.testing.assert_array_equal(thinned, complete[::step])


def test_intervals_are_order_statistics_and_may_be_open() -> None:
    result = interval(np.array([*range(1, 20), np.inf]))
    assert result == (10.0, 1.0, math.inf)
    assert interval(np.array([1.0, np.inf, np.inf, np.inf]))[0] == np.inf
    assert math.isnan(interval(np.array([np.nan]))[0])


def test_processes_give_the_same_members(arrivals: Arrivals) -> None:
    config, drawn = default_model().engine, members(drawn_model(), 5, seed=1)
    calls: list[int] = []
    alone = forecast(arrivals, config, drawn, seed=7, procs=1)
    several = forecast(arrivals, config, drawn, seed=7, procs=2, done=lambda: calls.append(1))
    assert len(calls) == 5
    for name in ("outcome", "arrival_ms", "ttft_ms", "e2e_ms", "output_tokens", "cached_tokens", "preemptions"):
        np.testing.assert_array_equal(getattr(alone, name), getattr(several, name))
    for first, second in zip(alone.gaps_ms, several.gaps_ms, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(signal.SIGINT, 130, b""), (signal.SIGKILL, 2, b"sim: error: a worker process died, ")],
)
def test_interrupts_and_dead_processes_print_a_single_line(
    number: signal.Signals, code: int, message: bytes, tmp_path: Path
) -> None:
    """Ctrl-C reaches all processes of the command; SIGKILL one of its workers."""
    write_shared(tmp_path / "shared.jsonl", 60, 400.0)
    save_model(default_model(), tmp_path / "model.json")
    given = ("shared.jsonl", "--latency-model", "model.json", "--members", "20000")
    command = module_command("sim", "what-if", *given)
    settings: Any = {"env": module_environment(), "cwd": tmp_path, "start_new_session": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings) as process:
        try:
            while len(workers := [pid for pid, parent in session(process.pid) if parent == process.pid]) < 2:
                assert process.poll() is None
                time.sleep(0.01)
            time.sleep(0.2)  # they are at their members
            os.kill(workers[0], number) if number == signal.SIGKILL else os.killpg(process.pid, number)
            output, errors = process.communicate(timeout=60)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    lines = [line for line in errors.splitlines() if not line.startswith(b"forecasts: ")]
    assert (process.returncode, output, len(lines)) == (code, b"", int(bool(message))), lines
    assert b"".join(lines).startswith(message)
    while session(process.pid):  # child processes exit soon after
        time.sleep(0.01)


def session(leader: int) -> list[tuple[int, int]]:
    """Ids of the processes of a session, with their parents'."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = path.read_text().rpartition(") ")[2].split()
            if int(words[3]) == leader and words[0] != "Z":
                processes.append((int(path.parent.name), int(words[1])))
    return processes
