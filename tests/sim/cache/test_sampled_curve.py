"""``sim curve --sample``: exact where it says so, and elsewhere as far off as it says."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.cache.accesses import Accesses
from measure.cache.hitcurve import HitCurve, hit_curve
from measure.cache.stackdepth import depth_of, empty_stack, touch, with_room
from sim.__main__ import main
from sim.cache.sampledcurve import Sampling, sample_curve
from sim.workload.accesses import read_accesses
from sim.workload.chain import Chains
from tests.sim.cache.packed import in_order
from tracefile.files.reading import load_trace
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, Meta, Record, RequestId

SIX = str(Path(__file__).parent.parent / "data" / "six_requests.jsonl")
META = Meta(block_size=16)


def chained(path: list[int]) -> list[int]:
    return [hash((17, *path[: end + 1])) & (2**64 - 1) for end in range(len(path))]


def records(paths: list[list[int]]) -> list[Record]:
    return [
        Record(
            request_id=RequestId(str(number)),
            prompt_tokens=16 * len(path) + 1,
            block_hashes=[BlockHash(key) for key in chained(path)],
        )
        for number, path in enumerate(paths)
    ]


def exact_curve(paths: list[list[int]]) -> HitCurve:
    numbers: dict[int, int] = {}
    blocks = [numbers.setdefault(key, len(numbers)) for path in paths for key in chained(path)]
    starts = np.cumsum([0] + [len(path) for path in paths])
    lengths = np.diff(starts)
    missing = np.full(len(paths), np.nan)
    return hit_curve(Accesses(*in_order(blocks, starts), lengths, len(numbers), 16, 16 * lengths, missing))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=30), st.integers(1, 12))
def test_a_sample_of_everything_is_the_curve(paths: list[list[int]], exact_blocks: int) -> None:
    found = sample_curve(records(paths), Chains(META), Sampling(rate=1.0, exact_blocks=exact_blocks), also=range(1, 40))
    curve = exact_curve(paths)
    expected = [curve.hits_at(int(size)) for size in found.sizes]
    assert found.hit_blocks.tolist() == found.low.tolist() == found.high.tolist() == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=80), st.integers(1, 20), st.one_of(st.none(), st.integers(1, 12)))
def test_an_order_set_anew_is_the_same_order(keys: list[int], every: int, most: int | None) -> None:
    stack, recent = empty_stack(64), list[int]()  # most recently touched first
    for number, key in enumerate(keys):
        if number % every == 0:
            stack = with_room(stack, every, most)
            recent = recent[:most]
        assert depth_of(stack, np.uint64(key)) == (recent.index(key) + 1 if key in recent else 0)
        touch(stack, np.uint64(key))
        recent = [key, *(other for other in recent if other != key)]
    assert stack.state[2] == len(recent)


def busy_paths() -> Iterator[list[int]]:
    """A few popular conversations and many rare ones, which grow and come back: 32,000 touches."""
    generator = np.random.default_rng(5)
    for _ in range(4_000):
        conversation = int(generator.zipf(1.3)) % 3_000
        yield [0, 0, conversation % 20, conversation, *range(int(generator.integers(1, 8)))]


def test_intervals_hold_the_exact_curve_as_often_as_they_say() -> None:
    paths = list(busy_paths())
    requests, curve = records(paths), exact_curve(paths)
    sizes = (1_000, 2_000, 4_000)
    inside = []
    for seed in range(40):
        sampling = Sampling(rate=0.1, exact_blocks=300, seed=seed)
        found = sample_curve(requests, Chains(META), sampling, also=sizes)
        places = np.searchsorted(found.sizes, sizes)
        expected = np.array([curve.hits_at(size) for size in sizes])
        inside.append((found.low[places] <= expected) & (expected <= found.high[places]))
        # A tenth of the blocks is enough to know the hits to some percent: the intervals are not idle.
        assert (found.high[places] - found.low[places] < 0.25 * expected).all()
        # Nothing is estimated for caches that are kept whole.
        small = found.sizes <= 300
        assert found.hit_blocks[small].tolist() == [curve.hits_at(int(size)) for size in found.sizes[small]]
        assert (found.low[small] == found.high[small]).all()
    assert np.mean(inside, axis=0).min() >= 0.9


def test_the_command_prints_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["curve", SIX, "--sample", "0.5", "--exact-blocks", "2", "--cache-tokens", "8,16"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["2", "8", "39.34%", "exact"]
    assert "…" in lines[3]
    assert main([*arguments, "--json"]) == 0
    curve = json.loads(capsys.readouterr().out)["curves"][0]
    assert (curve["block_size"], curve["lookup_blocks"], curve["input_tokens"]) == (4, 14, 61)
    assert curve["hit_blocks"][curve["sizes"].index(2)] == 6
    assert curve["sample"]["rate"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--sample", "0"], "--sample: 0"),
        (["--sample", "1.5"], "--sample: 1.5"),
        (["--sample", "nan"], "--sample: nan"),
        (["--sample", "0.1", "--exact-blocks", "0"], "--exact-blocks: 0"),
        (["--sample", "0.1", "--exact-blocks", "99999999999"], "--exact-blocks: 99999999999; expected 1 to 16777216"),
        (["--sample", "0.1", "--by", "session"], "--by: given with --sample"),
    ],
)
def test_flags_that_make_no_sense_are_refused(arguments: list[str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        main(["curve", SIX, *arguments])


def test_mooncake_conversation() -> None:
    folder = os.environ.get("KVTAPE_DATA")
    if not folder:
        pytest.skip("KVTAPE_DATA does not name a folder with mooncake/conversation_trace.jsonl")
    trace = Path(folder) / "mooncake" / "conversation_trace.jsonl"
    meta, requests = load_trace(trace)
    curve = hit_curve(read_accesses(trace))
    whole = sample_curve(requests, Chains(meta), Sampling(rate=1.0, exact_blocks=5_000), also=[10_000])
    assert whole.hit_blocks.tolist() == [curve.hits_at(int(size)) for size in whole.sizes]
    tenth = sample_curve(requests, Chains(meta), Sampling(rate=0.1, exact_blocks=5_000))
    exact = np.array([curve.hits_at(int(size)) for size in tenth.sizes])
    assert ((tenth.low <= exact) & (exact <= tenth.high)).all()
