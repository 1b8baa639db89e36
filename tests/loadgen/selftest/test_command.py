"""``loadgen selftest``: its arithmetic on round numbers, its file, and the command itself on this machine."""

from pathlib import Path

import msgspec
import pytest

from loadgen.__main__ import main
from loadgen.core.capacity import Capacity, RateTruth, capacity_file, load_capacity, save_capacity
from loadgen.selftest.command import capacity_lines
from loadgen.selftest.measuring import Runner, truth_server
from tracefile import InputError

# A request costs 84 µs beside its tokens, an event 1 µs, a prompt token 0.5 µs: 228 µs with 16 and 256 of them.
ROUND = Capacity(
    machine="m",
    measured="2026-01-02",
    procs=1,
    requests_per_s=1e6 / 228,
    events_per_s=256e6 / 468,
    prompt_tokens_per_s=8192e6 / 4196,
    requests_per_core_s=5000.0,
    events_per_core_s=600_000.0,
    at_rates=[
        RateTruth(
            rate=50.0,
            requests=400,
            ttft_error_p50_ms=0.1,
            ttft_error_p99_ms=None,
            lag_p50_ms=0.01,
            lag_p99_ms=0.5,
            client_cpu=0.07,
        )
    ],
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_three_loads_tell_what_each_part_of_a_request_costs() -> None:
    assert ROUND.seconds_per_event == pytest.approx(1e-6)
    assert ROUND.seconds_per_prompt_token == pytest.approx(0.5e-6)
    assert ROUND.seconds_per_request == pytest.approx(84e-6)


def test_a_run_s_share_is_its_cost_a_second() -> None:
    # The loads it was measured with are the whole machine.
    assert ROUND.share(round(ROUND.requests_per_s * 100), 438596 * 16, 438596 * 256, 100.0) == pytest.approx(
        1.0, rel=1e-4
    )
    # 100 requests/s of 1,000 prompt and 100 answer tokens: 100 × (84 + 500 + 100) µs.
    assert ROUND.share(1000, 100_000, 1_000_000, 10.0) == pytest.approx(0.0684)
    assert ROUND.share(0, 0, 0, 0.0) == 0.0


def test_noise_makes_no_cost_negative() -> None:
    odd = msgspec.structs.replace(ROUND, events_per_s=1e9, prompt_tokens_per_s=1e9)
    assert (odd.seconds_per_event, odd.seconds_per_prompt_token) == (0.0, 0.0)
    assert odd.seconds_per_request == pytest.approx(228e-6)


def test_it_is_kept_by_machine_and_senders(cache: Path) -> None:
    assert load_capacity() is None
    path = save_capacity(ROUND)
    assert path == capacity_file(1) != capacity_file(2)
    assert path.is_relative_to(cache / "kvtape" / "calibration")
    assert load_capacity() == ROUND
    assert load_capacity(2) is None
    path.write_text("{")
    assert load_capacity() is None


def test_the_table_says_what_was_not_told() -> None:
    lines = capacity_lines(ROUND)
    assert lines[1].split()[:4] == ["most", "requests", "4,386", "/s"]
    assert lines[-1].strip() == (
        "at  50 requests/s    TTFT error p50 0.10 p99 none; lag p50 0.01 p99 0.50 ms; 7% of a core"
    )


def test_the_command_prints_and_keeps_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, int]] = []

    def found(seconds: float, procs: int, folder: Path, tell: object) -> Capacity:
        asked.append((seconds, procs))
        return ROUND

    monkeypatch.setattr("loadgen.selftest.command.measuring.measure_capacity", found)
    assert main(["selftest", "--duration", "2s", "--json"]) == 0
    assert asked == [(2.0, 1)]
    printed = capsys.readouterr()
    assert msgspec.json.decode(printed.out, type=Capacity) == load_capacity() == ROUND
    assert "most requests" in printed.err
    assert f"kept in {capacity_file(1)}" in printed.err


def test_runs_are_counted_by_the_server_and_held_against_it(tmp_path: Path) -> None:
    told: list[str] = []
    runner = Runner(0.5, 1, tmp_path, told.append)
    with truth_server(("--ttft-ms", "1:3", "--tokens-per-write", "16")) as server:
        run = runner.saturated(server, "short answers", 16, 256)
        at = runner.at_rate(server, 40.0)
    # How many is the machine's affair; that none is missed is ours.
    assert len(run.served) == run.summary["sent"] == run.summary["statuses"]["ok"] > 0
    assert {one.tokens for one in run.served} == {16}
    assert run.rate > 0
    assert (at.rate, at.requests) == (40.0, 40)
    assert at.ttft_error_p50_ms is not None
    assert at.ttft_error_p99_ms is not None
    assert 0 <= at.ttft_error_p50_ms <= at.ttft_error_p99_ms
    assert told == ["short answers: 64 requests in flight, for 0.5 s", "40 requests/s, for 1 s"]


def test_what_cannot_be_measured_is_refused() -> None:
    for flags in (["--duration", "0"], ["--procs", "0"]):
        with pytest.raises(InputError, match="--duration, --procs"):
            main(["selftest", *flags])
