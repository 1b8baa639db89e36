"""A fault while traffic passes: nothing of it may reach a client, and every record is accounted for."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from scripts.proxybench.engine import Engine
from scripts.proxybench.tapprocess import RunningTap, records_in_files, running_tap
from scripts.proxybench.traffic import Tally, Traffic


@dataclass(slots=True)
class Scene:
    """Preparations of a fault before the tap starts, and its actions in words."""

    folder: Path
    seconds: float
    flags: list[str] = field(default_factory=lambda: ["--tokenizer", "ids"])
    environment: dict[str, str] = field(default_factory=dict)
    trace: Path | None = None
    text_prompts: bool = False
    """Whether prompts are sent as text, for a tokenizer to work on."""
    admin_port: int = 0
    done: str = ""
    problems: list[str] = field(default_factory=list)
    """What the fault itself found wrong."""
    undo: Callable[[], None] | None = None


class FaultImpossibleError(Exception):
    """Raised where this machine cannot make the fault; the message says what is missing."""


Act = Callable[[Scene, RunningTap], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault: ``prepare`` before the tap starts, ``act`` while traffic passes, ``check`` at the end."""

    name: str
    act: Act
    prepare: Callable[[Scene], None] | None = None
    check: Callable[[Scene, RunningTap], None] | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """Effect of a fault on clients and on the account."""

    fault: str
    done: str
    sent: int
    failures: dict[str, int]
    """Client-visible ones, by kind."""
    offered: int
    recorded: int
    in_files: int
    sampled_out: int
    dropped: dict[str, int]
    problems: list[str]

    @property
    def exact(self) -> bool:
        """Return whether the account holds: requests sent, requests accounted for, and records in the files agree."""
        accounted = self.recorded + self.sampled_out + sum(self.dropped.values())
        return self.sent == self.offered == accounted and self.recorded == self.in_files

    @property
    def passed(self) -> bool:
        """Return whether no client noticed and all records are accounted for."""
        return self.exact and not self.failures and not self.problems


async def find(fault: Fault, engine: Engine, upstream: int, folder: Path, *, seconds: float, users: int) -> Finding:
    """Run traffic through a tap, make the fault a third into it, and count. Raises FaultImpossibleError."""
    scene = Scene(folder, seconds)
    if fault.prepare is not None:
        fault.prepare(scene)
    engine.gaps_ms = [2, 5, 1, 8, 3]
    try:
        flags = ["--no-engine-facts", *scene.flags]
        async with running_tap(folder, upstream, flags, trace=scene.trace, environment=scene.environment) as tap:
            traffic = Traffic(tap.port, users=users, text_prompts=scene.text_prompts)
            traffic.start()
            await asyncio.sleep(seconds / 3)
            await fault.act(scene, tap)
            await asyncio.sleep(seconds / 3)
            await traffic.stop()
            await tap.end()
        if fault.check is not None:
            fault.check(scene, tap)
        return finding(fault, scene, tap, traffic.tally)
    finally:
        if scene.undo is not None:
            scene.undo()


def finding(fault: Fault, scene: Scene, tap: RunningTap, tally: Tally) -> Finding:
    """The account of one fault, from three sides."""
    problems = list(scene.problems)
    if not tap.account:
        problems.append("no account was kept")
    if tap.process.returncode != 0:
        problems.append(f"the tap ended with {tap.process.returncode}")
    return Finding(
        fault=fault.name,
        done=scene.done,
        sent=tally.total,
        failures=dict(tally.failures),
        offered=tap.account.get("offered", 0),
        recorded=tap.account.get("recorded", 0),
        in_files=records_in_files(tap.trace),
        sampled_out=tap.account.get("sampled_out", 0),
        dropped=tap.account.get("dropped", {}),
        problems=problems,
    )
