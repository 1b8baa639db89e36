"""InputError, the exception for bad user input; text for other errors."""

import traceback
from pathlib import Path


class InputError(Exception):
    """Bad input: one line with the file, line, flag or field, and the expectation. Exit code 2."""


USAGE_ADVICE = "capture with tap --inject usage, or have clients send stream_options.include_usage"
"""Advice for a trace without cached tokens: engines report usage in a stream only on request."""


def failure_words(error: BaseException) -> str:
    """Return the type and line of an error; its message only for RuntimeError, since others may quote a request."""
    if isinstance(error, RuntimeError):  # raised by kvtape
        return f"{type(error).__name__}: {error}"
    frame = next(reversed(traceback.extract_tb(error.__traceback__)), None)
    location = "" if frame is None else f" at {Path(frame.filename).name}:{frame.lineno}"
    return f"{type(error).__name__}{location}"
