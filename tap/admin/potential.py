"""What a prefix cache of each size could hold of the live traffic, and what the real one holds."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from tap.admin.cachecurve import SIZES
from tap.admin.snapshot import HitPotential
from tap.admin.state import LiveState

_LEAST_BLOCKS: Final = 16
_BEYOND_ENGINE: Final = 1.6
"""How much further than the real cache the curve is drawn."""


def potential(state: LiveState, now_s: float) -> HitPotential:
    """The curve from where it starts to where it ends or the real cache is well passed."""
    curve, block_size = state.curve, state.setup.block_size
    counts = curve.recent(now_s)
    hit_tokens = [block_size * blocks for blocks in counts.up_to_size()]
    whole = max(counts.prompt_tokens, 1)
    engine_blocks = _engine_blocks(state)
    last = bisect_left(hit_tokens, hit_tokens[-1]) + 4
    if engine_blocks is not None:
        last = max(last, bisect_left(SIZES, _BEYOND_ENGINE * engine_blocks))
    drawn = slice(bisect_left(SIZES, _LEAST_BLOCKS), min(last, bisect_left(SIZES, curve.deepest)) + 1)
    engine_share = None if engine_blocks is None else _hits_at(hit_tokens, engine_blocks) / whole
    measured = counts.cached_tokens / counts.reported_tokens if counts.reported_tokens else None
    return HitPotential(
        requests=counts.requests,
        sentence=_potential_sentence(hit_tokens[-1] / whole, engine_share, measured, counts.requests),
        note=_potential_note(state),
        tokens=[size * block_size for size in SIZES[drawn]] if counts.requests else [],
        hit_share=[round(tokens / whole, 5) for tokens in hit_tokens[drawn]] if counts.requests else [],
        exact_tokens=curve.exact_blocks * block_size,
        engine_tokens=None if engine_blocks is None else int(engine_blocks * block_size),
        engine_share=None if engine_share is None else round(engine_share, 5),
        measured_share=None if measured is None else round(measured, 5),
    )


def _engine_blocks(state: LiveState) -> float | None:
    """The real cache in blocks of the trace's size; one block is never used (vLLM's null block)."""
    engine = state.engine
    if not engine.num_gpu_blocks or engine.num_gpu_blocks < 2:
        return None
    return (engine.num_gpu_blocks - 1) * (engine.block_size or state.setup.block_size) / state.setup.block_size


def _hits_at(hit_tokens: Sequence[float], blocks: float) -> float:
    """Hits at any size, on a straight line between the sizes that were counted."""
    place = bisect_left(SIZES, blocks)
    if place == len(SIZES):
        return hit_tokens[-1]
    if place == 0 or SIZES[place] == blocks:
        return hit_tokens[place]
    part = (blocks - SIZES[place - 1]) / (SIZES[place] - SIZES[place - 1])
    return hit_tokens[place - 1] + part * (hit_tokens[place] - hit_tokens[place - 1])


def _potential_sentence(endless: float, at_engine: float | None, measured: float | None, requests: int) -> str:
    if not requests:
        return "No request with block hashes in the last minutes."
    words = [f"An endless cache would have held {100 * endless:.1f} % of recent prompt tokens"]
    if at_engine is not None:
        words.append(f"one of the engine's size {100 * at_engine:.1f} %")
    if measured is not None:
        words.append(f"the engine reports {100 * measured:.1f} %")
    return "; ".join(words) + "."


def _potential_note(state: LiveState) -> str:
    several = state.service is not None and len(state.service.upstreams) > 1
    shared = " The curve is of one cache for all upstreams together." if several else ""
    policy = "LRU over full prompt blocks, counted at arrival; blocks filled by answers are left out."
    return f"{policy}{shared}{_skipped_text(state)}"


def _skipped_text(state: LiveState) -> str:
    """What it means that not every record was looked at, if so."""
    skipped = 0 if state.recorder is None else state.recorder.feed_skipped
    seen = state.records_seen / (state.records_seen + skipped) if skipped else 1.0
    return f" Only {100 * seen:.0f} % of records were looked at: less is shared here than is." if seen < 0.995 else ""
