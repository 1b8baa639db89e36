"""Flags of ``kvtape init``."""

import argparse
from pathlib import Path
from typing import Final

from engines.access import DEFAULT_PORTS, add_access_arguments

EPILOG: Final = """\
examples:
  kvtape init
  kvtape init --url http://gpu-7:8000 -o gpu-7.toml && tap --config gpu-7.toml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``kvtape init``."""
    ports = ", ".join(map(str, DEFAULT_PORTS))
    parser.add_argument("--url", metavar="URL", help=f"base URL of the engine (default: the first at ports {ports})")
    parser.add_argument("-o", "--output", type=Path, default=Path("kvtape.toml"), help="file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    add_access_arguments(parser, "calls to the engine")


def run(flags: argparse.Namespace) -> int:
    """Write the configuration file for the engine."""
    from kvtape import init

    return init.run(flags)
