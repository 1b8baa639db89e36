"""The one exception that means: the user's input is wrong, and here is what was expected; other errors in words."""

import traceback
from pathlib import Path


class InputError(Exception):
    """Bad input: one line that names the file, line, flag or field; a command prints it and exits with 2."""


USAGE_ADVICE = "capture with tap --inject usage, or have clients send stream_options.include_usage"
"""Way to cached tokens in a trace: engines report them in a stream only if they are asked."""


def failure_words(error: BaseException) -> str:
    """Return an error's type and place; its message, which may quote a request, only of a RuntimeError."""
    if isinstance(error, RuntimeError):  # this program's own
        return f"{type(error).__name__}: {error}"
    frame = next(reversed(traceback.extract_tb(error.__traceback__)), None)
    place = "" if frame is None else f" at {Path(frame.filename).name}:{frame.lineno}"
    return f"{type(error).__name__}{place}"
