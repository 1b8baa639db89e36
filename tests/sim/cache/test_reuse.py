"""``sim curve --reuse``: times and distances against the plainest counting."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.cache.accesses import Accesses
from sim.__main__ import main
from sim.cache.curve import read_accesses
from sim.cache.reuse import LEVELS, measure_reuse
from tests.sim.cache.packed import in_order
from tracefile.records.errors import InputError

SIX = str(Path(__file__).parent.parent / "data" / "six_requests.jsonl")
Request = tuple[list[int], float]
"""A prompt's blocks, root to leaf, and the ms since the request before it."""

requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), max_size=6).map(
            lambda path: [hash(tuple(path[: i + 1])) for i in range(len(path))]
        ),
        st.sampled_from([0.0, 1.0, 2.5, 40.0]),
    ),
    max_size=30,
)


def accesses(result: list[Request]) -> Accesses:
    numbers: dict[int, int] = {}
    blocks = [numbers.setdefault(block, len(numbers)) for prompt, _ in result for block in prompt]
    starts = np.cumsum([0] + [len(prompt) for prompt, _ in result])
    lengths = np.diff(starts)
    arrival_ms = 100.0 + np.cumsum([gap for _, gap in result])
    return Accesses(*in_order(blocks, starts), lengths, len(numbers), 16, 16 * lengths, arrival_ms)


def quantiles(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[math.ceil(len(ordered) * step / len(LEVELS)) - 1] for step in range(1, len(LEVELS) + 1)]


@pytest.fixture(autouse=True, scope="module", params=[1 << 20, 4])
def pieces(request: pytest.FixtureRequest) -> Iterator[None]:
    """Requests at once, and a few blocks at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("measure.cache.accesses.MOST_BLOCKS", request.param)
        yield


@settings(max_examples=40, deadline=None)
@given(requests)
def test_distances_equal_a_plain_lru_list(result: list[Request]) -> None:
    reuse = measure_reuse(accesses(result))
    recent: list[int] = []  # most recently touched first
    last: dict[int, tuple[int, float]] = {}
    times: list[float] = []
    in_blocks: list[float] = []
    now_ms = 100.0
    for number, (prompt, gap_ms) in enumerate(result):
        now_ms += gap_ms
        for block in prompt:
            if block in last:
                in_blocks.append(recent.index(block) + 1)
                times.append(now_ms - last[block][1])
        for block in reversed(prompt):
            if block in recent:
                recent.remove(block)
            recent.insert(0, block)
            last[block] = (number, now_ms)
    for distribution, values in (
        (reuse.time_ms, times),
        (reuse.distance_blocks, in_blocks),
    ):
        assert distribution.count == len(values)
        if values:
            assert distribution.quantiles == pytest.approx(quantiles(values))
            assert distribution.mean == pytest.approx(sum(values) / len(values))
    assert reuse.first_accesses + len(times) == reuse.accesses == sum(len(prompt) for prompt, _ in result)


def test_six_requests_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    # r2: 1 and 2 after 1 request, at depths 1, 2. r3: 1, 2, 3 after 1. r5: 9 and 10, of r4's output, after 1.
    # r6: 1, 2, 3 after 3, below 9, 10.
    assert main(["curve", SIX, "--reuse", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["reuse"]
    assert (result["accesses"], result["first_accesses"]) == (14, 4)
    assert result["distance_blocks"]["mean"] == (1 + 2 + 1 + 2 + 3 + 1 + 2 + 3 + 4 + 5) / 10
    assert result["time_ms"]["quantiles"][-1] == 3.0


def test_requests_are_ordered_by_arrival(tmp_path: Path) -> None:
    head, *records = Path(SIX).read_text().splitlines()
    backwards = tmp_path / "backwards.jsonl"
    backwards.write_text("\n".join([head, *reversed(records)]) + "\n")
    assert measure_reuse(read_accesses(backwards)) == measure_reuse(read_accesses(Path(SIX)))
    backwards.write_text("\n".join([head, records[0].replace('"arrival_ms":0.0,', "")]) + "\n")
    with pytest.raises(InputError, match="r1: arrival_ms: missing"):
        main(["curve", str(backwards), "--reuse"])


def test_mooncake_conversation(mooncake: Path) -> None:
    result = measure_reuse(read_accesses(mooncake))
    # Half of the attainable hits are the curve's at 7,890 blocks, within the accesses that end a prompt.
    assert result.accesses - result.first_accesses >= 105_592
