"""``report compare`` on traces whose comparison is known: joins, refusals, cohorts, gates, JSON, terminal."""

import contextlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from measure.cohorts import all_cohorts
from report.__main__ import main
from report.compare.comparison import CompareConfig, compare
from report.compare.panels import comparison_cards, comparison_page
from report.output import render_page
from report.pages.panels import Card
from tracefile.files.digest import trace_digest
from tracefile.files.reading import load_trace
from tracefile.files.writing import TraceWriter
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine, Meta, Record, RequestId

MakeTrace = Callable[..., Path]
DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def compared(*argv: object) -> dict[str, Any]:
    """The JSON of one comparison with few draws."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["compare", *map(str, argv), "--bootstrap", "50", "--json"])
    result: dict[str, Any] = json.loads(out.getvalue())
    return result


def write(path: Path, records: list[Record], meta: Meta | None = None) -> Path:
    with TraceWriter(path, meta or Meta(source="tap")) as writer:
        for record in records:
            writer.write(record)
    return path


def answered(number: int, ttft_ms: float, cached: int | None = 0) -> Record:
    return Record(
        request_id=RequestId(f"r{number}"),
        arrival_ms=float(number),
        ttft_ms=ttft_ms,
        e2e_ms=ttft_ms,
        prompt_tokens=100,
        cached_tokens=cached,
    )


def test_uniform_slowdown_error_is_exact(tmp_path: Path, make_trace: MakeTrace) -> None:
    result = compared(f"captured={make_trace('a')}", f"slow={make_trace('b', slower=1.25)}")
    pair = result["pairs"]["slow"]
    assert (pair["truth"], pair["kind"], pair["joined"]) == ("captured", "error", 120)
    ttft = pair["cohorts"]["turns2+"]["ttft"]
    for level in ("p50", "p90", "p95", "p99"):
        # Both sides are drawn together, so a constant factor has an interval of no width; above p50 too few waits are.
        results = ttft[level]
        assert results["error"] == pytest.approx(0.25)
        ends = [results["low"], results["high"]]
        assert ends == (pytest.approx([0.25, 0.25]) if level == "p50" else [None, None])
    assert ttft["median_abs_error"] == pytest.approx(0.25)
    assert ttft["bias"] == pytest.approx(0.25)
    assert pair["cohorts"]["all"]["cached"]["exact_share"] == 1.0


def test_unreported_cached_tokens_are_no_misses(tmp_path: Path) -> None:
    truth = write(tmp_path / "t.jsonl", [answered(n, 10.0, None if n < 3 else 64) for n in range(40)])
    other = write(tmp_path / "o.jsonl", [answered(n, 10.0, 0 if n < 4 else 64) for n in range(40)])
    cached = compared(f"t={truth}", f"o={other}")["pairs"]["o"]["cohorts"]["all"]["cached"]
    assert (cached["joined"], cached["n"], cached["unreported_truth"]) == (40, 37, 3)
    assert cached["exact_share"] == pytest.approx(36 / 37)
    assert cached["token_error"] == pytest.approx(1 / 37)


def test_non_streamed_responses_have_no_ttft(tmp_path: Path) -> None:
    records = [answered(number, 50.0) for number in range(40)]
    for record in records[:30]:
        record.stream, record.ttft_ms = False, None
    result = compared(f"t={write(tmp_path / 't', records)}", f"o={write(tmp_path / 'o', records[30:])}")
    assert "t: 30 of 40 responses were not streamed: no TTFT, no ITL." in result["notes"]
    assert not any(note.startswith("o: ") and "whole" in note for note in result["notes"])


def test_small_cell_is_not_evaluated(tmp_path: Path) -> None:
    traces = [write(tmp_path / f"{name}.jsonl", [answered(n, 10.0) for n in range(29)]) for name in "to"]
    result = compared(f"t={traces[0]}", f"o={traces[1]}")
    ttft = result["pairs"]["o"]["cohorts"]["all"]["ttft"]
    assert (ttft["evaluated"], ttft["p50"], ttft["w1_ms"]) == (False, None, None)
    assert result["headline"] == ["o against t: 29 requests with a TTFT; not evaluated under 30."]


def test_quantile_beyond_the_curve_is_a_bound(tmp_path: Path) -> None:
    gone = [
        Record(request_id=RequestId(f"g{n}"), arrival_ms=0.0, e2e_ms=50.0, status="client_abort") for n in range(20)
    ]
    trace = write(tmp_path / "t.jsonl", [*(answered(n, 10.0) for n in range(20)), *gone])
    ttft = compared(f"t={trace}")["traces"]["t"]["cohorts"]["all"]["ttft"]
    assert (ttft["n"], ttft["censored_share"]) == (40, 0.5)
    assert ttft["p50"]["value_ms"] == 10.0
    assert (ttft["p90"]["value_ms"], ttft["p90"]["beyond_ms"]) == (None, 50.0)


def test_references_contrasts_and_repeats(tmp_path: Path, make_trace: MakeTrace) -> None:
    result = compared(
        f"captured={make_trace('a')}",
        f"again={make_trace('again', slower=1.02)}",
        f"replayed={make_trace('b', slower=1.01)}",
        f"cold={make_trace('c', cold=True)}",
        f"cold-predicted={make_trace('d', source='sim', cold=True, slower=1.1)}",
    )
    assert {label: (pair["truth"], pair["kind"]) for label, pair in result["pairs"].items()} == {
        "again": ("captured", "error"),
        "replayed": ("captured", "error"),
        "cold": ("captured", "contrast"),
        "cold-predicted": ("cold", "error"),
    }
    assert result["pairs"]["cold-predicted"]["cohorts"]["all"]["ttft"]["p50"]["repeat_error"] is None
    assert result["repeats"] == ["again"]
    assert result["pairs"]["replayed"]["cohorts"]["all"]["ttft"]["p50"]["repeat_error"] == pytest.approx(0.0, abs=0.02)


def test_equivalence_needs_an_interval_inside_a_margin(
    make_trace: MakeTrace, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluated(again: float, third: float, replayed: float) -> int:
        traces = {"captured": 1.0, "again": again, "third": third, "replayed": replayed}
        of = f"{again}-{third}"
        labels = [f"{name}={make_trace(name + of, slower=slower)}" for name, slower in traces.items()]
        gate = ["--gate", "replayed.turns2+.ttft.p50.equivalence<=10%", "--bootstrap", "20"]
        return main(["compare", *labels, "--repeat", "again", "--repeat", "third", *gate])

    # A deviation of 1 % over three captures: 2.92 · 0.01 · √(1 + 1/3) = 3.4 %.
    assert evaluated(1.01, 0.99, 1.005) == 0
    message = capsys.readouterr().out
    assert "TTFT of replayed against the mean of 3 captures: error, its interval, A/A" in message
    assert "A/A 2.0 %" in message
    # Without repeats, and without sessions resampled, there is no interval to be inside.
    lone = ["--bootstrap", "0", "--gate", "slow.ttft.p50.equivalence<=10%"]
    assert main(["compare", f"lone={make_trace('lone')}", f"slow={make_trace('slow')}", *lone]) == 1
    assert "no interval; capture the load again" in " ".join(capsys.readouterr().out.split())
    # The same error, and captures that are 20 % apart: it is inside A/A, and shows nothing.
    assert evaluated(1.1, 0.9, 1.005) == 1


def spaced(
    name: str, folder: Path, times: float, *, apart_ms: float = 1_000.0, n: int = 60, falling: bool = False, **meta: Any
) -> str:
    """A labelled trace: TTFTs of 1, 2, … ms ``times`` over; at 1 s apart no request waits for another."""
    records = [
        Record(
            request_id=RequestId(f"r{number}"),
            arrival_ms=number * apart_ms,
            ttft_ms=times * (n - number if falling else number + 1),
            e2e_ms=times * (n - number if falling else number + 1),
            prompt_tokens=100,
        )
        for number in range(n)
    ]
    return f"{name}={write(folder / f'{name}.jsonl', records, Meta(**({'source': 'tap'} | meta)))}"


@pytest.mark.parametrize(
    ("times", "meta", "apart_ms", "message"),
    [
        (1.25, {}, 1_000, "TTFT of all requests is 25.0 % higher at the median (90 % interval +25 % to +25 %)"),
        (0.97, {"source": "sim"}, 1_000, "is 3.0 % too low at the median (90 % interval −3.0 % to −3.0 %)"),
        (
            4.2,
            {"engine": Engine(enable_prefix_caching=False)},
            1_000,
            "without the prefix cache, all requests wait 4.2 times as long for the first token at the median "
            "(90 % interval 4.2 to 4.2)",
        ),
        (1.25, {}, 1, "is 25.0 % higher at the median (no interval: too few independent sessions)"),
    ],
)
def test_verdict_has_its_interval(
    tmp_path: Path, times: float, meta: dict[str, Any], apart_ms: float, message: str
) -> None:
    traces = [
        spaced("t", tmp_path, 1.0, apart_ms=apart_ms, engine=Engine()),
        spaced("o", tmp_path, times, apart_ms=apart_ms, **meta),
    ]
    (sentence,) = compared(*traces)["headline"]
    assert sentence.startswith("o against t: ")
    assert message in sentence


def test_sessions_are_counted_and_so_are_the_units_of_the_intervals(tmp_path: Path) -> None:
    """Sixty requests of twenty sessions, which all wait for one another: one unit of resampling."""
    for name in ("t", "o"):
        (tmp_path / "lone").mkdir(exist_ok=True)
        spaced(name, tmp_path / "lone", 1.25, apart_ms=1)
        meta, records = load_trace(tmp_path / "lone" / f"{name}.jsonl")
        named = [msgspec.structs.replace(item, session_id=f"s{at // 3}") for at, item in enumerate(records)]
        write(tmp_path / f"{name}.jsonl", named, meta)
    traces = {name: tmp_path / f"{name}.jsonl" for name in ("t", "o")}
    results = compare(CompareConfig(traces, bootstrap=20))
    everything = results.result.traces["t"].cohorts["all"]
    assert (everything.sessions, everything.ttft.units) == (20, 1)
    assert '<td class="num">60</td>' in render_page(comparison_page(results))
    # A tile has its label, both sides and their unit.
    assert comparison_cards(results.result)[1] == Card(
        "Error of TTFT p50, all requests", "0.0 %", "o 37.5 ms, t 37.5 ms"
    )


def test_verdict_uses_the_difference_between_repeats(tmp_path: Path) -> None:
    traces = [spaced("t", tmp_path, 1.0), spaced("again", tmp_path, 1.04), spaced("p", tmp_path, 1.03, source="sim")]
    sentences = {sentence.partition(" ")[0]: sentence for sentence in compared(*traces)["headline"]}
    assert sentences["p"] == (
        "p against t: TTFT of all requests is 3.0 % too high at the median (90 % interval +3.0 % to +3.0 %), less than "
        "2 captures of this load differ (4.0 %); within 3.0 % at p90 and p99."
    )
    assert "captures of this load" not in sentences["again"]
    traces[2] = spaced("far", tmp_path, 0.9, source="sim")
    (first, *_) = compared(*traces)["headline"]
    assert "10.0 % too low" in first
    assert ", more than 2 captures of this load differ (4.0 %)" in first


@pytest.mark.parametrize(
    ("engine", "settings", "kind"),
    [
        ({}, {}, "error"),
        ({"num_gpu_blocks": 4_100, "max_num_seqs": None}, {}, "error"),  # a few blocks more; one setting not told
        ({"num_gpu_blocks": 1_024}, {}, "contrast"),
        ({"max_num_seqs": 8}, {}, "contrast"),
        ({"enable_prefix_caching": False}, {}, "contrast"),
        ({}, {"free_rule": "append_all"}, "contrast"),
    ],
)
def test_engine_settings_are_an_effect(
    tmp_path: Path, engine: dict[str, Any], settings: dict[str, Any], kind: str
) -> None:
    known: dict[str, Any] = {"block_size": 32, "num_gpu_blocks": 4_096, "max_num_seqs": 32}
    captured = Meta(source="sim", engine=Engine(**known), extra={"settings": {"free_rule": "vllm"}})
    other = Meta(source="sim", engine=Engine(**(known | engine)), extra={"settings": {"free_rule": "vllm"} | settings})
    traces = [
        write(tmp_path / f"{name}.jsonl", [answered(number, 10.0) for number in range(30)], meta)
        for name, meta in (("a", captured), ("b", other))
    ]
    assert compared(f"a={traces[0]}", f"b={traces[1]}")["pairs"]["b"]["kind"] == kind


def test_fitted_trace_is_no_gate(make_trace: MakeTrace) -> None:
    captured = make_trace("a")
    predicted = make_trace("p", source="sim", fit_digests=[trace_digest(captured)])
    with pytest.raises(InputError, match="was fitted on captured"):
        main(["compare", f"captured={captured}", f"predicted={predicted}"])
    circular = make_trace("q", source="sim", fit_digests=["ab"], source_digest="ab")
    with pytest.raises(InputError, match="fitted on the trace that it predicts"):
        main(["compare", f"captured={captured}", f"predicted={circular}"])
    broken = make_trace("r", source="sim", fit_digests="ab")
    with pytest.raises(InputError, match="expected a list of hex trace digests"):
        main(["compare", f"captured={captured}", f"predicted={broken}"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["a=missing.jsonl"], "missing.jsonl"),
        (["missing.jsonl"], "expected LABEL=TRACE"),
        (["a=x.jsonl", "a=y.jsonl"], "given twice"),
        (["a=x.jsonl", "b=y.jsonl", "--repeat", "c"], "no compared label"),
        (["a=x.jsonl", "b=y.jsonl", "--gate", "b.all.ttft.p50"], "not a threshold"),
        (["a=x.jsonl", "b=y.jsonl", "--gate", "c.all.ttft.p50.error<=1"], "no compared label"),
        (["a=x.jsonl", "b=y.jsonl", "--gate", "b.turn9.ttft.p50.error<=1"], "no cohort 'turn9'"),
        (["a=x.jsonl", "b=y.jsonl", "--gate", "b.ttft.p50<=5"], "expected a limit in ms or s"),
        (["a=x.jsonl", "b=y.jsonl", "--gate", "b.ttft.p50.error<=5ms"], "expected a number or a percentage"),
        (["a=x.jsonl", "b=y.jsonl", "--gate", "a.ttft.p50.error<=5%"], "a has no truth; expected one of b"),
        (["a=x.jsonl", "b=y.jsonl", "--gate", "b.all.ttft.p51.error<=1"], "no quantile p51 of ttft"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        main(["compare", *argv])
    assert "\n" not in str(caught.value)


def test_gates_determine_the_exit_code(make_trace: MakeTrace, capsys: pytest.CaptureFixture[str]) -> None:
    traces = [f"captured={make_trace('a')}", f"predicted={make_trace('b', slower=1.08)}", "--bootstrap", "0"]
    assert main(["compare", *traces, "--gate", "predicted.turns2+.ttft.p50.error<=10%"]) == 0
    assert main(["compare", *traces, "--gate", "predicted.turns2+.ttft.p50.error<=0.05"]) == 1
    # 24 first turns are too few to judge: what was not measured was not shown to hold.
    assert main(["compare", *traces, "--gate", "predicted.turn1.ttft.p50.error<=10%"]) == 1
    assert "not evaluated" in capsys.readouterr().out


def test_error_with_large_noise_is_too_uncertain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same TTFTs in the opposite order: the medians are equal, and resampled requests move them apart."""
    traces = [spaced("t", tmp_path, 1.0), spaced("o", tmp_path, 1.0, falling=True), spaced("far", tmp_path, 3.0)]

    def evaluated(*gates: str) -> int:
        return main(["compare", *traces, "--bootstrap", "200", *(word for gate in gates for word in ("--gate", gate))])

    assert evaluated("o.ttft.p50.error<=5%") == 3
    message = " ".join(capsys.readouterr().out.split())
    assert "gate too uncertain to say: o.ttft.p50.error<=5% (0 %, noise" in message
    # A limit that is wider than the noise is kept; an error beyond it is one; a failed gate counts more.
    assert evaluated("o.ttft.p50.error<=200%") == 0
    assert evaluated("far.ttft.p50.error<=5%") == 1
    assert evaluated("o.ttft.p50.error<=5%", "o.ttft.p50<=1ms") == 1


def test_json_output_is_reproducible(make_trace: MakeTrace, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compare", "--json", f"a={make_trace('a')}", f"b={make_trace('b', seed=4)}", "--bootstrap", "60"]
    assert main(argv) == 0
    first = capsys.readouterr()
    assert json.loads(first.out)["schema"] == "kvtape-compare/1"
    assert "TTFT in ms" in first.err
    main(argv)
    assert capsys.readouterr().out == first.out


def test_the_terminal_fits_80_columns(make_trace: MakeTrace, capsys: pytest.CaptureFixture[str]) -> None:
    main(["compare", f"captured={make_trace('a')}", f"cold-predicted={make_trace('b', cold=True)}", "--bootstrap", "0"])
    out = capsys.readouterr().out.partition("Cached tokens, request by request")[2]
    assert out
    assert max(map(len, out.splitlines())) <= 80


def test_docs_define_every_cohort() -> None:
    assert not set(all_cohorts()) - set(re.findall(r"`([^`\n]+)`", DOCS.read_text()))
