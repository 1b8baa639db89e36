"""``loadgen``: synthetic load against an OpenAI-compatible engine, with a trace of what it saw."""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported  # isort: skip

from collections.abc import Sequence

from loadgen.loadflags import parse_config
from loadgen.sweepplan import parse_sweep
from tracefile.commandline.ending import run_command


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["selftest"]:
        from loadgen.selftest.command import main as selftest  # noqa: PLC0415 - no run needs it

        return selftest(argv[1:])
    if argv[:1] == ["build-dataset"]:
        from loadgen.datasets.building import main as build  # noqa: PLC0415 - no run needs it

        return build(argv[1:])
    if argv[:1] == ["sweep"]:
        plan = parse_sweep(argv[1:])
        from loadgen.sweeping import run_sweep  # noqa: PLC0415 - no single run needs it

        return run_sweep(plan)
    config = parse_config(argv)
    if config.lm_eval is not None:
        from loadgen.accuracyrun import run_accuracy  # noqa: PLC0415 - lm-eval takes seconds

        return run_accuracy(config, config.lm_eval)
    from loadgen.loadrun import run_load  # noqa: PLC0415 - --help needs none of it

    return run_load(config)


def command() -> None:
    run_command("loadgen", main)


if __name__ == "__main__":
    command()
