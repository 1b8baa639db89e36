"""``sim misses``: every prompt token has exactly the cause that a plain sequential pool assigns."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.__main__ import main
from sim.cache.misses import CAUSES, attribute
from sim.workload.chain import Chains, hashed_batches, tokens_computed
from sim.workload.prompts import Prompts, lay_out, read_prompts
from tests.sim.oracles.readable.pool import BlockPool
from tests.sim.oracles.sequential import full_keys, plain_hits
from tracefile.files.reading import open_trace
from tracefile.records.batches import Batch
from tracefile.records.schema import BlockHash, Meta, Record, RequestId

SIX = str(Path(__file__).parent.parent / "data" / "six_requests.jsonl")
META = Meta(block_size=4)
NOTHING = dict.fromkeys(CAUSES, 0)


def record(
    number: int,
    tokens: Sequence[int],
    prompt: int,
    *,
    known: int | None = None,
    turn: int | None = None,
    scored: bool = False,
) -> Record:
    """A request over ``tokens`` letters, the first ``prompt`` of them its prompt's, in blocks of 4."""
    full = [hash(tuple(tokens[: 4 * end])) & (2**63 - 1) for end in range(1, len(tokens) // 4 + 1)]
    blocks = prompt // 4
    computed = (max(len(tokens), prompt + 1) - 1) // 4
    return Record(
        request_id=RequestId(f"r{number}"),
        turn=turn,
        prompt_tokens=prompt,
        output_tokens=max(len(tokens) - prompt, 1),
        block_hashes=[BlockHash(key) for key in full[:blocks]],
        output_block_hashes=[BlockHash(key) for key in full[blocks:computed]],
        hashable_blocks=known,
        prompt_logprobs=scored or None,
    )


@st.composite
def traces(draw: st.DrawFn) -> list[Record]:
    result = []
    for number in range(draw(st.integers(1, 25))):
        # Few different chains, in runs of one letter a block, so that much is shared and much evicted.
        letters = draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
        tokens = [letter for letter in letters for _ in range(4)] + [7] * draw(st.integers(0, 3))
        prompt = draw(st.integers(1, len(tokens)))
        known = draw(st.one_of(st.none(), st.integers(0, 4)))
        turn = draw(st.one_of(st.none(), st.integers(1, 3)))
        scored = draw(st.sampled_from([False, False, False, True]))
        result.append(record(number, tokens, prompt, known=known, turn=turn, scored=scored))
    return result


class SlowAttribution:
    """The causes of a trace, block by block, from the oracle of the pool."""

    def __init__(self, records: list[Record], usable: int) -> None:
        self.causes: Counter[str] = Counter()
        self.pool = BlockPool(usable + 1, 4)
        self.chains = Chains(META)
        self.seen: set[int] = set()
        for record in records:
            if -(-tokens_computed(record) // 4) <= usable:
                self.serve(record)

    def is_cached(self, key: int) -> bool:
        return bool(self.pool.lookup([key], 1))

    def serve(self, record: Record) -> None:
        prompt, keys = record.prompt_tokens or 0, full_keys(record, self.chains)
        hits = self.pool.lookup(keys, 0 if record.prompt_logprobs else (prompt - 1) // 4)
        for position, key in enumerate(keys[: prompt // 4]):
            self.causes[self.cause(record, position, key, len(hits))] += 4
        self.causes["partial_block"] += prompt % 4
        self.pool.touch(hits)
        blocks = hits + self.pool.allocate(-(-tokens_computed(record) // 4) - len(hits))
        self.pool.insert(blocks[len(hits) : len(keys)], keys[len(hits) :])
        self.pool.free_blocks(blocks)
        self.seen.update(keys)

    def cause(self, record: Record, position: int, key: int, hits: int) -> str:
        if position < hits:
            return "hit"
        if position >= len(self.chains.hashed_keys(record)):
            return "hash_unknown"
        if key not in self.seen:
            return "cold"
        if not self.is_cached(key):
            return "evicted"
        if record.prompt_logprobs:
            return "prompt_logprobs"
        assert position == hits == ((record.prompt_tokens or 0) - 1) // 4
        return "last_token"


def prompts(records: list[Record]) -> Prompts:
    batch = Batch(records)
    return lay_out(batch, batch.hashes(), Chains(META))


@settings(max_examples=80, deadline=None)
@given(traces(), st.integers(1, 12))
def test_causes_equal_the_plain_pool(records: list[Record], usable: int) -> None:
    result = attribute(prompts(records), usable)
    slow = SlowAttribution(records, usable)
    assert result.total.tokens == {**NOTHING, **slow.causes}
    counts = plain_hits(records, Chains(META), usable)
    assert result.total.tokens["hit"] == counts.hit_tokens
    assert (result.rejected, result.total.input_tokens) == (counts.rejected, counts.input_tokens)
    for cause in CAUSES:
        assert sum(share.tokens[cause] for share in result.cohorts) == result.total.tokens[cause]


@settings(max_examples=50, deadline=None)
@given(traces())
def test_an_unlimited_cache_evicts_nothing(records: list[Record]) -> None:
    result = attribute(prompts(records), None)
    slow = SlowAttribution(records, 10_000)
    assert result.total.tokens == {**NOTHING, **slow.causes}
    assert result.total.tokens["evicted"] == 0
    assert result.total.input_tokens == sum(request.prompt_tokens or 0 for request in records)


def test_six_requests_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    # Four blocks. r1: 2 cold, 1 token over. r2: 2 hits, 1 cold. r3: 2 hits; its third block is there, but it ends the
    # prompt. r4: 1 cold, 1 over; it reuses both copies of block 3. r5: 9 and 10 hit, 2 over; it evicts block 2.
    # r6: hits 1; 2 was evicted by r5, 3 by r4; 1 over.
    assert main(["misses", SIX, "--num-gpu-blocks", "5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    causes = NOTHING | {"cold": 16, "evicted": 8, "last_token": 4, "partial_block": 5}
    assert result["total"]["tokens"] == causes | {"hit": 28}
    assert result["total"]["input_tokens"] == 61
    assert [(share["name"], share["requests"]) for share in result["cohorts"]] == [("turn unknown", 6)]


def test_mooncake_hits_equal_sim_pool(mooncake: Path) -> None:
    with open_trace(mooncake) as reader:
        result = attribute(read_prompts(hashed_batches(reader), Chains(reader.meta)), 10_000)
    assert result.total.tokens["hit"] == 61_238 * 512
    assert result.total.input_tokens == 144_793_823
    assert result.total.tokens["hit"] + result.total.tokens["evicted"] == 105_592 * 512
