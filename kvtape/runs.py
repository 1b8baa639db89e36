"""Load and replays from Python: keywords are the flags of ``loadgen`` and ``replay``.

A run forks workers, takes Ctrl-C and owns an event loop; inside a notebook's process all three would be in the way.
"""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

import msgspec

from loadgen.runs.summary import Summary
from replay.replayrun import ReplaySummary
from tracefile.commandline.configfile import flag_of
from tracefile.records.errors import InputError
from wire.process import module_command, module_environment

FlagValue = str | float | bool | os.PathLike[str] | Sequence[str | float] | None
"""A flag's value. True: the flag alone. False and None: not given. A sequence: the flag once for each."""
BAD_INPUT = 2
LAST_LINES = 5


def flag_words(flags: Mapping[str, FlagValue]) -> list[str]:
    """Return a command line's words: ``group_size=8`` is ``--group-size=8``."""
    words = []
    for name, value in flags.items():
        flag = flag_of(name)
        several = isinstance(value, Sequence) and not isinstance(value, str)
        for one in value if several else [value]:  # type: ignore[union-attr]  # a sequence, as asked before
            if one is True:
                words.append(flag)
            elif one is not False and one is not None:
                words.append(f"{flag}={os.fspath(one) if isinstance(one, os.PathLike) else one}")
    return words


def run_json(module: str, arguments: Sequence[str]) -> bytes:
    """Run ``MODULE --json ARGUMENTS`` and return its object.

    Raises InputError with the command's own line. Ctrl-C ends the run as in a terminal, so that its trace is whole.
    """
    process = subprocess.Popen(
        module_command(module, "--json", *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=module_environment(),
        start_new_session=True,
    )
    try:
        told, said = process.communicate()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.communicate()
        raise
    lines = said.decode(errors="replace").strip().splitlines()
    if process.returncode == BAD_INPUT:
        raise InputError(lines[-1].removeprefix(f"{module}: error: ") if lines else f"{module}: refused")
    if not told.strip():
        raise RuntimeError("\n".join([f"{module} ended with exit code {process.returncode}", *lines[-LAST_LINES:]]))
    return bytes(told)


def run_load(url: str, output: str | os.PathLike[str], **flags: FlagValue) -> Summary:
    """Send synthetic load to an engine, write its trace to ``output``, and return the summary of ``loadgen --json``.

    ``flags`` are those of docs/commands.md: ``rate=4, duration="30s"``. A missed SLO is in ``metrics.slos``, a run that
    was cut short in ``interrupted``. Raises InputError.
    """
    words = flag_words({"url": url, "output": output, **flags})
    return msgspec.json.decode(run_json("loadgen", words), type=Summary)


def run_replay(
    trace: str | os.PathLike[str], url: str, output: str | os.PathLike[str], **flags: FlagValue
) -> ReplaySummary:
    """Send a captured trace again, write the new trace to ``output``, and return the summary of ``replay --json``.

    ``flags`` are those of docs/commands.md: ``speedup=10``. Raises InputError.
    """
    words = flag_words({"url": url, "output": output, **flags})
    return msgspec.json.decode(run_json("replay", [*words, "--", os.fspath(trace)]), type=ReplaySummary)
