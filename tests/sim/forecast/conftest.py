"""A load on shared prefixes, and a Ctrl-C in the middle of forecasts."""

from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from tracefile.files.writing import TraceWriter
from tracefile.records.schema import BlockHash, Meta, Record, RequestId

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def interrupted_at(number: int, called: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """``called``, whose call of this number is interrupted."""
    calls = 0

    def call(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        nonlocal calls
        calls += 1
        if calls == number:
            raise KeyboardInterrupt
        return called(*arguments, **options)

    return call


def write_shared(path: Path, count: int, every_ms: float, prefix_of: Callable[[int], int] = lambda n: n % 5) -> None:
    """Write requests on prefixes of 28 blocks, by default five in turn, each with two unique blocks."""
    with TraceWriter(path, Meta(block_size=32)) as writer:
        for number in range(count):
            prefix = [BlockHash(prefix_of(number) * 100 + block) for block in range(28)]
            writer.write(
                Record(
                    request_id=RequestId(f"s{number}"),
                    arrival_ms=number * every_ms,
                    prompt_tokens=960,
                    output_tokens=2,
                    block_hashes=[*prefix, *(BlockHash(10_000 + number * 10 + block) for block in range(2))],
                )
            )
