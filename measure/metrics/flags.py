"""Flags of commands that print metrics: SLOs, GPUs, KV cache bytes per token."""

import argparse
from typing import Final

from tracefile.records.errors import InputError

EXAMPLE: Final = "ttft.p99<=500ms"
"""Example of an SLO."""
MOST_DRAWS: Final = 100_000


def add_slo_arguments(parser: argparse._ActionsContainer) -> None:
    """Add ``--slo``, a latency or throughput limit."""
    parser.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="EXPRESSION",
        help=f"exit 1 unless [COHORT.]metric.pNN<=LIMIT holds, such as {EXAMPLE} (repeatable)",
    )


def add_gpus_argument(parser: argparse._ActionsContainer) -> None:
    """Add ``--gpus``."""
    parser.add_argument("--gpus", type=int, help="GPUs of the engine, for throughput per GPU")


def add_kv_bytes_argument(parser: argparse._ActionsContainer) -> None:
    """Add ``--kv-bytes-per-token``."""
    parser.add_argument("--kv-bytes-per-token", type=int, help="KV cache bytes per token, to show sizes in GiB")


def checked_kv_bytes(kv_bytes: int | None) -> int | None:
    """Return the KV cache bytes per token. Raises InputError below 1."""
    if kv_bytes is not None and kv_bytes < 1:
        raise InputError(f"--kv-bytes-per-token: {kv_bytes}; expected a positive number of bytes")
    return kv_bytes


def checked_bootstrap(draws: int) -> int:
    """Return the number of bootstrap draws. Raises InputError outside 0 to ``MOST_DRAWS``."""
    if not 0 <= draws <= MOST_DRAWS:
        raise InputError(f"--bootstrap: {draws}; expected 0 to {MOST_DRAWS}")
    return draws


def checked_gpus(gpus: int | None) -> int | None:
    """Return the number of GPUs. Raises InputError below 1."""
    if gpus is not None and gpus < 1:
        raise InputError(f"--gpus: {gpus}; expected 1 or more")
    return gpus
