"""Python API: run load, replay, read traces, measure latencies, fit, forecast, draw; and ``kvtape COMMAND …``.

The import is light: the libraries of a function are imported on first use. docs/python.md has examples.
"""

import importlib
from typing import TYPE_CHECKING, Any

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported

if TYPE_CHECKING:
    from kvtape.modelling import fit_model, forecast
    from kvtape.pictures import compare_traces, draw
    from kvtape.runs import run_load, run_replay
    from kvtape.traces import measure_trace, read_frame, read_run
    from sim.forecast.scenarios import Scenario
    from tracefile.files.reading import open_trace
    from tracefile.records.errors import InputError

_MODULES = {
    "kvtape.modelling": "fit_model forecast",
    "kvtape.pictures": "compare_traces draw",
    "kvtape.runs": "run_load run_replay",
    "kvtape.traces": "measure_trace read_frame read_run",
    "sim.forecast.scenarios": "Scenario",
    "tracefile.files.reading": "open_trace",
    "tracefile.records.errors": "InputError",
}
"""Names of the API, by module."""

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
]


def __getattr__(name: str) -> Any:
    """Import a name of the API on first use (PEP 562): every command imports this package."""
    for module, names in _MODULES.items():
        if name in names.split():
            globals()[name] = value = getattr(importlib.import_module(module), name)
            return value
    expected = "" if name.startswith("_") else f"; expected one of {', '.join(__all__)}"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{expected}")


def __dir__() -> list[str]:
    return __all__
