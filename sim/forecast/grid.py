"""Grid of a sweep from a TOML file: values by axis, and the base setting."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

from measure.number_format import listed
from sim.engine.deployment import refuse_alone
from sim.forecast.scenarios import AS_CAPTURED, AXIS_OF, Axis, Scenario, axes_in, combinations
from tracefile.commandline.configfile import refuse_code
from tracefile.records.errors import InputError

MOST_POINTS: Final = 5_000


@dataclass(frozen=True, slots=True)
class Grid:
    """Combinations of axis values, such as KV cache blocks and batch size."""

    path: Path
    base: Scenario = AS_CAPTURED
    axes: Mapping[Axis, Sequence[Any]] = field(default_factory=dict)

    @property
    def scenarios(self) -> list[Scenario]:
        return list(combinations(self.axes, self.base))


def read_grid(path: Path) -> Grid:
    """Read a grid. Raises InputError naming file and key."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; expected the grid of a sweep, a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}; expected TOML") from None
    tables.pop("sim", None)  # flags of this command, for --config
    for key, value in tables.items():
        if key not in ("axes", "base") or not isinstance(value, dict):
            raise InputError(f"{path}: {key}: no such table; expected [axes], [base] or [sim.sweep]")
    axes, base = tables.get("axes", {}), tables.get("base", {})
    chosen = AS_CAPTURED
    for key, value in base.items():
        axis, where = _axis(path, "base", key)
        chosen = axis.put(chosen, _value(axis, value, where))
    grid = Grid(path, chosen, dict(_values(path, key, value) for key, value in axes.items()))
    named = {axis.name for axis in grid.axes} | set(axes_in(chosen))
    _with_location(lambda: refuse_alone(named), str(path))
    count = prod(len(values) for values in grid.axes.values())
    if not grid.axes or count > MOST_POINTS:
        raise InputError(f"{path}: axes: {count:,} points, all combinations; expected 2 to {MOST_POINTS:,}")
    return grid


def _axis(path: Path, table: str, key: str) -> tuple[Axis, str]:
    axis = AXIS_OF.get(key.replace("_", "-"))
    if axis is None:
        raise InputError(f"{path}: {table}.{key}: no such axis; expected some of {listed(list(AXIS_OF))}")
    return axis, f"{path}: {table}.{key}"


def _values(path: Path, key: str, raw: Any) -> tuple[Axis, list[Any]]:
    axis, where = _axis(path, "axes", key)
    if not isinstance(raw, list) or not raw:
        raise InputError(f"{where}: {raw!r}; expected values in brackets")
    values = [_value(axis, value, where) for value in raw]
    if len(set(values)) < len(values):
        raise InputError(f"{where}: {raw!r}; expected each value once")
    return axis, values


def _value(axis: Axis, value: Any, where: str) -> Any:
    if axis.kind is bool:
        if not isinstance(value, bool):
            raise InputError(f"{where}: {value!r}; expected true or false")
        return axis.on if value else not axis.on
    if axis.name == "route":
        refuse_code(where, str(value))
    return _with_location(lambda: axis.read(where, str(value)), where)


def _with_location(read: Callable[[], Any], where: str) -> Any:
    try:
        return read()
    except InputError as error:
        raise InputError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
