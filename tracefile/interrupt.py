"""Ctrl-C while a command imports its modules: exit code 130 at once, without a traceback.

Imported first by every ``__main__``; ``run_command`` then makes Ctrl-C a KeyboardInterrupt again. Other programs that
import these modules keep their own handler.
"""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """End the process as ``run_command`` would."""
    os._exit(INTERRUPTED)


def is_our_command() -> bool:
    """Return whether the process is one of this distribution's commands: ``NAME`` or ``python -m NAME``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and not spec.name.endswith(".__main__"):
        return False
    name = spec.parent if spec is not None else os.path.basename(sys.argv[0])
    beside = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), name)
    return name in sys.modules and beside in getattr(sys.modules[name], "__path__", ())


if is_our_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, exit_at_once)
