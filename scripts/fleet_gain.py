"""Gain of a routing policy, simulated and measured: engines of known parameters behind the tap, policy by policy.

    python -m scripts.fleet_gain                               # two and four engines, about twenty minutes
    python -m scripts.fleet_gain --engines 2 --loads sessions --repeats 1
    python -m scripts.fleet_gain --engine vllm --loads sessions          # a real vLLM on each core, about ten minutes

Each load goes through ``tap --route POLICY`` to engines with emptied caches, policies in turn. One capture under the
first policy is the trace: ``sim what-if --replicas N --route …`` forecasts the other policies from it alone. Exit
status 1: a hit-rate gain is more than a point off, or the intervals of a measured and a forecast TTFT gain do not
meet. The measured one is a bootstrap of sessions, which both captures share; the forecast's holds noise alone. With
``--repeats 2`` a row beside them, not judged, is the first policy's second capture over its first: the same load twice.
"""

import argparse
import contextlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from measure.cohorts import ALL
from measure.quantiles import quantile
from measure.resampling import interval
from report.pages.whatif import Row, Span, WhatIf
from scripts import vllm_engine
from scripts.demo import EngineKind, capture
from scripts.engine_home import CORES, on_core
from scripts.fidelity.loads import SCHEDULER
from scripts.job import Command, Workspace
from scripts.knownengine import known_engine
from scripts.proxybench.processes import free_port
from sim.latency.modelfile import save_model
from tracefile import Record, load_trace

POLICIES = ("round-robin", "session", "prefix")
MEASURES = ("hit_rate", "p50", "p90")
POINT = 0.01
DRAWS = 400
# Twelve prefixes of 94 blocks: more than one engine's pool keeps beside its conversations, less than the fleet's.
BLOCKS = 1_100
# A real engine shares its core with the tap and the client: both must be light beside it.
LIGHTER: dict[EngineKind, float] = {"sim": 1.0, "vllm": 0.6}
CALIBRATION = "--pattern calibration --prompt-tokens 64:4500 --parallel 16 --number 130"
_CONTENT = "--prefix-tokens 3000 --prompt-tokens 64:256 --output-tokens 16:48 --think 0.3s:1.5s"
# Sessions, or groups of rollouts, a second and engine: half of what an engine without a cache could do.
LOADS = {
    "sessions": (0.5, f"--pattern multiturn --turns 5 --prefix-count 12 {_CONTENT} --duration 45s"),
    "rollouts": (0.08, f"--pattern rollouts --group-size 8 --turns 4 --prefix-count 12 {_CONTENT} --duration 45s"),
}


@dataclass(frozen=True, slots=True)
class Gain:
    """Effect of one policy against the first on one measure, measured and simulated."""

    fleet: str
    """Number of engines and load."""
    policy: str
    measure: str
    measured: float
    """Hit rate: difference; TTFT: ratio. Over all repeats."""
    low: float
    high: float
    """Of 90 of 100 draws of sessions."""
    simulated: Span | None
    """Null: the same policy twice, of which nothing is forecast."""

    @property
    def holds(self) -> bool:
        """Return whether the simulated gain came true."""
        if self.simulated is None:
            return True
        if self.simulated.middle is None:
            return False
        if self.measure == "hit_rate":
            return abs(self.measured - self.simulated.middle) <= POINT
        low, high = self.simulated.low, self.simulated.high
        return (low is None or self.high >= low) and (high is None or self.low <= high)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Running engines of one model, and the folder of the runs."""

    work: Workspace
    model: Path
    urls: Sequence[str]
    kind: EngineKind

    def capture(self, load: str, policy: str, repeat: int) -> Path:
        """Send a load through a tap that routes by ``policy``; return the tap's trace."""
        first, *others = self.urls
        for url in others:
            self.work.empty_cache(url)
        rate, flags = LOADS[load]
        fleet_rate = rate * LIGHTER[self.kind] * len(self.urls)
        drawn = f"{flags} --seed 1 --nonce {100 + repeat} --rate {fleet_rate:g}"
        upstreams = [word for url in others for word in ("--upstream", url)]
        name = f"{len(self.urls)}-{load}-{policy}-{repeat}"
        return capture(self.work, first, name, drawn, *upstreams, "--route", policy)

    def forecast(self, load: str, trace: Path, policies: Sequence[str]) -> WhatIf:
        """``sim what-if`` on one capture: the other policies against the first."""
        name = f"{len(self.urls)}-{load}-what-if"
        first, *others = policies
        command: Command = [
            *("sim", "what-if", trace, "--latency-model", self.model, "--replicas", str(len(self.urls))),
            *("--base", f"route={first}", "--route", ",".join(others), "--json"),
        ]
        output = self.work.path(f"{name}.json")
        self.work.run(name, command, stdout=output)
        return msgspec.json.decode(output.read_bytes(), type=WhatIf)

    def gains(self, load: str, policies: Sequence[str], repeats: int) -> Iterator[Gain]:
        """Capture every policy ``repeats`` times, in turn and back, and yield the gains over the first."""
        captured: dict[str, list[Path]] = {policy: [] for policy in policies}
        for repeat in range(repeats):
            for policy in policies if repeat % 2 == 0 else policies[::-1]:
                captured[policy].append(self.capture(load, policy, repeat))
        first, *others = policies
        result = self.forecast(load, captured[first][0], policies)
        rows = [row for row in result.rows if row.kind == "scenario"]
        fleet, base = f"{len(self.urls)} × {load}", records_of(captured[first])
        for measure in MEASURES if repeats > 1 else ():
            before, after = (records_of([trace]) for trace in captured[first][:2])
            yield Gain(fleet, f"{first} again", measure, *gain(measure, before, after), None)
        for policy, row in zip(others, rows, strict=True):
            for measure in MEASURES:
                found = gain(measure, base, records_of(captured[policy]))
                yield Gain(fleet, policy, measure, *found, simulated(row, measure))


def records_of(traces: Sequence[Path]) -> list[Record]:
    """Return the records of several captures."""
    return [record for trace in traces for record in load_trace(trace)[1]]


def gain(measure: str, before: Sequence[Record], after: Sequence[Record]) -> tuple[float, float, float]:
    """Return the difference of hit rates or the ratio of TTFT quantiles, and its interval over draws of sessions."""
    runs = [by_session(records) for records in (before, after)]
    names = sorted(runs[0].keys() & runs[1].keys())
    random = np.random.default_rng(0)
    draws = [names, *(random.choice(names, len(names)).tolist() for _ in range(DRAWS))]
    found = []
    for drawn in draws:
        old, new = (value_of(measure, [one for name in drawn for one in run[name]]) for run in runs)
        found.append(new - old if measure == "hit_rate" else new / old)
    low, high = interval(np.array(found[1:]))
    return found[0], float(low), float(high)


def by_session(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return records by session id; a load's seed gives the same ids in every capture."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(str(record.session_id), []).append(record)
    return found


def value_of(measure: str, records: Sequence[Record]) -> float:
    """Return the hit rate or a quantile of TTFT."""
    if measure == "hit_rate":
        return sum(one.cached_tokens or 0 for one in records) / sum(one.prompt_tokens or 0 for one in records)
    return quantile(sorted(one.ttft_ms for one in records if one.ttft_ms is not None), float(measure[1:]) / 100)


def simulated(row: Row, measure: str) -> Span:
    """Return the forecast gain of a row."""
    found = row.measures["hit_rate" if measure == "hit_rate" else f"ttft.{ALL}.{measure}"]
    span = found.difference if measure == "hit_rate" else found.ratio
    return span or Span(middle=None, low=None, high=None)


@contextlib.contextmanager
def engines(work: Workspace, kind: EngineKind, model: Path, count: int) -> Iterator[list[str]]:
    """Keep ``count`` engines of one model running, each on a port of its own; real ones on a core each."""
    with contextlib.ExitStack() as stack:
        urls = []
        for place in range(count):
            name = f"engine {count} {place}"
            if kind == "vllm":
                with on_core(CORES[place % len(CORES)] if CORES else None):
                    urls.append(stack.enter_context(real_engine(work.log(name))))
                continue
            address = f"127.0.0.1:{free_port()}"
            command: Command = ["sim", "serve", "--listen", address, "--latency-model", model, "--seed", str(place)]
            urls.append(stack.enter_context(work.serving(name, command, f"http://{address}")))
        yield urls


def real_engine(log: Path) -> contextlib.AbstractContextManager[str]:
    """Start vLLM with the pool of the known engine, on this process's core."""
    shape = vllm_engine.ModelShape()
    vllm_engine.install(shape)
    print("\n── engine: starting vLLM on this machine's CPU (about a minute)", flush=True)
    flags = ["--num-gpu-blocks-override", str(BLOCKS)]
    return vllm_engine.running_vllm(shape, log, extra=flags, own_core=False)


def fitted_model(work: Workspace, urls: Sequence[str], path: Path) -> None:
    """Fit a model on captures of the designed load: one of each engine, one more of the first."""
    traces = [
        capture(work, url, f"calibration-{number}", f"{CALIBRATION} --seed {10 + number}")
        for number, url in enumerate([*urls, urls[0]], 1)
    ]
    work.run("fit", ["sim", "fit", *traces, *SCHEDULER, "-o", path])


def known_model(path: Path) -> None:
    """Write an engine whose steps vary by 10 %, with a pool that is too small for everything."""
    model = known_engine()
    save_model(msgspec.structs.replace(model, engine=replace(model.engine, num_gpu_blocks=BLOCKS)), path)


def table(gains: Sequence[Gain]) -> Iterator[str]:
    """Markdown: measured beside simulated gain."""
    yield "| fleet | policy | measure | measured | simulated | |"
    yield "|---|---|---|---|---|---|"
    for one in gains:
        span = one.simulated
        told = span_text(one.measure, one.measured, one.low, one.high)
        forecast = "–" if span is None else span_text(one.measure, span.middle, span.low, span.high)
        judged = "" if span is None else "✓" if one.holds else "✗"
        yield f"| {one.fleet} | {one.policy} | {one.measure} | {told} | {forecast} | {judged} |"


def span_text(measure: str, middle: float | None, low: float | None, high: float | None) -> str:
    """Return a gain with its interval: points of hit rate, or a ratio."""
    form = "{:+.1%}" if measure == "hit_rate" else "× {:.3f}"
    said = ["–" if value is None else form.format(value) for value in (middle, low, high)]
    return f"{said[0]} ({said[1]} … {said[2]})"


def main() -> int:
    """Run all fleets and loads; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=list(LIGHTER), default="sim", help="kind (sim)")
    parser.add_argument("--latency-model", type=Path, help="of the engines (sim: known; vllm: fitted before the loads)")
    parser.add_argument("--engines", type=int, nargs="+", help="sizes of the fleet (2 4; vllm: 2)")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="default: all")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), help="the first is the base")
    parser.add_argument("--repeats", type=int, default=2, help="captures of each policy (2)")
    parser.add_argument("--out", type=Path, default=Path("out/fleet-gain"), help="a folder, made anew")
    args = parser.parse_args()
    if (given := args.latency_model) and (not given.is_file() or given.resolve().is_relative_to(args.out.resolve())):
        parser.error(f"--latency-model {given}: expected a file, outside {args.out}, which is made anew")
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    work = Workspace(args.out.resolve())
    model = args.latency_model or work.path("model.json")
    if args.engine == "sim" and args.latency_model is None:
        known_model(model)
    gains: list[Gain] = []
    for count in args.engines or ([2] if args.engine == "vllm" else [2, 4]):
        with engines(work, args.engine, model, count) as urls:
            if not model.exists():
                fitted_model(work, urls, model)
            for load in args.loads:
                gains += Fleet(work, model, urls, args.engine).gains(load, args.policies, args.repeats)
    print("\n".join(table(gains)))
    return 0 if all(gain.holds for gain in gains) else 1


if __name__ == "__main__":
    sys.exit(main())
