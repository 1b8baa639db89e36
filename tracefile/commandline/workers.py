"""Usable cores of this machine, and Ray clusters."""

import contextlib
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator
from typing import Any, Final

from tracefile.commandline.parser import VERSION
from tracefile.records.errors import InputError
from tracefile.records.extras import load_extra

CONNECT_TIMEOUT_S: Final = 10.0


def usable_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@contextlib.contextmanager
def ray_cluster(address: str) -> Iterator[Any]:
    """Connect to a Ray cluster and yield ``ray``; raises InputError if the cluster is unreachable or Ray is missing."""
    ray = load_extra("ray", where="--ray: ")
    _require_reachable(address)
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"--ray: {address}: {reason}; expected the address of a Ray cluster, or auto") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_reachable(address: str) -> None:
    """Raise InputError if no server listens: Ray would retry for minutes."""
    match = re.fullmatch(r"(\S+):(\d+)", address)
    if match is None or "://" in address:
        return
    try:
        socket.create_connection((match[1], int(match[2])), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise InputError(
            f"--ray: {address}: {error.strerror or error}; expected the address of a Ray cluster"
        ) from None


def ray_error() -> type[Exception]:
    """Return the base class of Ray's errors."""
    from ray.exceptions import RayError  # noqa: PLC0415 - as above

    error: type[Exception] = RayError
    return error


def ray_fault(error: Exception) -> InputError:
    """Return a Ray worker's error as InputError in one line: usually a machine without this version of kvtape."""
    reason = str(error).strip().splitlines()[-1]
    return InputError(f"--ray: {reason}; expected kvtape {VERSION} on every machine")


def require_version(version: str, where: str) -> None:
    """Raise InputError if another machine has a different version of kvtape."""
    if version != VERSION:
        raise InputError(f"--ray: {where}: kvtape {version}; expected {VERSION}, the version on this machine")
