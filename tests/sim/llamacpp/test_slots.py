"""llama.cpp's slots: states worked by hand, random loads against its C++ on lists, and the command."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.__main__ import main
from sim.llamacpp.config import SlotConfig
from sim.llamacpp.slots import Chain, SlotCache
from tests.sim.cache.test_pool_command import SIX
from tests.sim.oracles.integrity import check_slots, saved_chains
from tests.sim.oracles.slow_slots import SlowServer
from tracefile.files.writing import TraceWriter
from tracefile.records.schema import BlockHash, Engine, HashInfo, Meta, Record, RequestId

ALONE = SlotConfig(slots=2, kv_unified=False, cache_ram_tokens=0)


class Interned:
    """Chained hashes of prefixes: equal numbers mean equal prefixes."""

    def __init__(self) -> None:
        self._keys: dict[tuple[int, ...], int] = {}

    def chain(self, tokens: list[int]) -> Chain:
        keys = [self._keys.setdefault(tuple(tokens[: end + 1]), len(self._keys)) for end in range(len(tokens))]
        return Chain(keys, len(tokens))


class Server:
    """A ``SlotCache`` on tokens, one request at a time unless ``end`` is called apart."""

    def __init__(self, config: SlotConfig) -> None:
        self.cache, self._interned = SlotCache(config), Interned()

    def start(self, tokens: list[int]) -> tuple[int, int] | None:
        started = self.cache.start(self._interned.chain(tokens))
        check_slots(self.cache)
        return None if started is None else (started[0].number, started[1])

    def end(self, number: int, tokens: list[int]) -> None:
        self.cache.end(self.cache.slots[number], self._interned.chain(tokens))

    def run(self, tokens: list[int]) -> tuple[int, int]:
        """The slot of a request that ends at once, and its cached tokens."""
        started = self.start(tokens)
        assert started is not None
        self.end(started[0], tokens)
        return started


A = [1] * 20
B = [2] * 20


def test_slot_assignment_order() -> None:
    server = Server(ALONE)
    assert server.run(A) == (1, 0)
    assert server.run(B) == (0, 0)  # nothing in common with slot 1
    assert server.run(A) == (1, 19)  # all of it is there, and the last token is computed
    assert server.run([*A, 5, 6]) == (1, 20)
    assert server.run([3] * 20) == (0, 0)  # slot 1 was used later
    assert server.run(B) == (1, 0)  # now slot 0 was; of A nothing is left
    assert server.run(A) == (0, 0)
    assert server.cache.evicted_tokens == 20 + 22 + 20


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
CONFIGS = st.builds(
    SlotConfig,
    slots=st.integers(1, 4),
    slot_prompt_similarity=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    kv_unified=st.booleans(),
    cache_idle_slots=st.booleans(),
    cache_ram_tokens=st.sampled_from([None, 0, 8, 30]),
)


@given(CONFIGS, st.lists(st.tuples(st.integers(0, 3), TOKENS, TOKENS), max_size=25))
def test_equals_the_slow_slots(config: SlotConfig, steps: list[Any]) -> None:
    ours = Server(config)
    slow = SlowServer(
        config.slots,
        config.slot_prompt_similarity,
        config.kv_unified,
        config.cache_idle_slots,
        config.cache_ram_tokens,
    )
    running: list[tuple[int, list[int]]] = []
    for position, prompt, output in steps:
        if position < len(running):  # a request ends first, not always the oldest
            number, tokens = running.pop(position)
            ours.end(number, tokens)
            slow.release(number, tokens)
        started = ours.start(prompt)
        assert started == slow.launch(prompt)
        if started is not None:
            running.append((started[0], [*prompt, *output]))
        assert [chain.tokens for chain in saved_chains(ours.cache)] == list(map(len, slow.states))


def test_request_start_is_fast_with_many_saved_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """800 chats on one system prompt, of which each start matches the saved prompt of its chat or none."""
    comparisons, common = 0, SlotCache._common

    def counted(cache: SlotCache, left: Chain, right: Chain) -> int:
        nonlocal comparisons
        comparisons += 1
        return common(cache, left, right)

    monkeypatch.setattr(SlotCache, "_common", counted)
    cache = SlotCache(SlotConfig())
    for turn in range(2):
        for chat in range(400):
            first = 1000 * (chat + 1)
            chain = Chain([*range(5), *range(first, first + 20), first + 20 + turn], 26)
            started = cache.start(chain)
            assert started is not None
            assert started[1] == (25 if turn else 5 if chat else 0)
            cache.end(started[0], chain)
    assert comparisons < 800 * 20


def request(name: str, arrival_ms: float, e2e_ms: float, tokens: list[int], cached: int | None) -> Record:
    return Record(
        request_id=RequestId(name),
        arrival_ms=arrival_ms,
        e2e_ms=e2e_ms,
        prompt_tokens=len(tokens),
        output_tokens=1,
        cached_tokens=cached,
        block_hashes=[BlockHash(hash(tuple(tokens[: end + 1])) % 2**64) for end in range(len(tokens))],
    )


def test_requests_run_at_their_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the file they are as they ended; the third finds both slots busy, and starts when the first one ends."""
    meta = Meta(
        source="tap", block_size=1, hash=HashInfo(algorithm="xxh3_64"), engine=Engine(name="llamacpp", max_num_seqs=2)
    )
    with TraceWriter(tmp_path / "t.jsonl", meta) as writer:
        for record in (
            request("second", 1.0, 30.0, B, 0),
            request("first", 0.0, 50.0, A, 0),
            request("third", 2.0, 70.0, [*B, 5], 19),
        ):
            writer.write(record)
    assert main(["pool", str(tmp_path / "t.jsonl"), "--engine", "llamacpp"]) == 0
    printed = capsys.readouterr().out
    assert "2 slots, prompt cache: unlimited: 20 of 61 input tokens hit (32.79%)" in printed
    assert "hits as reported: 2 of 3 requests, to the token" in printed


def test_six_sequential_requests(capsys: pytest.CaptureFixture[str]) -> None:
    # Without times each ends before the next. As in SGLang's tree of single tokens, r3 hits all but its last token.
    assert main(["pool", SIX, "--engine", "llamacpp", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["requests"], result["hit_tokens"], result["settings"]["slots"]) == (6, 39, 4)
