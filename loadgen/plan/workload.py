"""The load as drawn from its seed, before any response: arrivals, turns, prompt and output tokens."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
import numpy.typing as npt

from loadgen.core.draws import GENERATOR, Stream, below, draw, draw_array
from loadgen.core.job import DIGEST_BITS, UNSHARDED, Shard
from loadgen.core.lengthdraws import quantities, quantity
from loadgen.core.lengths import LengthDistribution
from loadgen.datasets import DATASETS
from loadgen.datasets.session import CountTokens, DatasetSession, DatasetTurn, estimated_tokens
from loadgen.plan.arrivals import CHUNK, Chunks, at_rate, before, evenly, exponentially, rate_profile
from loadgen.plan.config import SINGLE_TURN, LoadConfig
from loadgen.plan.shapes import SessionShape, TurnShape, session_digest
from loadgen.plan.stages import waves
from tracefile.records.errors import InputError

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
    """Totals of a shard's sessions: digest, requests, last send."""

    digest_share: int
    planned: int | None
    """Requests if every turn succeeds; null: too many to count."""
    last_send_ms: float | None = None
    """Time of the last send, if responses took no time; null: closed loop, or too many to count."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions of a shard in order of arrival, generated lazily, with equal tokens at every iteration."""

    config: LoadConfig
    shard: Shard = UNSHARDED
    count: CountTokens = estimated_tokens
    text: str = ""
    """Fingerprint of the words in prompts; empty: prompts are token ids."""

    def __iter__(self) -> Iterator[SessionShape]:
        if self.config.pattern == "calibration":
            return chain.from_iterable(wave.sessions for wave in waves(self.config))
        if self.config.dataset_path is None:
            return chain.from_iterable(self._random())
        return self._of_dataset()

    def _of_dataset(self) -> Iterator[SessionShape]:
        entries, size = dataset_sessions(self.config, self.count), self.config.group_size
        rows = chain.from_iterable(zip(*chunk, strict=True) for chunk in numbered(self.config))
        entry: DatasetSession | None = None
        for number, due_us in rows:
            if not number % size:
                entry = next(entries, None)
            if entry is None:
                return
            if self.shard.has(int(number) // size):
                yield shape_session(self.config, entry, int(number), int(due_us))

    def _random(self) -> Iterator[Iterator[SessionShape]]:
        for numbers, due_us in numbered(self.config):
            # By groups: sessions with a shared first prompt are sent by one worker.
            groups = numbers // np.uint64(self.config.group_size)
            selected = np.flatnonzero(groups % np.uint64(self.shard.count) == self.shard.index)
            yield draw_sessions(self.config, numbers[selected], due_us[selected])

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
    # In the form of versions with more caps and roles, so that equal loads keep their digests.
    closed = None if config.open_loop else (config.parallel, config.parallel)
    vocabulary = (config.vocabulary.low, config.vocabulary.high)
    words = f"{GENERATOR} {config.api} {text} {(config.prefix_tokens, 'user')} {closed} {vocabulary}"
    return hashlib.sha256((f"{words} {config.fields}" if config.fields.customised else words).encode()).digest()


def arrivals_us(config: LoadConfig) -> Chunks:
    """Yield due times of sessions, ``CLOSED`` in a closed loop, up to the bounds of the config."""
    if not config.open_loop:
        return before(repeat(np.full(CHUNK, CLOSED, dtype=np.int64)), config.number, None)
    rates = config.rate_series or [(0.0, config.rate or 0.0)]
    return before(at_rate(spaced(config), rate_profile(rates)), config.number, config.ends_s)


def numbered(config: LoadConfig) -> Iterator[tuple[Positions, Counts]]:
    """Chunks of sessions in order of arrival: numbers (group · group size + index in it) and due times."""
    size, start = config.group_size, 0
    for groups_us in arrivals_us(config):
        yield np.arange(start * size, (start + len(groups_us)) * size, dtype=np.uint64), np.repeat(groups_us, size)
        start += len(groups_us)


def spaced(config: LoadConfig) -> Chunks:
    """Arrivals in units of their expected number."""
    return evenly() if config.pattern == "constant" else exponentially(config.seed)


def draw_sessions(config: LoadConfig, numbers: Positions, due_us: Counts) -> Iterator[SessionShape]:
    """Random sessions, independent of each other; the sessions of a group share prefix and first prompt."""
    if not len(numbers):
        return
    seed = config.seed
    groups = numbers // np.uint64(config.group_size)
    counts = quantities(config.turns or SINGLE_TURN, draw_array(seed, Stream.TURN_COUNT, numbers))
    turns = np.arange(counts.max(), dtype=np.uint64)
    position = (numbers[:, np.newaxis], turns)
    prompt = (np.where(turns == 0, groups[:, np.newaxis], numbers[:, np.newaxis]), turns)
    prompts = quantities(config.prompt_tokens, draw_array(seed, Stream.PROMPT_LENGTH, *prompt)).tolist()
    keys = draw_array(config.tokens_from, Stream.PROMPT_TOKENS, *prompt).tolist()
    output_bits = draw_array(seed, Stream.OUTPUT_LENGTH, *position)
    outputs = quantities(config.output_tokens or DEFAULT_OUTPUT, output_bits).tolist()
    think_us = quantities(config.think_s or DEFAULT_THINK, draw_array(seed, Stream.THINK_TIME, *position), SECOND_US)
    think_us[:, 0] = 0
    think_ms = (think_us / 1000).tolist()
    prefixes = draw_prefixes(config, groups)
    rows = zip(numbers.tolist(), due_us.tolist(), counts.tolist(), strict=True)
    for row, (number, due, length) in enumerate(rows):
        shapes = [TurnShape(*turn) for turn in zip(prompts[row], keys[row], outputs[row], think_ms[row], strict=True)]
        yield SessionShape(number, None if due == CLOSED else due / 1000, *prefixes[row], shapes[:length])


def draw_prefixes(config: LoadConfig, groups: Positions) -> list[tuple[int | None, int]]:
    none = np.zeros(1, dtype=np.uint64)
    if not config.prefix_count:
        return [(None, int(draw_array(config.tokens_from, Stream.PREFIX_TOKENS, none)[0]))] * len(groups)
    uniform = LengthDistribution(0, config.prefix_count - 1)
    chosen = quantities(uniform, draw_array(config.seed, Stream.PREFIX_CHOICE, groups))
    keys = draw_array(config.tokens_from, Stream.PREFIX_TOKENS, chosen.astype(np.uint64))
    return list(zip(chosen.tolist(), keys.tolist(), strict=True))


def dataset_sessions(config: LoadConfig, count: CountTokens) -> Iterator[DatasetSession]:
    """Sessions of a dataset in endless passes; one pass if the run ends with the dataset."""
    passes = _passes(config, count)
    return next(passes, iter(())) if config.once else chain.from_iterable(passes)


def _passes(config: LoadConfig, count: CountTokens) -> Iterator[Iterator[DatasetSession]]:
    """Endless passes over the dataset. Raises InputError if it has no session."""
    path = config.dataset_path
    assert path is not None
    dataset, counter = DATASETS[config.dataset], count if config.output_tokens is None else None
    fewest = 1 if config.turns is None else int(config.turns.low)
    most = None if config.turns is None else int(config.turns.high)
    while True:
        entries = (entry[:most] for entry in dataset.read(path, counter) if len(entry) >= fewest)
        first = next(entries, None)
        if first is None:
            raise InputError(
                f"{path}: no session of {fewest} turns or more; expected a {config.dataset} dataset with such sessions"
            )
        yield chain([first], entries)


def shape_session(config: LoadConfig, entry: DatasetSession, number: int, due_us: int) -> SessionShape:
    group = number // config.group_size
    prefix = below(draw(config.seed, Stream.PREFIX_CHOICE, group), config.prefix_count) if config.prefix_count else None
    seed = config.tokens_from
    prefix_key = draw(seed, Stream.PREFIX_TOKENS, prefix or 0)
    turns = [
        _shape_turn(config, turn, number, index, draw(seed, Stream.PROMPT_TOKENS, number if index else group, index))
        for index, turn in enumerate(entry)
    ]
    return SessionShape(number, None if due_us == CLOSED else due_us / 1000, prefix, prefix_key, turns)


def _shape_turn(config: LoadConfig, turn: DatasetTurn, number: int, index: int, key: int) -> TurnShape:
    output, think_ms = turn.output_tokens, turn.think_ms
    if output is None or config.output_tokens is not None:
        lengths = config.output_tokens or DEFAULT_OUTPUT
        output = quantity(lengths, draw(config.seed, Stream.OUTPUT_LENGTH, number, index))
    if think_ms is None or config.think_s is not None:
        bits = draw(config.seed, Stream.THINK_TIME, number, index)
        think_ms = quantity(config.think_s or DEFAULT_THINK, bits, SECOND_US) / 1000
    return TurnShape(turn.new_tokens or 0, key, output, think_ms if index else 0.0, turn.quoted)
