"""Exit codes of every command: 0 done, 1 a gate failed, 2 bad input in one line, 3 too uncertain, 130 interrupted."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from tracefile.commandline.printing import printing_safely
from tracefile.records.errors import InputError

_OF_THE_MACHINE = frozenset(
    getattr(errno, name)
    for name in (
        "EACCES",
        "EPERM",
        "EROFS",
        "ENOSPC",
        "EDQUOT",
        "EFBIG",
        "EIO",
        "EMFILE",
        "ENFILE",
        "ENAMETOOLONG",
        "EPIPE",
    )
)
"""Errors of files, disks and permissions: not the program's."""
MOST_SAID: Final = 4000
"""Characters of an error's line."""
UNCERTAIN: Final = 3
"""No gate failed, but the noise of one is larger than its limit: neither passed nor failed."""


def verdict_code(*, failed: bool, uncertain: bool) -> int:
    """Return the exit code of gates: one that failed counts more than one that is too uncertain."""
    return 1 if failed else UNCERTAIN if uncertain else 0


def run_command(name: str, main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> NoReturn:
    """Call ``main`` with ``argv``, by default the command line, and exit with its code; InputError: one line and 2."""
    _open_standard_streams()
    with printing_safely():
        try:
            _raise_interrupts()
            code = main(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()
        except KeyboardInterrupt:
            code = 130
        except (InputError, RecursionError, MemoryError, ImportError, OSError) as error:
            if _is_ours(error):
                raise
            code = 130 if _was_interrupted(error) else 2
            if isinstance(error.__cause__ or error, BrokenPipeError):
                # The reader of our output (head, less) went away: nothing is wrong, and nothing more can be printed.
                _drop_output()
                code = 0
            if code == 2:
                print(f"{name}: error: {_one_line(error)}", file=sys.stderr)
                if isinstance(error, OSError) and error.filename is None:
                    _drop_output()
    sys.exit(code)


def _open_standard_streams() -> None:
    """Open those that are closed, as by ``>&-``, on the null device, or the first socket would take their number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free: this one


def _is_ours(error: Exception) -> bool:
    """Return whether an error is a mistake of the program, which is shown as it is."""
    if isinstance(error, OSError):
        return error.errno not in _OF_THE_MACHINE and not isinstance(error, BrokenPipeError)
    return isinstance(error, ImportError) and not _was_interrupted(error)


def _drop_output() -> None:
    """Let what stdout did not take go nowhere, or Python would try again as it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _raise_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on: see ``tracefile.interrupt``."""
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.default_int_handler):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _was_interrupted(error: BaseException | None) -> bool:
    """Return whether Ctrl-C is behind an error: modules turn one within their import into errors of their own."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _one_line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "the input is nested too deeply; expected a trace"
    if isinstance(error, MemoryError):
        return f"not enough memory for this input ({error or 'no allocation'}); expected a smaller one, or more memory"
    if isinstance(error, OSError):
        return f"{error.filename or 'output'}: {error.strerror}; expected room and permission"
    return _clipped(str(error)).replace("\n", "\\n")


def _clipped(text: str) -> str:
    """Return the text without its middle where a value of the input that it quotes fills the terminal."""
    return text if len(text) <= MOST_SAID else f"{text[: MOST_SAID // 2]} … {text[-MOST_SAID // 2 :]}"
