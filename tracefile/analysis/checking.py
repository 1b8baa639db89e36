"""``tracefile check``: violations of the schema's rules, with their lines."""

import math
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from tracefile.commandline.progress import counted
from tracefile.files.reading import TraceReader
from tracefile.records.decoding import OutOfBoundsError
from tracefile.records.errors import InputError
from tracefile.records.schema import Record, RequestId
from tracefile.storage.segments import absent_segments, segment_number


class Finding(NamedTuple):
    """A violation of a schema rule."""

    line: int
    """Line number of ``TraceReader.line``; ``TraceReader.where`` names the file."""
    field: str
    problem: str


Rule = Callable[[Record, int | None], Iterator[tuple[str, str]]]
"""Yields (field, violation and expectation) for a record of a trace with the given block size."""

NOT_NEGATIVE_MS = ("arrival_ms", "first_byte_ms", "ttft_ms", "e2e_ms", "think_ms")
ROUNDING_MS = 0.001
"""Tolerance when two times are compared, in ms: writers round."""
DISORDER_MS = 60_000.0
"""Tolerance of finish order, in ms: each tap worker sends its records itself, late if the recorder was restarting."""


def check_signs(record: Record, block_size: int | None) -> Iterator[tuple[str, str]]:
    """Times are 0 or more. Counts are bounded by the schema."""
    for name in NOT_NEGATIVE_MS:
        value = getattr(record, name)
        if value is not None and not 0 <= value < math.inf:
            yield name, f"{value}; expected 0 or more"


def check_times(record: Record, block_size: int | None) -> Iterator[tuple[str, str]]:
    """First byte, first token and end of the response occur in this order."""
    order = [("first_byte_ms", "ttft_ms"), ("first_byte_ms", "e2e_ms"), ("ttft_ms", "e2e_ms")]
    for early, late in order:
        first, then = getattr(record, early), getattr(record, late)
        if first is not None and then is not None and first > then + ROUNDING_MS:
            yield early, f"{first}, after {late} {then}; expected it before"


def check_gaps(record: Record, block_size: int | None) -> Iterator[tuple[str, str]]:
    """ITLs and their token counts have the same length, are not negative, and fit the output."""
    if len(record.itl_ms) != len(record.itl_tokens):
        yield "itl_tokens", f"{len(record.itl_tokens)} for {len(record.itl_ms)} gaps; expected one for each"
    if record.itl_ms and not 0 <= min(record.itl_ms) <= max(record.itl_ms) < math.inf:
        yield "itl_ms", f"an ITL of {min(record.itl_ms)}; expected 0 or more"
    if record.itl_tokens and min(record.itl_tokens) < 1:
        yield "itl_tokens", f"{min(record.itl_tokens)} tokens in a read; expected 1 or more"
    if record.output_tokens is not None and sum(record.itl_tokens) > record.output_tokens:
        yield "itl_tokens", f"{sum(record.itl_tokens)} in all; expected at most output_tokens {record.output_tokens}"
    if record.ttft_ms is not None and record.e2e_ms is not None:
        last_ms = record.ttft_ms + sum(record.itl_ms)
        if last_ms > record.e2e_ms + ROUNDING_MS * (1 + len(record.itl_ms)):
            yield "itl_ms", f"the last token at {last_ms}; expected it by e2e_ms {record.e2e_ms}"


def check_tokens(record: Record, block_size: int | None) -> Iterator[tuple[str, str]]:
    """Cached tokens are at most the prompt tokens."""
    if record.cached_tokens is not None and record.cached_tokens > (record.prompt_tokens or record.cached_tokens):
        yield "cached_tokens", f"{record.cached_tokens}; expected at most prompt_tokens {record.prompt_tokens}"


def check_hashes(record: Record, block_size: int | None) -> Iterator[tuple[str, str]]:
    """Block hashes fit 64 bits, and there are at most as many as prompt and output have full blocks."""
    hashes, output = record.block_hashes, record.output_block_hashes
    for name, values in (("block_hashes", hashes), ("output_block_hashes", output)):
        if values and not 0 <= min(values) <= max(values) < 2**64:
            yield name, "a hash outside 64 bits; expected an unsigned 64-bit integer"
    if hashes is None:
        if output:
            yield "output_block_hashes", "without block_hashes; expected the hashes of the prompt too"
        return
    if block_size is None:
        yield "block_hashes", "in a trace without meta.block_size; expected the tokens of a block"
        return
    if record.hashable_blocks is not None and record.hashable_blocks > len(hashes):
        yield "hashable_blocks", f"{record.hashable_blocks}; expected at most the {len(hashes)} block_hashes"
    if record.prompt_tokens is None:
        return
    full = record.prompt_tokens // block_size
    if len(hashes) > full:
        yield "block_hashes", f"{len(hashes)}; expected at most prompt_tokens // block_size = {full}"
    if output is not None and record.output_tokens is not None:
        output_blocks = max(0, (record.prompt_tokens + record.output_tokens - 1) // block_size - full)
        if len(output) > output_blocks:
            yield (
                "output_block_hashes",
                f"{len(output)}; expected at most {output_blocks}, the full blocks with output tokens",
            )


RULES: tuple[Rule, ...] = (check_signs, check_times, check_gaps, check_tokens, check_hashes)


def check_trace(reader: TraceReader) -> Iterator[Finding]:
    """Yield violations by record, then those of the complete trace; memory grows with request ids and parents."""
    lines: dict[RequestId, int] = {}
    parents: dict[RequestId, RequestId] = {}
    last_end_ms = -math.inf
    block_size = reader.meta.block_size
    for result in counted(reader.results(), "records checked"):
        line = reader.line
        if isinstance(result, OutOfBoundsError):
            yield from (Finding(line, name, problem) for name, problem in result.faults.items())
        elif isinstance(result, InputError):
            yield Finding(line, "line", str(result).removeprefix(f"{reader.where()}: "))
            continue
        record = result.record if isinstance(result, OutOfBoundsError) else result
        yield from (Finding(line, *breach) for breach in chain.from_iterable(r(record, block_size) for r in RULES))
        if record.request_id in lines:
            yield Finding(line, "request_id", f"as at {reader.where(lines[record.request_id])}; expected a unique id")
        lines.setdefault(record.request_id, line)
        if record.parent_id is not None:
            parents[record.request_id] = record.parent_id
        end_ms = record.end_ms()
        if end_ms is not None and end_ms < last_end_ms - DISORDER_MS:
            yield Finding(line, "e2e_ms", f"ended at {end_ms}, long before an earlier line; expected finish order")
        last_end_ms = last_end_ms if end_ms is None else max(last_end_ms, end_ms)
    yield from (Finding(line, "end", problem) for line, problem in reader.faults)
    # The parent may be in an earlier or a deleted segment.
    if segment_number(Path(reader.path)) <= 1 and not absent_segments(reader.path):
        for child, parent in parents.items():
            if parent not in lines:
                yield Finding(lines[child], "parent_id", "not in this trace; expected a request_id of it")
    yield from parent_cycles(lines, parents)


def parent_cycles(lines: dict[RequestId, int], parents: dict[RequestId, RequestId]) -> Iterator[Finding]:
    """Yield requests that are their own ancestors."""
    visited: set[RequestId] = set()
    for start in parents:
        path: dict[RequestId, None] = {}
        at: RequestId | None = start
        while at is not None and at not in visited and at not in path:
            path[at] = None
            at = parents.get(at)
        if at is not None and at in path:
            yield Finding(lines[at], "parent_id", "leads back to the request itself; expected an earlier one")
        visited.update(path)
