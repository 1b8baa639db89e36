"""Results of a benchmark: values by proxy and round, their figures, and the goals."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from scripts.markdown import markdown_table
from scripts.proxybench.streams import Floats

DIRECT, REFERENCE = "direct", "nginx"


@dataclass(frozen=True, slots=True)
class Goal:
    """Bound of the tap's figure, its own or beside nginx's: ``factor`` × the ratio, ``value`` + nginx's."""

    sign: Literal["≤", "≥"]
    value: float
    beside: Literal["", "factor", "extra"] = ""

    def __str__(self) -> str:
        forms = {"": f"{self.value:,g}", "factor": f"{self.value:g} × nginx", "extra": f"nginx + {self.value:g}"}
        return f"{self.sign} {forms[self.beside]}"

    def reached(self, value: float, reference: float | None, ratio: float | None) -> bool | None:
        """Return whether it is reached; null: nobody can say without nginx."""
        seen, bound = ratio if self.beside == "factor" else value, self.value
        if self.beside and (reference is None or seen is None):
            return None
        if self.beside == "extra":
            bound += reference or 0.0
        return (seen or 0.0) <= bound if self.sign == "≤" else (seen or 0.0) >= bound


@dataclass(frozen=True, slots=True)
class Figure:
    """Row of the table."""

    name: str
    label: str
    digits: int = 1
    added: bool = False
    """Values are shown with the direct connection's of the same round taken off."""
    goal: Goal | None = None


FIGURES = (
    Figure("cpu", "CPU µs per chunk, 25.6k chunks/s", 2, goal=Goal("≤", 1.3, "factor")),
    Figure("recorder_cpu", "– recorder's CPU µs per chunk", 2),
    Figure("rate", "– chunks/s sent", 0),
    Figure("rss", "– RSS MB, data plane", goal=Goal("≤", 80)),
    Figure("p50", "added chunk p50 µs, 6.4k chunks/s", 0, added=True),
    Figure("p99", "added chunk p99 µs", 0, added=True, goal=Goal("≤", 150, "extra")),
    Figure("ttft", "added TTFT µs, solo", 0, added=True, goal=Goal("≤", 1.5, "factor")),
    Figure("ttft_large", "added TTFT µs, 400 KB prompt", 0, added=True, goal=Goal("≤", 1.5, "factor")),
    Figure("lost", "requests not recorded, all runs", 0, goal=Goal("≤", 0)),
    Figure("failures", "failed streams and lost chunks, all runs", 0, goal=Goal("≤", 0)),
)


@dataclass(slots=True)
class Results:
    """Values as they are measured."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    """By proxy, then figure: a value a round."""
    failed: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, proxy: str, figure: str, value: float | None) -> None:
        """Add a round's value; None adds nothing."""
        if value is not None:
            self.values[proxy][figure].append(float(value))

    def add_latencies(self, proxy: str, latency_us: Floats) -> None:
        """Add a round's latencies at the lower rate."""
        self.add(proxy, "p50", float(np.percentile(latency_us, 50)))
        self.add(proxy, "p99", float(np.percentile(latency_us, 99)))

    def finish(self) -> None:
        """Add the failures of all rounds."""
        for proxy, count in self.failed.items():
            self.add(proxy, "failures", count)

    def figure(self, proxy: str, figure: Figure) -> float | None:
        """The median over the rounds; of what is added, over the differences of each round."""
        rounds = self._rounds(proxy, figure)
        return statistics.median(rounds) if rounds else None

    def ratio(self, proxy: str, figure: Figure) -> float | None:
        """The median of each round's figure over the reference's of the same round: noise that both had cancels."""
        pairs = zip(self._rounds(proxy, figure), self._rounds(REFERENCE, figure), strict=False)
        ratios = [value / reference for value, reference in pairs if reference > 0]
        return statistics.median(ratios) if ratios else None

    def _rounds(self, proxy: str, figure: Figure) -> list[float]:
        values = self.values[proxy].get(figure.name, [])
        if not figure.added:
            return values
        base = self.values[DIRECT].get(figure.name, [])
        return [] if proxy == DIRECT else [value - under for value, under in zip(values, base, strict=False)]


def table(results: Results, proxies: Sequence[str]) -> str:
    """Rows of figures, a column each proxy, then for each tap its ratio to nginx and whether the goal is reached."""
    taps = [proxy for proxy in proxies if proxy.startswith("tap")]
    header = ["", *proxies, *(f"{name} / nginx" for name in taps), "goal", *(["reached"] if taps else [])]
    rows = []
    for figure in FIGURES:
        cells = [_number(_shown(results, proxy, figure), figure.digits) for proxy in proxies]
        if not any(cells):
            continue
        ratios = [_number(results.ratio(name, figure), 2) for name in taps]
        verdict = [_verdict(results, taps, figure)] if taps else []
        rows.append([figure.label, *cells, *ratios, str(figure.goal or ""), *verdict])
    return markdown_table(header, rows, numbers=True)


def _shown(results: Results, proxy: str, figure: Figure) -> float | None:
    """Return the figures to show; where a proxy's figure is an addition, the direct column shows the base."""
    if figure.added and proxy == DIRECT:
        values = results.values[DIRECT].get(figure.name)
        return statistics.median(values) if values else None
    return results.figure(proxy, figure)


def _verdict(results: Results, taps: Sequence[str], figure: Figure) -> str:
    if figure.goal is None:
        return ""
    said = {True: "yes", False: "NO", None: "?"}
    reference = results.figure(REFERENCE, figure)
    verdicts = []
    for name in taps:
        value = results.figure(name, figure)
        if value is not None:
            verdicts.append(said[figure.goal.reached(value, reference, results.ratio(name, figure))])
    return " ".join(verdicts)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def as_json(results: Results, proxies: Sequence[str]) -> dict[str, Any]:
    """All figures with their rounds, as JSON."""
    return {
        proxy: {
            figure.name: {"value": results.figure(proxy, figure), "rounds": results.values[proxy][figure.name]}
            for figure in FIGURES
            if results.values[proxy].get(figure.name)
        }
        for proxy in proxies
    }
