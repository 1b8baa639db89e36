"""Targets of ``tracefile convert --to``, with the facts that their lines do not say."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tracefile.exporters.blocklines import BlockIds, mooncake_lines
from tracefile.exporters.events import dynamo_lines, otlp_lines
from tracefile.exporters.loss import Loss
from tracefile.exporters.trie import trie_lines
from tracefile.records.schema import Meta, Record


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


TARGETS = {
    "mooncake": Target(
        lambda export: mooncake_lines(export.records, export.ids(), export.loss),
        "sessions, statuses and the times of tokens, fractions of a millisecond",
        512,
    ),
    "dynamo": Target(
        lambda export: dynamo_lines(export.records, export.meta, export.ids(), export.loss),
        "statuses, gaps between tokens, fractions of a millisecond",
    ),
    "trie": Target(
        lambda export: trie_lines(export.records, export.loss),
        "arrivals, hashes (and so shared prefixes), statuses and times",
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
