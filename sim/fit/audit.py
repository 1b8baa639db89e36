"""``sim audit``: whether an engine's reported cached tokens are what the rules make of its own schedule.

The schedule is taken from the trace (``sim.fit.capturedschedule``), so that no model of time stands between the
rules and
what was reported. Where the two differ, the cause is looked for by trying: see ``sim.fit.auditcauses``.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sim.fit.auditcauses import Difference, explain
from sim.fit.capturedschedule import Reconstruction, reconstruct
from sim.vllm.config import EngineConfig
from sim.vllm.flags import add_engine_flags, engine_overrides
from sim.vllm.settings import settle
from sim.workload.arrivals import Arrival, plan_arrivals
from tracefile.files.reading import load_trace
from tracefile.records.errors import InputError

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Audit:
    """Reported and reconstructed cached tokens of one trace, side by side."""

    engine: EngineConfig
    assumed: dict[str, Any]
    """Settings that neither the trace nor a flag tells."""
    requests: int
    """Those that report their cached tokens."""
    exact: int
    prompt_tokens: int
    reported_tokens: int
    predicted_tokens: int
    preemptions: int
    """In the reconstruction."""
    evicted_blocks: int
    misplaced: int
    """Requests whose first token comes out in another step than it was seen in."""
    differences: list[Difference]

    @property
    def exact_share(self) -> float:
        """Requests whose cached tokens are to the token what the rules say."""
        return self.exact / self.requests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``sim audit``."""
    parser.add_argument("trace", type=Path, help="a captured trace with block hashes and reported cached tokens")
    parser.add_argument(
        "--min-exact-share", type=float, metavar="SHARE", help="exit with 1 if fewer requests than this share are exact"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every difference")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Audit and print; 1 if ``--min-exact-share`` is not reached."""
    least = arguments.min_exact_share
    if least is not None and not 0.0 <= least <= 1.0:
        raise InputError(f"--min-exact-share: {least}; expected a share from 0 to 1")
    audit = audit_trace(arguments.trace, engine_overrides(arguments))
    print(json.dumps(as_json(audit)) if arguments.json else describe(audit, arguments.trace))
    return int(least is not None and audit.exact_share < least)


def audit_trace(path: Path, overrides: dict[str, Any]) -> Audit:
    """Reconstruct the schedule of the trace at ``path`` and compare. Raises InputError for one that cannot be."""
    meta, records = load_trace(path)
    settings = settle({str(path): meta}, overrides)
    reporting = [record for record in records if record.cached_tokens is not None]
    if not reporting:
        raise InputError(f"{path}: cached_tokens: no record has any; expected an engine that reports them")
    arrivals = plan_arrivals(meta, records, settings.config.block_size, path=str(path)).objects()
    engine, found = settings.config, reconstruct(arrivals, settings.config)
    if not settings.scheduling_known and found.misfits:
        other = replace(engine, async_scheduling=not engine.async_scheduling)
        ahead = reconstruct(arrivals, other)
        engine, found = (other, ahead) if ahead.misfits < found.misfits else (engine, found)
    return _compare(arrivals, engine, found, settings.assumed)


def _compare(
    arrivals: Sequence[Arrival], engine: EngineConfig, found: Reconstruction, assumed: dict[str, Any]
) -> Audit:
    judged = [outcome for outcome in found.outcomes if outcome.arrival.record.cached_tokens is not None]
    differences = explain(arrivals, engine, found)
    return Audit(
        engine=engine,
        assumed=assumed,
        requests=len(judged),
        exact=len(judged) - len(differences),
        prompt_tokens=sum(outcome.arrival.prompt_tokens for outcome in judged),
        reported_tokens=sum(outcome.arrival.record.cached_tokens or 0 for outcome in judged),
        predicted_tokens=sum(outcome.cached_tokens or 0 for outcome in judged),
        preemptions=found.preemptions,
        evicted_blocks=found.evicted_blocks,
        misplaced=found.misfits,
        differences=differences,
    )


def as_json(audit: Audit) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {**asdict(audit), "exact_share": audit.exact_share}


def describe(audit: Audit, path: Path) -> str:
    """A paragraph, and a line for each of the first differences."""
    engine = audit.engine
    reported, predicted = (tokens / audit.prompt_tokens for tokens in (audit.reported_tokens, audit.predicted_tokens))
    lines = [
        f"{path}: {audit.exact:,} of {audit.requests:,} requests ({audit.exact_share:.1%}) have the cached tokens that "
        f"the rules give them",
        f"of {audit.prompt_tokens:,} prompt tokens cached: {reported:.2%} reported, {predicted:.2%} by the rules; "
        f"{audit.preemptions:,} preemptions, {audit.evicted_blocks:,} blocks evicted",
        f"{engine.num_gpu_blocks:,} blocks of {engine.block_size} tokens, {engine.max_num_seqs} sequences and "
        f"{engine.max_num_batched_tokens:,} tokens a step, "
        f"{'a step composed ahead' if engine.async_scheduling else 'one step at a time'}"
        + (f" (assumed: {', '.join(audit.assumed)})" if audit.assumed else ""),
        f"{audit.requests - audit.misplaced:,} first tokens in the step they were seen in",
    ]
    if audit.differences:
        lines.append(f"{'request':<34}{'reported':>10}{'rules':>10}  cause")
        lines += [
            f"{one.request_id[:32]:<34}{one.reported:>10,}{one.predicted or 0:>10,}  {one.cause}"
            for one in audit.differences[:_SHOWN]
        ]
        more = Counter(one.cause for one in audit.differences[_SHOWN:])
        lines += [f"and {count} more: {cause}" for cause, count in more.most_common()]
    return "\n".join(lines)
