"""Processes of the product without Python's start and imports: forked from a process that has the modules already.

``WarmPopen`` is ``subprocess.Popen`` for ``python -m MODULE …``. A nursery, one for each process of pytest, imports
a module when it is first wanted, and forks. What is forked has descriptors, environment, folder, session and signals of
its own; it is the nursery's child, which tells how it ended. A test of a start itself, of what is imported, or of whose
child a process is, uses ``subprocess.Popen``; so does whatever Python would be started differently for.
"""

import asyncio
import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from importlib.util import find_spec, module_from_spec
from inspect import signature
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any, NoReturn

from wire.process import PROJECT_ROOT, module_command, module_environment

STATUS = struct.Struct("<qi")
"""A process's id and how it ended, as ``waitpid`` tells them; at first the id alone counts."""
MOST_BYTES = 1 << 18
MOST_DESCRIPTORS = 32
LEAVE_S = 2.0
OUT_OF_THE_WAY = 512
"""Descriptors of a new process are moved above this one, then to the places where they are wanted."""

# Some containers forbid compiled modules; then each worker and each process that a test starts would compile them anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
AT_START = dict(os.environ)
"""The nursery's environment, whichever test is the first to want it, and whatever that test has set."""

_nursery: socket.socket | None = None


def nursery() -> socket.socket:
    """Where a process is asked for; the nursery leaves when nobody can ask any more."""
    global _nursery
    if _nursery is None:
        _nursery, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        local_path = os.pathsep.join(filter(None, (PROJECT_ROOT, AT_START.get("PYTHONPATH"))))
        with theirs:
            started = subprocess.Popen(
                module_command("tests.warmstart", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                env=AT_START
                | {"PYTHONPATH": local_path, "OPENBLAS_NUM_THREADS": "1"},  # what forks must have one thread
                start_new_session=True,
            )
        atexit.register(_leave, _nursery, started)
    return _nursery


def _leave(asked: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    asked.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process that a test left behind can still ask
        process.wait(LEAVE_S)


def is_plain(arguments: Any, environment: Mapping[str, str] | None) -> bool:
    """Whether a module is to run in a Python like the nursery."""
    if sys.platform != "linux" or not isinstance(arguments, list) or arguments[0] != sys.executable:
        return False
    if arguments[1:2] != ["-m"] and arguments[1:3] != ["-P", "-m"]:
        return False
    wanted, paths = python_settings(os.environ if environment is None else environment)
    local, local_paths = python_settings(AT_START)
    return wanted == local and paths <= local_paths


def python_settings(environment: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """What changes how Python starts, and where it looks for modules."""
    paths = {path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path != PROJECT_ROOT}
    rest = {name: text for name, text in environment.items() if name.startswith(("PYTHON", "LD_"))}
    return {name: text for name, text in rest.items() if name != "PYTHONPATH"}, paths


class WarmPopen(subprocess.Popen[Any]):
    """A process that the nursery forks, used as any other."""

    _status: socket.socket | None = None

    def _execute_child(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - as in the class above
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *rest
    ) -> None:
        if preexec_fn is not None or shell or not is_plain(args, env):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *rest
            )
            return
        standard, (new_session, group) = rest[:6], rest[-2:]
        stdin, stdout, stderr = (
            local if fd == -1 else fd for local, fd in enumerate((standard[0], standard[3], standard[5]))
        )
        where = {0: stdin, 1: stdout, 2: stderr} | {fd: fd for fd in pass_fds}
        wish = {
            "command": args[args.index("-m") + 1 :],
            "asker": os.getpid(),
            "environment": dict(os.environ if env is None else env),
            "folder": str(cwd or os.getcwd()),
            "umask": current_umask(),
            "new_session": bool(new_session),
            "group": group,
            "places": list(where),
        }
        self._status, theirs = socket.socketpair()
        with theirs:
            asked = nursery()
            socket.send_fds(asked, [json.dumps(wish).encode()], [theirs.fileno(), asked.fileno(), *where.values()])
        self.pid, _ = STATUS.unpack(self._status.recv(STATUS.size, socket.MSG_WAITALL))
        self._child_created = True
        self._close_pipe_fds(*standard)  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        if self._status is None and self.returncode is None:
            result: int | None = super()._internal_poll(_deadstate=_deadstate)  # type: ignore[misc]
            return result
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                self._look(os.WNOHANG)
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _look(self, flags: int) -> None:
        pid, status = self._try_wait(flags)
        if pid == self.pid:
            self._handle_exitstatus(status)  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._status is None:
            result: tuple[int, int] = super()._try_wait(flags)  # type: ignore[misc]
            return result
        if flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        reported = self._status.recv(STATUS.size, socket.MSG_WAITALL)
        self._status.close()
        self._status = None
        return STATUS.unpack(reported) if reported else (self.pid, signal.SIGKILL)


class WarmProcess:
    """``WarmPopen`` for coroutines: the part of ``asyncio.subprocess.Process`` that tests use."""

    def __init__(self, popen: WarmPopen, stdout: asyncio.StreamReader, stderr: asyncio.StreamReader) -> None:
        self.popen, self.stdout, self.stderr, self.pid = popen, stdout, stderr, popen.pid
        self.send_signal, self.kill = popen.send_signal, popen.kill

    @property
    def returncode(self) -> int | None:
        return self.popen.poll()

    async def wait(self) -> int:
        return await asyncio.to_thread(self.popen.wait)

    async def communicate(self) -> tuple[bytes, bytes]:
        out, err = await asyncio.gather(self.stdout.read(), self.stderr.read())
        await self.wait()
        return out, err


async def warm_process(*command: str, env: Mapping[str, str]) -> WarmProcess:
    """``python -m`` with this command, both of whose outputs are read."""
    pipe = subprocess.PIPE
    popen = WarmPopen([sys.executable, "-m", *command], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=env)
    return WarmProcess(popen, *[await _read_end(end) for end in (popen.stdout, popen.stderr)])


async def _read_end(end: Any) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), end)
    return reader


def warm_children(pid: int, module: str) -> list[int]:
    """Processes that ``pid`` had forked to run ``module``, oldest first: the nursery's children, and its command."""
    result = []
    for name in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if name.read_text() == f"{local_name(pid, module)}\n" and ") Z " not in (name.parent / "stat").read_text():
                result.append(int(name.parent.name))
    return sorted(result)


def local_name(asker: int, module: str) -> str:
    """Name of a forked process, as short as Linux has them."""
    return f"{asker}:{module.rpartition('.')[2]}"[:15]


def warm_subprocess() -> ModuleType:
    """The module ``subprocess`` with ``WarmPopen`` in it, which its ``run`` uses, too."""
    spec = find_spec("subprocess")
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    kept = {name: getattr(subprocess, name) for name in ("CalledProcessError", "CompletedProcess", "TimeoutExpired")}
    vars(made).update(kept, Popen=WarmPopen)
    return made


WARM = warm_subprocess()
STARTERS = ("wire.process", "scripts.job", "kvtape.runs")
"""Modules whose processes are warm in tests: children of the product, and commands that scripts and Python start."""


def run_warm(*command: str | os.PathLike[str], timeout: float = 150, **settings: Any) -> CompletedProcess[str]:
    """``python -m`` with this command, run to its end."""
    settings.setdefault("env", module_environment())
    line = [sys.executable, "-m", *map(str, command)]
    done: CompletedProcess[str] = WARM.run(
        line, capture_output=True, text=True, timeout=timeout, check=False, **settings
    )
    return done


def current_umask() -> int:
    """The umask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def tend(asked: socket.socket) -> None:
    """Fork what is asked for until nobody can ask any more, and tell how each process ends."""
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    ends: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([asked, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            report_ends(ends)
        if asked in ready:
            text, descriptors, _, _ = socket.recv_fds(asked, MOST_BYTES, MOST_DESCRIPTORS)
            if not text:
                return
            pid, status = start(json.loads(text), descriptors)
            ends[pid] = status
            status.sendall(STATUS.pack(pid, 0))


def report_ends(ends: dict[int, socket.socket]) -> None:
    while ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with ends.pop(pid) as asker, contextlib.suppress(BrokenPipeError):
            asker.sendall(STATUS.pack(pid, status))


def start(wish: dict[str, Any], descriptors: list[int]) -> tuple[int, socket.socket]:
    """Fork a process; return its id, and where its end is to be told."""
    status, *rest = descriptors
    with contextlib.suppress(Exception):  # the process itself will say so
        runnable(wish["command"][0])
        gc.collect()
        gc.freeze()
    pid = os.fork()
    if not pid:
        become(wish, rest)
    for fd in rest:
        os.close(fd)
    return pid, socket.socket(fileno=status)


def runnable(module: str) -> Any:
    """The imported module that ``python -m`` would run."""
    spec = find_spec(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    return importlib.import_module(f"{module}.__main__" if is_package else module)


def become(wish: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Run the module as ``python -m`` would, and end."""
    global _nursery  # noqa: PLW0603 - the parent's, for this process's own children
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, OUT_OF_THE_WAY) for fd in descriptors]
    os.closerange(3, OUT_OF_THE_WAY)
    for fd, position in zip(moved[1:], wish["places"], strict=True):
        os.dup2(fd, position)
        os.close(fd)
    _nursery = socket.socket(fileno=moved[0])
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - what stood there knew another file
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    if wish["new_session"]:
        os.setsid()
    if wish["group"] is not None and wish["group"] >= 0:
        os.setpgid(0, wish["group"])
    os.environ.clear()
    os.environ.update(wish["environment"])
    os.chdir(wish["folder"])
    os.umask(wish["umask"])
    module, *arguments = wish["command"]
    Path("/proc/self/comm").write_text(local_name(wish["asker"], module))
    end(run(module, arguments))


def run(module: str, arguments: list[str]) -> int:
    sys.orig_argv[:] = [sys.executable, "-P", "-m", module, *arguments]
    try:
        loaded = runnable(module)
        sys.argv[:] = [str(loaded.__file__), *arguments]
        start_warm()
        if hasattr(loaded, "command"):
            loaded.command()
        return int(loaded.main(*([arguments] if signature(loaded.main).parameters else [])))
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def end(code: int) -> NoReturn:
    """End as Python does."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start_warm() -> None:
    """Let the children of the product's own processes come from the nursery, too."""
    for name in STARTERS:
        if name in sys.modules:
            vars(sys.modules[name])["subprocess"] = WARM


if __name__ == "__main__":
    # The module itself, not a second one under another name, for those who import it in what is forked.
    sys.modules["tests.warmstart"] = sys.modules["__main__"]
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        tend(asked)
