"""Flags from a TOML file: a table for each command, such as ``[loadgen]`` or ``[sim.run]``, with long flags as keys."""

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
    """Return the flag of an argparse destination."""
    return f"--{name.replace('_', '-')}"


def refuse_beside(flag: str, arguments: argparse.Namespace, names: Iterable[str]) -> None:
    """Raise InputError if a flag of the argparse destinations ``names`` is given together with ``flag``."""
    given = given_flags(arguments, names)
    if given:
        raise InputError(f"{given[0]}: given with {flag}; expected only one of the two")


def refuse_without(flag: str, arguments: argparse.Namespace, names: Iterable[str]) -> None:
    """Raise InputError if a flag of the argparse destinations ``names`` is given: it needs ``flag``."""
    given = given_flags(arguments, names)
    if given:
        raise InputError(f"{given[0]}: without {flag}; expected both flags")


def given_flags(arguments: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return the flags of the argparse destinations ``names`` that are given; a switch that is off is not given."""
    values = ((name, getattr(arguments, name, None)) for name in names)
    return [flag_of(name) for name, value in values if value is not None and value is not False]


def config_words(path: Path, command: str, flags: Mapping[str, argparse.Action]) -> list[str]:
    """Return command-line arguments from the TOML table of ``command``; ``flags``: the argparse actions of the command.

    Raises InputError that names the file and the key.
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
    """Raise InputError if a value names a Python file as a routing policy: a configuration file must not run code."""
    if re.search(r"\.py\b", str(value)):
        raise InputError(
            f"{where}: {value!r}: a policy file is accepted only by --route on the command line; expected a policy name"
        )


def _table(path: Path, command: str) -> Mapping[str, Any]:
    try:
        table: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{CONFIG} {path}: {error.strerror or error}; expected a TOML file") from None
    except ValueError as error:
        raise InputError(f"{path}: {error}; expected a TOML file") from None
    for name in command.split():
        table = table.get(name) if isinstance(table, dict) else None
    if not isinstance(table, dict):
        raise InputError(f"{path}: expected a table [{command.replace(' ', '.')}] with flags of {command}")
    return table


def _words(where: str, flag: str, action: argparse.Action, value: object) -> list[str]:
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise InputError(f"{where}: {value!r}; expected true or false")
        off = f"--no-{flag[2:]}"  # only if the flag has a negative form
        return [flag] if value else [off] if off in action.option_strings else []
    several = isinstance(action, argparse._AppendAction)
    values = value if several and isinstance(value, list) else [value]
    for each in values:
        if isinstance(each, bool) or not isinstance(each, str | int | float):
            raise InputError(f"{where}: {each!r}; expected a string or a number{', or a list of them' * several}")
        if flag == "--route":
            refuse_code(where, each)
    return [f"{flag}={each}" for each in values]
