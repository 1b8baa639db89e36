"""Flags from a TOML file: a table for each command, as ``[loadgen]`` or ``[sim.fit]``, with its long flags as keys."""

import argparse
import re
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from tracefile.records.errors import InputError

CONFIG: Final = "--config"


def flag_of(name: str) -> str:
    """Return the flag whose value argparse keeps as ``name``."""
    return f"--{name.replace('_', '-')}"


def refuse_beside(flag: str, arguments: argparse.Namespace, names: Iterable[str]) -> None:
    """Raise InputError if one of the ``names``, as argparse keeps them, is given with a flag that excludes it."""
    given = given_flags(arguments, names)
    if given:
        raise InputError(f"{given[0]}: given with {flag}; expected one of them")


def refuse_without(flag: str, arguments: argparse.Namespace, names: Iterable[str]) -> None:
    """Raise InputError if one of the ``names``, as argparse keeps them, is given: it has an effect only with a flag."""
    given = given_flags(arguments, names)
    if given:
        raise InputError(f"{given[0]}: without {flag}; expected both")


def given_flags(arguments: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return the flags of the ``names``, as argparse keeps them, that have a value; a switch that is off has none."""
    values = ((name, getattr(arguments, name, None)) for name in names)
    return [flag_of(name) for name, value in values if value is not None and value is not False]


def config_words(path: Path, command: str, flags: Mapping[str, argparse.Action]) -> list[str]:
    """Return the words of a command line that a file's table of ``command`` stands for; ``flags``: the command's.

    Raises InputError that names the file and its key.
    """
    words = []
    for key, value in _table(path, command).items():
        if isinstance(value, dict):  # a subcommand's table, as [loadgen.sweep]
            continue
        flag, where = flag_of(key), f"{path}: [{command.replace(' ', '.')}] {key}"
        if flag not in flags or flag == CONFIG:
            near = get_close_matches(flag, flags, 1)
            raise InputError(f"{where}: no such flag" + (f"; did you mean {near[0][2:]}?" if near else ""))
        words += _words(where, flag, flags[flag], value)
    return words


def refuse_code(where: str, value: object) -> None:
    """Raise InputError if a file's value names a Python file as a policy (``--route``): files are data."""
    if re.search(r"\.py\b", str(value)):
        raise InputError(f"{where}: {value!r}: code is run only from the command line's own --route; expected a name")


def _table(path: Path, command: str) -> Mapping[str, Any]:
    try:
        found: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{CONFIG} {path}: {error.strerror or error}; expected a TOML file") from None
    except ValueError as error:
        raise InputError(f"{path}: {error}; expected a TOML file") from None
    for name in command.split():
        found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        raise InputError(f"{path}: expected a table [{command.replace(' ', '.')}] with flags of {command}")
    return found


def _words(where: str, flag: str, action: argparse.Action, value: object) -> list[str]:
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise InputError(f"{where}: {value!r}; expected true or false")
        off = f"--no-{flag[2:]}"  # of a flag that has both forms
        return [flag] if value else [off] if off in action.option_strings else []
    several = isinstance(action, argparse._AppendAction)
    values = value if several and isinstance(value, list) else [value]
    for each in values:
        if isinstance(each, bool) or not isinstance(each, str | int | float):
            raise InputError(f"{where}: {each!r}; expected a string or a number{', or a list of them' * several}")
        if flag == "--route":
            refuse_code(where, each)
    return [f"{flag}={each}" for each in values]
