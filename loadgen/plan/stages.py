"""Load of ``--pattern calibration``: each prefill and decode cost that ``sim calibrate`` fits varies independently.

Rounds of equal stages, a round in waves of sessions; a wave starts after the end of the previous wave, on an idle
engine:

- ``alone``: one cold prompt at a time, from the shortest to the longest, each extended by a warm second turn;
- ``short``: 2, 4, 8, … short prompts nearly at once: cost of one more sequence in a decode batch;
- ``long``: as many, of prompts that together have twice the tokens of the longest: cost of context in decode;
- ``shared``: as many with one prompt: cost of context that several sequences share (prefix hits);
- ``rested``: one session at a time, of short warm turns after pauses: cost after the engine was idle;
- ``beside``: prefill of long prompts during the decode of others;
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
"""Default output tokens: some dozens of ITL samples each."""
FIRST_WORDS = LengthDistribution(2, 2)
"""Output tokens before a prompt that overlaps others: at its end, the other requests are in decode."""
PAUSE_S = LengthDistribution(0.02, 0.12)
"""Think time before a turn: the engine is idle, or at any point of its step."""
IDLE_PAUSES_S = (LengthDistribution(0.1, 0.3), LengthDistribution(0.5, 1.0), LengthDistribution(2.5, 5.0))
"""Think times of a rested session: by its end, other processes have used the CPU caches."""
NO_PAUSE = LengthDistribution(0, 0)
FEWEST_NEW = 16
"""Minimum new tokens of a warm turn: its latency is then the cost of the cached prefix."""
MIX_SESSIONS = 16
MIX_TURNS = 4
"""Turns of every second session; the rest have one turn."""
US_PER_S = 1_000_000


class TurnPlan(msgspec.Struct, frozen=True):
    """Ranges of prompt tokens, output tokens and think time of a turn."""

    prompt: LengthDistribution
    output: LengthDistribution
    pause_s: LengthDistribution = NO_PAUSE


SessionPlan = Sequence[TurnPlan]


class Outline(msgspec.Struct, frozen=True):
    """Wave before its token lengths are drawn."""

    stage: Stage
    sessions: Sequence[SessionPlan]
    same_prompts: bool = False
    """True: the first turns have one prompt."""


class Wave(msgspec.Struct, frozen=True):
    """Sessions that the engine serves together; the next wave starts when all have ended."""

    stage: Stage
    sessions: Sequence[SessionShape]
    spaces: Sequence[float]
    """Gaps before sessions, exponential of mean 1, in the stage's unit."""


def waves(config: LoadConfig) -> Iterator[Wave]:
    """Waves of the load in order: rounds for ``number`` sessions, or the default rounds, or without an end."""
    numbers, left = count(), config.number
    for outline in outlines(config):
        plans = outline.sessions[:left]
        sessions = [_draw_session(config, next(numbers), plan) for plan in plans]
        if outline.same_prompts:
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
    for rung in mixed:  # in random order: a drift of the engine's speed must not look like a cost that depends on size
        yield Outline("alone", [extended(ladder[rung], output)])
    for width in widths:
        yield Outline("short", [[TurnPlan(ladder[0], output)]] * width)
    for width in widths:
        yield Outline("long", [extended(fraction_of(prompts, 2 / width), output)] * width)
    for width in widths[-2:]:
        yield Outline("shared", [[TurnPlan(fraction_of(prompts, 1 / 4), output)]] * width, same_prompts=True)
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

    The last is the longest prompt of the load: its prefill cost is not extrapolated.
    """
    steps = math.ceil(math.log2(prompts.high / prompts.low))
    middles = [prompts.low * (prompts.high / prompts.low) ** (step / steps) for step in range(steps)]
    return [*(_around(middle, prompts) for middle in middles), LengthDistribution(prompts.high, prompts.high)]


def sized_for(trace: Path) -> tuple[LengthDistribution, int]:
    """Return prompts up to a trace's longest, and its maximum requests in flight, within the engine's limits.

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
        raise InputError(f"--for {trace}: no prompt_tokens; expected a trace with prompt_tokens ({USAGE_ADVICE})")
    context, pool = engine.max_model_len, (engine.num_gpu_blocks or 0) * (engine.block_size or 0)
    # A conversation grows by a quarter and its outputs; the KV cache holds two of the longest, and others.
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
    """Prompt lengths within half an octave of ``middle``, clipped to the bounds."""
    half = math.sqrt(2)
    low, high = max(middle / half, prompts.low), min(middle * half, prompts.high)
    return LengthDistribution(round(low), round(high), "zipf", exponent=1)


def extended(prompt: LengthDistribution, output: LengthDistribution, turns: int = 2) -> list[TurnPlan]:
    """Cold prompt and its conversation up to ``turns`` turns; all later turns add a quarter of its tokens at most."""
    new = LengthDistribution(FEWEST_NEW, max(FEWEST_NEW, round(prompt.high / 4 / (turns - 1))), "zipf", exponent=1)
    return [TurnPlan(prompt, output), *[TurnPlan(new, output, PAUSE_S)] * (turns - 1)]


def rested(prompt: LengthDistribution) -> list[TurnPlan]:
    """Cold prompt, then short warm turns (prefix hits) after pauses."""
    new = LengthDistribution(FEWEST_NEW, FEWEST_NEW)
    return [TurnPlan(prompt, FIRST_WORDS), *[TurnPlan(new, FIRST_WORDS, pause_s) for pause_s in IDLE_PAUSES_S]]


def interrupting(prompt: LengthDistribution) -> list[TurnPlan]:
    """Short prompt that ends while other requests decode, then the prefill of a long prompt beside them."""
    return [TurnPlan(LengthDistribution(FEWEST_NEW, FEWEST_NEW), FIRST_WORDS), TurnPlan(prompt, FIRST_WORDS)]


def _with_first_prompt(first: SessionShape, session: SessionShape) -> SessionShape:
    """Session with the first prompt of session ``first``."""
    turn, shared = session.turns[0], first.turns[0]
    first_turn = msgspec.structs.replace(turn, prompt_tokens=shared.prompt_tokens, prompt_key=shared.prompt_key)
    return msgspec.structs.replace(session, turns=[first_turn, *session.turns[1:]])


def _draw_session(config: LoadConfig, index: int, plan: SessionPlan) -> SessionShape:
    """Session without a shared prefix."""
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
    """Exponential gap of mean 1, to the millionth: Poisson arrivals."""
    bits = np.array([draw(seed, Stream.ARRIVAL_GAP, index)], dtype=np.uint64)
    return round(float(-np.log(uniform(bits))[0]), 6)
