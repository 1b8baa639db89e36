"""Make the captures of a round that are missing, one after another, each kept with its manifest once it is complete."""

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
"""Of an engine; between captures; of a load that was not captured yet."""
CONTEXT = 16384


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Provenance of a capture, written once its trace is complete."""

    command: str
    """loadgen's or replay's, as a user would type it."""
    engine_version: str
    kvtape_commit: str
    machine: str
    began_utc: str
    wall_s: float
    load_average: float
    """Of the minute before it began."""
    others_share: float
    """Share of all cores that processes of others used meanwhile; the engine counts as one."""
    preemptions: int
    """Of this capture, by the engine's own count."""
    requests: int


def trace_path(folder: Path, capture: Capture) -> Path:
    return folder / f"{capture.name}.jsonl.zst"


def manifest_path(folder: Path, capture: Capture) -> Path:
    return folder / f"{capture.name}.manifest.json"


def read_manifest(folder: Path, capture: Capture) -> Manifest | None:
    """Return a capture's manifest; null: it was never finished."""
    path = manifest_path(folder, capture)
    if not path.exists() or not trace_path(folder, capture).exists():
        return None
    return msgspec.json.decode(path.read_bytes(), type=Manifest)


def capture_round(kind: EngineKind, folder: Path, hidden: int, layers: int, ends_s: float = math.inf) -> int:
    """Size a round to an engine, unless that was done before, and make its captures; return how many are left.

    ``ends_s``: of the monotonic clock; no capture begins that would last longer.
    """
    work = Workspace(folder / "work")
    made = read_round(folder)
    if made is None:
        with engine(kind, work, hidden, layers, prefix_caching=True) as url:
            made = _sized(kind, url)
            write_round(folder, made)
            first = [capture for capture in made.captures() if capture.prefix_caching]
            Bench(kind, url, folder, made).capture_each(first, ends_s)
    for prefix_caching, group in groupby(made.captures(), key=lambda capture: capture.prefix_caching):
        missing = [capture for capture in group if read_manifest(folder, capture) is None]
        if missing and time.monotonic() + START_S + expected_s(folder, made, missing[0]) <= ends_s:
            with engine(kind, work, hidden, layers, prefix_caching=prefix_caching) as url:
                Bench(kind, url, folder, made).capture_each(missing, ends_s)
    return sum(read_manifest(folder, capture) is None for capture in made.captures())


def _sized(kind: EngineKind, url: str) -> Round:
    with ControlClient(url) as control:
        reported, model = control.facts().engine, control.resolve_model("auto")
    cache_tokens = (reported.num_gpu_blocks or 0) * (reported.block_size or 0)
    probe = probe_engine(url, model)
    return sized_round(probe, scheduler_of(kind), cache_tokens, reported.max_model_len or CONTEXT)


def expected_s(folder: Path, made: Round, capture: Capture) -> float:
    """Longest of the captures of this load so far, and what is between two; unknown: a guess."""
    same = [one for one in made.captures() if one.load == capture.load]
    walls_s = [manifest.wall_s for one in same if (manifest := read_manifest(folder, one)) is not None]
    return BETWEEN_S + max(walls_s, default=UNKNOWN_S)


@dataclass(frozen=True, slots=True)
class Bench:
    """A started engine and the round that is captured on it."""

    kind: EngineKind
    url: str
    folder: Path
    made: Round

    def capture_each(self, captures: Sequence[Capture], ends_s: float) -> None:
        for capture in captures:
            if time.monotonic() + expected_s(self.folder, self.made, capture) > ends_s:
                return
            manifest = self.capture(capture)
            encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
            manifest_path(self.folder, capture).write_bytes(encoded + b"\n")

    def capture(self, capture: Capture) -> Manifest:
        """Make one capture; what an interrupted run left of it is replaced."""
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
            others_share=round(conditions.others_share, 4),
            preemptions=self.preemptions() - preempted,
            requests=len(load_trace(trace)[1]),
        )

    def replay(self, work: Workspace, capture: Capture, trace: Path) -> Command:
        """Send the warm capture again, with other tokens in every prompt."""
        sessions = ["--replay-sessions"] if capture.load.startswith("session") else []
        source = trace_path(self.folder, Capture(capture.load))
        command: Command = ["replay", source, "--url", self.url, "--cold-prompts", *sessions, "-o", trace]
        work.run(capture.name, command)
        return command

    def send(self, work: Workspace, capture: Capture, trace: Path) -> Command:
        """Send the load through a tap in front of the engine."""
        address, flags = f"127.0.0.1:{free_port()}", self.made.loads[capture.load].split()
        tap: Command = ["tap", "--upstream", self.url, "--listen", address, "-o", trace, "--tokenizer", "ids"]
        with work.serving(f"{capture.name} tap", tap, f"http://{address}") as tap_url:
            client = work.path(f"{capture.name}-client.jsonl.zst")
            work.run(capture.name, ["loadgen", "--url", tap_url, "-o", client, "--overwrite", *flags])
        return ["loadgen", "--url", "$TAP", *flags]

    def preemptions(self) -> int:
        """Preemptions since the engine's start, by its own count; SGLang's is not there before the first."""
        return round(facts(self.url).gauges.get("preemptions", 0.0))


def _commit() -> str:
    """Return the version of this code, with a mark if it was changed since."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(FileNotFoundError):  # a machine without git
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        return result.stdout.strip() or "unknown"
    return "unknown"
