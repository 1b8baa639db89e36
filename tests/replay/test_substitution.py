"""Spliced answers: on any load, the replay's prefix hits are the capture's, though every token is another.

The oracle is an endless prefix cache as a set of token tuples, first under the capture, then under the replay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from loadgen.core.job import Response
from loadgen.core.vocabulary import ORDINARY
from replay.capture import Captured, captured_of
from replay.config import ReplayConfig
from replay.expansion import Expansion
from replay.job import Replay, Replayed
from replay.substitution import OutputSubstitution
from tracefile.hashing.blockhash import BlockHasher
from tracefile.hashing.branches import BranchFinder
from tracefile.hashing.hashkey import HashKey
from tracefile.hashing.tokenchains import branches_of
from tracefile.records.schema import BlockHash, Record, RequestId

BLOCK = 4
HASHER = BlockHasher(HashKey(bytes(32)), block_size=BLOCK)
Tokens = tuple[int, ...]


class Cache:
    """Every prefix of whole engine blocks that was ever computed."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.prefixes: set[Tokens] = set()

    def look_up(self, prompt: Tokens) -> int:
        cached = 0
        while cached + self.block_size <= len(prompt) - 1 and prompt[: cached + self.block_size] in self.prefixes:
            cached += self.block_size
        return cached

    def fill(self, tokens: Tokens) -> None:
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            self.prefixes.add(tokens[:end])


@dataclass(frozen=True)
class Asked:
    """One request of a made-up capture; it arrives at 10 i ms."""

    parent: int | None
    """Which earlier one it goes on from; null: a root."""
    prefix: int
    """A root's shared prefix."""
    new: int
    """New tokens of its prompt."""
    output: int
    long: bool
    """Whether it is still running when the next two arrive."""

    def end_ms(self, index: int) -> float:
        return index * 10.0 + (25.0 if self.long else 5.0)


@dataclass
class Load:
    """A load as it was captured: prompts, answers, and hits."""

    asked: list[Asked]
    engine_block: int
    prompts: list[Tokens] = field(default_factory=list)
    outputs: list[Tokens] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)

    def events(self) -> list[tuple[float, bool, int]]:
        """(time, whether it is an arrival, which), in order."""
        arrivals = [(index * 10.0, True, index) for index in range(len(self.asked))]
        return sorted([*arrivals, *((asked.end_ms(index), False, index) for index, asked in enumerate(self.asked))])


PREFIXES = (tuple(range(9_000, 9_006)), tuple(range(9_100, 9_117)), ())


def capture(asked: list[Asked], engine_block: int) -> Load:
    """Run the load once; every new or generated token is one never seen before."""
    load = Load(asked, engine_block)
    cache = Cache(engine_block)
    for index, ask in enumerate(asked):
        before = PREFIXES[ask.prefix] if ask.parent is None else load.prompts[ask.parent] + load.outputs[ask.parent]
        load.prompts.append(before + tuple(range(index * 1000, index * 1000 + ask.new)))
        load.outputs.append(tuple(range(index * 1000 + 500, index * 1000 + 500 + ask.output)))
    for _, arrives, index in load.events():
        if arrives:
            load.cached.append(cache.look_up(load.prompts[index]))
            cache.fill(load.prompts[index])
        else:
            cache.fill(load.prompts[index] + load.outputs[index][:-1])
    return load


def captured(load: Load, index: int) -> Captured:
    """The request of the record that a tap would have written."""
    return captured_of(recorded(load, index), 0.0, BLOCK)


def recorded(load: Load, index: int, finder: BranchFinder | None = None) -> Record:
    """The record that a tap would have written; ``finder``: it tells to the token where chains part."""
    prompt, output, ask = load.prompts[index], load.outputs[index], load.asked[index]
    chain = HASHER.hash_blocks([*prompt, *output[:-1]])
    record = Record(
        request_id=RequestId(f"r{index}"),
        parent_id=None if ask.parent is None else RequestId(f"r{ask.parent}"),
        arrival_ms=index * 10.0,
        e2e_ms=ask.end_ms(index) - index * 10.0,
        prompt_tokens=len(prompt),
        output_tokens=len(output),
        block_hashes=chain[: len(prompt) // BLOCK],
        output_block_hashes=chain[len(prompt) // BLOCK :],
    )
    branch = None if finder is None else finder.add(HASHER.root, chain, prompt, output[:-1], record.request_id)
    if branch is not None:
        record.branch_tokens, record.branch_hash = branch.tokens, branch.block
    return record


def config(**flags: bool) -> ReplayConfig:
    return ReplayConfig(source=Path("a"), url="http://x", trace=Path("b"), nonce="n", **flags)  # type: ignore[arg-type]


def replay_of(requests: Sequence[Captured], settings: ReplayConfig | None = None, **more: Any) -> Replay:
    settings = settings or config()
    return Replay(config=settings, model="m", requests=requests, links={}, block_size=BLOCK, **more)


def replay_hits(load: Load, replay: Replay) -> tuple[list[int], list[Record]]:
    """Send the load again at its times to an engine that generates other tokens; the hits, and the records."""
    cache = Cache(load.engine_block)
    running = [Replayed(replay, request) for request in replay.requests]
    prompts: list[Tokens] = []
    hits: list[int] = []
    records: list[Record] = []
    for at_ms, arrives, index in load.events():
        if arrives:
            running[index].build()
            prompt = running[index].prompt
            assert prompt is not None
            prompts.append(tuple(prompt.tolist()))
            hits.append(cache.look_up(prompts[index]))
            cache.fill(prompts[index])
        else:
            generated = [2_000_000 + index * 1000 + position for position in range(load.asked[index].output)]
            cache.fill((*prompts[index], *generated[:-1]))
            record = Record(request_id=RequestId(f"r{index}"), arrival_ms=index * 10.0, cached_tokens=hits[index])
            answer = Response(record, at_ms, generated, None, "")
            running[index].follow_ups(answer)
            records.append(running[index].describe(answer))
        replay.substitution.check_integrity()
    assert [len(prompt) for prompt in prompts] == [len(prompt) for prompt in load.prompts]
    return hits, records


@st.composite
def loads(draw: st.DrawFn) -> list[Asked]:
    asked: list[Asked] = []
    for index in range(draw(st.integers(1, 9))):
        ended = [earlier for earlier, ask in enumerate(asked) if ask.end_ms(earlier) <= index * 10.0]
        parent = draw(st.sampled_from([None, *ended]))
        new = draw(st.integers(1, 11))
        asked.append(Asked(parent, draw(st.integers(0, 2)), new, draw(st.integers(1, 11)), draw(st.booleans())))
    return asked


@given(loads(), st.sampled_from([BLOCK, 2 * BLOCK]))
@example([Asked(None, 1, 3, 7, False), Asked(0, 0, 2, 5, False), Asked(0, 0, 5, 1, False)], BLOCK)
def test_replay_hits_equal_the_captures(asked: list[Asked], engine_block: int) -> None:
    load = capture(asked, engine_block)
    requests = [captured(load, index) for index in range(len(asked))]
    hits, records = replay_hits(load, replay_of(requests))
    assert hits == load.cached
    # Every parent had answered in time, so the capture's hashes are true of the replay too.
    by_id = {record.request_id: record for record in records}
    for request in requests:
        assert by_id[request.request_id].block_hashes == list(request.hashes)
        assert by_id[request.request_id].output_block_hashes == list(request.output_hashes or ())


@given(loads(), st.sampled_from([1, 2, BLOCK]))
@example([Asked(None, 0, 3, 7, True), Asked(None, 0, 3, 7, False), Asked(0, 0, 2, 5, False)], 1)
def test_hits_with_smaller_blocks_equal_the_captures(asked: list[Asked], engine_block: int) -> None:
    load, finder = capture(asked, engine_block), BranchFinder(BLOCK)
    order = sorted(range(len(asked)), key=lambda index: asked[index].end_ms(index))  # as a tap writes
    records = {index: recorded(load, index, finder) for index in order}
    requests = [captured_of(records[index], 0.0, BLOCK) for index in range(len(asked))]
    branches = branches_of(records.values(), BLOCK)
    hits, _ = replay_hits(load, replay_of(requests, branches=branches))
    assert hits == load.cached


@given(loads())
def test_cold_prompts_share_nothing(asked: list[Asked]) -> None:
    load = capture(asked, BLOCK)
    requests = [captured(load, index) for index in range(len(asked))]
    hits, records = replay_hits(load, replay_of(requests, config(cold_prompts=True)))
    assert hits == [0] * len(asked)
    hashes = [
        block for record in records for block in [*(record.block_hashes or []), *(record.output_block_hashes or [])]
    ]
    assert len(set(hashes)) == len(hashes)
    assert len(hashes) == sum(len(load.prompts[i] + load.outputs[i][:-1]) // BLOCK for i in range(len(asked)))


EXPANSION = Expansion(BLOCK, "n", ORDINARY)
A, B, C = BlockHash(1), BlockHash(2), BlockHash(3)


def prompt_of(substitution: OutputSubstitution, hashes: Sequence[BlockHash], tail: int, name: str) -> list[int]:
    blocks = substitution.blocks(hashes, RequestId(name)).ravel().tolist()
    return [*blocks, *EXPANSION.tail(tail, RequestId(name)).tolist()]


def test_block_with_prompt_and_output_tokens() -> None:
    substitution = OutputSubstitution(EXPANSION, {B: 0})
    prompt = prompt_of(substitution, [A], 3, "first")
    # 7 prompt tokens and 4 generated: block 1 holds the prompt's last 3 and the answer's first; block 2 would need the
    # 5th generated token, and the last one's KV is never computed anyway.
    true = substitution.answered(RequestId("first"), [B], np_tokens(prompt), [501, 502, 503, 504])
    assert true == [B]
    assert substitution.blocks([A, B], RequestId("second"))[1].tolist() == [*prompt[4:7], 501]
    assert (substitution.substituted_blocks, substitution.missed_blocks) == (1, 0)


def test_synthetic_tokens_stay_once_sent() -> None:
    substitution = OutputSubstitution(EXPANSION, {B: 0, C: 0})
    first = prompt_of(substitution, [A], 0, "first")
    early = substitution.blocks([A, B], RequestId("early"))  # open loop: its parent has not answered yet
    true = substitution.answered(RequestId("first"), [B, C], np_tokens(first), list(range(9)))
    # Nothing of this run has those real blocks in a prompt: they get hashes of their own, the one behind them too.
    assert true == [EXPANSION.rekeyed(B, RequestId("first")), EXPANSION.rekeyed(C, RequestId("first"))]
    assert substitution.blocks([A, B], RequestId("late")).tolist() == early.tolist()
    assert substitution.missed_blocks == 2
    substitution.check_integrity()


def test_equal_output_hashes_with_different_tokens() -> None:
    substitution = OutputSubstitution(EXPANSION, {B: 0})
    prompt = np_tokens(prompt_of(substitution, [A], 0, "first"))
    assert substitution.answered(RequestId("first"), [B], prompt, [1, 2, 3, 4, 5]) == [B]
    assert substitution.answered(RequestId("twin"), [B], prompt, [1, 2, 3, 4, 9]) == [B]
    assert substitution.answered(RequestId("other"), [B], prompt, [6, 7, 8, 9, 5]) == [
        EXPANSION.rekeyed(B, RequestId("other"))
    ]
    assert substitution.blocks([B], RequestId("next")).tolist() == [[1, 2, 3, 4]]


def np_tokens(tokens: Sequence[int]) -> "np.typing.NDArray[np.uint32]":
    return np.array(tokens, dtype=np.uint32)
