"""The load as drawn from its seed, before any answer: who arrives when, with how many turns of which lengths."""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

from loadgen.arrivals import bounded_us, constant_us, poisson_us
from loadgen.config import LoadConfig, Span
from loadgen.draws import GENERATOR, Stream, below, draw
from loadgen.messages import Said

ENDLESS_SESSIONS = 1000


@dataclass(frozen=True, slots=True)
class TurnShape:
    """One turn: lengths, the key its new tokens come from, and the pause before it."""

    prompt_tokens: int
    """New tokens: the context before them is not counted."""
    prompt_key: int
    output_tokens: int
    think_ms: float
    """From the turn before's end; 0 for a first turn."""
    said: Sequence[Said] = ()
    """What is said before the answer is asked for (a tool's results, a dataset's text, a system message in a first
    turn); ``prompt_tokens`` is then their length as far as it is known. Empty: one user message from ``prompt_key``."""


@dataclass(frozen=True, slots=True)
class SessionShape:
    """One conversation, or one stand-alone request: a session of one turn."""

    index: int
    due_ms: float | None
    """When its first turn is due; null: as soon as another session ends (closed loop)."""
    prefix: int | None
    """Which shared prefix it begins with; null: none."""
    prefix_key: int
    turns: Sequence[TurnShape]


@dataclass(frozen=True, slots=True)
class Workload:
    """Every session in order of arrival; ``digest`` names the traffic."""

    config: LoadConfig
    due_ms: Sequence[float] | None
    """When each session is due; null: closed loop, each as soon as another one ends."""

    def planned(self) -> int | None:
        """How many sessions there are; null: as many as end in time."""
        return self.config.number if self.due_ms is None else len(self.due_ms)

    def __iter__(self) -> Iterator[SessionShape]:
        if self.due_ms is not None:
            return (draw_session(self.config, index, due_ms) for index, due_ms in enumerate(self.due_ms))
        indices = count() if self.config.number is None else range(self.config.number)
        return (draw_session(self.config, index, None) for index in indices)

    def digest(self) -> str:
        """SHA-256, hex, over every arrival, length, pause and token key, the vocabulary, the api and the generator.

        Token ids are a fixed function of their key (``draws.expand_tokens``, pinned by a test), so equal digests mean
        equal bodies, save the model's name and answers, without making every token twice. Of a closed loop without
        end, the first ``ENDLESS_SESSIONS`` stand for all.
        """
        config = self.config
        closed = config.parallel if self.due_ms is None else None
        digest = hashlib.sha256(f"{GENERATOR} {config.api} {config.prefix_tokens} {closed}".encode())
        digest.update(struct.pack("<QQ", config.vocabulary.low, config.vocabulary.high))
        for session in islice(self, None if self.planned() is not None else ENDLESS_SESSIONS):
            due_ms = -1.0 if session.due_ms is None else session.due_ms
            prefix_key = 0 if session.prefix is None else session.prefix_key
            digest.update(struct.pack("<dQQ", due_ms, prefix_key, len(session.turns)))
            for turn in session.turns:
                digest.update(
                    struct.pack("<QQQd", turn.prompt_tokens, turn.prompt_key, turn.output_tokens, turn.think_ms)
                )
        return digest.hexdigest()


def draw_workload(config: LoadConfig) -> Workload:
    """The whole load of a config; the same for equal configs, everywhere."""
    if config.rate is None:
        return Workload(config, None)
    arrivals_us = constant_us(config.rate) if config.pattern == "constant" else poisson_us(config.rate, config.seed)
    return Workload(config, [at_us / 1000 for at_us in bounded_us(arrivals_us, config.number, config.duration_s)])


def draw_session(config: LoadConfig, index: int, due_ms: float | None) -> SessionShape:
    """Session ``index`` of a config."""
    seed = config.seed
    prefix = None
    if config.prefix_count:
        prefix = below(draw(seed, Stream.PREFIX_CHOICE, index), config.prefix_count)
    return SessionShape(
        index=index,
        due_ms=due_ms,
        prefix=prefix,
        prefix_key=draw(seed, Stream.PREFIX_TOKENS, prefix or 0),
        turns=[_draw_turn(config, index, turn) for turn in range(config.turns)],
    )


def _draw_turn(config: LoadConfig, session: int, turn: int) -> TurnShape:
    seed = config.seed
    think_us = 0 if turn == 0 else _in_span(draw(seed, Stream.THINK_TIME, session, turn), config.think_s, 1_000_000)
    return TurnShape(
        prompt_tokens=_in_span(draw(seed, Stream.PROMPT_LENGTH, session, turn), config.prompt_tokens),
        prompt_key=draw(seed, Stream.PROMPT_TOKENS, session, turn),
        output_tokens=_in_span(draw(seed, Stream.OUTPUT_LENGTH, session, turn), config.output_tokens),
        think_ms=think_us / 1000,
    )


def _in_span(bits: int, span: Span, units: int = 1) -> int:
    """A draw from a span, in whole units (``units`` of them to 1 of the span's)."""
    low, high = round(span.low * units), round(span.high * units)
    return low + below(bits, high - low + 1)
