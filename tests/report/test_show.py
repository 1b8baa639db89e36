"""``report show``: tables, one JSON object, SLOs as exit codes."""

import json
import sys
from pathlib import Path

import pytest

from report.__main__ import main
from tests.jsonoutput import json_of
from tests.report.conftest import MakeTrace
from tracefile.files.reading import load_trace
from tracefile.records.errors import InputError

STATISTICS = {"n", "mean", "min", "p50", "p90", "p95", "p99", "max"}


def test_json_has_every_documented_key(make_trace: MakeTrace) -> None:
    result = json_of(main, ["show", str(make_trace("a", sessions=12, turns=3))])
    assert result["schema"] == "kvtape-metrics/1"
    assert result["requests"] | {"n": 36, "completed": 35} == result["requests"]
    assert {"success", "with_hit"} <= set(result["requests"])
    names = {"ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "input_tokens", "output_tokens", "turns"}
    assert all(set(result["per_request"][name]) == STATISTICS for name in names)
    names = {"latency_ms", "ttft_ms", "ttfat_ms", "decode_tps", "hit_rate"}
    assert all(set(result["per_session"][name]) == STATISTICS for name in names)
    assert 0 < result["per_session"]["hit_rate"]["p50"] < 1  # a fraction
    windows = {"overall", "last_30s", "steady", "steady_per_gpu"}
    assert all(
        set(result["workload"][f"{name}_tps"]) == windows for name in ("prompt", "cached", "uncached", "completion")
    )


def test_the_tables(make_trace: MakeTrace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(make_trace("a", sessions=12, turns=3)), "--gpus", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a.jsonl: 35 of 36 requests completed (97.2 %), 11 of 12 sessions; 94.3 % of requests had a hit"
    firsts = [line.split("  ")[0] for line in lines]
    for title in ("per request", "TTFT ms", "per session", "TTFAT ms", "workload", "completion tok/s"):
        assert title in firsts
    assert "steady/GPU" in next(line for line in lines if line.startswith("workload"))
    assert max(map(len, lines)) <= 120


def test_sessions_by_their_cached_tokens(make_trace: MakeTrace, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(make_trace("a", sessions=30, turns=3))
    result = json_of(main, ["show", trace, "--by", "session"])["by_session"]
    assert len(result) == 30
    assert sum(item["requests"] for item in result) == 90
    cached = [item["cached_tokens"] for item in result]
    assert cached == sorted(cached, reverse=True)
    best = [record for record in load_trace(trace)[1] if record.session_id == result[0]["session_id"]]
    assert (result[0]["requests"], cached[0]) == (3, sum(record.cached_tokens or 0 for record in best))
    assert result[0]["hit_rate"] == cached[0] / result[0]["prompt_tokens"] <= 1
    assert result[0]["ttft_p50_ms"] == sorted(record.ttft_ms or 0.0 for record in best)[1]
    main(["show", trace, "--by", "session"])
    lines = capsys.readouterr().out.splitlines()
    row = next(position for position, line in enumerate(lines) if line.startswith("session  "))
    assert lines[row + 1].startswith(result[0]["session_id"])
    assert lines[row + 21].startswith("10 more")
    assert json_of(main, ["show", trace])["by_session"] == []


def test_a_missed_slo_is_exit_code_1(make_trace: MakeTrace, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(make_trace("a", sessions=12, turns=3))
    assert main(["show", trace, "--slo", "ttft.p99<=1h"]) == 0
    assert main(["show", trace, "--slo", "ttft.p99<=1ms", "--json"]) == 1
    assert json.loads(capsys.readouterr().out.partition("SLO met")[2].partition("\n")[2])["slos"][0]["met"] is False


def test_bad_input_is_named(make_trace: MakeTrace, tmp_path: Path) -> None:
    trace = str(make_trace("a", sessions=12, turns=3))
    with pytest.raises(InputError, match="--gpus: 0; expected 1 or more"):
        main(["show", trace, "--gpus", "0"])
    with pytest.raises(InputError, match="--kv-bytes-per-token: 0; expected a positive number of bytes"):
        main(["show", trace, "--kv-bytes-per-token", "0"])
    with pytest.raises(InputError, match=r"a\.jsonl has no lag"):
        main(["show", trace, "--slo", "lag.p99<=1ms"])
    with pytest.raises(InputError, match="absent"):
        main(["show", str(tmp_path / "absent")])


def test_truncated_trace_gives_a_warning(make_trace: MakeTrace, capsys: pytest.CaptureFixture[str]) -> None:
    trace = make_trace("a", sessions=12, turns=3)
    trace.write_bytes(trace.read_bytes()[:-20])
    assert main(["show", str(trace)]) == 0
    assert f"warning: {trace}:37: torn last line skipped; its writer was cut short\n" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["itl_ms", "ttft_ms", "e2e_ms", "arrival_ms"])
@pytest.mark.parametrize("value", [1e-320, 1e15])
def test_missing_times_give_no_warnings(make_trace: MakeTrace, field: str, value: float) -> None:
    """Warnings are errors in tests."""
    usual, odd = make_trace("usual", sessions=12, turns=3), make_trace("odd", sessions=12, turns=3)
    header, *lines = odd.read_text().splitlines()
    reported = [value, value] if field == "itl_ms" else value
    odd.write_text("\n".join([header, *(json.dumps(json.loads(line) | {field: reported}) for line in lines)]) + "\n")
    assert main(["show", str(odd), "--html", str(odd.with_suffix(".html"))]) == 0
    assert main(["compare", f"odd={odd}", f"usual={usual}"]) in {0, 1}


HOSTILE = "<a href='https://x/'></script><script>\u2028\u202e\x1b[31m"


def test_names_are_escaped(make_trace: MakeTrace, capsys: pytest.CaptureFixture[str]) -> None:
    trace = make_trace("a", sessions=12, turns=3)
    header, *lines = map(json.loads, trace.read_text().splitlines())
    header["meta"] |= {"model": HOSTILE, "engine": {"name": "vllm", "version": HOSTILE}}
    names = dict.fromkeys(("model", "lora", "endpoint", "finish_reason", "error", "session_id"), HOSTILE)
    lines = [line | names | {"upstream": f"{HOSTILE}{number % 2}"} for number, line in enumerate(lines)]
    trace.write_text("\n".join(map(json.dumps, [header, *lines])) + "\n")
    page = trace.with_suffix(".html")
    assert main(["show", str(trace), "--html", str(page)]) == 0
    assert HOSTILE[:8] not in page.read_text()
    assert HOSTILE.replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#39;") in page.read_text()
    assert not set("\u2028\u202e\x1b") & set(capsys.readouterr().out)


def test_report_works_without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = str(Path(__file__).parents[2] / "data" / "captures" / "128x2" / "poisson-slow.jsonl.zst")
    shown = json_of(main, ["show", trace])
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert json_of(main, ["show", trace]) == shown
    assert shown["cache"] is not None
