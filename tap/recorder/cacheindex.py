"""Upstreams' caches as their KV events tell them, written into the tables that the workers route by.

A worker knows a prompt by keys of its bytes; events know blocks of tokens. The recorder has seen both of a request, and
so can say which keys end in which blocks: a prompt's start is known from its first request's end on. Tables hold what
workers sent at once; events take out what an engine evicted, and put in what it still holds.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from engines.kvevents import Change, EngineCache, EventFollower
from tap.ipc.exchange import CacheFeed, ExchangeCopy, RecorderSetup
from tap.ipc.feed import CacheFeedStats
from tap.ipc.stderr import say
from tap.ipc.upstreamboard import PrefixTable, UpstreamBoard
from tap.prompts.promptstart import PIECE_BYTES, prompt_start
from tracefile.hashing.blockhash import BlockHasher
from tracefile.hashing.hashkey import HashKey
from tracefile.records.extras import load_extra
from tracefile.records.schema import BlockHash, Record

MAX_KEYS = 1 << 16
"""Keys of prompts' starts whose block is remembered."""
ANSWER_TIMEOUT_MS = 5000
"""Wait for a first connection before a line says that there is none, and for each batch of a replay."""
RECONNECT_MS = 1000
POLL_MS = 500
"""Longest time until ``close`` is seen."""
MAX_MESSAGE_BYTES = 1 << 28
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
        self.upstream, self._events, self._replay_at = told.upstream, told.events, told.replay
        self.follower = EventFollower(cache, None if told.replay is None else self._replay)
        self._zmq = load_extra("zmq")
        self._context = self._zmq.Context()
        self._connected = False
        self._ended = threading.Event()

    def follow(self, index: CacheIndex) -> None:
        """Take events until ``close``; ZeroMQ connects again by itself, its monitor tells when."""
        zmq, recv_monitor_message = self._zmq, load_extra("zmq.utils.monitor").recv_monitor_message
        with self._socket(zmq.SUB) as events:
            events.subscribe(b"")
            changes = events.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            poller = zmq.Poller()
            poller.register(events, zmq.POLLIN)
            poller.register(changes, zmq.POLLIN)
            events.connect(self._events)
            silent_from, told = time.monotonic() + ANSWER_TIMEOUT_MS / 1000, False
            while not self._ended.is_set():
                ready = dict(poller.poll(POLL_MS))
                if events in ready:  # before the end of the connection that they came over
                    self._take(events.recv_multipart(), index)
                elif changes in ready:
                    self._connected = recv_monitor_message(changes)["event"] != zmq.EVENT_DISCONNECTED
                    self._tell(index)
                    told = True
                elif not told and time.monotonic() > silent_from:
                    self._tell(index)
                    told = True
            events.disable_monitor()
            changes.close()
        self._connected = False
        self._context.term()

    def close(self) -> None:
        self._ended.set()

    def stats(self) -> CacheFeedStats:
        follower = self.follower
        return CacheFeedStats(
            upstream=self.upstream,
            connected=self._connected,
            batches=follower.batches,
            gaps=follower.gaps,
            faults=follower.faults,
            blocks=len(follower.cache),
            unplaced=follower.cache.unplaced,
            lag_s=follower.lag_s,
        )

    def _socket(self, kind: int) -> Any:
        """Return a socket that keeps nothing at its end, and finds out about a peer that vanished."""
        zmq, made = self._zmq, self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 30),
            (zmq.TCP_KEEPALIVE_INTVL, 10),
            (zmq.TCP_KEEPALIVE_CNT, 3),
        ):
            made.setsockopt(option, value)
        return made

    def _tell(self, index: CacheIndex) -> None:
        if self._connected:
            say(f"KV events of {self.upstream} come in")
        else:
            index.changed(self.upstream, self.follower.restart())
            say(f"no KV events of {self.upstream} ({self._events}: not connected); the router goes by what it sent")

    def _take(self, parts: Sequence[bytes], index: CacheIndex) -> None:
        """Take a message: topic, number and batch; another one counts as a fault."""
        if len(parts) < 2:
            self.follower.faults += 1
            return
        number = int.from_bytes(parts[-2], "big", signed=True)
        for change in self.follower.take(number, parts[-1], time.time()):
            index.changed(self.upstream, change)

    def _replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Yield the batches that the engine kept; fewer where it does not answer."""
        with self._socket(self._zmq.DEALER) as router:
            router.connect(self._replay_at)
            router.send_multipart([b"", first.to_bytes(NUMBER_BYTES, "big")])
            while router.poll(ANSWER_TIMEOUT_MS):
                parts = router.recv_multipart()
                number = int.from_bytes(parts[-2], "big", signed=True) if len(parts) > 1 else END_OF_REPLAY
                if number == END_OF_REPLAY:
                    return
                yield number, parts[-1]
