"""Make the captures that are missing, one after another, each kept as soon as it is whole."""

import contextlib
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from scripts import gpu_engine
from scripts.engine_home import measuring_cores
from scripts.fidelity.coreclock import clocked
from scripts.fidelity.engines import (
    EngineKind,
    engine,
    engine_command,
    facts,
    preemptions,
    probe,
    scheduler_of,
    served_model,
    wait_until_idle,
)
from scripts.fidelity.loads import LOADS, REPLAY_FLAGS, SCHEDULERS, SERVERS, Capture, EngineSettings, captures
from scripts.fidelity.manifest import (
    Manifest,
    definition,
    file_digest,
    index,
    off_pace,
    read_manifest,
    trace_path,
    write_manifest,
)
from scripts.fidelity.sizing import add_sized_loads, keep_sized_loads, loads_path, probe_engine, sized_loads
from scripts.job import Command, Workspace, shown
from scripts.proxybench.conditions import Watch
from scripts.proxybench.processes import free_port
from tracefile import load_trace

TICKS_PER_S = 100.0
"""Of /proc/stat, on every Linux there is."""
START_S, BETWEEN_S, UNKNOWN_S = 60.0, 5.0, 90.0
"""Of an engine; between captures; of a load that was not captured yet."""
CONTEXT = 16384


@dataclass(frozen=True, slots=True)
class Bench:
    """Started engine and the captures made on it."""

    kind: EngineKind
    url: str
    out: Path
    work: Workspace

    def capture(self, capture: Capture) -> Manifest:
        """Make one capture; what an interrupted run left of it is replaced."""
        trace = trace_path(self.out, capture)
        trace.parent.mkdir(parents=True, exist_ok=True)
        trace.unlink(missing_ok=True)
        probes = probe(self.url, served_model(self.url), int(definition(capture), 16))
        wait_until_idle(self.url)
        self.work.empty_cache(self.url)
        preempted = preemptions(self.url)
        watch, stolen, began = Watch(), stolen_s(), datetime.now(UTC)
        with clocked(None if self.kind == "vllm-gpu" else measuring_cores()[1]) as core:
            command = self.replay(capture, trace) if capture.is_replay else self.send(capture, trace)
        conditions = watch.stop([])
        return Manifest(
            name=capture.name,
            shape=capture.shape,
            load=capture.load,
            way=capture.way,
            definition=definition(capture),
            command=shown(command),
            engine_command=engine_command(self.kind, capture.engine),
            engine_version=facts(self.url).engine.version or "unknown",
            kvtape_commit=commit(),
            machine=f"{conditions.machine}{gpu_engine.describe_gpu() if self.kind == 'vllm-gpu' else ''}",
            began_utc=began.isoformat(timespec="seconds"),
            wall_s=round(conditions.seconds, 1),
            load_average=round(conditions.load_before, 2),
            others_share=round(conditions.others_share, 4),
            stolen_share=round((stolen_s() - stolen) / conditions.seconds / cores(), 4),
            probes_ms=probes,
            core_python_ms=core.python_ms,
            core_matrix_ms=core.matrix_ms,
            preemptions=preemptions(self.url) - preempted,
            requests=len(load_trace(trace)[1]),
            digest=file_digest(trace),
        )

    def send(self, capture: Capture, trace: Path) -> Command:
        """The load through a tap in front of the engine."""
        address = f"127.0.0.1:{free_port()}"
        tap: Command = ["tap", "--upstream", self.url, "--listen", address, "-o", trace, "--tokenizer", "ids"]
        client_trace = self.work.path(f"{capture.shape}-{capture.name}-client.jsonl.zst")
        flags = LOADS[capture.shape][capture.load].split()
        with self.work.serving(f"{capture.shape} {capture.name} tap", tap, f"http://{address}") as tap_url:
            load: Command = ["loadgen", "--url", tap_url, "-o", client_trace, "--overwrite", *flags]
            self.work.run(f"{capture.shape} {capture.name}", load)
        return ["loadgen", "--url", "$TAP", *flags]

    def replay(self, capture: Capture, trace: Path) -> Command:
        """The warm capture, sent again."""
        source = trace_path(self.out, Capture(capture.shape, capture.load))
        flags = [*REPLAY_FLAGS[capture.way], *(["--replay-sessions"] if capture.has_sessions else [])]
        command: Command = ["replay", source, "--url", self.url, *flags, "-o", trace]
        self.work.run(f"{capture.shape} {capture.name}", command)
        return ["replay", source.name, "--url", "$SGLANG" if self.kind == "sglang" else "$VLLM", *flags]


def capture_missing(
    kind: EngineKind,
    out: Path,
    wanted: Sequence[Capture],
    everything: Sequence[Capture],
    ends_s: float = math.inf,
) -> None:
    """Make what is wanted and not there yet; ``ends_s``: of the monotonic clock, none begins that would last longer."""
    work = Workspace(out / "work")
    for settings, group in missing_by_engine(out, wanted):
        if time.monotonic() + START_S + expected_s(out, group[0], everything) > ends_s:
            break
        own: EngineKind = kind if kind == "sim" else SERVERS.get(group[0].shape, kind)
        flags = SCHEDULERS.get(group[0].shape, ()) if own == "sim" else ()
        with engine(own, work, settings, *flags) as url:
            capture_each(Bench(own, url, out, work), group, everything, ends_s)
    for sentence in off_pace(out, list(everything)):
        print(sentence)


def capture_each(bench: Bench, group: Sequence[Capture], everything: Sequence[Capture], ends_s: float) -> None:
    """Make captures on a started engine, and keep ``index.md`` current after each."""
    for capture in group:
        if time.monotonic() + expected_s(bench.out, capture, everything) > ends_s:
            break
        write_manifest(bench.out, capture, bench.capture(capture))
        (bench.out / "index.md").write_text(index(bench.out, list(everything)))


def expected_s(out: Path, capture: Capture, everything: Sequence[Capture]) -> float:
    """Longest of the captures of this load so far, and what is between two; unknown: a guess."""
    same = [one for one in everything if (one.shape, one.load) == (capture.shape, capture.load)]
    walls_s = [made.wall_s for one in same if (made := read_manifest(out, one)) is not None]
    return BETWEEN_S + max(walls_s, default=UNKNOWN_S)


def capture_sized(kind: EngineKind, out: Path, shape: str, ends_s: float) -> int:
    """Size loads to an engine, unless that was done before, and make its captures; returns how many are left."""
    add_sized_loads(out)
    if not loads_path(out, shape).exists():
        if shape in LOADS:
            sys.exit(
                f"--shape {shape}: the matrix has its own loads for it; expected HIDDENxLAYERS or …-NAME of another"
            )
        settings, work = Capture(shape, "any").engine, Workspace(out / "work")
        with engine(kind, work, settings) as url:
            told, scheduler = facts(url).engine, scheduler_of(kind)
            cache_tokens = (told.num_gpu_blocks or 0) * (told.block_size or 0)
            sizes = sized_loads(probe_engine(url), scheduler, cache_tokens, told.max_model_len or CONTEXT)
            keep_sized_loads(out, shape, sizes)
            _, group = next(missing_by_engine(out, captures([shape])))
            capture_each(Bench(kind, url, out, work), group, captures(), ends_s)
    capture_missing(kind, out, captures([shape]), captures(), ends_s)
    return sum(read_manifest(out, one) is None for one in captures([shape]))


def missing_by_engine(out: Path, wanted: Sequence[Capture]) -> Iterator[tuple[EngineSettings, list[Capture]]]:
    """Yield missing captures in order, in runs that share an engine; looked up again for each run."""
    for (settings, _), group in groupby(wanted, key=lambda capture: (capture.engine, SERVERS.get(capture.shape))):
        missing = [capture for capture in group if read_manifest(out, capture) is None]
        if missing:
            yield settings, missing


def commit() -> str:
    """The version of this code, with a mark if it was changed since."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(FileNotFoundError):  # a machine without git
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        return result.stdout.strip() or "unknown"
    return "unknown"


def stolen_s() -> float:
    """CPU time that the hypervisor gave to others since the machine started, all cores."""
    try:
        return float(Path("/proc/stat").read_text().split()[8]) / TICKS_PER_S
    except (OSError, IndexError, ValueError):
        return 0.0


def cores() -> int:
    """Cores of the machine."""
    return max(1, len(list(Path("/sys/devices/system/cpu").glob("cpu[0-9]*"))))
