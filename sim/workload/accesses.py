"""A trace's prompts as flat arrays of block numbers, for the passes over all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sim.workload.arrivals import require_times
from sim.workload.chain import Chains, chain_places, hashed_batches, known_prompt_blocks, leading_keys
from sim.workload.groups import Grouping, Groups, namer_of
from sim.workload.interning import lay_out_chains
from tracefile.files.reading import open_trace
from tracefile.records.arrays import IntArray
from tracefile.records.batches import Batch, Hashes
from tracefile.records.reader import TraceReader
from tracefile.records.schema import Record


@dataclass(frozen=True, slots=True)
class Accesses:
    """Requests one after another, each with its full prompt blocks, root to leaf."""

    blocks: IntArray
    """Dense numbers 0 … distinct − 1; a block whose hash is not known has one of its own."""
    starts: IntArray
    """Where each request's blocks start in ``blocks``; one more entry than requests."""
    limits: IntArray
    """How many leading blocks each request may hit."""
    distinct: int
    block_size: int
    prompt_tokens: IntArray
    arrival_ms: npt.NDArray[np.float64]
    """NaN: not recorded."""
    groups: Groups | None = None

    @property
    def input_tokens(self) -> int:
        return int(self.prompt_tokens.sum())

    @property
    def request_of(self) -> IntArray:
        """Request of each of ``blocks``."""
        return np.repeat(np.arange(len(self.limits)), np.diff(self.starts))

    @property
    def may_hit(self) -> npt.NDArray[np.bool_]:
        """True where a block is short of its prompt's last token."""
        lengths = np.diff(self.starts)
        return np.arange(len(self.blocks)) < np.repeat(self.starts[:-1] + self.limits, lengths)


def read_accesses(trace: Path, block_size: int | None = None, *, by_arrival: bool = False) -> Accesses:
    """Read a trace's prompts, in file order or by arrival. Raises InputError without hashes, or the times needed."""
    with open_trace(trace) as reader:
        (columns,) = _read_columns(reader, [block_size])
    return columns.accesses(columns.by_arrival(trace) if by_arrival else None)


def read_block_sizes(
    trace: Path, block_sizes: Sequence[int | None], grouping: Grouping | None = None
) -> list[Accesses]:
    """Read the prompts in file order at each of several block sizes, in one pass."""
    with open_trace(trace) as reader:
        return [columns.accesses() for columns in _read_columns(reader, block_sizes, grouping)]


def _read_columns(
    reader: TraceReader, block_sizes: Sequence[int | None], grouping: Grouping | None = None
) -> "list[_Columns]":
    groups = [Groups(namer_of(grouping)) if grouping else None for _ in block_sizes]
    columns = [_Columns(Chains(reader.meta, size), own) for size, own in zip(block_sizes, groups, strict=True)]
    for batch, hashes in hashed_batches(reader):
        asked = np.flatnonzero(batch.numbers("prompt_tokens") > 0)
        records = batch.records(asked) if grouping else []
        for column in columns:
            column.add(batch, hashes, asked, records)
    return columns


@dataclass(slots=True)
class _Columns:
    """Prompts of a trace, batch by batch."""

    chains: Chains
    groups: Groups | None
    names: list[str] = field(default_factory=list)
    arrival_ms: list[npt.NDArray[np.float64]] = field(default_factory=list)
    prompt_tokens: list[IntArray] = field(default_factory=list)
    known: list[IntArray] = field(default_factory=list)
    hashes: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    """Known keys, request after request."""

    def add(self, batch: Batch, hashes: Hashes, asked: IntArray, records: Sequence[Record]) -> None:
        tokens = batch.numbers("prompt_tokens")
        known = np.minimum(known_prompt_blocks(batch, hashes, self.chains), tokens // self.chains.block_size)[asked]
        self.hashes.append(leading_keys(hashes, hashes.starts[asked], known, self.chains.factor))
        self.known.append(known)
        self.prompt_tokens.append(tokens[asked])
        self.arrival_ms.append(batch.times("arrival_ms")[asked])
        words = batch.words("request_id")
        self.names += [words[place] or "" for place in asked.tolist()]
        for record in records:
            assert self.groups is not None
            self.groups.add(record, self.chains.prompt(record))

    def by_arrival(self, trace: Path) -> IntArray:
        """Places in the order of arrivals. Raises InputError naming one without a time."""
        arrival_ms = np.concatenate(self.arrival_ms)
        require_times(trace, self.names, arrival_ms)
        return np.argsort(arrival_ms, kind="stable")

    def accesses(self, order: IntArray | None = None) -> Accesses:
        known, tokens = np.concatenate(self.known), np.concatenate(self.prompt_tokens)
        hashes, arrival_ms = np.concatenate(self.hashes), np.concatenate(self.arrival_ms)
        if order is not None:
            hashes = hashes[chain_places((np.cumsum(known) - known)[order], known[order])]
            known, tokens, arrival_ms = known[order], tokens[order], arrival_ms[order]
        block_size = self.chains.block_size
        blocks = tokens // block_size
        ends = np.cumsum(blocks)
        interned = lay_out_chains(hashes, known, blocks, ends - blocks, int(blocks.sum()))
        return Accesses(
            blocks=interned.keys.astype(np.int64),
            starts=np.concatenate([[0], ends]),
            limits=(tokens - 1) // block_size,
            distinct=interned.distinct,
            block_size=block_size,
            prompt_tokens=tokens,
            arrival_ms=arrival_ms,
            groups=self.groups,
        )
