"""One replay from its config to its exit code."""

from collections.abc import Mapping

import msgspec

from loadgen.driving import Drive, drive, origin_of
from loadgen.engine import ControlClient, EngineFacts
from loadgen.running import exit_code, finish, refusal, summarize_run
from loadgen.summary import Summary, summary_lines
from replay.cachereset import reset_prefix_cache
from replay.capture import Capture, load_capture
from replay.config import ReplayConfig
from replay.fidelity import Fidelity, fidelity_lines, fidelity_notes
from replay.links import Link, link_requests
from replay.plan import Replay, make_replay
from tracefile import HashInfo, InputError, Meta, RequestId, Workload, trace_digest


class ReplaySummary(msgspec.Struct, frozen=True):
    """What ``--json`` writes: the run, and how true it was to the capture."""

    run: Summary
    fidelity: Fidelity
    left_out: dict[str, int]
    """Requests of the capture that cannot be sent again, by reason."""


def run_replay(config: ReplayConfig) -> int:
    """Send the capture again, write its trace, print its summary; exit codes as loadgen's."""
    capture = load_capture(config.source, limit=config.limit, sessions=config.replay_sessions)
    require_hashes(capture, config)
    links = link_requests(capture.requests) if config.replay_sessions else {}
    notes = advance_notes(links, config)
    with ControlClient(str(origin_of(config.url))) as control:
        model = control.resolve_model(config.model)
        facts = control.facts()
        if config.reset_cache:
            note = reset_prefix_cache(control, model, config.vocabulary, facts.engine.block_size)
            notes += [note] if note else []
            facts = control.facts()
        replay = make_replay(config, model, capture.requests, links, capture.block_size)
        digest = replay.digest()
        driven = drive(
            replay.plan(),
            Drive(
                url=config.url,
                trace=config.trace,
                meta=replay_meta(capture, replay, digest, facts),
                planned=len(capture.requests),
                timeout_s=config.timeout_s,
                overwrite=config.overwrite,
            ),
        )
        if driven.stopped == "refused":
            raise InputError(refusal(control, model, config.vocabulary))
        fidelity = replay.final_fidelity()
        notes += fidelity_notes(fidelity, cold=config.cold_prompts)
        summary = summarize_run(driven, pattern_of(config), digest, (facts, control.facts()), notes)
    lines = summary_lines(summary)
    lines[1:1] = [f"  {line}" for line in [*_left_out_lines(capture), *fidelity_lines(fidelity)]]
    finish(ReplaySummary(summary, fidelity, dict(capture.left_out)), lines, config.summary)
    return exit_code(driven)


def require_hashes(capture: Capture, config: ReplayConfig) -> None:
    """Raise InputError if the trace says nothing of what was shared and the run depends on it."""
    if capture.has_hashes:
        return
    if config.replay_sessions:
        raise InputError(f"{capture.path}: block_hashes: none; expected a trace with hashes for --replay-sessions")
    if not config.cold_prompts:
        raise InputError(
            f"{capture.path}: block_hashes: none; expected a trace with hashes, or --cold-prompts to share nothing"
        )


def advance_notes(links: Mapping[RequestId, Link], config: ReplayConfig) -> list[str]:
    """What is known before the run."""
    notes = []
    if config.speedup != 1.0:
        notes.append(
            f"--speedup {config.speedup:g}: arrivals and pauses are that much closer, answers are not: "
            "what is still cached when a prefix comes again differs from the capture"
        )
    if links and all(link.anchor is None for link in links.values()):
        notes.append("--replay-sessions: no request of the trace is known to continue another; all were open loop")
    return notes


def pattern_of(config: ReplayConfig) -> str:
    """The pattern's name in the trace."""
    return "replay-sessions" if config.replay_sessions else "replay"


def replay_meta(capture: Capture, replay: Replay, digest: str, facts: EngineFacts) -> Meta:
    """The trace's header, its clock apart."""
    config = replay.config
    counters = {} if facts.counters is None else {"prefix_counters_before": msgspec.to_builtins(facts.counters)}
    # A cold run's hashes are its own: they are equal to nobody's, whatever the capture's key was.
    hashes = HashInfo(algorithm="replay-cold") if config.cold_prompts else capture.meta.hash
    return Meta(
        source="replay",
        model=replay.model,
        tokenizer="ids",
        block_size=capture.meta.block_size,
        hash=hashes,
        engine=facts.engine,
        workload=Workload(
            pattern=pattern_of(config),
            digest=digest,
            nonce=config.nonce,
            speedup=None if config.speedup == 1.0 else config.speedup,
            cold_prompts=True if config.cold_prompts else None,
            source_digest=trace_digest(config.source),
        ),
        extra=counters,
    )


def _left_out_lines(capture: Capture) -> list[str]:
    if not capture.left_out:
        return []
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(capture.left_out.items()))
    return [f"left out            {reasons}"]
