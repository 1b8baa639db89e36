"""Signals while a command imports its modules: Ctrl-C exits with 130 and no traceback; SIGHUP does not end the tap.

Imported first by every ``__main__``; the entry of the console scripts takes the signals. ``run_command`` then makes
Ctrl-C a KeyboardInterrupt again, and a tap that serves takes SIGHUP as a reload. Other programs that import these
modules keep their own handlers.
"""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
PROGRAMS = ("kvtape", "loadgen", "replay", "report", "sim", "tap", "tracefile")


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """End the process as ``run_command`` would."""
    os._exit(INTERRUPTED)


def command_name() -> str | None:
    """Return the command of this distribution that runs: ``NAME``, ``python -m NAME`` or ``kvtape NAME``; or none."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and not spec.name.endswith(".__main__"):
        return None
    name = spec.parent if spec is not None else os.path.basename(os.path.realpath(sys.argv[0])).removesuffix(".exe")
    # A script's entry point imports its command later.
    module = name if spec is not None else "kvtape.entry"
    place = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), *module.split("."))
    if name not in PROGRAMS or not (getattr(sys.modules.get(module), "__file__", None) or "").startswith(place):
        return None
    return sys.argv[1] if name == "kvtape" and len(sys.argv) > 1 else name


def take_signals() -> None:
    """Set both handlers, in a process that runs a command of this distribution."""
    program = command_name()
    if program is not None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_at_once)
    if program == "tap" and hasattr(signal, "SIGHUP"):  # Windows has none
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


take_signals()
