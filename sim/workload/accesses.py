"""A trace's chains as flat arrays of block numbers, for the passes over all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from measure.cache.accesses import Accesses, KnownChains, lay_out_accesses
from measure.cache.chains import leading_places
from measure.cache.interning import Interner, PackedChains, join_chains, pack_chains
from sim.workload.arrivals import require_times
from sim.workload.chain import Chains, engine_chains, hashed_batches, known_blocks
from sim.workload.groups import Grouping, Groups, Members, PrefixChains
from tracefile.files.reading import open_trace
from tracefile.records.arrays import IntArray
from tracefile.records.batches import Batch, Hashes
from tracefile.records.reader import TraceReader


@dataclass(frozen=True, slots=True)
class GroupedAccesses(Accesses):
    """Accesses of requests in groups."""

    groups: Groups | None = None


def read_accesses(trace: Path, block_size: int | None = None, *, needs_times: bool = False) -> Accesses:
    """Read a trace's chains by arrival, in file order if a time is missing.

    Raises InputError without hashes, or if ``needs_times`` and one is missing.
    """
    with open_trace(trace) as reader:
        (columns,) = _read_columns(reader, [block_size], needs_times=needs_times)
    return columns.accesses()


def read_block_sizes(
    trace: Path, block_sizes: Sequence[int | None], grouping: Grouping | None = None
) -> list[GroupedAccesses]:
    """Read the chains by arrival, as ``read_accesses``, at each of several block sizes, in one pass."""
    with open_trace(trace) as reader:
        members = Members(grouping, reader.meta.block_size or 1) if grouping else None
        return [columns.accesses(members) for columns in _read_columns(reader, block_sizes, members)]


def _read_columns(
    reader: TraceReader, block_sizes: Sequence[int | None], members: Members | None = None, *, needs_times: bool = False
) -> "list[_Columns]":
    columns = [_Columns(engine_chains(reader.meta, size), keeps=members is not None) for size in block_sizes]
    for batch, hashes in hashed_batches(reader):
        asked = np.flatnonzero(batch.numbers("prompt_tokens") > 0)
        if needs_times:
            ids = batch.words("request_id")
            require_times(reader.path, [ids[place] for place in asked.tolist()], batch.times("arrival_ms")[asked])
        for column in columns:
            column.add(batch, hashes, asked)
        if members is not None:
            members.add(batch, asked)
    return columns


@dataclass(slots=True)
class _Columns:
    """Chains of a trace, batch by batch."""

    chains: Chains
    keeps: bool = False
    """Keep the hashes too, which groups are made of."""
    arrival_ms: list[npt.NDArray[np.float64]] = field(default_factory=list)
    prompt_tokens: list[IntArray] = field(default_factory=list)
    prompt_logprobs: list[IntArray] = field(default_factory=list)
    known: list[IntArray] = field(default_factory=list)
    hashes: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    """Known keys, request after request, if they are kept."""
    interner: Interner = field(default_factory=Interner)
    packed: list[PackedChains] = field(default_factory=list)
    whole_chains: int = 0

    def add(self, batch: Batch, hashes: Hashes, asked: IntArray) -> None:
        tokens = batch.numbers("prompt_tokens")
        known = known_blocks(batch, hashes, self.chains)[asked]
        keys = hashes.values[leading_places(hashes.starts[asked], known, self.chains.factor)]
        self.hashes += [keys] if self.keeps else []
        self.packed.append(pack_chains(self.interner.number(keys), known))
        self.known.append(known)
        filled = (tokens + np.maximum(batch.numbers("output_tokens") - 1, 0))[asked] // self.chains.block_size
        self.whole_chains += int((known >= filled).sum())
        self.prompt_tokens.append(tokens[asked])
        self.prompt_logprobs.append(batch.numbers("prompt_logprobs")[asked])
        self.arrival_ms.append(batch.times("arrival_ms")[asked])

    def accesses(self, members: Members | None = None) -> GroupedAccesses:
        known, tokens = np.concatenate(self.known), np.concatenate(self.prompt_tokens)
        chains = KnownChains(
            chains=join_chains(self.packed),
            numbers=self.interner.distinct,
            known=known,
            prompt_tokens=tokens,
            prompt_logprobs=np.concatenate(self.prompt_logprobs),
            arrival_ms=np.concatenate(self.arrival_ms),
            block_size=self.chains.block_size,
            fine_block_size=self.chains.fine_block_size,
            whole_chains=self.whole_chains,
        )
        found = lay_out_accesses(chains)
        parts = {one.name: getattr(found, one.name) for one in fields(found)}
        if members is None:
            return GroupedAccesses(**parts)
        order, full = chains.order, found.lookup_blocks
        hashes, firsts = np.concatenate(self.hashes), np.cumsum(known) - known
        prompts = PrefixChains(hashes, firsts[order], np.minimum(known[order], full), full, found.unlimited_hits)
        return GroupedAccesses(**parts, groups=members.groups(prompts, order, found.block_size))
