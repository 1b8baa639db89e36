"""A process of a run, with a socket to it: it leaves by itself when the socket is closed."""

import os
import socket
import subprocess
import sys
from pathlib import Path

PROJECT_ROOT = str(Path(__file__).resolve().parents[2])


def module_command(module: str, *arguments: str) -> list[str]:
    """``python -m module …``, of this program and no other, wherever it is started."""
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """In which ``module_command`` finds its module."""
    path = os.pathsep.join(filter(None, (PROJECT_ROOT, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def start_child(module: str) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Run ``python -m module FD``; gives the process and our end of its socket.

    It is in a session of its own: Ctrl-C is for the run's parent to hear, which tells the others what to do.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            module_command(module, str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=module_environment(),
            start_new_session=True,
        )
    return process, ours
