"""Every end of a command has its exit code, and Ctrl-C has none of a traceback."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tracefile import InputError, interrupt
from tracefile.commandline.ending import run_command


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
    ("main", "code", "said"),
    [
        (lambda argv: 1, 1, ""),
        (raises(InputError("t:1: a\nb; expected c")), 2, "x: error: t:1: a\\nb; expected c\n"),
        (raises(KeyboardInterrupt()), 130, ""),
        (interrupted_import, 130, ""),
        (raises(RecursionError()), 2, "x: error: the input is nested too deeply; expected a trace\n"),
        (raises(MemoryError("1 TiB")), 2, "x: error: not enough memory for this input (1 TiB); "),
    ],
)
def test_an_end_is_an_exit_code_and_at_most_one_line(
    main: Callable[[Sequence[str]], int], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        run_command("x", main, [])
    assert exited.value.code == code
    assert capsys.readouterr().err.startswith(said)


def test_an_error_of_the_program_stays_one() -> None:
    with pytest.raises(ImportError, match="no module"):
        run_command("x", raises(ImportError("no module")), [])


def test_other_programs_keep_their_handler_of_ctrl_c() -> None:
    assert not interrupt.is_our_command()
    assert signal.getsignal(signal.SIGINT) is not interrupt.exit_at_once


def test_ctrl_c_while_modules_are_imported_ends_with_130_and_no_word(tmp_path: Path) -> None:
    # In numba's place, a module whose import is interrupted.
    (tmp_path / "numba.py").write_text("import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(60)\n")
    done = subprocess.run(
        [sys.executable, "-m", "sim", "curve", "none"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
