"""Manifests of captures: how and on which machine a trace was made, so that it need not be made again."""

import hashlib
import json
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from scripts.fidelity.loads import LOADS, REPLAY_FLAGS, Capture

OFF_PACE = 0.15
"""How far the clock of the engine's core may be from the middle of the captures'; it varies by 5 % or so by itself."""
FEWEST_CLOCKED = 5


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Provenance of a capture, written once its trace is complete."""

    name: str
    shape: str
    load: str
    way: str
    definition: str
    """Digest of what was asked for; a capture of the same definition is kept."""
    command: str
    """loadgen's or replay's, as a user would type it."""
    engine_command: str
    engine_version: str
    kvtape_commit: str
    machine: str
    began_utc: str
    wall_s: float
    load_average: float
    """Of the minute before it began."""
    others_share: float
    """Share of all cores that processes of others used meanwhile; the engine counts as one."""
    stolen_share: float
    """Share of all cores that the hypervisor gave to other machines meanwhile."""
    probes_ms: list[float]
    """Just before, in an empty engine: single cold prompts of one size. How fast the machine was."""
    core_python_ms: float | None = None
    """Meanwhile, on the engine's core: CPU time of the same small work over and over. See :mod:`fidelity.coreclock`."""
    core_matrix_ms: float | None = None
    preemptions: int
    """Of this capture, by the engine's own count."""
    requests: int
    digest: str
    """SHA-256 of the trace file."""


def definition(capture: Capture) -> str:
    """Digest of all that decides what a capture should hold."""
    asked: dict[str, Any] = {
        "flags": LOADS[capture.shape][capture.load],
        "way": capture.way,
        "replay": REPLAY_FLAGS.get(capture.way),
        "engine": msgspec.to_builtins(capture.engine),
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def trace_path(out: Path, capture: Capture) -> Path:
    """Path of a capture's trace."""
    return out / capture.shape / f"{capture.name}.jsonl.zst"


def manifest_path(out: Path, capture: Capture) -> Path:
    """Path of a capture's manifest."""
    return out / capture.shape / f"{capture.name}.manifest.json"


def read_manifest(out: Path, capture: Capture) -> Manifest | None:
    """Return a capture's manifest; null: never finished, or of another definition."""
    path = manifest_path(out, capture)
    if not path.exists() or not trace_path(out, capture).exists():
        return None
    found = msgspec.json.decode(path.read_bytes(), type=Manifest)
    return found if found.definition == definition(capture) else None


def write_manifest(out: Path, capture: Capture, manifest: Manifest) -> None:
    """Say that a capture is whole."""
    path = manifest_path(out, capture)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def off_pace(out: Path, captures: list[Capture]) -> list[str]:
    """Captures during which the engine's core was clocked far from how it was in its round, in a sentence each: they
    tell of a machine that had changed its pace. None in rounds with fewer than ``FEWEST_CLOCKED``."""
    found = [manifest for capture in captures if (manifest := read_manifest(out, capture)) is not None]
    said: list[str] = []
    for shape in dict.fromkeys(one.shape for one in found):
        clocks = {one.name: one.core_python_ms for one in found if one.shape == shape and one.core_python_ms}
        if len(clocks) < FEWEST_CLOCKED:
            continue
        middle_ms = median(clocks.values())
        said += [
            f"{shape}/{name}: the engine's core was clocked at {ms:.2f} ms, in the middle of its round at "
            f"{middle_ms:.2f}; expected that to {OFF_PACE:.0%}: remove its manifest to capture it again"
            for name, ms in clocks.items()
            if abs(ms / middle_ms - 1.0) > OFF_PACE
        ]
    return said


def index(out: Path, captures: list[Capture]) -> str:
    """All captures that there are, in Markdown: what each is, and how quiet the machine was."""
    lines = [
        "| trace | requests | preempted | probe, ms | core | others | stolen | load | wall, s | began | command |",
        "|---" * 11 + "|",
    ]
    for capture in captures:
        if (found := read_manifest(out, capture)) is None:
            continue
        probe = "–" if not found.probes_ms else f"{sorted(found.probes_ms)[len(found.probes_ms) // 2]:.0f}"
        cells = [
            f"{capture.shape}/{capture.name}",
            str(found.requests),
            str(found.preemptions),
            probe,
            "–" if found.core_python_ms is None else f"{found.core_python_ms:.2f} / {found.core_matrix_ms:.2f}",
            f"{found.others_share:.0%}",
            f"{found.stolen_share:.1%}",
            f"{found.load_average:.1f}",
            f"{found.wall_s:.0f}",
            found.began_utc[11:19],
            f"`{found.command}`",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
