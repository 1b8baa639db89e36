"""Cached tokens by two accounts, and the hits of an unlimited cache against a slow oracle."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from measure.metrics.hits import count_hits, measure_upstreams
from measure.metrics.tables import upstream_table
from measure.runs import make_run
from tests.measure.metrics.made import request, run_of
from tests.measure.metrics.test_sessions import AGENT
from tracefile.records.schema import BlockHash, Engine, Meta, Record


def test_reported_and_simulated_hits() -> None:
    hits = count_hits(run_of(AGENT, block_size=16))
    reported, simulated = (result["all"] for result in (hits.reported, hits.simulated))
    assert (reported.tokens, simulated.tokens, hits.differences) == (0 + 32 + 64, 0 + 32 + 64, [])
    assert hits.reported["turn1"].tokens == 0
    assert hits.reported["turns2+"].rate == 96 / 144
    (parting,) = count_hits(run_of([*AGENT[:2], replace(AGENT[2], cached_tokens=47)], block_size=16)).differences
    assert (parting.accounts, parting.requests, parting.tokens) == ("reported < simulated", 1, 17)
    assert parting.example == "3"


def test_hits_are_full_engine_blocks_without_the_last_token() -> None:
    same = {"prompt_tokens": 64, "block_hashes": [1, 2, 3, 4]}
    records = [request("a", 0.0, e2e_ms=1.0, **same), request("b", 5.0, e2e_ms=1.0, **same)]
    assert run_of(records, block_size=16).reusable_tokens.tolist() == [0, 48]  # the fourth holds the last token
    engine = Engine(block_size=32)
    assert run_of(records, block_size=16, engine=engine).reusable_tokens.tolist() == [0, 32]
    assert run_of(records).reusable_tokens.tolist() == [-1, -1]  # no block size: hashes say nothing
    records += [request("c", 9.0, e2e_ms=1.0, prompt_logprobs=True, **same)]  # computed whole, whatever is cached
    assert run_of(records, block_size=16).reusable_tokens.tolist() == [0, 48, 0]


def test_metrics_per_upstream() -> None:
    def sent(name: str, upstream: str | None, ttft_ms: float | None, **hashed: Any) -> Record:
        return request(name, 0.0, upstream=upstream, ttft_ms=ttft_ms, **hashed)

    records = [
        sent("a", "http://two", 10.0, prompt_tokens=100, cached_tokens=50),
        sent("b", "http://one", 20.0, prompt_tokens=100, cached_tokens=0),
        sent("c", "http://two", 30.0, prompt_tokens=300, cached_tokens=50),
        sent("d", None, None, status="error", error="connect_refused"),
        sent("e", "http://one", None, status="error"),
    ]
    result = measure_upstreams(run_of(records))
    assert {name: (item.requests, item.completed, item.hits.rate) for name, item in result.items()} == {
        "http://one": (2, 1, 0.0),
        "http://two": (2, 2, 0.25),
    }
    assert upstream_table(result).lines == [
        "upstream    requests  completed  hit rate  TTFT p50 ms  TTFT p90 ms  TTFT p99 ms",
        "http://one         2          1       0 %         20.0         20.0         20.0",
        "http://two         2          2    25.0 %         10.0         30.0         30.0",
    ]
    assert run_of(records).select(np.array([1, 4])).upstream.tolist() == [1, 1]
    assert measure_upstreams(run_of(records[1:2])) == {}
    assert upstream_table({}).lines == []


chains = st.lists(st.integers(0, 2), min_size=0, max_size=5)
"""Forks of a tree: block i is named by the forks up to it."""


@st.composite
def records_of(draw: Any) -> list[Record]:
    result = []
    for number in range(draw(st.integers(1, 12))):
        forks, outputs = draw(chains), draw(st.integers(0, 2))
        blocks = [BlockHash(hash(tuple(forks[: at + 1])) % 2**64) for at in range(len(forks))]
        beyond = [BlockHash(hash((*forks, "output", at)) % 2**64) for at in range(outputs)]
        tokens = 4 * len(blocks) + draw(st.integers(0, 3))
        times = {"e2e_ms": draw(st.integers(0, 5)) * 1.0}
        hashed: dict[str, Any] = {"hashable_blocks": draw(st.none() | st.integers(0, len(blocks)))}
        if draw(st.booleans()):
            hashed |= {"block_hashes": blocks, "output_block_hashes": beyond}
        result.append(request(f"r{number}", draw(st.integers(0, 9)) * 1.0, prompt_tokens=tokens, **times, **hashed))
    return result


@given(records_of())
def test_an_unlimited_cache_by_a_set(records: list[Record]) -> None:
    """Ends come before arrivals at the same time; requests that arrive together, in the order of the file."""
    events = [(record.arrival_ms or 0.0, 1, row) for row, record in enumerate(records)]
    events += [(record.end_ms() or 0.0, 0, row) for row, record in enumerate(records)]
    seen: set[int] = set()
    expected = [-1] * len(records)
    for _, arrives, row in sorted(events):
        record = records[row]
        if record.block_hashes is None:
            continue
        true = record.block_hashes[: record.hashable_blocks]
        if arrives:
            leading = next((at for at, block in enumerate(true) if block not in seen), len(true))
            expected[row] = min(4 * leading, max((record.prompt_tokens or 1) - 1, 0) // 4 * 4)
            seen.update(true)
        elif len(true) == len(record.block_hashes):
            seen.update(record.output_block_hashes or [])
    assert run_of(records, block_size=4).reusable_tokens.tolist() == expected
    numbered = make_run("run", "run.jsonl", Meta(source="client", block_size=4), records, chains=True)
    assert numbered.reusable_tokens.tolist() == expected
