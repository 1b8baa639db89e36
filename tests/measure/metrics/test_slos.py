"""SLOs: their grammar, their values on a trace, goodput, and what a trace cannot be judged by."""

import re

import pytest

from measure.metrics.slos import parse_slos
from measure.metrics.trace import measure_run
from tests.measure.metrics.made import request, run_of
from tracefile.records.errors import InputError

RUN = run_of(
    [
        request(
            f"r{number}",
            1000.0 * number,
            session_id=f"s{number // 2}",
            turn=1 + number % 2,
            scheduled_ms=1000.0 * number - 1,
            ttft_ms=100.0 + 100 * number,
            itl_ms=[20.0, 30.0],
            e2e_ms=500.0,
            status="ok" if number < 9 else "error",
            prompt_tokens=100,
            cached_tokens=50,
            output_tokens=3,
        )
        for number in range(10)
    ]
)


@pytest.mark.parametrize(
    ("slo", "value", "met", "n"),
    [
        ("ttft.p50<=500ms", 500.0, True, 10),  # the 5th of 100, 200 … 1000
        ("ttft.p90<900ms", 900.0, False, 10),
        ("ttft.mean<=0.6s", 550.0, True, 10),
        ("turns2+.ttft.max<=1s", 1000.0, True, 5),
        ("turn1.ttft.p99<=0.8s", 900.0, False, 5),
        ("itl.p75<=25ms", 30.0, False, 20),
        ("session.ttfat.p90<=20s", 1800.0, True, 4),  # of the 4 sessions that completed: 1000 + 200 … 1000 + 800
        ("session.hit_rate.p50>=50%", 0.5, True, 4),
        ("success>=99%", 0.9, False, 10),
        ("completion_tps>=2", 27 / 9.5, True, 10),
        ("prompt_tps.steady<100", 700 / 7.6, True, 10),  # 7 of 9 ended after 1.9 s of 9.5
        ("lag.p99<=1ms", 1.0, True, 10),
    ],
)
def test_an_slo_on_a_trace(slo: str, value: float, met: bool, n: int) -> None:
    (result,) = measure_run(RUN, slos=parse_slos([slo])).slos
    assert (result.slo, result.met, result.n) == (slo, met, n)
    assert result.value == pytest.approx(value)


def test_goodput_counts_requests_within_all_slos() -> None:
    good = measure_run(RUN, slos=parse_slos(["ttft.p99<=700ms", "turns2+.ttft.p90<=400ms", "goodput>=10%"])).workload
    assert good.goodput is not None
    # Turn 1: 100, 300, 500 and 700 ms; turn 2: 200 and 400 ms. The limits of a cohort bind no other request.
    assert (good.goodput.requests, good.goodput.share) == (6, 0.6)
    assert good.goodput.requests_per_s == 6 / 9.5
    assert good.goodput.completion_tps == 18 / 9.5
    assert measure_run(RUN, slos=parse_slos(["success>=1%"])).workload.goodput is None


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ("ttfx.p99<=1s", "no metric 'ttfx'; expected one of ttft, "),
        ("ttft<=1s", "ttft: a sample; expected ttft.pNN, ttft.mean, ttft.min or ttft.max"),
        ("ttft.p99<=1", "a limit in number; expected a duration, such as 500ms"),
        ("turn1.session.ttft.p99<=1s", "session.ttft: has no cohorts; expected it without 'turn1'"),
    ],
)
def test_invalid_slos(slo: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_slos([slo])
    assert str(raised.value).startswith(f"--slo {slo}: {message}")


BARE = request("a", 0.0, e2e_ms=9.0)


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ("ttft.p99<=1s", "run.jsonl has no ttft: it needs ttft_ms; expected streamed responses, or a limit on e2e"),
        ("lag.p99<=1s", "has no lag: it needs scheduled_ms; expected a trace of loadgen or replay"),
        ("session.hit_rate.p50>=1%", "it needs prompt_tokens and cached_tokens; capture with tap"),
        ("completion_tps.steady_per_gpu>=1", "has no completion_tps a GPU; expected --gpus N"),
    ],
)
def test_missing_metric_error_has_its_fix(slo: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        measure_run(run_of([BARE]), slos=parse_slos([slo]))
    assert str(caught.value).startswith(f"--slo {slo}: ")
    assert "\n" not in str(caught.value)
