"""The load as drawn from its seed, before any response: who arrives when, with how many turns of which lengths."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count, islice

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.core.draws import GENERATOR, Stream, below, draw, draw_each
from loadgen.core.job import DIGEST_BITS, WHOLE, Shard
from loadgen.core.lengths import LengthDistribution, quantities, quantity
from loadgen.datasets import DATASETS
from loadgen.datasets.session import ESTIMATED, DatasetOptions, DatasetSession, DatasetTurn, TextLengths
from loadgen.plan.arrivals import (
    CHUNK,
    Chunks,
    RateProfile,
    at_rate,
    before,
    bursts,
    evenly,
    exponentially,
    flat,
    gamma_spaced,
    profile,
    ramp,
    staircase,
    stepped,
)
from loadgen.plan.config import LoadConfig
from loadgen.plan.shapes import SessionShape, TurnShape, session_digest
from loadgen.plan.stages import waves
from loadgen.text.messages import Piece, SyntheticMessage
from tracefile import InputError

Counts = npt.NDArray[np.int64]
Positions = npt.NDArray[np.uint64]

ENDLESS_SESSIONS = 1000
DIGESTED_SESSIONS = 100_000
"""Sessions in a run's digest: an endless load needs a bound."""

SECOND_US = 1_000_000
CLOSED = -1
DEFAULT_OUTPUT = LengthDistribution(16, 16)
DEFAULT_THINK = LengthDistribution(0, 0)


@dataclass(frozen=True, slots=True)
class Survey:
    """Result of going through a shard's sessions once."""

    digest_share: int
    planned: int | None
    """Requests if every turn succeeds; null: too many to count."""
    last_send_ms: float | None = None
    """Time of the last send, if responses took no time; null: closed loop, or too many to count."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A shard's sessions in order of arrival, made as they are asked for, the same at every iteration."""

    config: LoadConfig
    shard: Shard = WHOLE
    lengths: TextLengths = ESTIMATED
    text: str = ""
    """Fingerprint of the words that are sent; empty: token ids are sent."""

    def __iter__(self) -> Iterator[SessionShape]:
        if self.config.pattern == "calibration":
            return chain.from_iterable(wave.sessions for wave in waves(self.config))
        if self.config.dataset_path is None:
            return chain.from_iterable(draw_sessions(self.config, *places) for places in self._places())
        return self._of_dataset()

    def _of_dataset(self) -> Iterator[SessionShape]:
        entries = dataset_sessions(self.config, self.lengths)
        in_use: dict[int, tuple[DatasetSession, int]] = {}  # entries by group, each with its sessions to come
        rows = chain.from_iterable(zip(*chunk, strict=True) for chunk in placed(self.config))
        for index, (number, due_us) in enumerate(rows):
            group, size = int(number) // self.config.group_size, self.config.group_size
            # First sessions of groups come in order of their groups.
            entry, left = in_use.pop(group) if group in in_use else (next(entries, None), size)
            if entry is None and not in_use:
                return
            if entry is None:
                continue
            if left > 1:
                in_use[group] = entry, left - 1
            if self.shard.has(group):
                yield place_session(self.config, entry, index, int(number), int(due_us))

    def _places(self) -> Iterator[tuple[Positions, Positions, Counts]]:
        """Chunks of the shard's sessions: their order of arrival in the whole run, numbers, and due times."""
        start = 0
        for numbers, due_us in placed(self.config):
            # By groups: what one session shares with another is then known where it is sent.
            groups = numbers // np.uint64(self.config.group_size)
            own = np.flatnonzero(groups % np.uint64(self.shard.count) == self.shard.index)
            yield (own + start).astype(np.uint64), numbers[own], due_us[own]
            start += len(due_us)

    def survey(self) -> Survey:
        config = self.config
        bounded = config.open_loop or config.number is not None or config.once
        most = DIGESTED_SESSIONS if bounded else ENDLESS_SESSIONS
        header = common_header(config, self.text)
        share = requests = 0
        last_send_ms: float | None = None
        for session in self:
            if session.index >= most:
                return Survey(share % (1 << DIGEST_BITS), None)
            share += session_digest(header, session)
            requests += len(session.turns)
            if session.due_ms is not None:
                last_turn_ms = session.due_ms + sum(turn.think_ms for turn in session.turns)
                last_send_ms = max(last_send_ms or 0.0, last_turn_ms)
        return Survey(share % (1 << DIGEST_BITS), requests, last_send_ms)


def common_header(config: LoadConfig, text: str) -> bytes:
    closed = None if config.open_loop else (config.sessions_at_once, config.requests_at_once)
    vocabulary = (config.vocabulary.low, config.vocabulary.high)
    prefix = (config.prefix_tokens, config.tool_role)
    told = f"{GENERATOR} {config.api} {text} {prefix} {closed} {vocabulary}"
    return hashlib.sha256((f"{told} {config.fields}" if config.fields.given else told).encode()).digest()


def arrivals_us(config: LoadConfig) -> Chunks:
    """Yield due times of sessions, ``CLOSED`` in a closed loop, up to the config's bounds."""
    if not config.open_loop:
        return before((np.full(CHUNK, CLOSED, dtype=np.int64) for _ in count()), config.number, None)
    if config.pattern == "burst":
        assert config.burst_size is not None
        assert config.burst_every_s is not None
        arrivals = bursts(config.burst_size, config.burst_every_s)
    else:
        arrivals = at_rate(spaced(config), rate_profile(config))
    return before(arrivals, config.number, config.ends_s)


def placed(config: LoadConfig) -> Iterator[tuple[Positions, Counts]]:
    """Chunks of sessions in order of arrival: numbers (group · group size + place in it) and due times.

    Sessions of a group that are due after the next chunk's first group wait for that chunk.
    """
    size, start = config.group_size, 0
    ends_us = round(config.ends_s * SECOND_US) if config.open_loop and config.ends_s is not None else None
    numbers, due_us = np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64)
    for groups_us in arrivals_us(config):
        if not len(groups_us):
            continue
        places = np.arange(start * size, (start + len(groups_us)) * size, dtype=np.uint64)
        start += len(groups_us)
        numbers = np.concatenate([numbers, places])
        due_us = np.concatenate([due_us, (groups_us[:, np.newaxis] + group_offsets_us(config, places)).ravel()])
        order = np.lexsort((numbers, due_us))
        numbers, due_us = numbers[order], due_us[order]
        ready = int(np.searchsorted(due_us, groups_us[-1], side="right"))
        yield numbers[:ready], due_us[:ready]
        numbers, due_us = numbers[ready:], due_us[ready:]
    in_time = len(due_us) if ends_us is None else int(np.searchsorted(due_us, ends_us))
    if in_time:
        yield numbers[:in_time], due_us[:in_time]


def group_offsets_us(config: LoadConfig, numbers: Positions) -> Counts:
    """Time of each session after its group's first; shape (groups, group size)."""
    shape = (-1, config.group_size)
    if config.group_gap_s is None:
        return np.zeros(len(numbers), dtype=np.int64).reshape(shape)
    at = numbers + np.uint64(config.dataset_offset * config.group_size)
    gaps_us = quantities(config.group_gap_s, draw_each(config.seed, Stream.GROUP_GAP, at), SECOND_US).reshape(shape)
    gaps_us[:, 0] = 0
    return np.cumsum(gaps_us, axis=1)


def spaced(config: LoadConfig) -> Chunks:
    """Arrivals in units of their expected number."""
    spacing = config.spacing or config.pattern
    if spacing == "constant":
        return evenly()
    if spacing == "gamma" and config.burstiness is not None:
        return evenly() if config.burstiness == np.inf else gamma_spaced(config.seed, config.burstiness)
    return exponentially(config.seed)


def rate_profile(config: LoadConfig) -> RateProfile:
    if config.pattern == "series":
        return (stepped if config.rate_between == "steps" else profile)(config.rate_series)
    assert config.rate is not None
    if config.rate_to is None:
        return flat(config.rate)
    if config.pattern == "ramp":
        assert config.duration_s is not None
        return ramp(config.rate, config.rate_to, config.duration_s)
    assert config.steps is not None
    assert config.step_s is not None
    return staircase(config.rate, config.rate_to, config.steps, config.step_s)


def draw_sessions(config: LoadConfig, indices: Positions, numbers: Positions, due_us: Counts) -> Iterator[SessionShape]:
    """Random sessions, each independent of those before it; a group's sessions have one prefix and first prompt."""
    if not len(indices):
        return
    seed = config.seed
    at = numbers + np.uint64(config.dataset_offset * config.group_size)
    groups = at // np.uint64(config.group_size)
    counts = quantities(config.turns, draw_each(seed, Stream.TURN_COUNT, at))
    turns = np.arange(counts.max(), dtype=np.uint64)
    place = (at[:, np.newaxis], turns)
    said = (np.where(turns == 0, groups[:, np.newaxis], at[:, np.newaxis]), turns)
    prompts = quantities(config.prompt_tokens, draw_each(seed, Stream.PROMPT_LENGTH, *said)).tolist()
    keys = draw_each(config.tokens_from, Stream.PROMPT_TOKENS, *said).tolist()
    outputs = quantities(config.output_tokens or DEFAULT_OUTPUT, draw_each(seed, Stream.OUTPUT_LENGTH, *place)).tolist()
    pause = config.tool_latency_s or config.think_s or DEFAULT_THINK
    thinks = quantities(pause, draw_each(seed, Stream.THINK_TIME, *place), SECOND_US)
    thinks[:, 0] = 0
    pauses = (thinks / 1000).tolist()
    prefixes = draw_prefixes(config, groups)
    numbered = zip(indices.tolist(), due_us.tolist(), counts.tolist(), strict=True)
    for row, (index, due, length) in enumerate(numbered):
        shapes = [TurnShape(*turn) for turn in zip(prompts[row], keys[row], outputs[row], pauses[row], strict=True)]
        if config.tool_latency_s is not None and config.tool_role == "tool":
            shapes[1:] = [msgspec.structs.replace(turn, said=tool_output(turn)) for turn in shapes[1:]]
        yield SessionShape(index, None if due == CLOSED else due / 1000, *prefixes[row], shapes[:length])


def tool_output(turn: TurnShape) -> tuple[SyntheticMessage]:
    return (SyntheticMessage("tool", (Piece(turn.prompt_key, turn.prompt_tokens),)),)


def draw_prefixes(config: LoadConfig, at: Positions) -> list[tuple[int | None, int]]:
    none = np.zeros(1, dtype=np.uint64)
    if not config.prefix_count:
        return [(None, int(draw_each(config.tokens_from, Stream.PREFIX_TOKENS, none)[0]))] * len(at)
    uniform = LengthDistribution(0, config.prefix_count - 1)
    chosen = quantities(uniform, draw_each(config.seed, Stream.PREFIX_CHOICE, at))
    keys = draw_each(config.tokens_from, Stream.PREFIX_TOKENS, chosen.astype(np.uint64))
    return list(zip(chosen.tolist(), keys.tolist(), strict=True))


def dataset_sessions(config: LoadConfig, lengths: TextLengths) -> Iterator[DatasetSession]:
    """A dataset's sessions from ``dataset_offset`` on, in endless passes; or once, if the run ends with the dataset."""
    entries = _entries_again(config, lengths)
    if config.once:
        return islice(next(entries, iter(())), config.dataset_offset, None)
    return islice(chain.from_iterable(entries), config.dataset_offset, None)


def _entries_again(config: LoadConfig, lengths: TextLengths) -> Iterator[Iterator[DatasetSession]]:
    """Endless passes over the dataset; raises InputError if it has no session."""
    path = config.dataset_path
    assert path is not None
    dataset = DATASETS[config.dataset]
    options = DatasetOptions(
        lengths=lengths,
        counts_outputs=config.output_tokens is None,
        seed=config.seed,
        min_turns=config.min_turns,
        max_turns=config.max_turns,
        first_turn_tokens=config.first_turn_tokens,
        subsequent_turn_tokens=config.subsequent_turn_tokens,
        tool_role=config.tool_role,
    )
    fewest = 1 if dataset.cuts_turns else config.min_turns or 1
    while True:
        entries = (entry[: config.max_turns] for entry in dataset.read(path, options) if len(entry) >= fewest)
        first = next(entries, None)
        if first is None:
            raise InputError(
                f"{path}: no session of {fewest} turns or more; expected a {config.dataset} dataset of some"
            )
        yield chain([first], entries)


def place_session(config: LoadConfig, entry: DatasetSession, index: int, number: int, due_us: int) -> SessionShape:
    at = number + config.dataset_offset * config.group_size
    group = at // config.group_size
    prefix = below(draw(config.seed, Stream.PREFIX_CHOICE, group), config.prefix_count) if config.prefix_count else None
    seed = config.tokens_from
    prefix_key = draw(seed, Stream.PREFIX_TOKENS, prefix or 0)
    turns = [
        _place_turn(config, turn, at, place, draw(seed, Stream.PROMPT_TOKENS, at if place else group, place))
        for place, turn in enumerate(entry)
    ]
    return SessionShape(index, None if due_us == CLOSED else due_us / 1000, prefix, prefix_key, turns)


def _place_turn(config: LoadConfig, turn: DatasetTurn, at: int, place: int, key: int) -> TurnShape:
    output, think_ms = turn.output_tokens, turn.think_ms
    if output is None or config.output_tokens is not None:
        lengths = config.output_tokens or DEFAULT_OUTPUT
        output = quantity(lengths, draw(config.seed, Stream.OUTPUT_LENGTH, at, place))
    pause = config.tool_latency_s if turn.from_tool and config.tool_latency_s is not None else config.think_s
    if think_ms is None or pause is not None:
        think_ms = quantity(pause or DEFAULT_THINK, draw(config.seed, Stream.THINK_TIME, at, place), SECOND_US) / 1000
    placed = TurnShape(turn.new_tokens or 0, key, output, think_ms if place else 0.0, turn.quoted)
    as_tool = turn.from_tool and config.tool_role == "tool" and not turn.quoted
    return msgspec.structs.replace(placed, said=tool_output(placed)) if as_tool else placed
