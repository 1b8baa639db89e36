"""An engine's own KV cache events, as vLLM and SGLang publish them: which prefixes it holds, by our hashes.

Events carry token ids; they are hashed with our key at once and dropped. A batch is msgpack: ``[time, events, rank]``,
an event a map with its name under ``type``, or in older versions an array that begins with it.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from tracefile.hashing.blockhash import BlockHasher
from tracefile.records.decoding import NOT_JSON
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash

EngineHash = int | bytes
"""Engine's own name for a block."""
GPU = "GPU"
MAX_BLOCKS = 1 << 21
"""Blocks of an engine that are remembered at most."""


class BlocksStored(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive blocks that got full."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None = None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    """Content of each block beside its tokens: LoRA adapter, cache salt, media. Our hashes have the adapter alone."""
    group_idx: int | None = None


class BlocksRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """Evicted blocks."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


_KINDS: dict[str, type[BlocksStored | BlocksRemoved]] = {"BlockStored": BlocksStored, "BlockRemoved": BlocksRemoved}
_CLEARED = "AllBlocksCleared"
_ARRAYS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        "extra_keys",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
}
"""Fields of events that are arrays, in order."""


class Change(NamedTuple):
    """Effect of an event, or of a lost engine."""

    stored: Sequence[BlockHash] = ()
    removed: Sequence[BlockHash] = ()
    cleared: bool = False
    """The cache was emptied before ``stored`` came in."""


class EngineCache:
    """Blocks that an engine holds, each named by our hash of the tokens up to its end."""

    def __init__(self, new_hasher: Callable[[str | None], BlockHasher]) -> None:
        """``new_hasher``: of a LoRA adapter's blocks, null for the base model."""
        self._new_hasher = new_hasher
        self._hashers: dict[str | None, BlockHasher] = {}
        self._ends: dict[EngineHash, BlockHash] = {}
        """Our hash by the engine's."""
        self._copies: dict[BlockHash, list[EngineHash]] = {}
        """The engine's hashes of a block, one for each copy: vLLM keeps what two requests computed at once."""
        self.fine_blocks = 0
        """Blocks of our hashes in one of the engine's. 0: not known yet."""
        self.unplaced = 0
        """Blocks that could not be named: unknown parent, salt or media, block size that ours does not divide."""

    def __len__(self) -> int:
        return len(self._copies)

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._copies

    def clear(self) -> Change:
        self._ends.clear()
        self._copies.clear()
        return Change(cleared=True)

    def apply(self, event: Any) -> Change:
        """Take an event as it was decoded. Raises InputError for a known one of other fields; others change nothing."""
        name, found = _named(event)
        if name == _CLEARED:
            return self.clear()
        kind = _KINDS.get(name)
        if kind is None:
            return Change()
        try:
            read = msgspec.convert(found, kind)
        except msgspec.ValidationError as error:
            raise InputError(f"KV event {name}: {error}; expected vLLM's or SGLang's") from None
        if read.medium not in (None, GPU) or read.group_idx:  # offloaded, or of another kind of layer
            return Change()
        if isinstance(read, BlocksStored):
            return Change(stored=[block for name, block in self._store(read) if self._add(name, block)])
        return Change(removed=[block for block in map(self._drop, read.block_hashes) if block is not None])

    def _store(self, event: BlocksStored) -> Iterator[tuple[EngineHash, BlockHash]]:
        hasher = self._hasher(event.lora_name)
        per_block, rest = divmod(event.block_size, hasher.block_size)
        self.fine_blocks = 0 if rest else per_block
        known = event.parent_block_hash is None or event.parent_block_hash in self._ends
        count = _plain_blocks(event) if known and self.fine_blocks and len(self._ends) < MAX_BLOCKS else 0
        self.unplaced += len(event.block_hashes) - count
        previous = None if event.parent_block_hash is None else self._ends.get(event.parent_block_hash)
        ids = event.token_ids[: count * event.block_size]
        ends = hasher.extend(previous, ids)[per_block - 1 :: per_block] if count else []
        return zip(event.block_hashes, ends, strict=False)

    def _hasher(self, lora: str | None) -> BlockHasher:
        hasher = self._hashers.get(lora)
        if hasher is None:
            hasher = self._hashers[lora] = self._new_hasher(lora)
        return hasher

    def _add(self, name: EngineHash, block: BlockHash) -> bool:
        """Add a copy; return True if it is the first one."""
        self._ends[name] = block
        copies = self._copies.setdefault(block, [])
        copies.append(name)
        return len(copies) == 1

    def _drop(self, engine_hash: EngineHash) -> BlockHash | None:
        """Take out a copy; return the block if it was the last one."""
        block = self._ends.get(engine_hash)
        if block is None:
            return None
        copies = self._copies[block]
        copies.remove(engine_hash)
        if engine_hash not in copies:
            del self._ends[engine_hash]
        if copies:
            return None
        del self._copies[block]
        return block


def _named(event: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(event, dict):
        return str(event.get("type")), event
    if isinstance(event, list) and event:
        return str(event[0]), dict(zip(_ARRAYS.get(str(event[0]), ()), event[1:], strict=False))
    return "", {}


def _plain_blocks(event: BlocksStored) -> int:
    """Count the leading blocks whose content is their tokens and adapter alone."""
    for place, keys in enumerate(event.extra_keys or ()):
        if keys and keys != [event.lora_name]:
            return place
    return len(event.block_hashes)


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]


_batches = msgspec.msgpack.Decoder(_Batch)
Replay = Callable[[int], Iterable[tuple[int, bytes]]]
"""Gives the publisher's kept batches from a sequence number on."""


class EventFollower:
    """Keeps an engine's cache by its batches, which are numbered from 0 on.

    A gap is filled by the engine's replay; else the cache counts as lost. Numbers that begin anew are a new engine.
    """

    def __init__(self, cache: EngineCache, replay: Replay | None = None) -> None:
        self.cache = cache
        self._replay = replay
        self._next: int | None = None
        """Number of the batch to come. Null: none came yet."""
        self._last_live = -1
        self.batches = self.gaps = self.faults = 0
        self.lag_s: float | None = None
        """From the engine's clock in the latest live batch to its taking in. Null: none came."""

    def restart(self) -> Change:
        """Take the connection as lost: the engine may have restarted, and events been missed."""
        self._next, self._last_live = None, -1
        return self.cache.clear()

    def take(self, number: int, payload: bytes, now_s: float) -> Iterator[Change]:
        """Yield the changes of a live batch, and before them those of batches that were missed."""
        if number <= self._last_live:
            yield self.restart()
        self._last_live = number
        if number > (self._next or 0):
            yield from self._fill(number)
        if number < (self._next or 0):
            return  # the replay had it already
        self._next = number + 1
        time_s = yield from self._apply(payload)
        if time_s is not None:
            self.lag_s = max(0.0, now_s - time_s)

    def _fill(self, number: int) -> Iterator[Change]:
        """Apply the missed batches before ``number``; clear the cache if some stay unknown that it needs."""
        is_first = self._next is None
        for missed, payload in self._replay(self._next or 0) if self._replay is not None else ():
            if self._next is None or missed == self._next:
                self._next = missed + 1
                yield from self._apply(payload)
        if not is_first and (self._next or 0) < number:
            self.gaps += 1
            yield self.cache.clear()

    def _apply(self, payload: bytes) -> Generator[Change, None, float | None]:
        """Yield a batch's changes; return the engine's time of it."""
        self.batches += 1
        try:
            batch = _batches.decode(payload)
        except NOT_JSON:
            self.faults += 1
            return None
        for event in batch.events:
            try:
                yield self.cache.apply(event)
            except InputError:
                self.faults += 1
        return batch.ts
