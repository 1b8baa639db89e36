"""Tables of the workers, put right by engines' KV events, and those events from a publisher on real sockets."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.kvevents import Change, EngineCache
from tap.ipc.exchange import BoardSize, CacheFeed, ExchangeCopy, RecorderSetup
from tap.ipc.upstreamboard import PrefixTable, UpstreamBoard
from tap.prompts.promptstart import prompt_start
from tap.recorder.cacheindex import MAX_KEYS, CacheFeeds, CacheIndex
from tests.kvpublisher import Publisher
from tests.waiting import wait_until
from tracefile import BlockHash, BlockHasher, HashKey, Meta, Record, RequestId

KEY = HashKey(b"k" * 32)
ONE, OTHER = "http://one:8000", "http://other:8000"
TOKENS = list(range(1000, 1033))
HASHES = BlockHasher(KEY, block_size=4, model="m").hash_blocks(TOKENS)
BODY = json.dumps({"model": "m", "prompt": "x" * 4100}).encode()  # 8 pieces of 512 bytes, 4.1 tokens in each
KEYS = prompt_start([BODY], 8192)


def stored(names: list[int], tokens: list[int], parent: int | None = None) -> dict[str, Any]:
    found = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": tokens}
    return {**found, "block_size": 8}


def exchange(upstream: str) -> ExchangeCopy:
    return ExchangeCopy(
        endpoint="/v1/completions",
        arrival_ns=0,
        concurrency=1,
        request_headers={},
        request_body=[BODY],
        upstream=upstream,
    )


def record() -> Record:
    return Record(request_id=RequestId("r"), prompt_tokens=len(TOKENS), block_hashes=list(HASHES))


class Fleet:
    """Two upstreams without sockets: their tables, their caches and the index."""

    def __init__(self) -> None:
        board = UpstreamBoard(size=BoardSize(slots=2))
        self.tables = {ONE: board.table(0), OTHER: board.table(1)}
        self.caches = {name: EngineCache(lambda _: BlockHasher(KEY, block_size=4, model="m")) for name in self.tables}
        self.index = CacheIndex(self.tables, self.caches, 4, 8192)

    def event(self, upstream: str, event: dict[str, Any]) -> None:
        self.index.changed(upstream, self.caches[upstream].apply(event))

    def overlaps(self) -> list[int]:
        return [table.overlap(KEYS) for table in self.tables.values()]


def test_a_prompts_pieces_go_and_come_with_the_blocks_they_end_in() -> None:
    fleet = Fleet()
    fleet.tables[ONE].add(KEYS)  # by the worker that sent it
    fleet.event(ONE, stored([1, 2, 3, 4], TOKENS[:32]))
    fleet.index.learn(exchange(ONE), record())
    assert len(KEYS) == 8
    assert fleet.overlaps() == [8, 0]
    # The engine's blocks have 8 tokens, two pieces each: a piece in the middle of a block counts with the block before.
    fleet.event(ONE, {"type": "BlockRemoved", "block_hashes": [4]})
    assert fleet.overlaps() == [7, 0]
    fleet.event(ONE, {"type": "BlockRemoved", "block_hashes": [3]})
    assert fleet.overlaps() == [5, 0]
    fleet.event(OTHER, stored([7, 8], TOKENS[:16]))  # it got the prompt by another way
    assert fleet.overlaps() == [5, 5]  # the first piece fills no block: those behind it tell of it
    fleet.event(OTHER, {"type": "AllBlocksCleared"})
    assert fleet.overlaps() == [5, 0]


def test_a_prompt_learnt_after_its_blocks_went_is_taken_out() -> None:
    fleet = Fleet()
    fleet.tables[ONE].add(KEYS)
    fleet.event(ONE, stored([1, 2, 3, 4], TOKENS[:32]))
    fleet.event(ONE, {"type": "BlockRemoved", "block_hashes": [2, 3, 4]})
    fleet.index.learn(exchange(ONE), record())
    assert fleet.overlaps() == [3, 0]


def test_a_prompt_under_another_name_of_the_model_stays_with_whom_it_was_sent_to() -> None:
    fleet = Fleet()
    fleet.tables[ONE].add(KEYS)
    fleet.event(ONE, stored([1], [5] * 8))  # some other prompt
    fleet.index.learn(exchange(ONE), record())
    assert fleet.overlaps() == [8, 0]


def test_only_so_many_keys_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tap.recorder.cacheindex.MAX_KEYS", 5)
    fleet = Fleet()
    fleet.event(ONE, stored([1, 2, 3, 4], TOKENS[:32]))
    fleet.index.learn(exchange(ONE), record())
    assert len(fleet.index._blocks) == 5 < MAX_KEYS
    assert sum(map(len, fleet.index._keys.values())) == 5


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    found = Publisher()
    yield found
    found.close()


def test_events_on_a_socket_reach_the_workers_table(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tap.recorder.cacheindex.RECONNECT_MS", 10)
    monkeypatch.setattr("tap.recorder.cacheindex.POLL_MS", 20)
    board = tmp_path / "board"
    feeds = CacheFeeds(setup_of(board, CacheFeed(ONE, 1, publisher.endpoint, publisher.replay_endpoint)), KEY)
    table = UpstreamBoard(board, BoardSize(slots=2)).table(1)

    def publish(number: int, *found: dict[str, Any], live: bool = True) -> None:
        publisher.publish(number, msgspec.msgpack.encode([time.time(), found, 0]), live=live)

    publisher.wait_for_subscriber()
    publish(0, stored([1, 2, 3], TOKENS[:24]))
    wait_until(lambda: feeds.stats()[0].blocks == 3)
    table.add(KEYS)
    feeds.index.learn(exchange(ONE), record())
    assert table.overlap(KEYS) == 7
    publish(1, {"type": "BlockRemoved", "block_hashes": [3]}, live=False)
    publish(2, {"type": "BlockRemoved", "block_hashes": [2]})
    wait_until(lambda: table.overlap(KEYS) == 3)  # the lost batch came by the replay
    found = feeds.stats()[0]
    assert (found.connected, found.batches, found.gaps, found.faults, found.unplaced) == (True, 3, 0, 0, 0)
    assert found.lag_s is not None
    assert 0 <= found.lag_s < 20
    publisher.kept.clear()
    publisher.restart()  # the engine restarts, and numbers from 0 on
    wait_until(lambda: table.overlap(KEYS) == 0)
    publisher.wait_for_subscriber()
    publish(0, stored([9], TOKENS[:8]))
    wait_until(lambda: feeds.stats()[0].blocks == 1)
    feeds.close()
    wait_until(lambda: not feeds.stats()[0].connected)
    said = capfd.readouterr().err
    assert said.count(f"tap: KV events of {ONE} come in\n") == 2
    assert f"tap: no KV events of {ONE} (" in said


def setup_of(board: Path, feed: CacheFeed) -> RecorderSetup:
    return RecorderSetup(
        trace="captured.jsonl",
        overwrite=False,
        meta=Meta(model="m"),
        tokenizer="ids",
        key_secret=KEY.secret,
        algorithm="xxh3_64",
        block_size=4,
        hash_model=None,
        loras=[],
        epoch_ns=0,
        cache_feeds=[feed],
        board_path=str(board),
        board=BoardSize(slots=2),
        route_bytes=8192,
    )


def test_a_block_of_no_known_prompt_changes_no_table() -> None:
    table = PrefixTable(memoryview(bytearray(8 * 8)).cast("Q"))
    table.add([1, 2])
    index = CacheIndex({ONE: table}, {ONE: EngineCache(lambda _: BlockHasher(KEY))}, 16, 512)
    index.changed(ONE, Change(stored=[BlockHash(5)], removed=[BlockHash(1)]))
    assert table.overlap([1, 2]) == 2
