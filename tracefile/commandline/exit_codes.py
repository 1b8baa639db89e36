"""Exit codes of all commands: 0 success, 1 failed gate, 2 bad input, 3 gate too uncertain, 130 interrupted."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from tracefile.commandline.printing import printing_safely
from tracefile.records.errors import InputError

_ENVIRONMENT_ERRORS = frozenset(
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
"""Errors of files, disks and permissions: not bugs."""
MAX_MESSAGE_CHARACTERS: Final = 4000
"""Maximum characters of an error line."""
UNCERTAIN: Final = 3
"""No gate failed, but the interval of a gate's error is wider than its limit."""


def verdict_code(*, failed: bool, uncertain: bool) -> int:
    """Return the exit code of gates: a failed gate outranks an uncertain gate."""
    return 1 if failed else UNCERTAIN if uncertain else 0


def run_command(name: str, main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> NoReturn:
    """Call ``main`` with ``argv`` (default: the command line) and exit with its code; 2 for InputError."""
    _open_standard_streams()
    with printing_safely():
        try:
            _raise_interrupts()
            code = main(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()
        except KeyboardInterrupt:
            code = 130
        except (InputError, RecursionError, MemoryError, ImportError, OSError) as error:
            if _is_bug(error):
                raise
            code = 130 if _was_interrupted(error) else 2
            if isinstance(error.__cause__ or error, BrokenPipeError):
                # The reader of the output (head, less) closed the pipe: not an error, and no more output is possible.
                _drop_output()
                code = 0
            if code == 2:
                print(f"{name}: error: {_error_line(error)}", file=sys.stderr)
                if isinstance(error, OSError) and error.filename is None:
                    _drop_output()
    sys.exit(code)


def _open_standard_streams() -> None:
    """Open closed standard streams (``>&-``) on the null device, or the first socket would get their descriptor."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free descriptor: this number


def _is_bug(error: Exception) -> bool:
    """Return whether an error is a bug, shown with its traceback."""
    if isinstance(error, OSError):
        return error.errno not in _ENVIRONMENT_ERRORS and not isinstance(error, BrokenPipeError)
    return isinstance(error, ImportError) and not _was_interrupted(error)


def _drop_output() -> None:
    """Redirect stdout to the null device, or Python would flush the rest again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _raise_interrupts() -> None:
    """Make Ctrl-C raise KeyboardInterrupt from now on; see ``tracefile.interrupt``."""
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.default_int_handler):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _was_interrupted(error: BaseException | None) -> bool:
    """Return whether Ctrl-C caused an error: modules interrupted during import raise errors of their own."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _error_line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "the input is nested too deeply; expected a trace"
    if isinstance(error, MemoryError):
        return (
            f"not enough memory for this input ({error or 'no allocation'}); expected a smaller input, or more memory"
        )
    if isinstance(error, OSError):
        return f"{error.filename or 'output'}: {error.strerror}; expected free space and permission"
    return _clipped(str(error)).replace("\n", "\\n")


def _clipped(text: str) -> str:
    """Cut the middle of a long message, which may quote a long input value."""
    return (
        text
        if len(text) <= MAX_MESSAGE_CHARACTERS
        else f"{text[: MAX_MESSAGE_CHARACTERS // 2]} … {text[-MAX_MESSAGE_CHARACTERS // 2 :]}"
    )
