"""The tap's traces on disk, by its commands: segments, uploads and samples, from crash to resumption."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.tap.conftest import upstream_of
from tests.waiting import until
from tracefile.__main__ import main as tracefile
from tracefile.files.digest import trace_digest
from tracefile.files.reading import load_trace, open_trace
from tracefile.storage.segments import manifest_path, read_manifest

SMALL_SEGMENTS = ("--rotate-mb", "0.0005")


@contextlib.asynccontextmanager
async def tap_on(lab: Any, *flags: str) -> AsyncIterator[Any]:
    async with upstream_of(lab) as port, lab.command(port, "--no-engine-facts", *flags) as tap:
        yield tap


async def converse(tap: Any, session: str, turns: int) -> None:
    for _ in range(turns):
        body = {"model": "m", "prompt": list(range(12)), "max_tokens": 1, "session_id": session}
        assert b"200 OK" in await tap.post("/v1/completions", body)


async def until_closed(lab: Any, segments: int) -> None:
    await until(lambda: len(read_manifest(manifest_path(lab.trace)).segments) >= segments)


def summary(lab: Any) -> Any:
    return json.loads(Path(f"{lab.trace}.summary.json").read_text())


def readable(lab: Any) -> int:
    """How many records a reader finds by now."""
    with open_trace(lab.trace) as reader:
        return sum(1 for _ in reader)


def test_trace_continues_after_a_machine_failure(lab: Any) -> None:
    there = lab.folder / "there"

    async def scenario() -> None:
        flags = (*SMALL_SEGMENTS, "--upload", f"file://{there}", "--resume")
        async with tap_on(lab, *flags) as tap:
            for closed in range(4):
                await converse(tap, "a", 3)  # more than a segment is to hold
                await until_closed(lab, closed + 1)
            await until(lambda: readable(lab) == 12)
            recorder = tap.recorder_pid()
            tap.process.kill()
            os.kill(recorder, signal.SIGKILL)
            await tap.process.wait()
        async with tap_on(lab, *flags) as tap:
            await converse(tap, "a", 3)
            await tap.end()
            assert tap.code == 0, tap.errors

    asyncio.run(scenario())
    account = summary(lab)
    assert (account["offered"], account["recorded"], account["dropped"]) == (3, 3, {}), "of this run alone"
    records = load_trace(lab.trace)[1]
    assert [record.turn for record in records] == list(range(1, 16)), "one conversation"
    arrivals = [record.arrival_ms or 0.0 for record in records]
    assert arrivals == sorted(arrivals), "one clock"
    manifest = read_manifest(manifest_path(lab.trace))
    assert len(manifest.segments) > 1
    assert account["uploaded"] == len(manifest.segments)
    assert trace_digest(there) == trace_digest(lab.trace)
    joined = lab.folder / "joined.jsonl.gz"
    assert tracefile(["convert", str(manifest_path(lab.trace)), str(joined)]) == 0
    assert trace_digest(joined) == trace_digest(lab.trace)
    assert tracefile(["check", str(joined)]) == 0
