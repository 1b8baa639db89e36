"""Why a prompt token was not served from the cache: one cause for each, and who evicted what was there before.

The pool is that of ``sim pool``: one request at a time, in file order, and to the block the same hits.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.kernels import layout
from sim.kernels.asking import ASK, CACHED, NEVER, Asking, ask_all
from sim.kernels.layout import Pool
from sim.kernels.pool import NO_KEY
from sim.vllm.config import FreeRule
from sim.workload.chain import Chains, chain_places, tokens_computed
from sim.workload.groups import Grouping, Groups, namer_of
from sim.workload.interning import intern_chains
from tracefile.records.arrays import IntArray
from tracefile.records.schema import Record

CAUSES = ("hit", "cold", "evicted", "behind_miss", "last_token", "partial_block", "hash_unknown")
"""What can become of a prompt token; docs/curves.md defines each."""
HIT, COLD, EVICTED, BEHIND_MISS, LAST_TOKEN, PARTIAL_BLOCK, HASH_UNKNOWN = range(len(CAUSES))
COHORTS = ("turn 1", "turns 2+", "turn unknown")
ALL = "all"


@dataclass(slots=True)
class Requests:
    """Requests with a prompt length as arrays, and their chains."""

    prompt_tokens: IntArray
    known_blocks: IntArray
    """Full prompt blocks whose hash is known: leading ones."""
    held: IntArray
    """Blocks at its end."""
    cohort: IntArray
    """Place in ``COHORTS``."""
    chains: list[list[int]]
    """Keys of every block full at the end."""
    groups: Groups | None
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The prompt tokens of some requests by cause; they add up to ``input_tokens``."""

    name: str
    requests: int
    input_tokens: int
    tokens: dict[str, int]
    """By cause, in the order of ``CAUSES``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Every prompt token of a trace with its cause, summed."""

    block_size: int
    blocks: int | None
    """Usable blocks; null: endless."""
    rejected: int
    """Requests that alone do not fit the pool: they touch nothing and are in no sum."""
    total: Share
    cohorts: list[Share]
    """By turn, those that there are."""
    by: str | None
    groups: list[Share]
    evictions: list[list[int]]
    """Row: the group whose request evicted; column: the group that asked for the block again; in blocks asked for."""


def read_requests(records: Iterable[Record], chains: Chains, grouping: Grouping | None = None) -> Requests:
    """Lay the records out. The whole trace's chains are in memory."""
    groups = Groups(namer_of(grouping)) if grouping else None
    rows: list[tuple[int, int, int, int]] = []
    whole: list[list[int]] = []
    for record in records:
        tokens = record.prompt_tokens or 0
        full = tokens // chains.block_size
        known = min(len(chains.known(record)), full)
        held = -(-tokens_computed(record) // chains.block_size)
        cohort = 2 if record.turn is None else min(record.turn, 2) - 1
        rows.append((tokens, known, held, cohort))
        whole.append(chains.whole(record))
        if groups is not None:
            groups.add(record, whole[-1][:full])
    prompt_tokens, known_blocks, held_blocks, cohorts = np.array(rows, np.int64).reshape(-1, 4).T
    return Requests(prompt_tokens, known_blocks, held_blocks, cohorts, whole, groups, chains.block_size)


def attribute(
    requests: Requests, usable: int | None, free_rule: FreeRule = "vllm", grouping: Grouping | None = None
) -> Attribution:
    """Run the pool of ``usable`` blocks (None: endless) and give every prompt token its cause."""
    fits = np.full(len(requests.chains), True) if usable is None else requests.held <= usable
    whose, found, hits = _ask(requests, fits, usable, free_rule)
    causes = _block_causes(requests, whose, found, hits)
    tokens = np.bincount(whose * len(CAUSES) + causes, minlength=len(fits) * len(CAUSES)) * requests.block_size
    by_request = tokens.reshape(-1, len(CAUSES)).astype(np.int64)
    by_request[fits, PARTIAL_BLOCK] = requests.prompt_tokens[fits] % requests.block_size
    names: list[str] = []
    place = np.zeros(len(fits), np.int64)
    evictions = np.zeros((0, 0), np.int64)
    if grouping is not None and requests.groups is not None and len(fits):
        names, place = requests.groups.largest(requests.prompt_tokens, grouping.most)
        lost = causes == EVICTED
        pairs = place[found[lost]] * len(names) + place[whose[lost]]
        evictions = np.bincount(pairs, minlength=len(names) ** 2).reshape(len(names), len(names))
    cohorts = _shares(COHORTS, requests.cohort, by_request, fits)
    return Attribution(
        block_size=requests.block_size,
        blocks=usable,
        rejected=int((~fits).sum()),
        total=_shares((ALL,), np.zeros_like(place), by_request, fits)[0],
        cohorts=[share for share in cohorts if share.requests],
        by=grouping.by if grouping else None,
        groups=_shares(tuple(names), place, by_request, fits) if names else [],
        evictions=evictions.tolist(),
    )


def _ask(
    requests: Requests, fits: npt.NDArray[np.bool_], usable: int | None, free_rule: FreeRule
) -> tuple[IntArray, IntArray, IntArray]:
    """Of each full prompt block of the requests that fit: whose it is and what that one found; hits by request."""
    chosen = np.flatnonzero(fits)
    chains = [requests.chains[place] for place in chosen]
    asks = np.zeros(len(chosen), ASK)
    asks["num_keys"] = [len(chain) for chain in chains]
    asks["first_key"] = np.cumsum(asks["num_keys"]) - asks["num_keys"]
    tokens = requests.prompt_tokens[chosen]
    asks["prompt_blocks"] = tokens // requests.block_size
    asks["most_hits"] = np.minimum((tokens - 1) // requests.block_size, requests.known_blocks[chosen])
    asks["held"] = requests.held[chosen]
    size = int(asks["num_keys"].sum())
    interned = intern_chains(chains, asks["first_key"], size)
    most_held = int(asks["held"].max(initial=0))
    # Endless: room for everything, and for one started block of each request.
    blocks = interned.distinct + most_held + len(asks) if usable is None else usable
    evictor, found = np.full(interned.distinct, NEVER, np.int32), np.full(size, NEVER, np.int32)
    pool = _pool(blocks, interned.distinct, free_rule)
    ask_all(Asking(pool, asks, interned.keys, evictor, found, np.zeros(most_held, np.int32)))
    hits = np.zeros(len(fits), np.int64)
    hits[chosen] = asks["hits"]
    prompts = found[chain_places(asks["first_key"], asks["prompt_blocks"])].astype(np.int64)
    evicted = prompts >= 0
    prompts[evicted] = chosen[prompts[evicted]]
    return np.repeat(chosen, asks["prompt_blocks"]), prompts, hits


def _block_causes(requests: Requests, whose: IntArray, found: IntArray, hits: IntArray) -> IntArray:
    depth = _places_in_runs(whose)
    limit = (requests.prompt_tokens - 1) // requests.block_size
    causes = np.full(len(whose), BEHIND_MISS, np.int64)
    # The block is there and so are all before it, but the prompt ends with it.
    causes[(depth == limit[whose]) & (hits == limit)[whose] & (found == CACHED)] = LAST_TOKEN
    causes[found >= 0] = EVICTED
    causes[found == NEVER] = COLD
    causes[depth >= requests.known_blocks[whose]] = HASH_UNKNOWN
    causes[depth < hits[whose]] = HIT
    return causes


def _places_in_runs(values: IntArray) -> IntArray:
    """0, 1, 2 … within each run of one value."""
    places = np.arange(len(values))
    begins = np.append(True, values[1:] != values[:-1])[: len(values)]
    return np.asarray(places - np.maximum.accumulate(np.where(begins, places, 0)))


def _pool(usable: int, keys: int, free_rule: FreeRule) -> Pool:
    settings = np.zeros(1, layout.SETTINGS)
    settings["enable_prefix_caching"], settings["append_all"] = True, free_rule == "append_all"
    blocks, numbers = np.zeros(usable + 1, layout.BLOCK), np.arange(usable + 1)
    blocks["next_free"], blocks["previous_free"] = np.roll(numbers, -1), np.roll(numbers, 1)
    blocks["next_twin"] = blocks["previous_twin"] = numbers
    blocks["key"] = NO_KEY
    counts = np.zeros(1, layout.POOL)
    counts["num_free"] = usable
    return Pool(settings, counts, blocks, np.zeros(keys, np.int32))


def _shares(names: tuple[str, ...], place: IntArray, by_request: IntArray, fits: npt.NDArray[np.bool_]) -> list[Share]:
    tokens = np.zeros((len(names), len(CAUSES)), np.int64)
    np.add.at(tokens, place[fits], by_request[fits])
    requests = np.bincount(place[fits], minlength=len(names))
    return [
        Share(
            name=name,
            requests=int(requests[row]),
            input_tokens=int(tokens[row].sum()),
            tokens=dict(zip(CAUSES, tokens[row].tolist(), strict=True)),
        )
        for row, name in enumerate(names)
    ]
