"""The command beside the tap that holds a model to the trace: its messages, its end, its next life."""

import asyncio
import sys
from pathlib import Path

import pytest

from tap.supervisor import processes
from tap.supervisor.processes import watch_model

MODEL, STATE = Path("m.json"), Path("s.json")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Command lines that were run; each is a program that says a word and ends, the last one when its input does."""
    run: list[tuple[str, ...]] = []
    ends = ["sys.exit(1)", "sys.exit(2)", "sys.stdin.read()"]

    def command(*arguments: str) -> list[str]:
        run.append(arguments)
        says = "print('sim watch: run', file=sys.stderr, flush=True)"
        return [sys.executable, "-c", f"import sys; {says}; {ends[len(run) - 1]}"]

    monkeypatch.setattr(processes, "module_command", command)
    monkeypatch.setattr(processes, "backoff_s", lambda deaths: 0.0)
    return run


def test_it_is_run_again_when_it_dies_and_not_when_its_input_is_wrong(
    commands: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(watch_model(MODEL, "t.jsonl", STATE))
    assert commands == [("sim", "watch", "t.jsonl", "--latency-model", "m.json", "--follow", "-o", "s.json")] * 2
    assert capsys.readouterr().err.splitlines() == [
        "tap: run",
        "tap: the model watch died; the page keeps its last numbers; started again in 0 s",
        "tap: run",
        "tap: --latency-model m.json: the traffic is not held to it; all else goes on",
    ]


def test_it_leaves_with_the_tap(commands: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    commands += [("", ""), ("", "")]

    async def watch_and_leave() -> None:
        task = asyncio.create_task(watch_model(MODEL, "t.jsonl", STATE))
        while "run" not in capsys.readouterr().err:  # noqa: ASYNC110 - a process has no event
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(watch_and_leave())
    assert capsys.readouterr().err == ""
