"""``replay``: a captured trace as load on any engine, with the capture's lengths, times and sharing, and new tokens."""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported  # isort: skip

from collections.abc import Sequence

from replay.replayflags import parse_config
from tracefile.commandline.ending import run_command


def main(argv: Sequence[str]) -> int:
    config = parse_config(argv)
    from replay.replayrun import run_replay  # noqa: PLC0415 - --help needs none of it

    return run_replay(config)


def command() -> None:
    run_command("replay", main)


if __name__ == "__main__":
    command()
