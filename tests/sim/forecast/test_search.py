"""``sim search`` against every value tried, on loads small enough for it."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from report.pages.forecastpages import render_search
from report.pages.search import Quantity, Search, answer_sentence, describe
from sim.__main__ import main
from sim.forecast.captured import plan, read_captured
from sim.forecast.ensemble import forecast, members
from sim.forecast.fleets import forecast_load
from sim.forecast.scenarios import Scenario, parse_base
from sim.forecast.search import SearchConfig, Target, parse_target, search
from sim.latency.modelfile import default_model, load_model, make_model, save_model
from sim.vllm.config import EngineConfig
from tests.report.browser import CHROMIUM, figures_drawn, page_figures
from tests.sim.fleets import COSTS
from tests.sim.forecast.conftest import interrupted_at
from tracefile import BlockHash, InputError, Meta, Record, RequestId, TraceWriter

MEMBERS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 requests over six prefixes of 28 blocks, in turn, three a second."""
    path = tmp_path_factory.mktemp("search")
    with TraceWriter(path / "shared.jsonl", Meta(block_size=32)) as writer:
        for number in range(120):
            writer.write(
                Record(
                    request_id=RequestId(f"s{number}"),
                    arrival_ms=number * 333.0,
                    e2e_ms=60.0,
                    prompt_tokens=960,
                    output_tokens=2,
                    block_hashes=[
                        *(BlockHash(number * number % 6 * 100 + block) for block in range(28)),
                        *(BlockHash(10_000 + number * 10 + block) for block in range(2)),
                    ],
                )
            )
    model = default_model()
    row = [parameter.value for parameter in model.parameters.values()]
    draws = [[value * share for value in row] for share in (0.94, 0.98, 1.0, 1.03)]
    save_model(msgspec.structs.replace(model, draws=draws), path / "model.json")
    return path


def asked(folder: Path, quantity: Quantity, target: str, **options: Any) -> SearchConfig:
    config = SearchConfig(
        trace=folder / "shared.jsonl",
        model=folder / "model.json",
        quantity=quantity,
        target=parse_target(target, 0.75),
        scenario=Scenario({}),
        members=MEMBERS,
    )
    return replace(config, **options)


def shares_within(folder: Path, scenarios: list[Scenario], rank: int, limit_ms: float) -> list[float]:
    """Of the members whose TTFT of this rank is within the limit, each scenario forecast by itself."""
    model = load_model(folder / "model.json")
    captured, drawn = read_captured(folder / "shared.jsonl", model, paced=None), members(model, MEMBERS, 0)
    loads = [plan(captured, scenario) for scenario in scenarios]
    found = [forecast(load.arrivals, load.engine, drawn, seed=0).ttft_ms for load in loads]
    return [float(np.mean(np.sort(ttft_ms, axis=1)[:, rank - 1] <= limit_ms)) for ttft_ms in found]


def test_the_smallest_cache_is_the_one_that_trying_all_finds(folder: Path) -> None:
    """To the block; the 60th of 120 is the median."""
    found = search(asked(folder, "num-gpu-blocks", "ttft.p50<=24ms", between=(60.0, 100.0), tolerance=0.0))
    sizes = range(60, 101)
    shares = shares_within(folder, [Scenario({"num_gpu_blocks": blocks}) for blocks in sizes], 60, 24.0)
    by_size = dict(zip(sizes, shares, strict=True))
    assert found.outcome == "found"
    assert found.answer == 1 + max(blocks for blocks, share in by_size.items() if share < 0.75)
    assert {one.value: one.share for one in found.evaluated} == {
        one.value: by_size[int(one.value)] for one in found.evaluated
    }
    assert [one.value for one in found.evaluated] == sorted(one.value for one in found.evaluated)


def test_the_highest_rate_is_the_one_that_a_grid_finds(folder: Path) -> None:
    found = search(asked(folder, "rate", "ttft.p90<=80ms", between=(1.0, 200.0), tolerance=0.02))
    grid = np.geomspace(60.0, 140.0, 16).tolist()
    shares = shares_within(folder, [Scenario({}, rate=rate) for rate in grid], 108, 80.0)
    assert found.outcome == "found"
    assert found.answer == pytest.approx(max(np.array(grid)[np.array(shares) >= 0.75]), rel=0.1)


@pytest.mark.parametrize("metric", ["ttft", "itl", "tpot", "e2e"])
def test_a_target_may_be_on_any_latency(folder: Path, metric: str) -> None:
    """As captured, 120 requests of two tokens: one gap each, which is TPOT too; the 60th is the median."""
    model = load_model(folder / "model.json")
    captured, drawn = read_captured(folder / "shared.jsonl", model, paced=None), members(model, MEMBERS, 0)
    load = plan(captured, Scenario({}))
    made = forecast(load.arrivals, load.engine, drawn, seed=0)
    own_ms = {"ttft": made.ttft_ms, "e2e": made.e2e_ms, "itl": made.e2e_ms - made.ttft_ms, "tpot": made.tpot_ms}
    medians_ms = np.sort(np.sort(own_ms[metric], axis=1)[:, 59])
    limit_ms = round(float(medians_ms[5] + medians_ms[6]) / 2, 4)  # six of eight members keep it
    found = search(asked(folder, "rate", f"{metric}.p50<={limit_ms}ms", between=(1.0, 1.1), tolerance=0.5))
    assert found.metric == metric
    assert found.evaluated[0].value == 1.0
    assert found.evaluated[0].share == 0.75
    assert found.evaluated[0].latency.middle == pytest.approx(medians_ms[3], abs=1e-6)
    assert f"{metric.upper()} p50 ms" in describe(found)


def test_a_target_out_of_reach_is_said_with_the_best_there_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No cache makes the front end faster than its 7 ms and a step's 4.3."""
    argv = ["search", str(folder / "shared.jsonl"), "--latency-model", str(folder / "model.json"), "--members", "4"]
    assert main([*argv, "--minimize", "num-gpu-blocks", "--target", "ttft.p50<=9ms"]) == 1
    said = capsys.readouterr().out
    assert said.startswith(
        "not reachable: ttft.p50<=9ms (all requests, n = 120) with 90% confidence holds at no num-gpu-blocks"
    )
    assert "0% of the members within" in said
    assert main([*argv, "--minimize", "num-gpu-blocks", "--target", "ttft.p50<=9ms", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["outcome"] == "none holds"
    assert found["answer"] is None
    assert [one["value"] for one in found["evaluated"]] == [found["high"]]  # the rest is harder


def test_a_file_name_that_is_no_text_is_told(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = tmp_path / os.fsdecode(b"a\xff.jsonl")
    odd.write_bytes((folder / "shared.jsonl").read_bytes())
    argv = ["search", str(odd), "--latency-model", str(folder / "model.json"), "--members", "2", "--json"]
    assert main([*argv, "--minimize", "num-gpu-blocks", "--target", "ttft.p50<=500ms"]) == 0
    assert json.loads(capsys.readouterr().out)["trace"] == "a?.jsonl"


def test_an_end_that_holds_is_not_passed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = search(asked(folder, "rate", "ttft.p50<=1s", between=(0.5, 0.6), tolerance=0.05))
    assert (found.outcome, found.answer) == ("all hold", 0.6)
    assert "the end of what was asked" in describe(found)
    assert all(0.5 <= one.value <= 0.6 for one in found.evaluated)


def test_nothing_holds_where_more_is_asked_than_the_engine_can_do(folder: Path) -> None:
    """The limit is kept for as long as the capture lasts, and longer loads would break it."""
    found = search(asked(folder, "rate", "ttft.p90<=5s", between=(1.0, 400.0), tolerance=0.1))
    assert found.outcome == "found"
    assert found.answer is not None
    assert all(one.holds is (one.share >= 0.75 and not one.saturated) for one in found.evaluated)
    beyond = [one for one in found.evaluated if one.value > found.answer]
    assert beyond[0].saturated
    assert beyond[0].share == 1.0
    said = describe(found)
    assert "where the load reaches what the engine can do: at 1" in said
    assert not any("holds" in line for line in said.splitlines() if "saturated" in line)


def test_a_load_that_every_value_saturates_is_said(folder: Path) -> None:
    found = search(asked(folder, "rate", "ttft.p90<=5s", between=(300.0, 400.0), tolerance=0.1))
    assert found.outcome == "none holds"
    assert "more waits grow for as long as the load lasts" in answer_sentence(found)


def test_what_was_tried_is_kept_on_interrupt(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sim.forecast.search.running.forecast_load", interrupted_at(3, forecast_load))
    argv = ["search", str(folder / "shared.jsonl"), "--latency-model", str(folder / "model.json"), "--members", "2"]
    assert main([*argv, "--maximize", "rate", "--target", "ttft.p90<=80ms"]) == 130
    printed = capsys.readouterr()
    assert "interrupted; 2 values are done" in printed.err
    assert "×0.1" in printed.out
    assert "×10" in printed.out


def test_a_seed_gives_the_same_search_and_a_page_that_holds_it(folder: Path) -> None:
    one, same = (search(asked(folder, "rate", "ttft.p90<=80ms", tolerance=0.2)) for _ in range(2))
    assert one == same
    figures = page_figures(render_search(one))
    marks = [trace for trace in figures["curve"]["data"] if trace["meta"]["part"] == "points"]
    assert sum(len(trace["x"]) for trace in marks) == len(one.evaluated)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found")
def test_a_browser_draws_the_page(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(render_search(search(asked(folder, "rate", "ttft.p90<=80ms", tolerance=0.2))))
    assert figures_drawn(page) == {"curve"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--target", "ttft.p90<500ms"], "--target ttft.p90<500ms: expected a percentile of all, turn1, turns2+"),
        (["--target", "ttft.p90<=500"], "--target ttft.p90<=500: expected a percentile"),
        (["--target", "turn1.itl.p90<=9ms"], "--target turn1.itl.p90<=9ms: gaps are not kept by request; expected itl"),
        (["--target", "queue.p90<=9ms"], "--target queue.p90<=9ms: no metric 'queue'; expected one of ttft, tpot, itl"),
        (["--target", "ttft.p0<=500ms"], "--target ttft.p0<=500ms: 'p0'; expected pNN"),
        (["--target", "ttft.p90<=0ms"], "--target ttft.p90<=0ms: expected a limit above 0"),
        (["--confidence", "1.2"], "--confidence: 1.2; expected more than 0 and at most 1"),
        (["--between", "2,1"], "--between: '2,1'; expected two numbers above 0, the smaller first"),
        (["--between", "1"], "--between: '1'; expected two numbers above 0, the smaller first"),
        (["--tolerance", "0"], "--tolerance: 0; expected a share from 0.0001 to below 1"),
        (["--rate", "2"], "--rate: it is what is searched; expected --between to limit it"),
        (["--num-gpu-blocks", "100,200"], "2 scenarios; expected one value of each flag, as rate is varied"),
        (["--target", "turns2+.ttft.p90<=80ms"], "--target: the trace has no requests of turns2+; expected another"),
    ],
)
def test_bad_flags_are_refused_in_a_line(folder: Path, flags: list[str], said: str) -> None:
    argv = ["search", str(folder / "shared.jsonl"), "--latency-model", str(folder / "model.json"), "--maximize", "rate"]
    with pytest.raises(InputError) as refused:
        main([*argv, "--target", "ttft.p90<=80ms", *flags])
    assert str(refused.value).startswith(said)


def even_load(path: Path, every_ms: float, chains: list[list[int]], tail: int) -> Path:
    """Requests of these blocks and ``tail`` further tokens, evenly spaced, on an engine of 0.1 ms a prompt token."""
    with TraceWriter(path / "even.jsonl", Meta(block_size=32)) as writer:
        for number, chain in enumerate(chains):
            writer.write(
                Record(
                    request_id=RequestId(f"e{number}"),
                    arrival_ms=number * every_ms,
                    e2e_ms=60.0,
                    prompt_tokens=32 * len(chain) + tail,
                    output_tokens=2,
                    block_hashes=[BlockHash(block) for block in chain],
                )
            )
    engine = EngineConfig(num_gpu_blocks=1000, block_size=32, max_num_seqs=8, max_num_batched_tokens=1024)
    save_model(make_model(COSTS, engine), path / "even.json")
    return path


def found_in(folder: Path, quantity: Quantity, target: str, scenario: str, between: tuple[float, float]) -> Search:
    config = asked(folder, quantity, target, scenario=parse_base(scenario), between=between, tolerance=0.0, members=2)
    return search(replace(config, trace=folder / "even.jsonl", model=folder / "even.json"))


def own_prompts(count: int) -> list[list[int]]:
    return [list(range(100 * number, 100 * number + 30)) for number in range(count)]


def test_host_blocks_are_those_of_all_prompts_that_come_in_turn(tmp_path: Path) -> None:
    """Five prompts of four blocks, on a GPU with room for one. With 19 some of every round's blocks are gone."""
    even_load(tmp_path, 200.0, [list(range(100 * place, 100 * place + 4)) for place in range(5)] * 8, 1)
    scenario = "num-gpu-blocks=7,kv-bytes-per-token=1000"
    found = found_in(tmp_path, "host-blocks", "ttft.p85<=6ms", scenario, (5.0, 64.0))
    assert (found.outcome, found.answer) == ("found", 20.0)
    rates = {one.value: one.hit_rate for one in found.evaluated}
    assert rates[20.0] == pytest.approx(35 * 128 / (40 * 129))
    assert rates[19.0] < rates[20.0]
    # Without --between: from the longest request's blocks to all blocks there are, with a part of one in each request.
    config = asked(tmp_path, "host-blocks", "ttft.p85<=6ms", scenario=parse_base(f"{scenario},disk-blocks=9"))
    config = replace(config, trace=tmp_path / "even.jsonl", model=tmp_path / "even.json", members=2, tolerance=0.5)
    assert (search(config).low, search(config).high) == (6.0, 61.0)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["host-blocks", "--between", "3,64", "--kv-bytes-per-token", "8"],
            "--host-blocks: 3 blocks; expected 30 or more, as many as the longest prompt",
        ),
        (["host-blocks", "--between", "30,64"], "--kv-bytes-per-token: not told; expected the KV cache's bytes"),
        (["num-gpu-blocks", "--host-gb-per-s", "0"], "--host-gb-per-s: '0'; expected a number above 0"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_forecast(
    folder: Path, flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.forecast.search.running.forecast_load", interrupted_at(1, forecast_load))
    argv = ["search", str(folder / "shared.jsonl"), "--latency-model", str(folder / "model.json"), "--minimize", *flags]
    with pytest.raises(InputError) as refused:
        main([*argv, "--target", "ttft.p90<=80ms"])
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


def test_targets_are_read_in_either_unit() -> None:
    assert parse_target("ttft.p99.5 <= 2s", 0.9).limit_ms == 2_000.0
    assert parse_target("ttft.p99.5 <= 2s", 0.9).percentile == 0.995
    assert parse_target("turn1.ttft.p50<=80ms", 0.9) == Target("turn1.ttft.p50<=80ms", "ttft", 0.5, 80.0, "turn1", 0.9)
