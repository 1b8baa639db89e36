"""Gain of a routing policy, simulated and measured: engines of known parameters behind the tap, policy by policy.

    python -m scripts.fleet_gain                               # two and four engines, about twenty minutes
    python -m scripts.fleet_gain --engines 2 --loads sessions --repeats 1

Each load goes through ``tap --route POLICY`` to engines with emptied caches, policies in turn. One capture under the
first policy is the trace: ``sim what-if --replicas N --route …`` forecasts the other policies from it alone. Exit
status 1: a hit-rate gain is more than a point off, or a measured TTFT gain is outside the forecast's interval.
"""

import argparse
import contextlib
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import msgspec

from measure.cohorts import ALL
from measure.quantiles import quantile
from report.pages.whatif import Measure, Row, Span, WhatIf
from scripts.job import Command, Workspace
from scripts.proxybench.processes import free_port
from sim.latency.modelfile import default_model, save_model
from tracefile import Record, load_trace

POLICIES = ("round-robin", "session", "prefix")
LEVELS = ("p50", "p90")
POINT = 0.01
# Twelve prefixes of 94 blocks: more than one engine's pool keeps beside its conversations, less than the fleet's.
BLOCKS = 1_100
_CONTENT = "--prefix-tokens 3000 --prompt-tokens 64:256 --output-tokens 16:48 --think 0.3s:1.5s"
# Sessions, or groups of rollouts, a second and engine: half of what an engine without a cache could do.
LOADS = {
    "sessions": (0.5, f"--pattern multiturn --turns 5 --prefix-count 12 {_CONTENT} --duration 60s"),
    "rollouts": (0.08, f"--pattern rollouts --group-size 8 --turns 4 --prefix-count 12 {_CONTENT} --duration 60s"),
}


@dataclass(frozen=True, slots=True)
class Gain:
    """Effect of one policy against the first on one measure, measured and simulated."""

    fleet: str
    """Number of engines and load."""
    policy: str
    measure: str
    measured: float
    """Hit rate: difference; TTFT: ratio. Mean over the repeats, for ratios of the logarithms."""
    spread: float
    """Largest less smallest of the repeats."""
    simulated: Span

    @property
    def holds(self) -> bool:
        """Return whether the simulated gain came true."""
        if self.simulated.middle is None:
            return False
        if self.measure == "hit_rate":
            return abs(self.measured - self.simulated.middle) <= POINT
        low, high = self.simulated.low, self.simulated.high
        return (low is None or self.measured >= low) and (high is None or self.measured <= high)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Running engines of one model, and the folder of the runs."""

    work: Workspace
    model: Path
    urls: Sequence[str]

    def capture(self, load: str, policy: str, repeat: int) -> Path:
        """Send a load through a tap that routes by ``policy``; return the tap's trace."""
        name = f"{len(self.urls)}-{load}-{policy}-{repeat}"
        for url in self.urls:
            self.work.empty_cache(url)
        trace, address = self.work.path(f"{name}.jsonl.zst"), f"127.0.0.1:{free_port()}"
        upstreams = [word for url in self.urls for word in ("--upstream", url)]
        tap: Command = ["tap", *upstreams, "--route", policy, "--listen", address, "-o", trace, "--tokenizer", "ids"]
        with self.work.serving(f"{name} tap", tap, f"http://{address}") as tap_url:
            rate, flags = LOADS[load]
            seed = ["--seed", "1", "--token-seed", str(100 + repeat), "--rate", f"{rate * len(self.urls):g}"]
            client: Command = ["loadgen", "--url", tap_url, "-o", self.work.path(f"{name}-client.jsonl.zst")]
            self.work.run(name, [*client, *flags.split(), *seed])
        return trace

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
        captured: dict[str, list[dict[str, float]]] = {policy: [] for policy in policies}
        first: Path | None = None
        for repeat in range(repeats):
            for policy in policies if repeat % 2 == 0 else policies[::-1]:
                trace = self.capture(load, policy, repeat)
                first = first or trace
                captured[policy].append(measures(load_trace(trace)[1]))
        assert first is not None
        result = self.forecast(load, first, policies)
        for policy, row in zip(policies[1:], scenarios(result), strict=True):
            for measure in ("hit_rate", *LEVELS):
                pairs = list(zip(captured[policies[0]], captured[policy], strict=True))
                effects = [effect(measure, before[measure], after[measure]) for before, after in pairs]
                yield Gain(
                    fleet=f"{len(self.urls)} × {load}",
                    policy=policy,
                    measure=measure,
                    measured=mean(effects) if measure == "hit_rate" else math.exp(mean(map(math.log, effects))),
                    spread=max(effects) - min(effects),
                    simulated=simulated(row, measure),
                )


def measures(records: Sequence[Record]) -> dict[str, float]:
    """Return hit rate and TTFT quantiles of a capture."""
    cached = sum(record.cached_tokens or 0 for record in records)
    times = sorted(record.ttft_ms for record in records if record.ttft_ms is not None)
    quantiles = {level: quantile(times, float(level[1:]) / 100) for level in LEVELS}
    return {"hit_rate": cached / sum(record.prompt_tokens or 0 for record in records), **quantiles}


def effect(measure: str, before: float, after: float) -> float:
    """Return the difference of hit rates, or the ratio of times."""
    return after - before if measure == "hit_rate" else after / before


def scenarios(result: WhatIf) -> list[Row]:
    """Return the rows of the other policies."""
    return [row for row in result.rows if row.kind == "scenario"]


def simulated(row: Row, measure: str) -> Span:
    """Return the forecast gain of a row."""
    found: Measure = row.measures["hit_rate" if measure == "hit_rate" else f"ttft.{ALL}.{measure}"]
    span = found.difference if measure == "hit_rate" else found.ratio
    return span or Span(middle=None, low=None, high=None)


@contextlib.contextmanager
def engines(work: Workspace, model: Path, count: int) -> Iterator[list[str]]:
    """Keep ``count`` engines of one model running, each on a port of its own."""
    with contextlib.ExitStack() as stack:
        urls = []
        for place in range(count):
            address = f"127.0.0.1:{free_port()}"
            command: Command = ["sim", "serve", "--listen", address, "--latency-model", model, "--seed", str(place)]
            urls.append(stack.enter_context(work.serving(f"engine {count} {place}", command, f"http://{address}")))
        yield urls


def known_model(path: Path) -> Path:
    """Write the built-in engine with a pool that is too small for everything."""
    model = default_model()
    engine = replace(model.engine, num_gpu_blocks=BLOCKS)
    save_model(msgspec.structs.replace(model, engine=engine), path)
    return path


def table(gains: Sequence[Gain]) -> Iterator[str]:
    """Markdown: measured beside simulated gain."""
    yield "| fleet | policy | measure | measured | spread | simulated | |"
    yield "|---|---|---|---|---|---|---|"
    for gain in gains:
        said = [f"{value:+.1%}" if gain.measure == "hit_rate" else f"× {value:.3f}" for value in values(gain)]
        yield (
            f"| {gain.fleet} | {gain.policy} | {gain.measure} | {said[0]} | {gain.spread:.3f}"
            f" | {said[1]} ({said[2]} … {said[3]}) | {'✓' if gain.holds else '✗'} |"
        )


def values(gain: Gain) -> list[float]:
    """Return the measured gain, and the simulated one with its interval; NaN: none."""
    span = gain.simulated
    return [gain.measured, *(math.nan if one is None else one for one in (span.middle, span.low, span.high))]


def main() -> int:
    """Run all fleets and loads; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 4], help="sizes of the fleet (2 4)")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="default: all")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), help="the first is the base")
    parser.add_argument("--repeats", type=int, default=2, help="captures of each policy (2)")
    parser.add_argument("--out", type=Path, default=Path("out/fleet-gain"), help="a folder, made anew")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    work = Workspace(args.out.resolve())
    model = known_model(work.path("model.json"))
    gains: list[Gain] = []
    for count in args.engines:
        with engines(work, model, count) as urls:
            for load in args.loads:
                gains += Fleet(work, model, urls).gains(load, args.policies, args.repeats)
    print("\n".join(table(gains)))
    return 0 if all(gain.holds for gain in gains) else 1


if __name__ == "__main__":
    sys.exit(main())
