"""Signal handlers during imports: Ctrl-C exits with 130 without a traceback; SIGHUP does not end the tap.

Every ``__main__`` imports this module first. ``run_command`` then makes Ctrl-C raise KeyboardInterrupt again, and a
running tap handles SIGHUP as a reload. Other programs that import kvtape keep their handlers.
"""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
PROGRAMS = ("kvtape", "loadgen", "replay", "report", "sim", "tap", "tracefile")


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """Exit with the code that ``run_command`` has for an interrupt."""
    os._exit(INTERRUPTED)


def command_name() -> str | None:
    """Return the running kvtape command: ``NAME``, ``python -m NAME`` or ``kvtape NAME``; None: another program."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and not spec.name.endswith(".__main__"):
        return None
    name = spec.parent if spec is not None else os.path.basename(os.path.realpath(sys.argv[0])).removesuffix(".exe")
    # A script's entry point imports its command later.
    module = name if spec is not None else "kvtape.entry"
    prefix = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), *module.split("."))
    if name not in PROGRAMS or not (getattr(sys.modules.get(module), "__file__", None) or "").startswith(prefix):
        return None
    return sys.argv[1] if name == "kvtape" and len(sys.argv) > 1 else name


def install_handlers() -> None:
    """Install both handlers in a process that runs a kvtape command."""
    program = command_name()
    if program is not None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_at_once)
    if program == "tap" and hasattr(signal, "SIGHUP"):  # Windows has none
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


install_handlers()
