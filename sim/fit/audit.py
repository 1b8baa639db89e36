"""``sim audit``: compare an engine's reported cached tokens with the rules on its own schedule.

The schedule is reconstructed from the trace. Where the two differ, causes are tested one by one: content without hashes
or from before the capture; a step that is not recovered.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isnan
from pathlib import Path
from typing import Any

from measure.table import table_lines
from sim.engine import simulation
from sim.engine.simulatedrequest import SimulatedRequest
from sim.fit import capturedschedule
from sim.fit.schedule import Reconstruction
from sim.vllm.config import EngineConfig, engine_overrides
from sim.vllm.settings import resolve_settings
from sim.workload import arrivals as planning
from tracefile.files.reading import load_trace
from tracefile.records.errors import USAGE_ADVICE, InputError
from tracefile.records.schema import Meta, Record

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Difference:
    """A request whose two counts differ."""

    request_id: str
    reported: int
    predicted: int | None
    """None: the rules never admit it."""
    preemptions: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Reported cached tokens of a trace and those of vLLM's rules, side by side."""

    engine: EngineConfig
    assumed: dict[str, Any]
    requests: int
    exact: int
    prompt_tokens: int
    reported_tokens: int
    predicted_tokens: int
    preemptions: int
    evicted_blocks: int
    misplaced: int
    """Requests whose first token comes out in another step than it was seen in."""
    differences: list[Difference]

    @property
    def exact_share(self) -> float:
        return self.exact / self.requests


def run(arguments: argparse.Namespace) -> int:
    """Audit and print; 1 if ``--min-exact-share`` is not reached."""
    least = arguments.min_exact_share
    if least is not None and not 0.0 <= least <= 1.0:
        raise InputError(f"--min-exact-share: {least}; expected a share from 0 to 1")
    meta, records = load_trace(arguments.trace)
    if meta.engine is not None and meta.engine.name == "sglang":
        raise InputError(f"{arguments.trace}: of SGLang; expected sim pool --engine sglang, which compares the hits")
    audit = audit_loaded(arguments.trace, meta, records, engine_overrides(arguments))
    if not audit.prompt_tokens:
        raise InputError(f"{arguments.trace}: prompt_tokens: no request with cached_tokens has any; {USAGE_ADVICE}")
    told = {**asdict(audit), "exact_share": audit.exact_share}
    print(json.dumps(told) if arguments.json else describe(audit, arguments.trace))
    return int(least is not None and audit.exact_share < least)


def audit_loaded(path: Path, meta: Meta, records: list[Record], overrides: dict[str, Any]) -> Audit:
    """Reconstruct the schedule of the trace and compare. Raises InputError for an unfit trace."""
    settings = resolve_settings({str(path): meta}, overrides)
    reporting = [record for record in records if record.cached_tokens is not None]
    if not reporting:
        raise InputError(f"{path}: cached_tokens: no record has any; {USAGE_ADVICE}")
    arrivals = planning.plan_arrivals(meta, records, settings.config.block_size, path=str(path))
    columns = simulation.request_columns(arrivals, settings.config.block_size)
    engine, found = settings.config, capturedschedule.reconstruct(records, columns, settings.config)
    if not settings.scheduling_recorded and found.misfits:
        other = replace(engine, async_scheduling=not engine.async_scheduling)
        ahead = capturedschedule.reconstruct(records, columns, other)
        engine, found = (other, ahead) if ahead.misfits < found.misfits else (engine, found)
    return _compare(engine, records, found, settings.assumed)


def _compare(engine: EngineConfig, records: Sequence[Record], found: Reconstruction, assumed: dict[str, Any]) -> Audit:
    judged = [pair for pair in zip(records, found.requests, strict=True) if pair[0].cached_tokens is not None]
    differences = explain(engine, records, found)
    return Audit(
        engine=engine,
        assumed=assumed,
        requests=len(judged),
        exact=len(judged) - len(differences),
        prompt_tokens=sum(record.prompt_tokens or 0 for record, _ in judged),
        reported_tokens=sum(record.cached_tokens or 0 for record, _ in judged),
        predicted_tokens=sum(_cached_tokens(request) or 0 for _, request in judged),
        preemptions=found.preemptions,
        evicted_blocks=found.evicted_blocks,
        misplaced=found.misfits,
        differences=differences,
    )


def describe(audit: Audit, path: Path) -> str:
    engine = audit.engine
    reported, predicted = (tokens / audit.prompt_tokens for tokens in (audit.reported_tokens, audit.predicted_tokens))
    lines = [
        f"{path}: {audit.exact:,} of {audit.requests:,} requests ({audit.exact_share:.1%}) have the cached tokens that "
        "the rules give them",
        f"of {audit.prompt_tokens:,} prompt tokens cached: {reported:.2%} reported, {predicted:.2%} by the rules; "
        f"{audit.preemptions:,} preemptions, {audit.evicted_blocks:,} blocks evicted",
        f"{engine.num_gpu_blocks:,} blocks of {engine.block_size} tokens, {engine.max_num_seqs} sequences and "
        f"{engine.max_num_batched_tokens:,} tokens a step, "
        f"{'a step composed ahead' if engine.async_scheduling else 'one step at a time'}"
        + (f" (assumed: {', '.join(audit.assumed)})" if audit.assumed else ""),
        f"{audit.requests - audit.misplaced:,} first tokens in the step they were seen in",
    ]
    return "\n".join([*lines, *_difference_lines(audit.differences)])


def _difference_lines(differences: Sequence[Difference]) -> list[str]:
    """Return a table of the first differences, and the causes of the others; nothing if there are none."""
    if not differences:
        return []
    rows = [
        [one.request_id[:32], f"{one.reported:,}", f"{one.predicted or 0:,}", one.cause] for one in differences[:_SHOWN]
    ]
    more = Counter(one.cause for one in differences[_SHOWN:])
    return [
        *table_lines(["request", "reported", "rules", "cause"], rows, "<>><"),
        *(f"and {count} more: {cause}" for cause, count in more.most_common()),
    ]


def explain(engine: EngineConfig, records: Sequence[Record], found: Reconstruction) -> list[Difference]:
    """Return the requests that differ, by admission, with causes; requests never admitted come last."""
    differences = []
    for request in sorted(found.requests, key=lambda one: inf if isnan(one.admitted_ms) else one.admitted_ms):
        reported, predicted = records[request.index].cached_tokens, _cached_tokens(request)
        if reported is None or reported == predicted:
            continue
        cause = _beyond_the_trace(request, reported, found, engine.block_size)
        cause = cause or _off_schedule(request, found.steps_off[request.index]) or "unexplained"
        differences.append(Difference(request.request_id, reported, predicted, int(request.preemptions), cause))
    return differences


def _cached_tokens(request: SimulatedRequest) -> int | None:
    """Tokens that the request hit at its admission; None: it was never admitted."""
    return None if request.cached_tokens < 0 else int(request.cached_tokens)


def _keys(request: SimulatedRequest) -> list[int]:
    """Known keys of the blocks that the request fills."""
    return list(request.keys[request.first_key : request.first_key + request.num_keys])


def _beyond_the_trace(request: SimulatedRequest, reported: int, found: Reconstruction, block_size: int) -> str | None:
    """Causes outside the trace: no order can explain them."""
    if not request.has_arrived:
        return "ended before it was served" if request.is_as_recorded else "never served under these settings"
    if reported % block_size:
        return f"reported is no multiple of {block_size}: another block size"
    blocks = reported // block_size
    if reported <= (_cached_tokens(request) or 0) or not blocks:
        return None
    if blocks > request.num_keys:
        return "reported reaches beyond the hashes that the trace has of it"
    last = _keys(request)[blocks - 1]
    if not any(last in _keys(other) for other in found.requests if other is not request):
        return "cached before the capture, or part of an output whose ids are unknown"
    return None


def _off_schedule(request: SimulatedRequest, steps_off: int) -> str | None:
    if steps_off:
        return f"its first token was seen {steps_off:+d} steps off: its step is not recovered"
    return f"preempted {request.preemptions} times: its admission is not recovered" if request.preemptions else None
