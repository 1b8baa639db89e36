"""``loadgen``: synthetic load against an OpenAI-compatible engine, with a trace of what it saw."""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported  # isort: skip

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracefile.commandline.ending import run_command
from tracefile.records.latenames import late_modules

if TYPE_CHECKING:
    from loadgen import loadflags, loadrun, sweeping, sweepplan
else:  # only the work of the chosen command, after its flags
    loadflags, loadrun, sweeping, sweepplan = late_modules("loadgen", "loadflags loadrun sweeping sweepplan")


def main(argv: Sequence[str]) -> int:
    chosen, rest = argv[:1], argv[1:]
    if chosen == ["sweep"]:
        plan = sweepplan.parse_sweep(rest)
        return sweeping.run_sweep(plan)
    config = loadflags.parse_config(argv)
    return loadrun.run_load(config)


def command() -> None:
    run_command("loadgen", main)


if __name__ == "__main__":
    command()
