"""Python interface: run a load, replay, read traces, measure, fit, forecast, draw; and ``kvtape COMMAND …``.

The import is light: a function's libraries are imported with its first use. docs/python.md has an example of each.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtape.modelling import fit_model, forecast
    from kvtape.pictures import compare_traces, draw, write_images
    from kvtape.runs import run_load, run_replay
    from kvtape.traces import measure_trace, read_frame, read_run
    from sim.forecast.scenarios import Scenario
    from tracefile.files.reading import open_trace
    from tracefile.records.errors import InputError

_HOMES = {
    "InputError": "tracefile.records.errors",
    "Scenario": "sim.forecast.scenarios",
    "compare_traces": "kvtape.pictures",
    "draw": "kvtape.pictures",
    "fit_model": "kvtape.modelling",
    "forecast": "kvtape.modelling",
    "measure_trace": "kvtape.traces",
    "open_trace": "tracefile.files.reading",
    "read_frame": "kvtape.traces",
    "read_run": "kvtape.traces",
    "run_load": "kvtape.runs",
    "run_replay": "kvtape.runs",
    "write_images": "kvtape.pictures",
}
"""Module of each name."""

__all__ = [
    "InputError",
    "Scenario",
    "compare_traces",
    "draw",
    "fit_model",
    "forecast",
    "measure_trace",
    "open_trace",
    "read_frame",
    "read_run",
    "run_load",
    "run_replay",
    "write_images",
]


def __getattr__(name: str) -> Any:
    """Import a name's module when the name is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvtape' has no attribute {name!r}; expected one of {', '.join(__all__)}")
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    """Return the names of the interface."""
    return __all__
