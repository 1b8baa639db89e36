"""``sim sweep``: a capture forecast at every point of a grid, on all cores or a Ray cluster.

Each point is forecast once; then today's setting and the points near the Pareto set by an ensemble. A point's numbers
depend on nothing but its scenario, so a sweep that was cut goes on from its journal, and any machine gives the same.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from measure.cohorts import ALL
from measure.metrics.flags import add_gpus_argument, checked_gpus
from report.output import add_page_argument, page_path, write_page
from report.sweeps.grid import GridSweep, sweep_lines
from sim.forecast.captured import Captured, Load, plan, read_captured
from sim.forecast.effectgates import parse_slo
from sim.forecast.grid import Grid, read_grid
from sim.forecast.scenarios import Scenario, add_forecast_flags, checked_confidence, checked_members
from sim.latency.modelfile import Model, load_model, model_digest
from sim.latency.verdicts import engine_warning, verdict_sentence
from tracefile.commandline.printing import print_result
from tracefile.commandline.progress import counted
from tracefile.commandline.workers import add_worker_arguments, results
from tracefile.records.errors import InputError
from tracefile.records.latenames import LateModule, late_modules
from tracefile.storage.output import PARQUET, check_output, replace_output

if TYPE_CHECKING:
    import numpy as np

    from report.files import folder
    from report.sweeps import gridpage
    from sim.forecast import ensemble, gridpoints
    from sim.forecast import fleets as running
    from sim.forecast import summary as summing
    from sim.forecast.ensemble import Forecast
    from sim.forecast.gridpoints import Choice
else:  # numpy and a page's libraries, which the flags need not
    np = LateModule("numpy")
    folder = LateModule("report.files.folder")
    gridpage = LateModule("report.sweeps.gridpage")
    ensemble, running, summing, gridpoints = late_modules("sim.forecast", "ensemble fleets summary gridpoints")


JOURNAL_SCHEMA: Final = "kvtape-grid-journal/1"


class Journal:
    """Forecasts by their key, in memory and in a file beside the sweep's results, which is theirs until it is whole."""

    def __init__(self, output: Path, about: Mapping[str, Any], *, overwrite: bool) -> None:
        self.path = output.with_name(f"{output.name}.journal")
        self._known: dict[str, Any] = {}
        self._head = {"schema": JOURNAL_SCHEMA, **about}
        try:
            whole = 0 if overwrite else self._read()
            self._file = open(self.path, "ab")  # noqa: SIM115 - closed by __exit__
            self._file.truncate(whole)
        except OSError as error:
            raise InputError(f"--output {output}: {error.strerror}; expected a writable path") from None
        if not whole:
            self._write(self._head)

    def __len__(self) -> int:
        return len(self._known)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def get(self, key: str) -> Any:
        """Return what was put under a key, or None."""
        return self._known.get(key)

    def put(self, key: str, told: Any) -> None:
        """Keep a forecast; a kill does not lose it."""
        self._known[key] = told
        self._write([key, told])

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _write(self, line: Any) -> None:
        # The standard encoder keeps infinite numbers, of waits without an end, and every digit.
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def _read(self) -> int:
        """Read whole lines; return their length. Raises InputError for a journal of another sweep."""
        if not self.path.exists():
            return 0
        head, *lines = self.path.read_bytes().splitlines(keepends=True) or [b""]
        if not head.endswith(b"\n"):
            return 0
        if _decoded(head) != self._head:
            raise InputError(
                f"{self.path}: of a cut sweep of another trace, model, seed or pacing; expected another --output, or "
                "--overwrite"
            )
        whole = len(head)
        for line in lines:
            entry = _decoded(line)
            if not line.endswith(b"\n") or entry is None:  # torn by the kill
                break
            self._known[entry[0]] = entry[1]
            whole += len(line)
        return whole


def _decoded(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


LATE_SHARE: Final = 0.05
"""Part of a load's length by which its last output may be late, before a single run is taken for a growing queue."""
Task = tuple[Scenario, int]
"""Scenario and members."""


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """Settings of ``sim sweep``."""

    grid: Grid
    trace: Path
    model: Path
    output: Path
    choice: "Choice"
    paced: bool | None = None
    members: int = 32
    refine: int = 16
    seed: int = 0
    procs: int | None = None
    ray: str | None = None
    overwrite: bool = False


EPILOG = "examples:\n  sim sweep grid.toml monday.jsonl.zst --latency-model model.json --slo 'ttft.p90<=500ms'\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("grid", type=Path, help="TOML file of the axes and their values (docs/capacity.md)")
    parser.add_argument("trace", type=Path, help="the capture; never one that the model was fitted on")
    parser.add_argument("--latency-model", type=Path, required=True, help="model.json from sim calibrate")
    parser.add_argument("-o", "--output", type=Path, help="results, a row a point (default GRID.parquet)")
    parser.add_argument("--overwrite", action="store_true", help="begin anew instead of going on with a cut sweep")
    add_page_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object; tables go to stderr")
    choice = parser.add_argument_group("choice")
    choice.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="THRESHOLD",
        help="limit of the chosen point, as ttft.p90<=500ms or hit_rate>=30%% (default: today's TTFT p90; repeatable)",
    )
    choice.add_argument("--confidence", type=float, default=0.9, help="share of the members that keep it")
    choice.add_argument("--gpu-price", type=float, help="price of a GPU and hour, such as 2.5, for the cost of tokens")
    add_gpus_argument(choice)
    add_forecast_flags(parser)
    parser.add_argument("--refine", type=int, default=16, help="points at most that get all members")
    add_worker_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Sweep, write and print; 1 if no point keeps the limits."""
    config = _config(arguments)
    inputs = [config.grid.path, config.trace, config.model]
    check_output(config.output, PARQUET, inputs, "--output")
    html = page_path(arguments, inputs)
    found = Sweep(config).run()
    if found is None:
        return 130
    print_result(found, list(sweep_lines(found)), as_json=arguments.json)
    if html is not None:
        write_page(html, gridpage.render_grid(found))
    return 0 if found.chosen is not None else 1


def _config(arguments: argparse.Namespace) -> SweepConfig:
    price = arguments.gpu_price
    if price is not None and not 0.0 < price < float("inf"):
        raise InputError(f"--gpu-price: {price:g}; expected a price above 0")
    for name in ("procs", "refine"):
        number = getattr(arguments, name)
        if number is not None and number < 1:
            raise InputError(f"--{name}: {number}; expected 1 or more")
    slos = tuple(parse_slo(text) for text in arguments.slo)
    return SweepConfig(
        grid=read_grid(arguments.grid),
        trace=arguments.trace,
        model=arguments.latency_model,
        output=arguments.output or arguments.grid.with_suffix(".parquet"),
        choice=gridpoints.Choice(
            slos, checked_confidence(arguments.confidence), price, checked_gpus(arguments.gpus) or 1
        ),
        paced=arguments.replay_sessions,
        members=checked_members(arguments.members),
        **{name: getattr(arguments, name) for name in ("refine", "seed", "procs", "ray", "overwrite")},
    )


class PointForecast:
    """Forecast of a scenario's measures by member; sent once to each process."""

    def __init__(self, captured: Captured, model: Model, seed: int) -> None:
        self._captured, self._model, self._seed = captured, model, seed
        self._cohorts = summing.cohorts_of(captured.records)
        self._point = running.PointRuns(captured, model)

    def __call__(self, task: Task) -> dict[str, Any]:
        """Return values by measure and member; with several members also demand, and what no capture supports."""
        scenario, count = task
        load = plan(self._captured, scenario)
        drawn = [self._model] if count == 1 else ensemble.members(self._model, count, self._seed)
        found = running.forecast_load(load, drawn, seed=self._seed, threads=1)
        told: dict[str, Any] = {"utilization": None, "saturated": None, "warnings": []}
        horizon_ms = np.inf
        if count > 1:
            demand, horizon_ms, warnings = self._point(load)
            told = {
                "utilization": summing.finite(demand.utilization),
                "saturated": demand.is_saturated,
                "warnings": warnings,
            }
        elif not self._captured.paced and _ends_late(found, load):
            horizon_ms = load.horizon_ms
        values, beyond, _ = summing.measures_of(found, self._cohorts, horizon_ms)
        return {"values": {name: value.tolist() for name, value in values.items()}, "beyond": beyond, **told}


def _ends_late(found: "Forecast", load: Load) -> bool:
    return bool((found.arrival_ms + found.e2e_ms).max() > load.horizon_ms * (1.0 + LATE_SHARE))


class Sweep:
    """A sweep from its first point to its file."""

    def __init__(self, config: SweepConfig) -> None:
        self._config = config
        self._model = load_model(config.model)
        self._captured = read_captured(config.trace, self._model, paced=config.paced)
        known = summing.cohorts_of(self._captured.records)
        for slo in config.choice.slos:
            if (slo.cohort or ALL) not in known:
                raise InputError(
                    f"--slo {slo.text}: the trace has no requests of {slo.cohort}; expected another cohort"
                )
        self._points = gridpoints.GridPoints(self._captured, config.grid, config.choice)

    def run(self) -> GridSweep | None:
        """Forecast all points and write the file; None: interrupted, and what is done is kept."""
        config, points = self._config, self._points
        about = {"trace": self._captured.digest, "model": model_digest(self._model), "seed": config.seed}
        with Journal(config.output, about | {"paced": self._captured.paced}, overwrite=config.overwrite) as journal:
            try:
                self._forecast([(points.base, config.members), *((one, 1) for one in points.scenarios)], journal)
                while wanted := points.to_refine(config.refine):
                    self._forecast([(one, config.members) for one in wanted], journal)
            except KeyboardInterrupt:
                kept = f"{len(journal):,} forecasts are kept in {journal.path}"
                print(f"sim sweep: interrupted; {kept}; the same command goes on", file=sys.stderr)
                return None
            self._write()
            journal.remove()
        captured, model = self._captured, self._model
        own = summing.trust_on(captured, model, ensemble.members(model, config.members, config.seed), config.seed)
        said = [] if own is None else [own.sentence]
        return points.result(
            trace=config.trace.name,
            trace_digest=captured.digest,
            model_digest=model_digest(model),
            verdict="; ".join([verdict_sentence(config.model, model, captured.digest, captured.meta), *said]),
            trusted=own is None or own.trusted,
            paced=captured.paced,
            requests=len(captured.records),
            seed=config.seed,
            members=config.members,
            notes=[
                *filter(None, [captured.part_hashed]),
                *engine_warning(model, captured.meta, captured.engine),
                *ensemble.no_draws(model),
                *points.notes(),
            ],
        )

    def _forecast(self, tasks: Sequence[Task], journal: Journal) -> None:
        """Forecast what the journal does not have."""
        asked = {self._key(task): task for task in tasks}
        missing = [task for key, task in asked.items() if journal.get(key) is None]
        if missing:
            config, work = self._config, PointForecast(self._captured, self._model, self._config.seed)
            done = counted(range(len(missing)), "points" if missing[-1][1] == 1 else "points near the frontier")
            for task, told in results(work, missing, procs=config.procs, ray=config.ray):
                journal.put(self._key(task), told)
                next(done, None)
            next(done, None)
        for key, (scenario, count) in asked.items():
            self._points.put(scenario, count, journal.get(key))

    def _key(self, task: Task) -> str:
        """Return a forecast's key; it tells the other engines' model from a later one of the same path."""
        return gridpoints.key_of(*task)

    def _write(self) -> None:
        output, file = self._config.output, BytesIO()
        try:
            folder.write_parquet(self._points.table(), file)
        except folder.Lacking as lacking:
            raise InputError(f"--output {output}: {lacking}") from None
        replace_output(output, file.getvalue(), PARQUET, "--output")
        print(f"results: {output}", file=sys.stderr)
