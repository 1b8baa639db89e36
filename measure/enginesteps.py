"""Steps of a simulated engine as JSON Lines: ``sim run --steps`` writes them, ``report show --steps`` draws them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from tracefile.records.decoding import convert_object, parse_object
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta
from tracefile.storage.lines import LineReader

SCHEMA: Final = "kvtape-steps/1"


class StepsHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First line: the simulation that the steps are of."""

    schema: Literal["kvtape-steps/1"] = SCHEMA
    source_digest: str
    """Of the trace that was simulated."""
    model_digest: str
    seed: int | None
    """Of the noise. Null: medians."""
    settings: dict[str, Any]
    """The engine's."""
    usable_blocks: int


class EngineStep(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduler step. Times in ms on the trace's clock."""

    start_ms: float
    duration_ms: float
    prefill_tokens: int
    """Prompt tokens computed."""
    decodes: int
    """Requests that decode, one token each."""
    decode_kv_tokens: int
    """KV tokens that these read."""
    running: int
    """Requests after the step; of two equal decode steps in a row, after the second. So are the next two."""
    waiting: int
    used_blocks: int
    """Blocks that requests hold; a free block may still be cached."""


def header_of(meta: Meta, usable_blocks: int) -> StepsHeader:
    """Return the header for a predicted trace's steps. Raises InputError if the trace is no result of ``sim run``."""
    workload, told = meta.workload, meta.extra
    if meta.source != "sim" or workload is None or workload.source_digest is None or "model_digest" not in told:
        raise InputError("not a trace of sim run; expected the one that sim run --steps wrote with the steps")
    return StepsHeader(
        source_digest=workload.source_digest,
        model_digest=str(told["model_digest"]),
        seed=workload.seed,
        settings=dict(told.get("settings") or {}),
        usable_blocks=usable_blocks,
    )


def read_steps(path: Path) -> Iterator[EngineStep]:
    """Yield the steps in order. Raises InputError that names file, line and field."""
    with LineReader(path, expected="the steps of a sim run") as lines:
        for line in lines:
            if lines.number > 1:
                where = f"{path}:{lines.number}"
                yield convert_object(parse_object(line, where), EngineStep, where)


def check_steps(path: Path, trace: Path, meta: Meta) -> None:
    """Raise InputError unless the steps are those of the simulation that wrote ``trace``."""
    with LineReader(path, expected="the steps of a sim run") as lines:
        where = f"{path}:1"
        found = convert_object(parse_object(next(lines, b"{}"), where), StepsHeader, where)
    try:
        expected = header_of(meta, found.usable_blocks)
    except InputError as error:
        raise InputError(f"{trace}: {error}") from None
    if found != expected:
        raise InputError(f"--steps {path}: of another simulation than {trace}; expected the steps of the same sim run")
