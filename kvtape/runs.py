"""Load and replays from Python: keywords are the flags of ``loadgen`` and ``replay``."""

import os

import msgspec

from kvtape.command import FlagValue, flag_words, run_json
from loadgen.runs.summary import Summary
from replay.__main__ import ReplaySummary


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
