"""A trace's chains as flat arrays of block numbers, for the passes over all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sim.workload.arrivals import require_times
from sim.workload.chain import Chains, chain_places, engine_chains, hashed_batches, known_blocks, leading_keys
from sim.workload.groups import Grouping, Groups, Members, PrefixChains
from sim.workload.interning import lay_out_chains, leading, unlimited_hits
from tracefile.files.reading import open_trace
from tracefile.records.arrays import BoolArray, IntArray
from tracefile.records.batches import Batch, Hashes
from tracefile.records.reader import TraceReader


@dataclass(frozen=True, slots=True)
class Accesses:
    """Requests one after another, each with its full blocks, root to leaf: its prompt's, then its output's."""

    blocks: IntArray
    """Dense numbers 0 … distinct − 1; a prompt block whose hash is not known has one of its own."""
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
    fine_block_size: int | None = None
    """The trace's block size. Null: ``block_size``."""
    whole_chains: int = 0
    """Requests whose filled blocks are all known, outputs' included."""

    @property
    def input_tokens(self) -> int:
        return int(self.prompt_tokens.sum())

    @property
    def lookup_blocks(self) -> IntArray:
        """Full prompt blocks of each request, the first of its blocks."""
        return self.prompt_tokens // self.block_size

    @property
    def asked(self) -> BoolArray:
        """True where a block belongs to a prompt: outputs are written, not looked up."""
        return self._leading(self.lookup_blocks)

    @property
    def request_of(self) -> IntArray:
        """Request of each of ``blocks``."""
        return np.repeat(np.arange(len(self.limits)), np.diff(self.starts))

    @property
    def may_hit(self) -> BoolArray:
        """True where a block is short of its prompt's last token."""
        return self._leading(self.limits)

    @property
    def unlimited_hits(self) -> IntArray:
        """Hits of each request in an unlimited cache."""
        return unlimited_hits(self.blocks, self.starts, self.limits, self.distinct)

    def _leading(self, counts: IntArray) -> BoolArray:
        return leading(self.starts, counts)


def read_accesses(trace: Path, block_size: int | None = None, *, needs_times: bool = False) -> Accesses:
    """Read a trace's chains by arrival, in file order if a time is missing.

    Raises InputError without hashes, or if ``needs_times`` and one is missing.
    """
    with open_trace(trace) as reader:
        (columns,) = _read_columns(reader, [block_size])
    if needs_times:
        require_times(trace, columns.names, np.concatenate(columns.arrival_ms))
    return columns.accesses()


def read_block_sizes(
    trace: Path, block_sizes: Sequence[int | None], grouping: Grouping | None = None
) -> list[Accesses]:
    """Read the chains by arrival, as ``read_accesses``, at each of several block sizes, in one pass."""
    with open_trace(trace) as reader:
        members = Members(grouping, reader.meta.block_size or 1) if grouping else None
        return [columns.accesses(members) for columns in _read_columns(reader, block_sizes, members)]


def _read_columns(
    reader: TraceReader, block_sizes: Sequence[int | None], members: Members | None = None
) -> "list[_Columns]":
    columns = [_Columns(engine_chains(reader.meta, size)) for size in block_sizes]
    for batch, hashes in hashed_batches(reader):
        asked = np.flatnonzero(batch.numbers("prompt_tokens") > 0)
        for column in columns:
            column.add(batch, hashes, asked)
        if members is not None:
            members.add(batch, asked)
    return columns


@dataclass(slots=True)
class _Columns:
    """Chains of a trace, batch by batch."""

    chains: Chains
    names: list[str] = field(default_factory=list)
    arrival_ms: list[npt.NDArray[np.float64]] = field(default_factory=list)
    prompt_tokens: list[IntArray] = field(default_factory=list)
    known: list[IntArray] = field(default_factory=list)
    hashes: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    """Known keys, request after request."""
    whole_chains: int = 0

    def add(self, batch: Batch, hashes: Hashes, asked: IntArray) -> None:
        tokens = batch.numbers("prompt_tokens")
        known = known_blocks(batch, hashes, self.chains)[asked]
        self.hashes.append(leading_keys(hashes, hashes.starts[asked], known, self.chains.factor))
        self.known.append(known)
        filled = (tokens + np.maximum(batch.numbers("output_tokens") - 1, 0))[asked] // self.chains.block_size
        self.whole_chains += int((known >= filled).sum())
        self.prompt_tokens.append(tokens[asked])
        self.arrival_ms.append(batch.times("arrival_ms")[asked])
        words = batch.words("request_id")
        self.names += [words[place] or "" for place in asked.tolist()]

    def accesses(self, members: Members | None = None) -> Accesses:
        known, tokens = np.concatenate(self.known), np.concatenate(self.prompt_tokens)
        hashes, arrival_ms = np.concatenate(self.hashes), np.concatenate(self.arrival_ms)
        timed = not np.isnan(arrival_ms).any()
        order = np.argsort(arrival_ms, kind="stable") if timed else np.arange(len(tokens))
        if (np.diff(order) < 0).any():
            hashes = hashes[chain_places((np.cumsum(known) - known)[order], known[order])]
            known, tokens, arrival_ms = known[order], tokens[order], arrival_ms[order]
        block_size = self.chains.block_size
        blocks = np.maximum(tokens // block_size, known)
        ends = np.cumsum(blocks)
        interned = lay_out_chains(hashes, known, blocks, ends - blocks, int(blocks.sum()))
        found = Accesses(
            blocks=interned.keys.astype(np.int64),
            starts=np.concatenate([[0], ends]),
            limits=(tokens - 1) // block_size,
            distinct=interned.distinct,
            block_size=block_size,
            prompt_tokens=tokens,
            arrival_ms=arrival_ms,
            fine_block_size=self.chains.fine_block_size,
            whole_chains=self.whole_chains,
        )
        if members is None:
            return found
        full = found.lookup_blocks
        first, hits = np.cumsum(known) - known, found.unlimited_hits
        prompts = PrefixChains(hashes, first, np.minimum(known, full), full, hits)
        return replace(found, groups=members.groups(prompts, order, block_size))
