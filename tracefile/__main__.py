"""``tracefile``: summarise, check, print and convert traces."""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported  # isort: skip

from collections.abc import Sequence

from tracefile.commandline.exit_codes import run_command
from tracefile.config import parse_config


def main(argv: Sequence[str]) -> int:
    """Run an action; exit code 1 if ``check`` finds a violation of the schema."""
    config = parse_config(argv)
    from tracefile.actions import run_action

    return run_action(config)


def command() -> None:
    """Entry point of the ``tracefile`` script."""
    run_command("tracefile", main)


if __name__ == "__main__":
    command()
