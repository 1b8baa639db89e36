"""``sim run``: predict what an engine would do with a trace, as a trace."""

import argparse
import gc
import importlib.metadata
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from sim.arrivalorder import records_in_parts
from sim.compiled import is_compiled
from sim.config import EngineConfig
from sim.flags import add_engine_flags, engine_overrides
from sim.model import Model, engine_with, load_model, model_digest
from sim.parts import PartialRun
from sim.prediction import FinishOrder, Summary, Tally
from sim.settings import refuse_other_attention
from sim.workload import Arrival, plan_arrivals
from tracefile import Engine as EngineInfo
from tracefile import InputError, Meta, Record, TraceReader, TraceWriter, Workload, open_trace, trace_digest
from tracefile.sessions import infer_sessions

ROUNDING_MS = 0.001
"""More than what rounding can do to a record's end."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What ``sim run`` was asked for."""

    trace: Path
    model: Path
    output: Path
    overrides: dict[str, Any]
    """Engine settings that differ from the model's."""
    cold_prompts: bool = False
    replay_sessions: bool = False
    seed: int | None = 0
    """None: no noise."""
    json: bool = False
    overwrite: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``sim run``."""
    parser.add_argument("trace", type=Path, help="trace to predict; never one that the model was fitted on")
    parser.add_argument("--model", type=Path, required=True, help="model.json from sim fit")
    parser.add_argument("-o", "--output", type=Path, required=True, help="predicted trace (.gz and .zst compress)")
    add_engine_flags(parser)
    parser.add_argument("--cold-prompts", action="store_true", help="nothing is shared: every block is unique")
    parser.add_argument(
        "--replay-sessions", action="store_true", help="a turn comes its think time after its parent's predicted end"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    parser.add_argument("--no-noise", action="store_true", help="medians instead of draws")
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Predict, write, summarize. 1 if the engine could serve no request at all."""
    config = RunConfig(
        trace=arguments.trace,
        model=arguments.model,
        output=arguments.output,
        overrides=engine_overrides(arguments),
        cold_prompts=arguments.cold_prompts,
        replay_sessions=arguments.replay_sessions,
        seed=None if arguments.no_noise else arguments.seed,
        json=arguments.json,
        overwrite=arguments.overwrite,
    )
    gc.disable()  # a short process that makes millions of objects and no cycles: looking for them takes a quarter of it
    try:
        summary = predict_trace(config)
    finally:
        gc.enable()
    print(json.dumps(_as_json(summary)) if config.json else _as_text(summary, config.output))
    return 1 if summary.unservable and not summary.steps else 0


def predict_trace(config: RunConfig) -> Summary:
    """Read the trace and the model, simulate, write the predicted trace."""
    model = load_model(config.model)
    digest = trace_digest(config.trace)
    model.refuse_fit_traces(digest, config.trace)
    engine = engine_with(model.engine, config.overrides)
    if not is_compiled():
        print("sim: compiling the simulator, once for this installation (about 20 s) …", file=sys.stderr, flush=True)
    with open_trace(config.trace) as reader:
        refuse_other_attention(reader.meta, config.trace)
        header = predicted_meta(reader.meta, model, engine, config, digest)
        parts = arrivals_in_parts(reader, engine, model, config)
        first = next(parts)  # what is wrong with the trace is said before there is an output
        with TraceWriter(config.output, header, overwrite=config.overwrite) as writer:
            return write_prediction(chain([first], parts), engine, model, config, writer)


def write_prediction(
    parts: Iterable[Sequence[Arrival]], engine: EngineConfig, model: Model, config: RunConfig, writer: TraceWriter
) -> Summary:
    """Simulate arrivals that come in parts, and write each record as soon as nothing can come before it."""
    simulation, order, tally = PartialRun(engine, model, config.seed), FinishOrder(), Tally()
    for part, last in with_last(parts):
        for ending in simulation.feed(part, last=last):
            order.add(ending, engine.block_size, keep_hashes=not config.cold_prompts)
        released = order.release(math.inf if last else simulation.certain_until_ms - ROUNDING_MS)
        for record in released:
            writer.write(record)
        tally.add(released)
    return tally.summary(simulation.preemptions, simulation.engine_steps)


def with_last(parts: Iterable[Sequence[Arrival]]) -> Iterator[tuple[Sequence[Arrival], bool]]:
    """Each part, and whether it is the last."""
    before: Sequence[Arrival] | None = None
    for part in parts:
        if before is not None:
            yield before, False
        before = part
    if before is not None:
        yield before, True


def arrivals_in_parts(
    reader: TraceReader, engine: EngineConfig, model: Model, config: RunConfig
) -> Iterator[list[Arrival]]:
    """The trace's requests by their arrival. All at once where they wait for each other, or for the engine's core."""
    if config.replay_sessions or model.frontend.placement == "shared_core":
        records = list(reader)
        if config.replay_sessions:
            records = linked_records(reader.meta, records, config.trace)
        parts = iter([records])
    else:
        parts = records_in_parts(reader, config.trace)
    for number, part in enumerate(parts):
        if not part:
            raise InputError(f"{config.trace}: no records; expected at least one request")
        yield plan_arrivals(
            reader.meta,
            part,
            engine.block_size,
            path=str(config.trace),
            cold_prompts=config.cold_prompts,
            replay_sessions=config.replay_sessions,
            needs_hashes=number == 0,
        )
    for warning in reader.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def linked_records(meta: Meta, records: list[Record], path: Path) -> list[Record]:
    """``records`` with their sessions: as recorded, else inferred from their hashes."""
    if any(record.parent_id is not None for record in records):
        return records
    if meta.block_size is None or all(record.block_hashes is None for record in records):
        raise InputError(f"{path}: --replay-sessions: no sessions and no block hashes to infer them from")
    inference = infer_sessions(records, meta.block_size)
    print(f"{path}: no sessions recorded; inferred from block hashes", file=sys.stderr)
    return list(inference.records)


def predicted_meta(meta: Meta, model: Model, engine: EngineConfig, config: RunConfig, digest: str) -> Meta:
    """Header of a predicted trace, and its manifest: all that decided it. The same header gives the same records."""
    return msgspec.structs.replace(
        meta,
        source="sim",
        model=meta.model or model.model_name,
        engine=EngineInfo(
            name="kvtape-sim",
            version=_version(),
            block_size=engine.block_size,
            num_gpu_blocks=engine.num_gpu_blocks,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_model_len=engine.max_model_len,
            enable_prefix_caching=engine.enable_prefix_caching,
            async_scheduling=engine.async_scheduling,
        ),
        workload=Workload(
            pattern="replay-sessions" if config.replay_sessions else "replay",
            seed=config.seed,
            cold_prompts=config.cold_prompts or None,
            source_digest=digest,
        ),
        extra={
            "model_digest": model_digest(model),
            "fit_digests": model.fit_digests,
            "settings": asdict(engine),
        },
    )


def _version() -> str | None:
    """Ours; None: not installed as a package."""
    try:
        return importlib.metadata.version("kvtape")
    except importlib.metadata.PackageNotFoundError:
        return None


def _as_json(summary: Summary) -> dict[str, Any]:
    return {**asdict(summary), "hit_rate": summary.hit_rate}


def _as_text(summary: Summary, output: Path) -> str:
    too_long = f" ({summary.unservable} too long for this engine)" if summary.unservable else ""
    lines = [
        f"{output}: {summary.requests} requests, {summary.not_ok} not ok{too_long}; {summary.steps} steps, "
        f"{summary.preemptions} preemptions; {summary.hit_rate:.1%} of prompt tokens cached",
        f"{'TTFT ms':<10}{'n':>8}{'p50':>14}{'p90':>14}{'p99':>14}",
    ]
    lines += [
        f"{cohort.name:<10}{cohort.requests:>8}{cohort.p50_ms:>14.1f}{cohort.p90_ms:>14.1f}{cohort.p99_ms:>14.1f}"
        for cohort in summary.cohorts
    ]
    if summary.is_overrun:
        came_s, drain_s = summary.arrivals_ms / 1e3, summary.drain_ms / 1e3
        lines.append(
            f"overrun: {came_s:,.0f} s of arrivals kept the engine busy for {drain_s:,.0f} s more: they come faster "
            "than it serves them, and TTFTs say how long the trace is"
        )
    return "\n".join(lines)
