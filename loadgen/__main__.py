"""``loadgen``: send a synthetic load to an OpenAI-compatible engine and record latencies and tokens in a trace."""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported  # isort: skip

from collections.abc import Sequence

from loadgen.loadflags import parse_config
from loadgen.sweepplan import parse_sweep
from tracefile.commandline.exit_codes import run_command


def main(argv: Sequence[str]) -> int:
    chosen, flags = argv[:1], argv[1:]
    if chosen == ["sweep"]:
        plan = parse_sweep(flags)
        from loadgen.sweeping import run_sweep

        return run_sweep(plan)
    config = parse_config(argv)
    from loadgen.loadrun import run_load

    return run_load(config)


def command() -> None:
    run_command("loadgen", main)


if __name__ == "__main__":
    command()
