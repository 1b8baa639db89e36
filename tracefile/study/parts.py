"""Results over a store of many traces: each trace alone, on any core or machine, and the parts added up."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from tracefile.commandline.configfile import refuse_without
from tracefile.commandline.progress import counted
from tracefile.commandline.workers import add_worker_arguments, results
from tracefile.records.errors import InputError
from tracefile.records.latenames import LateModule

if TYPE_CHECKING:
    from tracefile.study import index
else:  # all formats of traces, which the flags need not
    index = LateModule("tracefile.study.index")


class _Part(Protocol):
    def plus(self, other: Self) -> Self:
        """Return the sum of two parts, the same in any order. Raises InputError for parts that have none."""


Part = TypeVar("Part", bound=_Part)


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``added_up``."""
    group = parser.add_argument_group("many engines")
    group.add_argument(
        "--each-trace",
        action="store_true",
        help="take TRACE as a folder or URL of traces, at any depth: one engine with a cache of its own each; add up "
        "their counts",
    )
    add_worker_arguments(group)


def takes_each(arguments: argparse.Namespace) -> bool:
    """Return whether the traces of a store are asked for. Raises InputError for flags of these alone."""
    if not arguments.each_trace:
        refuse_without("--each-trace", arguments, ("procs", "ray"))
    return bool(arguments.each_trace)


def added_up(arguments: argparse.Namespace, work: Callable[[str], Part]) -> Part:
    """Return the sum of all traces' parts. Raises InputError for parts without a sum, or if there is no trace."""
    traces = index.traces_below(str(arguments.trace))
    whole: Part | None = None
    done = results(work, traces, procs=arguments.procs, ray=arguments.ray)
    for trace, part in counted(done, "traces"):
        try:
            whole = part if whole is None else whole.plus(part)
        except InputError as error:
            raise InputError(f"{trace}: {error}") from None
    assert whole is not None
    return whole
