"""Signals while a command imports its modules: Ctrl-C exits with 130 and no traceback; SIGHUP does not end the tap.

Imported first by every ``__main__``; ``run_command`` then makes Ctrl-C a KeyboardInterrupt again, and a tap that serves
takes SIGHUP as a reload. Other programs that import these modules keep their own handlers.
"""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """End the process as ``run_command`` would."""
    os._exit(INTERRUPTED)


def command_name() -> str | None:
    """Return the command of this distribution that runs: ``NAME``, ``python -m NAME`` or ``kvtape NAME``; or none."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and not spec.name.endswith(".__main__"):
        return None
    name = spec.parent if spec is not None else os.path.basename(sys.argv[0])
    beside = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), name)
    if name not in sys.modules or beside not in getattr(sys.modules[name], "__path__", ()):
        return None
    return sys.argv[1] if name == "kvtape" and len(sys.argv) > 1 else name


if command_name() is not None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, exit_at_once)
if command_name() == "tap" and hasattr(signal, "SIGHUP"):  # Windows has none
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
