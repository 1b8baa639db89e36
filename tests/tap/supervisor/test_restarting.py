"""Child processes kept alive: killed, refusing, deaf; and what the supervisor does about each."""

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest

from tap.ipc.messages import Drained, EngineChanged
from tap.supervisor.processes import BACKOFF_S, MAX_BACKOFF_S, RestartingChild, backoff_s
from tests.waiting import until
from tracefile.records.errors import InputError

SETUP = EngineChanged(None)
"""Any message: the child below does not look into it."""
CHILD = """
import os, pathlib, socket, sys, time
from tap.ipc.messages import Drained
from tap.ipc.messages import Ready, Refused, encode_frame

folder = pathlib.Path(__file__).parent
sock = socket.socket(fileno=int(sys.argv[1]))
sock.recv(100)
while (folder / "slow").exists():
    time.sleep(0.01)
if (folder / "refuse").exists():
    sock.sendall(encode_frame(Refused("not today")))
elif (folder / "die").exists():
    sys.exit(1)
else:
    sock.sendall(encode_frame(Ready()) + encode_frame(Drained(os.getpid())))
    while sock.recv(100):
        pass
    while (folder / "deaf").exists():
        signal.pause()
"""


class Nursery:
    """A child whose behaviour is decided by files that are there or not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.heard: list[int] = []
        self.deaths = self.started = 0
        self.child = RestartingChild(
            *("test", "child_of_test", self.setup),
            on_message=self.hear,
            on_death=self.mourn,
            consequence="nothing happens",
        )

    def setup(self) -> msgspec.Struct:
        self.started += 1
        return SETUP

    def hear(self, message: Drained) -> None:
        self.heard.append(message.cut)

    def mourn(self) -> None:
        self.deaths += 1

    def behave(self, word: str) -> None:
        (self.folder / word).touch()

    def forget(self, word: str) -> None:
        (self.folder / word).unlink()


@pytest.fixture
def nursery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nursery:
    (tmp_path / "child_of_test.py").write_text(CHILD.replace("import os,", "import os, signal,"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("tap.supervisor.processes.BACKOFF_S", 0.01)
    monkeypatch.setattr("tap.supervisor.processes.REAP_S", 0.2)
    return Nursery(tmp_path)


def test_restart_backoff_grows_to_a_limit() -> None:
    waits = [backoff_s(deaths) for deaths in range(8)]
    assert waits == [0.0, BACKOFF_S, 2.0, 4.0, 8.0, 16.0, MAX_BACKOFF_S, MAX_BACKOFF_S]


def test_failed_restart_is_retried(nursery: Nursery, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        child = nursery.child
        await child.start()
        await until(lambda: nursery.heard)
        nursery.behave("refuse")
        os.kill(nursery.heard[0], signal.SIGKILL)
        await until(lambda: "not today" in printed(capsys))
        assert not child.ready
        nursery.behave("die")
        nursery.forget("refuse")
        await until(lambda: "ended before it was ready" in printed(capsys))
        nursery.forget("die")
        await until(lambda: child.ready)
        assert await child.finish(30)

    asyncio.run(scenario())
    assert (nursery.deaths, nursery.child.restarts) == (1, 1)


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


@pytest.mark.parametrize(("behaviour", "reason"), [("refuse", "not today"), ("die", "ended before it was ready")])
def test_failed_first_start_is_an_error(nursery: Nursery, behaviour: str, reason: str) -> None:
    nursery.behave(behaviour)
    with pytest.raises(InputError, match=reason):
        asyncio.run(nursery.child.start())


def test_child_that_does_not_exit_is_killed(nursery: Nursery) -> None:
    async def scenario() -> bool:
        await nursery.child.start()
        nursery.behave("deaf")
        return await nursery.child.finish(0.2)

    assert asyncio.run(scenario()) is False
    assert nursery.child.pid is None
    assert nursery.deaths == 0


def test_child_restarting_at_shutdown_is_awaited(nursery: Nursery) -> None:
    async def scenario() -> bool:
        child = nursery.child
        await child.start()
        await until(lambda: nursery.heard)
        nursery.behave("slow")
        os.kill(nursery.heard[0], signal.SIGKILL)
        await until(lambda: nursery.started == 2)
        finishing = asyncio.create_task(child.finish(30))
        await asyncio.sleep(0.05)
        nursery.forget("slow")
        return await finishing

    assert asyncio.run(scenario()) is True
    assert (len(nursery.heard), nursery.child.pid) == (2, None), "it told what it had, and left"
