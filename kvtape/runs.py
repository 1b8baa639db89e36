"""Load and replays from Python: keywords are the flags of ``loadgen`` and ``replay``.

A run is a separate process, because it forks workers, handles Ctrl-C and has an event loop.
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
"""Value of a flag. True: a flag without value. False and None: not given. A sequence: a repeated flag."""
BAD_INPUT = 2
LAST_LINES = 5


def flag_words(flags: Mapping[str, FlagValue]) -> list[str]:
    """Convert keywords to command-line arguments: ``group_size=8`` to ``--group-size=8``."""
    words = []
    for name, value in flags.items():
        flag = flag_of(name)
        is_repeated = isinstance(value, Sequence) and not isinstance(value, str)
        for item in value if is_repeated else [value]:  # type: ignore[union-attr]  # a sequence if is_repeated
            if item is True:
                words.append(flag)
            elif item is not False and item is not None:
                words.append(f"{flag}={os.fspath(item) if isinstance(item, os.PathLike) else item}")
    return words


def run_json(module: str, arguments: Sequence[str]) -> bytes:
    """Run ``MODULE --json ARGUMENTS`` and return its JSON object.

    Raises InputError with the command's error message. Ctrl-C stops the run as in a terminal and completes its trace.
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
        output, messages = process.communicate()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.communicate()
        raise
    lines = messages.decode(errors="replace").strip().splitlines()
    if process.returncode == BAD_INPUT:
        raise InputError(lines[-1].removeprefix(f"{module}: error: ") if lines else f"{module}: bad input")
    if not output.strip():
        raise RuntimeError("\n".join([f"{module} ended with exit code {process.returncode}", *lines[-LAST_LINES:]]))
    return bytes(output)


def run_load(url: str, output: str | os.PathLike[str], **flags: FlagValue) -> Summary:
    """Send synthetic load to an engine, write its trace to ``output``, and return the summary of ``loadgen --json``.

    ``flags``: see docs/commands.md, such as ``rate=4, duration="30s"``. ``metrics.slos`` has missed SLOs;
    ``interrupted``: the run was stopped early. Raises InputError.
    """
    words = flag_words({"url": url, "output": output, **flags})
    return msgspec.json.decode(run_json("loadgen", words), type=Summary)


def run_replay(
    trace: str | os.PathLike[str], url: str, output: str | os.PathLike[str], **flags: FlagValue
) -> ReplaySummary:
    """Replay a captured trace, write the new trace to ``output``, and return the summary of ``replay --json``.

    ``flags``: see docs/commands.md, such as ``speedup=10``. Raises InputError.
    """
    words = flag_words({"url": url, "output": output, **flags})
    return msgspec.json.decode(run_json("replay", [*words, "--", os.fspath(trace)]), type=ReplaySummary)
