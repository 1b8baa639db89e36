"""Output hashes inferred from the prompts of next turns."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tracefile.conversations import B, altered, chat, exact, record_of, traffic
from tracefile.hashing.chain import repeated_output
from tracefile.outputs import InferredOutputs, infer_outputs
from tracefile.records.batches import Batch
from tracefile.records.schema import BlockHash, Engine, Meta, Record, RequestId
from tracefile.sessions import SessionIndex

META = Meta(source="tap", block_size=4, engine=Engine(block_size=8))


def turn(
    name: str, prompt: list[int], tokens: tuple[int, int], parent: str | None = None, cached: int | None = None
) -> Record:
    """A request with block names for hashes."""
    return Record(
        request_id=RequestId(name),
        parent_id=None if parent is None else RequestId(parent),
        prompt_tokens=tokens[0],
        output_tokens=tokens[1],
        cached_tokens=cached,
        block_hashes=list(map(BlockHash, prompt)),
    )


@pytest.mark.parametrize(
    ("cached", "expected"),
    [
        (None, (2, 7, None)),  # not reported
        (0, (2, 7, None)),  # evicted, or another replica: it says nothing of the output
        (8, (2, 2, "altered")),  # the prompt's blocks alone: the output begins with other tokens
        (16, (2, 4, "altered")),
        (24, (2, 7, "exact")),  # 28 tokens are computed: the engine's fourth block of 8 is not full
        (32, (2, 7, "exact")),
    ],
)
def test_cached_tokens_limit_the_inferred_output(cached: int | None, expected: tuple[int, int, str | None]) -> None:
    # A prompt of 10 tokens and an output of 20: the last token has no KV, so 29 are computed, in blocks 2 to 6 of 4.
    assert repeated_output((10, 20), cached, block_size=4, engine_block_size=8) == expected


def test_output_blocks_come_from_the_next_turn() -> None:
    first = turn("a", [1, 2], (10, 9))
    second = turn("b", [1, 2, 3, 4, 5, 6], (26, 5), "a", cached=16)
    filled = [infer_outputs(META, [first, second]).fill(item) for item in (first, second)]
    assert filled[0].output_block_hashes == [3, 4]  # 18 tokens are computed
    assert filled[0].output_hash_source == "inferred"
    assert filled[1] is second
    assert first.output_block_hashes is None


def test_longest_repeating_turn_counts() -> None:
    first = turn("a", [1, 2], (10, 17))
    edited = turn("b", [1, 2, 3, 4, 50], (22, 5), "a", cached=16)
    later = turn("c", [1, 2, 3, 4, 5, 6], (30, 5), "a", cached=24)
    assert infer_outputs(META, [first, edited, later]).fill(first).output_block_hashes == [3, 4, 5, 6]


@pytest.mark.parametrize(
    "second",
    [
        turn("b", [1, 9, 3, 4, 5], (20, 5), "a"),  # a named session's next turn that does not begin with the prompt
        turn("b", [1, 2, 3, 4, 5], (20, 5)),  # no parent
        turn("b", [1, 2, 3, 4, 5], (20, 5), "a", cached=8),  # the output was changed from its first block on
    ],
)
def test_unrelated_prompt_gives_no_output(second: Record) -> None:
    first = turn("a", [1, 2], (10, 9))
    assert infer_outputs(META, [first, second]).fill(first) is first


def test_recorded_outputs_and_imported_traces_are_unchanged() -> None:
    first, second = turn("a", [1, 2], (10, 9)), turn("b", [1, 2, 3, 4, 5], (20, 5), "a")
    known = msgspec.structs.replace(first, output_block_hashes=[BlockHash(7)])
    assert infer_outputs(META, [known, second]).fill(known) is known
    assert infer_outputs(Meta(block_size=4), [first, second]).fill(first) is first


def test_several_choices_have_no_output_hashes() -> None:
    first = msgspec.structs.replace(turn("a", [1, 2], (10, 9)), n=2)
    assert infer_outputs(META, [first, turn("b", [1, 2, 3, 4, 5], (20, 5), "a")]).fill(first) is first


def test_inferred_hashes_equal_the_engines() -> None:
    sent = traffic(lambda r: chat(r, again=exact), seed=5, sessions=40)
    index = SessionIndex(B)
    reported = [index.link(record_of(item, output_ids=False), item.prompt) for item in sent]
    inferred = infer_outputs(Meta(source="tap", block_size=B), reported)
    parents = {record.parent_id for record in reported}
    for item, record in zip(sent, reported, strict=True):
        if record.request_id in parents:
            assert (inferred.fill(record).output_block_hashes or []) == record_of(
                item, output_ids=True
            ).output_block_hashes


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.booleans())
def test_batches_are_filled_as_records_are(seed: int, changed: bool) -> None:
    sent = traffic(lambda r: chat(r, again=altered if changed else exact), seed=seed, sessions=5)
    index = SessionIndex(B)
    reported = [
        index.link(record_of(item, output_ids=seed % 3 == 0 and i % 2 == 0), item.prompt) for i, item in enumerate(sent)
    ]
    inferred = infer_outputs(Meta(source="tap", block_size=B), reported)
    batch = Batch(reported)
    by_batch = inferred.fill_hashes(batch, batch.hashes())
    by_record = Batch([inferred.fill(record) for record in reported]).hashes()
    for item, other in zip(by_batch, by_record, strict=True):
        assert np.array_equal(item, other)


def test_batch_without_inferred_outputs_is_unchanged() -> None:
    batch = Batch([turn("a", [1, 2], (10, 9))])
    hashes = batch.hashes()
    assert InferredOutputs(META).fill_hashes(batch, hashes) is hashes
