"""Capture the missing loads of a round; each complete capture has a manifest."""

import contextlib
import math
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

import msgspec

from engines.control import ControlClient
from scripts import gpu_engine
from scripts.conditions import Watch
from scripts.fidelity.engines import EngineKind, engine, facts, scheduler_of
from scripts.fidelity.loads import Capture, Round, probe_engine, read_round, sized_round, write_round
from scripts.job import Command, Workspace, shown
from scripts.processes import free_port
from tracefile.files.reading import load_trace

START_S, BETWEEN_S, UNKNOWN_S = 60.0, 5.0, 90.0
"""Start time of an engine; time between captures; expected time of a load without captures."""
CONTEXT = 16384


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Provenance of a capture, written when its trace is complete."""

    command: str
    """Command line of loadgen or replay."""
    engine_version: str
    kvtape_commit: str
    machine: str
    began_utc: str
    wall_s: float
    load_average: float
    """Load average of the minute before the capture."""
    other_share: float = msgspec.field(name="others_share")
    """Share of all cores used by other processes, the engine included."""
    preemptions: int
    """Preemptions during this capture, reported by the engine."""
    requests: int


def trace_path(folder: Path, capture: Capture) -> Path:
    return folder / f"{capture.name}.jsonl.zst"


def manifest_path(folder: Path, capture: Capture) -> Path:
    return folder / f"{capture.name}.manifest.json"


def read_manifest(folder: Path, capture: Capture) -> Manifest | None:
    """Return the manifest of a capture; None: the capture is incomplete."""
    path = manifest_path(folder, capture)
    if not path.exists() or not trace_path(folder, capture).exists():
        return None
    return msgspec.json.decode(path.read_bytes(), type=Manifest)


def capture_round(kind: EngineKind, folder: Path, hidden: int, layers: int, ends_s: float = math.inf) -> int:
    """Size a round for an engine, unless it is sized, and run its captures; return the number of missing captures.

    ``ends_s``: deadline on the monotonic clock; no capture begins that would exceed it.
    """
    work = Workspace(folder / "work")
    sized = read_round(folder)
    if sized is None:
        with engine(kind, work, hidden, layers, prefix_caching=True) as url:
            sized = _sized(kind, url)
            write_round(folder, sized)
            first = [capture for capture in sized.captures() if capture.prefix_caching]
            Bench(kind, url, folder, sized).capture_each(first, ends_s)
    for prefix_caching, group in groupby(sized.captures(), key=lambda capture: capture.prefix_caching):
        missing = [capture for capture in group if read_manifest(folder, capture) is None]
        if missing and time.monotonic() + START_S + expected_s(folder, sized, missing[0]) <= ends_s:
            with engine(kind, work, hidden, layers, prefix_caching=prefix_caching) as url:
                Bench(kind, url, folder, sized).capture_each(missing, ends_s)
    return sum(read_manifest(folder, capture) is None for capture in sized.captures())


def _sized(kind: EngineKind, url: str) -> Round:
    with ControlClient(url) as control:
        reported, model = control.facts().engine, control.resolve_model("auto")
    cache_tokens = (reported.num_gpu_blocks or 0) * (reported.block_size or 0)
    probe = probe_engine(url, model)
    return sized_round(probe, scheduler_of(kind), cache_tokens, reported.max_model_len or CONTEXT)


def expected_s(folder: Path, sized: Round, capture: Capture) -> float:
    """Return the longest time of the load's captures plus the time between captures; a default without captures."""
    same = [other for other in sized.captures() if other.load == capture.load]
    walls_s = [manifest.wall_s for other in same if (manifest := read_manifest(folder, other)) is not None]
    return BETWEEN_S + max(walls_s, default=UNKNOWN_S)


@dataclass(frozen=True, slots=True)
class Bench:
    """A running engine and the round that is captured on it."""

    kind: EngineKind
    url: str
    folder: Path
    sized: Round

    def capture_each(self, captures: Sequence[Capture], ends_s: float) -> None:
        for capture in captures:
            if time.monotonic() + expected_s(self.folder, self.sized, capture) > ends_s:
                return
            manifest = self.capture(capture)
            encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
            manifest_path(self.folder, capture).write_bytes(encoded + b"\n")

    def capture(self, capture: Capture) -> Manifest:
        """Run a capture; an incomplete trace is replaced."""
        work, trace = Workspace(self.folder / "work"), trace_path(self.folder, capture)
        trace.unlink(missing_ok=True)
        work.empty_cache(self.url)
        preempted = self.preemptions()
        watch, began = Watch(), datetime.now(UTC)
        command = (self.replay if capture.way == "cold-replayed" else self.send)(work, capture, trace)
        conditions = watch.stop([])
        return Manifest(
            command=shown(command),
            engine_version=facts(self.url).engine.version or "unknown",
            kvtape_commit=_commit(),
            machine=f"{conditions.machine}{gpu_engine.describe_gpu() if self.kind == 'vllm-gpu' else ''}",
            began_utc=began.isoformat(timespec="seconds"),
            wall_s=round(conditions.seconds, 1),
            load_average=round(conditions.load_before, 2),
            other_share=round(conditions.other_share, 4),
            preemptions=self.preemptions() - preempted,
            requests=len(load_trace(trace)[1]),
        )

    def replay(self, work: Workspace, capture: Capture, trace: Path) -> Command:
        """Replay the warm capture with different tokens in every prompt."""
        sessions = ["--replay-sessions"] if capture.load.startswith("session") else []
        source = trace_path(self.folder, Capture(capture.load))
        command: Command = ["replay", source, "--url", self.url, "--cold-prompts", *sessions, "-o", trace]
        work.run(capture.name, command)
        return command

    def send(self, work: Workspace, capture: Capture, trace: Path) -> Command:
        """Send the load through a tap to the engine."""
        address, flags = f"127.0.0.1:{free_port()}", self.sized.loads[capture.load].split()
        tap: Command = ["tap", "--upstream", self.url, "--listen", address, "-o", trace, "--tokenizer", "ids"]
        with work.serving(f"{capture.name} tap", tap, f"http://{address}") as tap_url:
            client = work.path(f"{capture.name}-client.jsonl.zst")
            work.run(capture.name, ["loadgen", "--url", tap_url, "-o", client, "--overwrite", *flags])
        return ["loadgen", "--url", "$TAP", *flags]

    def preemptions(self) -> int:
        """Return the preemptions that the engine reports since its start; SGLang reports none before the first."""
        return round(facts(self.url).gauges.get("preemptions", 0.0))


def _commit() -> str:
    """Return the commit of kvtape, marked if the working tree has changes."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(FileNotFoundError):  # a machine without git
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        return result.stdout.strip() or "unknown"
    return "unknown"
