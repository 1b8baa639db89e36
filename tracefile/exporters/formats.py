"""Targets of ``tracefile convert --to``, with the facts that their lines do not say."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tracefile.exporters.blockids import BlockIds
from tracefile.exporters.blocklines import bailian_lines, by_arrival, guidellm_line, mooncake_line, timed_line
from tracefile.exporters.conversations import aiperf_lines, trie_lines
from tracefile.exporters.events import dynamo_lines, otlp_lines, vcr_lines
from tracefile.exporters.loss import Loss
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record

TIMES = "sessions, statuses and the times of tokens"


@dataclass(frozen=True, slots=True)
class Export:
    """A trace on its way into a format."""

    meta: Meta
    records: Iterable[Record]
    where: str
    """The trace's name, for errors."""
    block_size: int | None
    """Tokens in a block of the target, as asked for; null: the target's usual size, if that is a multiple."""
    loss: Loss

    def ids(self, usual: int | None = None) -> BlockIds:
        """Numbers of blocks, at the usual size of the target where the trace's blocks add up to it."""
        size = self.block_size
        if size is None and usual is not None and self.meta.block_size and usual % self.meta.block_size == 0:
            size = usual
        return BlockIds(self.meta, size, self.where)


@dataclass(frozen=True, slots=True)
class Target:
    """Format that can be written."""

    lines: Callable[[Export], Iterator[bytes]]
    lost: str
    """Facts of a trace that its lines do not say."""


def _aiperf(export: Export) -> Iterator[bytes]:
    ids = None if export.meta.block_size is None else export.ids(512)
    return aiperf_lines(export.records, ids, export.loss)


TARGETS = {
    "mooncake": Target(
        lambda export: by_arrival(export.records, export.ids(512), export.loss, mooncake_line),
        f"{TIMES}, fractions of a millisecond",
    ),
    "aiperf-mooncake": Target(_aiperf, "arrivals and hashes of later turns, statuses and times"),
    "bailian": Target(
        lambda export: by_arrival(export.records, export.ids(16), export.loss, bailian_lines()),
        "statuses and times but the arrival",
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


def export_lines(target: str, export: Export) -> Iterator[bytes]:
    """Lines of a trace in a format; raises InputError if it can hold none of the requests."""
    if export.block_size is not None and export.block_size < 1:
        raise InputError(f"--block-size {export.block_size}; expected 1 or more")
    yield from TARGETS[target].lines(export)
    export.loss.check(export.where, target)
