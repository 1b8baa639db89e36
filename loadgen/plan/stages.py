"""Load of ``--pattern calibration``: every cost that ``sim calibrate`` looks for varies on its own.

Rounds of the same stages, a round in waves of sessions; a wave begins after the end of the one before, so that each
meets an idle engine:

- ``alone``: one cold prompt at a time, from the shortest to the longest, each extended by a warm second turn;
- ``short``: 2, 4, 8, … short prompts nearly at once: the cost of one more output in a step;
- ``long``: as many, of prompts that together are twice the longest: the cost of an output's context;
- ``shared``: as many of one and the same prompt: the cost of context that several outputs share;
- ``rested``: one session at a time, of short warm turns after pauses: the cost of an engine's rest;
- ``beside``: long prompts during the decode of others;
- ``mix``: all of it at random times, at the rate that the engine can serve: chance overlaps, above all of warm turns
  with decodes, as in real sessions.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, count
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from loadgen.core.draws import Stream, draw
from loadgen.core.lengthdraws import quantity, uniform
from loadgen.core.lengths import LengthDistribution
from loadgen.plan.config import LEAST_RANGE, STAGED_PARALLEL, STAGED_PROMPT, STAGED_ROUNDS, LoadConfig
from loadgen.plan.shapes import SessionShape, TurnShape
from tracefile.files.reading import open_trace
from tracefile.records.errors import USAGE_ADVICE, InputError
from tracefile.records.schema import Engine

Stage = Literal["alone", "short", "long", "shared", "rested", "beside", "mix"]

OUTPUT = LengthDistribution(16, 48)
"""Default output: some dozens of gaps each."""
FIRST_WORDS = LengthDistribution(2, 2)
"""Output before a prompt that overlaps others: at its end, the others have begun."""
PAUSE_S = LengthDistribution(0.02, 0.12)
"""Before a turn: the engine is idle, or at any point of its step."""
IDLE_PAUSES_S = (LengthDistribution(0.1, 0.3), LengthDistribution(0.5, 1.0), LengthDistribution(2.5, 5.0))
"""Before the turns of a rested session: by its end, other processes have had the processor's cache."""
NO_PAUSE = LengthDistribution(0, 0)
FEWEST_NEW = 16
"""Least new tokens of a warm turn: its time is then the cost of the cached prompt."""
MIX_SESSIONS = 16
MIX_TURNS = 4
"""Turns of every second session; the others have one."""
US_PER_S = 1_000_000


class TurnPlan(msgspec.Struct, frozen=True):
    """A turn before it is drawn: between which lengths."""

    prompt: LengthDistribution
    output: LengthDistribution
    pause_s: LengthDistribution = NO_PAUSE


SessionPlan = Sequence[TurnPlan]


class Outline(msgspec.Struct, frozen=True):
    """A wave before it is drawn."""

    stage: Stage
    sessions: Sequence[SessionPlan]
    alike: bool = False
    """The first turns are one prompt."""


class Wave(msgspec.Struct, frozen=True):
    """Sessions that have the engine to themselves: the next wave's begin when all of these are over."""

    stage: Stage
    sessions: Sequence[SessionShape]
    spaces: Sequence[float]
    """Gaps before sessions, exponential of mean 1, in the stage's unit."""


def waves(config: LoadConfig) -> Iterator[Wave]:
    """The load's waves in order: as many rounds as ``number`` sessions need, or the usual ones, or without an end."""
    numbers, left = count(), config.number
    for outline in outlines(config):
        plans = outline.sessions[:left]
        sessions = [_draw_session(config, next(numbers), plan) for plan in plans]
        if outline.alike:
            sessions = [_with_first_prompt(sessions[0], session) for session in sessions]
        yield Wave(outline.stage, sessions, [_space(config.seed, session.index) for session in sessions])
        left = None if left is None else left - len(plans)
        if left == 0:
            return


def outlines(config: LoadConfig) -> Iterator[Outline]:
    endless = config.number is not None or config.duration_s is not None
    for number in count() if endless else range(STAGED_ROUNDS):
        yield from round_of(config, number)


def round_of(config: LoadConfig, number: int) -> Iterator[Outline]:
    prompts, output = config.prompt_tokens, config.output_tokens or OUTPUT
    assert config.parallel is not None  # checked with the config
    widths = widths_to(config.parallel)
    ladder = rungs(prompts)
    mixed = sorted(range(len(ladder)), key=lambda rung: draw(config.seed, Stream.STAGE_ORDER, number, rung))
    for rung in mixed:  # not by size: an engine that grows faster or slower would look like one of another shape
        yield Outline("alone", [extended(ladder[rung], output)])
    for width in widths:
        yield Outline("short", [[TurnPlan(ladder[0], output)]] * width)
    for width in widths:
        yield Outline("long", [extended(fraction_of(prompts, 2 / width), output)] * width)
    for width in widths[-2:]:
        yield Outline("shared", [[TurnPlan(fraction_of(prompts, 1 / 4), output)]] * width, alike=True)
    for prompt in (ladder[0], fraction_of(prompts, 1 / 4), ladder[-1]):
        yield Outline("rested", [rested(prompt)])
    for share in (1, 1 / 4):
        decoding = [[TurnPlan(ladder[0], output)]] * (config.parallel // 2)
        yield Outline("beside", [*decoding, interrupting(fraction_of(prompts, share))])
    any_length = LengthDistribution(prompts.low, prompts.high, "zipf", exponent=1)
    once = [TurnPlan(any_length, output)]
    yield Outline("mix", [once, extended(any_length, output, MIX_TURNS)] * (MIX_SESSIONS // 2))


def rungs(prompts: LengthDistribution) -> list[LengthDistribution]:
    """Prompt lengths from the shortest to the longest, each about twice the last, log-uniform between neighbours.

    The last is the longest itself: a load's longest prompt is then no extrapolation.
    """
    steps = math.ceil(math.log2(prompts.high / prompts.low))
    middles = [prompts.low * (prompts.high / prompts.low) ** (step / steps) for step in range(steps)]
    return [*(_around(middle, prompts) for middle in middles), LengthDistribution(prompts.high, prompts.high)]


def sized_for(trace: Path) -> tuple[LengthDistribution, int]:
    """Return prompts up to a trace's longest, and its most requests in flight, within what its engine can hold.

    Raises InputError for a trace without prompt lengths.
    """
    events: list[tuple[float, int]] = []
    longest = 0
    with open_trace(trace) as reader:
        for record in reader:
            longest = max(longest, record.prompt_tokens or 0)
            if record.arrival_ms is not None and (end_ms := record.end_ms()) is not None:
                events += [(record.arrival_ms, 1), (end_ms, -1)]
        engine = reader.meta.engine or Engine()
    if not longest:
        raise InputError(f"--for {trace}: no prompt_tokens; expected a trace with them ({USAGE_ADVICE})")
    context, pool = engine.max_model_len, (engine.num_gpu_blocks or 0) * (engine.block_size or 0)
    # A conversation grows by a quarter and its outputs; two of the longest have room in the cache, with others beside.
    bounds = [longest, *([(context - 4 * OUTPUT.high) * 4 // 5] if context else []), *([pool // 3] if pool else [])]
    high = max(min(bounds), LEAST_RANGE)
    in_flight = max(accumulate((change for _, change in sorted(events)), initial=0))
    parallel = max(STAGED_PARALLEL, in_flight)
    return (
        LengthDistribution(min(STAGED_PROMPT.low, high // LEAST_RANGE), high),
        max(2, min(parallel, engine.max_num_seqs or parallel)),
    )


def widths_to(parallel: int) -> list[int]:
    doubled = [1 << power for power in range(1, parallel.bit_length())]
    return doubled if doubled[-1] == parallel else [*doubled, parallel]


def fraction_of(prompts: LengthDistribution, share: float) -> LengthDistribution:
    return _around(min(max(prompts.high * share, prompts.low), prompts.high), prompts)


def _around(middle: float, prompts: LengthDistribution) -> LengthDistribution:
    """Within half an octave of ``middle``, and the bounds."""
    half = math.sqrt(2)
    low, high = max(middle / half, prompts.low), min(middle * half, prompts.high)
    return LengthDistribution(round(low), round(high), "zipf", exponent=1)


def extended(prompt: LengthDistribution, output: LengthDistribution, turns: int = 2) -> list[TurnPlan]:
    """A cold prompt and its conversation up to ``turns`` turns; all later turns add a quarter at most."""
    new = LengthDistribution(FEWEST_NEW, max(FEWEST_NEW, round(prompt.high / 4 / (turns - 1))), "zipf", exponent=1)
    return [TurnPlan(prompt, output), *[TurnPlan(new, output, PAUSE_S)] * (turns - 1)]


def rested(prompt: LengthDistribution) -> list[TurnPlan]:
    """A cold prompt, and short warm turns after pauses."""
    new = LengthDistribution(FEWEST_NEW, FEWEST_NEW)
    return [TurnPlan(prompt, FIRST_WORDS), *[TurnPlan(new, FIRST_WORDS, pause_s) for pause_s in IDLE_PAUSES_S]]


def interrupting(prompt: LengthDistribution) -> list[TurnPlan]:
    """A few words that end while others are still being answered, then a long prompt beside these."""
    return [TurnPlan(LengthDistribution(FEWEST_NEW, FEWEST_NEW), FIRST_WORDS), TurnPlan(prompt, FIRST_WORDS)]


def _with_first_prompt(first: SessionShape, session: SessionShape) -> SessionShape:
    """Session whose first prompt is that of the session ``first``."""
    turn, shared = session.turns[0], first.turns[0]
    first_turn = msgspec.structs.replace(turn, prompt_tokens=shared.prompt_tokens, prompt_key=shared.prompt_key)
    return msgspec.structs.replace(session, turns=[first_turn, *session.turns[1:]])


def _draw_session(config: LoadConfig, index: int, plan: SessionPlan) -> SessionShape:
    """Nothing in it is shared with another session."""
    seed, tokens_from = config.seed, config.tokens_from
    turns = [
        TurnShape(
            prompt_tokens=quantity(turn.prompt, draw(seed, Stream.PROMPT_LENGTH, index, number)),
            prompt_key=draw(tokens_from, Stream.PROMPT_TOKENS, index, number),
            output_tokens=quantity(turn.output, draw(seed, Stream.OUTPUT_LENGTH, index, number)),
            think_ms=quantity(turn.pause_s, draw(seed, Stream.THINK_TIME, index, number), US_PER_S) / 1000,
        )
        for number, turn in enumerate(plan)
    ]
    return SessionShape(index, None, None, draw(tokens_from, Stream.PREFIX_TOKENS, 0), turns)


def _space(seed: int, index: int) -> float:
    """An exponential distance of mean 1, to the millionth: arrivals at random."""
    bits = np.array([draw(seed, Stream.ARRIVAL_GAP, index)], dtype=np.uint64)
    return round(float(-np.log(uniform(bits))[0]), 6)
