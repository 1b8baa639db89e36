"""Upstreams' caches as their KV events tell them, written into the tables that the workers route by.

A worker knows a prompt by keys of its bytes; events know blocks of tokens. The recorder has seen both of a request, and
so can say which keys end in which blocks: a prompt's start is known from its first request's end on. Tables hold what
workers sent at once; events take out what an engine evicted, and put in what it still holds.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from engines.kvevents import Change, EngineCache, EventFollower
from engines.zmtp import ZmtpSocket, parse_endpoint
from tap.ipc.exchange import CacheFeed, ExchangeCopy, RecorderSetup
from tap.ipc.feed import CacheFeedStats
from tap.ipc.stderr import say
from tap.ipc.upstreamboard import PrefixTable, UpstreamBoard
from tap.prompts.promptstart import PIECE_BYTES, prompt_start
from tracefile.hashing.blockhash import BlockHasher
from tracefile.hashing.hashkey import HashKey
from tracefile.records.schema import BlockHash, Record
from wire.errors import WireError

MAX_KEYS = 1 << 16
"""Keys of prompts' starts whose block is remembered."""
CONNECT_TIMEOUT_S = 5.0
RECONNECT_S = 1.0
NUMBER_BYTES = 8
END_OF_REPLAY = -1


class CacheIndex:
    """Tables of upstreams, kept to their engines' caches. Any thread may call."""

    def __init__(
        self, tables: Mapping[str, PrefixTable], caches: Mapping[str, EngineCache], block_size: int, route_bytes: int
    ) -> None:
        """``tables``, ``caches``: by upstream. ``block_size``: of a record's hashes."""
        self._tables, self._caches = tables, caches
        self._block_size, self._route_bytes = block_size, route_bytes
        self._blocks: OrderedDict[int, BlockHash] = OrderedDict()
        """Block of an engine's size in which a key's bytes end, the latest learnt last."""
        self._keys: dict[BlockHash, list[int]] = {}
        self._lock = threading.Lock()

    def learn(self, exchange: ExchangeCopy, record: Record) -> None:
        """Learn the blocks of a prompt's start, and put right what the tables say of it."""
        if not (exchange.request_body and record.prompt_tokens and record.block_hashes):
            return
        keys = prompt_start(exchange.request_body, self._route_bytes)
        blocks = self._ends(record.block_hashes, record.prompt_tokens, sum(map(len, exchange.request_body)))
        with self._lock:
            for key, block in zip(keys, blocks, strict=False):
                if block is not None:
                    self._remember(key, block)
            for upstream, cache in self._caches.items():
                held = [key for key in keys if (block := self._blocks.get(key)) is not None and block in cache]
                self._tables[upstream].add(held)
                # A prompt of which nothing is there may have been sent under another name of the model.
                if held and upstream == exchange.upstream:
                    self._tables[upstream].remove(({*keys} - {*held}) & self._blocks.keys())

    def changed(self, upstream: str, change: Change) -> None:
        table = self._tables[upstream]
        with self._lock:
            if change.cleared:
                table.clear()
            for block in change.removed:
                table.remove(self._keys.get(block, ()))
            for block in change.stored:
                table.add(self._keys.get(block, ()))

    def _ends(self, hashes: Sequence[BlockHash], tokens: int, body_bytes: int) -> Iterator[BlockHash | None]:
        """Yield, piece by piece of the body, the last full block of an engine's size. Null: none is full yet.

        The prompt's tokens are taken to be spread evenly over the body.
        """
        fine = max(cache.fine_blocks for cache in self._caches.values())
        piece_tokens = tokens * PIECE_BYTES / max(body_bytes, PIECE_BYTES)
        for place in count(1) if fine else ():
            block = min(int(place * piece_tokens) // self._block_size, len(hashes)) // fine * fine
            yield hashes[block - 1] if block else None

    def _remember(self, key: int, block: BlockHash) -> None:
        before = self._blocks.pop(key, None)
        if before != block:
            self._forget(key, before)
            self._keys.setdefault(block, []).append(key)
        self._blocks[key] = block
        if len(self._blocks) > MAX_KEYS:
            self._forget(*self._blocks.popitem(last=False))

    def _forget(self, key: int, block: BlockHash | None) -> None:
        if block is None:
            return
        keys = self._keys[block]
        keys.remove(key)
        if not keys:
            del self._keys[block]


class CacheFeeds:
    """Followers of engines' KV events, each in a thread; they end with the process."""

    def __init__(self, setup: RecorderSetup, key: HashKey) -> None:
        def new_hasher(lora: str | None) -> BlockHasher:
            model = setup.hash_model or lora or setup.meta.model or ""
            return BlockHasher(key, setup.algorithm, setup.block_size, model=model, lora=lora)

        board = UpstreamBoard(Path(setup.board_path), setup.board)
        self._feeds = [_Feed(feed, EngineCache(new_hasher)) for feed in setup.cache_feeds]
        self.index = CacheIndex(
            {feed.upstream: board.table(feed.slot) for feed in setup.cache_feeds},
            {feed.upstream: feed.follower.cache for feed in self._feeds},
            setup.block_size,
            setup.route_bytes,
        )
        for feed in self._feeds:
            threading.Thread(target=feed.follow, args=(self.index,), daemon=True, name="kv-events").start()

    def stats(self) -> list[CacheFeedStats]:
        return [feed.stats() for feed in self._feeds]

    def close(self) -> None:
        for feed in self._feeds:
            feed.close()


class _Feed:
    """An engine's events."""

    def __init__(self, told: CacheFeed, cache: EngineCache) -> None:
        self.upstream = told.upstream
        self._events = parse_endpoint(told.events)
        self._replay_at = None if told.replay is None else parse_endpoint(told.replay)
        self.follower = EventFollower(cache, None if self._replay_at is None else self._replay)
        self._socket: ZmtpSocket | None = None
        """Null: there is no connection."""
        self._ended = threading.Event()

    def follow(self, index: CacheIndex) -> None:
        """Take events until ``close``, over one connection after another."""
        problem = ""
        while not self._ended.is_set():
            try:
                with ZmtpSocket(self._events, "SUB", timeout_s=CONNECT_TIMEOUT_S) as self._socket:
                    self._socket.set_timeout(None)
                    problem = ""
                    say(f"KV events of {self.upstream} come in")
                    self._take_all(self._socket, index)
            except (OSError, WireError) as error:
                if self._socket is not None:
                    self._socket = None
                    index.changed(self.upstream, self.follower.restart())
                if str(error) != problem and not self._ended.is_set():
                    problem = str(error)
                    say(f"no KV events of {self.upstream} ({problem}); the router goes by what it sent")
            self._ended.wait(RECONNECT_S)

    def close(self) -> None:
        self._ended.set()
        if (connected := self._socket) is not None:
            connected.close()

    def stats(self) -> CacheFeedStats:
        follower = self.follower
        return CacheFeedStats(
            upstream=self.upstream,
            connected=self._socket is not None,
            batches=follower.batches,
            gaps=follower.gaps,
            faults=follower.faults,
            blocks=len(follower.cache),
            unplaced=follower.cache.unplaced,
            lag_s=follower.lag_s,
        )

    def _take_all(self, events: ZmtpSocket, index: CacheIndex) -> None:
        while True:
            parts = events.receive()
            if len(parts) < 2:
                raise WireError(f"a message of {len(parts)} parts; expected topic, number and batch")
            number = int.from_bytes(parts[-2], "big", signed=True)
            for change in self.follower.take(number, parts[-1], time.time()):
                index.changed(self.upstream, change)

    def _replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Yield the batches that the engine kept; fewer where it does not answer."""
        if self._replay_at is None:
            return
        with suppress(OSError, WireError), ZmtpSocket(self._replay_at, "DEALER", timeout_s=CONNECT_TIMEOUT_S) as router:
            router.send([b"", first.to_bytes(NUMBER_BYTES, "big")])
            while True:
                parts = router.receive()
                number = int.from_bytes(parts[-2], "big", signed=True) if len(parts) > 1 else END_OF_REPLAY
                if number == END_OF_REPLAY:
                    return
                yield number, parts[-1]
