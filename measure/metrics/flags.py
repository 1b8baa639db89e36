"""Flags of every command that prints a run's metrics: SLOs, and the number of GPUs."""

import argparse
from pathlib import Path

from measure.metrics.slos import EXAMPLE
from tracefile.records.errors import InputError


def add_slo_arguments(parser: argparse._ActionsContainer, label: str = "") -> None:
    """Add ``--slo`` and ``--slo-file``; ``label``: the form's beginning where there are several traces."""
    parser.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="EXPRESSION",
        help=f"exit 1 unless {label}[COHORT.]metric.pNN<=LIMIT holds, as {EXAMPLE} (repeatable)",
    )
    parser.add_argument("--slo-file", type=Path, metavar="FILE", help="TOML file of SLOs")


def add_gpus_argument(parser: argparse._ActionsContainer) -> None:
    """Add ``--gpus``."""
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of the engine, for throughput per GPU")


def checked_gpus(gpus: int | None) -> int | None:
    """Return the number; raises InputError below 1."""
    if gpus is not None and gpus < 1:
        raise InputError(f"--gpus: {gpus}; expected 1 or more")
    return gpus
