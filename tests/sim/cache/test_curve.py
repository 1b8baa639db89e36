"""``sim curve``: one pass over all sizes against one LRU per size."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.cache.accesses import Accesses
from measure.cache.hitcurve import HitCurve, hit_curve
from sim.__main__ import main
from sim.cache.curve import read_accesses
from sim.cache.reuse import measure_reuse
from tests.sim.cache.packed import in_order
from tracefile.files.writing import TraceWriter
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, Meta, Record, RequestId

SIX = Path(__file__).parent.parent / "data" / "six_requests.jsonl"
Prompt = tuple[list[int], int]
"""A prompt's blocks, root to leaf, and how many of them may be hit."""


class ListLru:
    """The curve's policy at a single size, in its simplest form."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.order: list[int] = []  # least recently touched first

    def hits(self, prompt: Prompt) -> int:
        blocks, limit = prompt
        leading = 0
        for block in blocks[:limit]:
            if block not in self.order:
                break
            leading += 1
        for block in reversed(blocks):
            if block in self.order:
                self.order.remove(block)
            self.order.append(block)
        self.order = self.order[-self.size :]
        return leading


def accesses(prompts: list[Prompt], block_size: int = 16) -> Accesses:
    numbers: dict[int, int] = {}
    blocks = [numbers.setdefault(block, len(numbers)) for prompt, _ in prompts for block in prompt]
    starts = np.cumsum([0] + [len(prompt) for prompt, _ in prompts])
    return Accesses(
        *in_order(blocks, starts),
        np.array([limit for _, limit in prompts], np.int64),
        len(numbers),
        block_size,
        block_size * np.diff(starts),
        np.full(len(prompts), np.nan),
    )


def chained(prompt: list[int]) -> list[int]:
    return [hash(tuple(prompt[: i + 1])) for i in range(len(prompt))]


letters = st.lists(st.integers(0, 2), max_size=7)
prompts_in_a_tree = st.lists(st.tuples(letters.map(chained), st.integers(0, 7)), max_size=30)
# Ids that are no chain: the leading-blocks rule has to hold by itself. A block may even come twice in a prompt.
prompts_at_random = st.lists(st.tuples(st.lists(st.integers(0, 12), max_size=7), st.integers(0, 7)), max_size=30)


@settings(max_examples=120, deadline=None)
@given(st.one_of(prompts_in_a_tree, prompts_at_random), st.sampled_from([1, 8, 1 << 20]))
def test_every_size_is_an_lru_of_that_size(prompts: list[Prompt], piece: int) -> None:
    result = accesses(prompts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("measure.cache.accesses.MOST_BLOCKS", piece)
        curve = hit_curve(result)
    for size in range(1, result.distinct + 2):
        cache = ListLru(size)
        assert curve.hits_at(size) == sum(cache.hits(prompt) for prompt in prompts), f"size {size}"
    # The arrays end where the last hit is gained.
    assert curve.hits_at(len(curve.sizes) - 1) < curve.max_hit_blocks or not len(curve.sizes)


def test_depths_across_many_words() -> None:
    # Prompts of 100 blocks: touches of one request span several 64-bit words of the packed times.
    a, b = list(range(100)), list(range(1000, 1100))
    curve = hit_curve(accesses([(a, 100), (b, 100), (a, 100), (a, 50), (b, 99)]))
    assert curve.hits_at(50) == 50  # only the second a in a row finds its blocks at depths 1 to 50
    assert curve.hits_at(101) == 50 + 1 + 1  # after b, a's root is 101 deep; so is b's after a
    assert curve.hits_at(200) == 50 + 100 + 99
    assert curve.max_hit_blocks == 249
    assert len(curve.sizes) == 200


def test_six_requests_by_hand() -> None:
    # Depths at arrival: r2 and r3 1, 2; r5 1, 2 (r4's output filled block 10); r6 3, 4, 5.
    curve = hit_curve(read_accesses(SIX))
    assert curve.sizes.tolist() == [1, 2, 3, 4, 5]
    assert curve.hit_blocks.tolist() == [3, 6, 7, 8, 9]
    assert curve.hit_tokens.tolist() == [12, 24, 28, 32, 36]
    assert curve.bound_blocks.tolist() == [4, 8, 9, 9, 9]  # unlimited hits: 2, 2, 2 and 3
    assert (curve.lookup_blocks, curve.input_tokens) == (14, 61)
    assert [curve.size_for(hits) for hits in (1, 4, 5, 8, 9)] == [1, 2, 2, 4, 5]
    assert [curve.hits_at(size) for size in (0, 3, 99)] == [0, 7, 9]


def test_json_output_has_the_complete_curve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", str(SIX), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["kind"], result["trace"], len(result["curves"])) == ("curve", str(SIX), 1)
    assert result["curves"][0] == {
        "block_size": 4,
        "lookup_blocks": 14,
        "input_tokens": 61,
        "requests": 6,
        "complete_chains": 6,
        "sizes": [1, 2, 3, 4, 5],
        "hit_blocks": [3, 6, 7, 8, 9],
        "bound_blocks": [4, 8, 9, 9, 9],
        "hit_tokens": [12, 24, 28, 32, 36],
        "kv_bytes_per_token": None,
    }
    assert result["reuse"] is None


def test_the_readme_shows_the_real_output(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[3]
    assert main(["curve", str(root / "data" / "captures" / "128x2" / "poisson-slow.jsonl.zst")]) == 0
    assert f"```\n{capsys.readouterr().out}```" in (root / "README.md").read_text()


def test_mooncake_conversation(mooncake: Path) -> None:
    result = read_accesses(mooncake)
    curve = hit_curve(result)
    assert curve.max_hit_blocks == 105_592  # hits of an unlimited cache: the last size is sufficient
    assert f"{curve.rate_at(len(curve.sizes)):.2%}" == "37.34%"
    assert curve.size_for_share(0.9) == 29_599
    check_size(result, curve, 10_000)


@settings(max_examples=50, deadline=None)
@given(prompts_at_random, st.lists(st.integers(0, 7), min_size=30, max_size=30))
def test_unhashed_blocks_are_never_reused(prompts: list[Prompt], hashed: list[int]) -> None:
    cut = [prompt[:count] for (prompt, _), count in zip(prompts, hashed, strict=False)]
    apart = [
        (retained + [-1 - row * 10 - position for position in range(len(prompt) - len(retained))], limit)
        for row, ((prompt, limit), retained) in enumerate(zip(prompts, cut, strict=True))
    ]
    expected, numbered = (
        accesses(apart),
        accesses([(retained, limit) for retained, (_, limit) in zip(cut, prompts, strict=True)]),
    )
    result = replace(numbered, starts=expected.starts, limits=expected.limits, prompt_tokens=expected.prompt_tokens)
    assert result.distinct == expected.distinct
    for name in ("hit_blocks", "bound_blocks", "lookup_blocks"):
        assert np.array_equal(getattr(hit_curve(result), name), getattr(hit_curve(expected), name))
    reuse, plain = (measure_reuse(replace(log, arrival_ms=log.order.astype(np.float64))) for log in (result, expected))
    for name in ("accesses", "first_accesses", "time_ms", "distance_blocks"):
        assert getattr(reuse, name) == getattr(plain, name)


def check_size(result: Accesses, curve: HitCurve, size: int) -> None:
    """The same policy at a single size, with a dict for the order so that a real trace runs in a second."""
    order: dict[int, None] = {}
    hits = 0
    for start, end, limit in zip(result.starts, result.starts[1:], result.limits, strict=False):
        blocks = result.blocks[start:end].tolist()
        leading = [block in order for block in blocks[:limit]]
        hits += leading.index(False) if False in leading else len(leading)
        for block in reversed(blocks):
            order.pop(block, None)
            order[block] = None
        if len(order) > size:
            for block in list(order)[: len(order) - size]:
                del order[block]
    assert curve.hits_at(size) == hits


def test_sizes_in_gib(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", str(SIX), "--kv-bytes-per-token", str(1 << 28)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[2].split()[-1], lines[3].split()[-2:]) == ("GiB", ["8", "2"])
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["curve", str(SIX), "--model-config", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["curves"][0]["kv_bytes_per_token"] == 512
    for flags in (["--kv-bytes-per-token", "0"], ["--kv-bytes-per-token", "1", "--model-config", str(tmp_path)]):
        with pytest.raises(InputError, match="--kv-bytes-per-token"):
            main(["curve", str(SIX), *flags])


def test_prompt_with_log_probabilities_is_cached_without_hits(tmp_path: Path) -> None:
    trace = tmp_path / "scored.jsonl"
    with TraceWriter(trace, Meta(block_size=4)) as writer:
        for number, scored in enumerate((None, True, None)):
            hashes = [BlockHash(1), BlockHash(2)]
            name = RequestId(f"r{number}")
            writer.write(Record(request_id=name, prompt_tokens=9, block_hashes=hashes, prompt_logprobs=scored))
    assert hit_curve(read_accesses(trace)).hit_blocks.tolist() == [1, 2]  # of the third request alone
