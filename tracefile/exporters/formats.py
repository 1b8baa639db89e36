"""Targets of ``tracefile convert --to``, with the facts that their lines do not say."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tracefile.exporters.blocklines import BlockIds, bailian_lines, by_arrival, guidellm_line, mooncake_line, timed_line
from tracefile.exporters.conversations import aiperf_lines, trie_lines
from tracefile.exporters.events import dynamo_lines, otlp_lines, vcr_lines
from tracefile.exporters.loss import Loss
from tracefile.records.schema import Meta, Record

TIMES = "sessions, statuses and the times of tokens"


@dataclass(frozen=True, slots=True)
class Export:
    """A trace on its way into a format."""

    meta: Meta
    records: Iterable[Record]
    where: str
    """The trace's name, for errors."""
    loss: Loss

    def ids(self) -> BlockIds:
        return BlockIds(self.meta, self.where)


@dataclass(frozen=True, slots=True)
class Target:
    """Format that can be written."""

    lines: Callable[[Export], Iterator[bytes]]
    lost: str
    """Facts of a trace that its lines do not say."""
    block_size: int | None = None
    """Tokens in a block as the format is usually written; null: its readers are told."""


def _aiperf(export: Export) -> Iterator[bytes]:
    ids = None if export.meta.block_size is None else export.ids()
    return aiperf_lines(export.records, ids, export.loss)


TARGETS = {
    "mooncake": Target(
        lambda export: by_arrival(export.records, export.ids(), export.loss, mooncake_line),
        f"{TIMES}, fractions of a millisecond",
        512,
    ),
    "aiperf-mooncake": Target(_aiperf, "arrivals and hashes of later turns, statuses and times", 512),
    "bailian": Target(
        lambda export: by_arrival(export.records, export.ids(), export.loss, bailian_lines()),
        "statuses and times but the arrival",
        16,
    ),
    "vllm-timed-trace": Target(lambda export: by_arrival(export.records, export.ids(), export.loss, timed_line), TIMES),
    "guidellm": Target(lambda export: by_arrival(export.records, export.ids(), export.loss, guidellm_line), TIMES),
    "dynamo": Target(
        lambda export: dynamo_lines(export.records, export.meta, export.ids(), export.loss),
        "statuses, gaps between tokens, fractions of a millisecond",
    ),
    "trie": Target(
        lambda export: trie_lines(export.records, export.loss),
        "arrivals, hashes (and so shared prefixes), statuses and times",
    ),
    "vllm-vcr": Target(
        lambda export: vcr_lines(export.records, export.meta, export.loss),
        "request ids, sessions, ends after the last token",
    ),
    "otlp": Target(lambda export: otlp_lines(export.records, export.meta, export.loss), "hashes, gaps between tokens"),
}
"""Formats by name."""


def usual_block_size(target: str, meta: Meta) -> int | None:
    """Return the block size to write a trace with, if the format has a usual one and the trace's adds up to it."""
    usual = None if target not in TARGETS else TARGETS[target].block_size
    return usual if usual is not None and meta.block_size is not None and usual % meta.block_size == 0 else None


def export_lines(target: str, export: Export) -> Iterator[bytes]:
    """Lines of a trace in a format; raises InputError if it can hold none of the requests."""
    yield from TARGETS[target].lines(export)
    export.loss.check(export.where, target)
