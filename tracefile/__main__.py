"""``tracefile``: list, inspect, check, convert, cut, join and scale traces."""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported  # isort: skip

from collections.abc import Sequence

from tracefile.commandline.exit_codes import run_command
from tracefile.config import parse_config


def main(argv: Sequence[str]) -> int:
    """Do what the flags ask; 1 if ``check`` found a broken rule."""
    config = parse_config(argv)
    from tracefile.actions import run_action

    return run_action(config)


def command() -> None:
    """The ``tracefile`` command."""
    run_command("tracefile", main)


if __name__ == "__main__":
    command()
