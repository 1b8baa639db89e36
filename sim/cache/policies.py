"""Hits of vLLM's pool under several policies of eviction at the same sizes, with Belady's as the bound.

Requests come one at a time, by arrival as in the curve. Belady's policy evicts the block whose next lookup is the
farthest; a block that is computed again before that lookup goes first. As a block is looked up whenever one after it in
its chain is, no hit needs a block that went before; so no policy that evicts only to make room has more hits.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from measure.cacheuse import PolicyHits
from measure.table import table_lines
from sim.cache.onebyone import OneByOnePool, Requests, by_arrival, joined
from sim.cache.sampledcurve import GROUPS, T_95
from sim.vllm.eviction import parse_evict
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.errors import InputError

BOUND = "belady"
USUAL = "vllm"
SHARES = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
"""Of the max hits: sizes of the table unless it is told some."""


def parse_policies(text: str) -> list[str]:
    """Return the policies of ``a,b,…``, vLLM's own first and the bound last. Raises InputError."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        parse_evict(word)
    if len(set(words)) < len(words):
        raise InputError(f"--evict: {text!r}; expected different policies separated by commas")
    return list(dict.fromkeys([USUAL, *(word for word in words if word != BOUND), BOUND]))


def compare_policies(
    parts: Iterable[Requests], policies: Sequence[str], sizes: Sequence[int], block_size: int
) -> list[PolicyHits]:
    """Return the hits of each policy at each of ``sizes``, in usable blocks."""
    whole = by_arrival(joined(parts))
    hits = {
        policy: np.stack([hits_of_requests(whole, size, policy, block_size) for size in sizes]) for policy in policies
    }
    rate = block_size / max(int(whole.prompt_tokens.sum()), 1)
    return [_policy_hits(policy, sizes, found, hits[USUAL], rate) for policy, found in hits.items()]


def hits_of_requests(whole: Requests, usable_blocks: int | None, evict: str, block_size: int) -> IntArray:
    """Hit blocks of each request in a pool of its own; 0 of requests that do not fit it."""
    fits = whole.fits(usable_blocks)
    requests = whole.requests[fits]
    hits = np.zeros(len(fits), np.int64)
    hits[fits] = OneByOnePool(usable_blocks, "vllm", evict, requests, block_size).run(whole.keys, requests)
    return hits


def _policy_hits(evict: str, sizes: Sequence[int], hits: IntArray, usual: IntArray, rate: float) -> PolicyHits:
    gains = np.asarray((hits - usual) * rate, np.float64)
    return PolicyHits(
        evict=evict,
        sizes=[*sizes],
        hit_blocks=hits.sum(axis=1).tolist(),
        gain=gains.sum(axis=1).tolist(),
        gain_error=_error_of_sum(gains).tolist(),
    )


def _error_of_sum(values: FloatArray) -> FloatArray:
    """Half of the 95 % interval of each row's sum, from the spread of consecutive parts of the trace."""
    parts = [part.sum(axis=1) for part in np.array_split(values, GROUPS, axis=1)]
    return np.asarray(T_95 * np.sqrt(GROUPS) * np.std(parts, axis=0, ddof=1))


def describe_policies(found: Sequence[PolicyHits], block_size: int, input_tokens: int) -> list[str]:
    if not found or not found[0].sizes:
        return []
    headings = ["evict \\ usable blocks", *(f"{size:,}" for size in found[0].sizes)]
    rows = [
        [one.evict, *(f"{hits * block_size / max(input_tokens, 1):.2%}" for hits in one.hit_blocks)] for one in found
    ]
    lines = ["", "% of input tokens that hit, requests one at a time", *table_lines(headings, rows)]
    return [*lines, *(_sentence(found, place, size) for place, size in enumerate(found[0].sizes))]


def _sentence(found: Sequence[PolicyHits], place: int, size: int) -> str:
    """Return the best policy's gain over vLLM's own at one size, and the bound's."""
    bound = next(one for one in found if one.evict == BOUND)
    rest = [one for one in found if one.evict not in (BOUND, USUAL)]
    said = f"{size:,} blocks: "
    if rest:
        best = max(rest, key=lambda one: one.gain[place])
        said += f"{best.evict} {best.gain[place]:+.2%} ± {best.gain_error[place]:.2%} beside {USUAL}; "
    return f"{said}{bound.evict}, the bound, {bound.gain[place]:+.2%}"
