"""Every end of a command has its exit code, and Ctrl-C has none of a traceback."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tracefile.commandline.exit_codes import run_command
from tracefile.records.errors import InputError


def interrupted_import(argv: Sequence[str]) -> int:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise ImportError("cannot import name _multiarray") from None


def raises(error: BaseException) -> Callable[[Sequence[str]], int]:
    def main(argv: Sequence[str]) -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("main", "code", "message"),
    [
        (lambda argv: 1, 1, ""),
        (raises(InputError("t:1: a\nb; expected c")), 2, "x: error: t:1: a\\nb; expected c\n"),
        (raises(KeyboardInterrupt()), 130, ""),
        (interrupted_import, 130, ""),
        (
            raises(PermissionError(errno.EACCES, "No", "/f")),
            2,
            "x: error: /f: No; expected free space and permission\n",
        ),
    ],
)
def test_exit_codes_and_error_lines(
    main: Callable[[Sequence[str]], int], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        run_command("x", main, [])
    assert exited.value.code == code
    assert capsys.readouterr().err.startswith(message)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ending") / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1]}\n')
    return path


def shell(command: str) -> tuple[int, str]:
    """Return the exit code and stderr of ``command``, where ``tracefile`` is this interpreter's."""
    text = f'set -o pipefail; tracefile() {{ "{sys.executable}" -m tracefile "$@"; }}; {command}'
    done = subprocess.run(["bash", "-c", text], check=False, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_behind_stdout_is_one_line(trace: Path) -> None:
    message = "tracefile: error: output: No space left on device; expected free space and permission\n"
    assert shell(f"tracefile cat {trace} > /dev/full") == (2, message)


@pytest.mark.parametrize("command", ["info {}", "convert {} -"])
def test_closed_pipe_is_no_error(command: str, trace: Path) -> None:
    assert shell(f"tracefile {command.format(trace)} | true") == (0, "")


def test_stdin_to_stdout_works_for_one_pass(trace: Path) -> None:
    assert shell(f"cat {trace} | tracefile convert - - | grep -q prompt_tokens") == (0, "-: 1 records\n")
    message = "tracefile: error: /dev/stdin: a pipe; expected a file: this command reads the trace more than once\n"
    assert shell(f"cat {trace} | tracefile convert - - --anonymize") == (2, message)


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_reopened(closed: str) -> None:
    """libuv ends the process where it closes one of these numbers, in children too."""
    text = (
        "import socket, subprocess, sys; from tracefile.commandline.exit_codes import run_command\n"
        "own = lambda: socket.socket().fileno()\n"
        "child = [sys.executable, '-c', 'import socket; raise SystemExit(socket.socket().fileno())']\n"
        "run_command('x', lambda argv: min(own(), subprocess.run(child).returncode))"
    )
    assert shell(f'"{sys.executable}" -c "{text}" {closed}') == (3, "")


@pytest.mark.parametrize("started", ["module", "script"])
@pytest.mark.parametrize(("command", "number", "code"), [("sim", signal.SIGINT, 130), ("tap", signal.SIGHUP, 7)])
def test_a_signal_while_modules_are_imported(
    command: str, number: signal.Signals, code: int, started: str, tmp_path: Path
) -> None:
    # In msgspec's place, one that gets the signal, and ends a process that goes on.
    (tmp_path / "msgspec.py").write_text(f"import signal\nsignal.raise_signal({number:d})\nraise SystemExit(7)\n")
    script = tmp_path / "bin" / command
    script.parent.mkdir()
    script.write_text("from kvtape.entry import command\ncommand()\n")
    start = ["-m", command] if started == "module" else [str(script)]
    arguments = [*start, *(["curve", "none"] if command == "sim" else [])]
    paths = [str(tmp_path), os.getcwd(), os.environ.get("PYTHONPATH", "")]
    # A process that a script started in the background has Ctrl-C ignored, and its children have, too.
    heard = f"import os, signal; signal.signal({number:d}, signal.SIG_DFL); "
    heard += f"os.execv({sys.executable!r}, {[sys.executable, *arguments]!r})"
    done = subprocess.run(
        [sys.executable, "-c", heard],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
