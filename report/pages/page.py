"""The comparison as one HTML page that opens offline: tables, figures, provenance, definitions."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from measure import wording
from measure.cohorts import ALL, LATER_TURNS, MAIN, cohort_order, cohort_title
from report.compare import terminal
from report.compare.cells import JUDGED_LEVELS
from report.compare.comparison import Compared
from report.compare.headline import error_text, ordered_labels, telling_cohort
from report.compare.results import LEVELS, METRICS, Comparison
from report.pages.figures import (
    Figure,
    arrival_figure,
    cached_figure,
    error_figure,
    gap_figure,
    survival_figures,
)
from report.pages.palette import SLOTS


@dataclass(frozen=True, slots=True)
class Card:
    """A number of the first screen."""

    title: str
    value: str
    detail: str


def comparison_figures(compared: Compared) -> dict[str, Figure]:
    """Return the page's figures by id, those with nothing to draw left out."""
    survival = survival_figures(compared)
    telling = LATER_TURNS if LATER_TURNS in survival else ALL
    figures: dict[str, Figure | None] = {f"survival-{cohort_id(name)}": figure for name, figure in survival.items()}
    figures |= {
        "errors": error_figure(compared, telling),
        "cached": cached_figure(compared),
        "gaps": gap_figure(compared),
        "arrivals": arrival_figure(compared),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def render_page(compared: Compared) -> str:
    result = compared.result
    drawn = comparison_figures(compared)
    first = LATER_TURNS if f"survival-{cohort_id(LATER_TURNS)}" in drawn else ALL
    present = {name for trace in result.traces.values() for name in trace.cohorts}
    return render(
        "page.html.jinja",
        drawn,
        tool="sim validate" if result.forecasts else "report compare",
        title=", ".join(result.traces),
        headlines=result.headline,
        defined="docs/metrics.md",
        result=result,
        cards=cards(result),
        first=first,
        cohorts=[name for name in cohort_order(present) if name in MAIN],
        buckets=[name for name in cohort_order(present) if name not in MAIN],
        slots={label: slot % SLOTS for slot, label in enumerate(result.traces)},
    )


def cards(result: Comparison) -> list[Card]:
    """Return the first pair's cached tokens and TTFT errors, each with both values and the A/A difference."""
    labels = ordered_labels(result.traces, result.pairs)
    if not labels or not result.pairs[labels[0]].joined:
        return []
    label = labels[0]
    pair = result.pairs[label]
    cached, name = pair.cohorts[ALL].cached, telling_cohort(pair)
    found = [
        Card(
            "Cached tokens exact",
            wording.share(cached.exact_share) if cached.judged else "not judged",
            f"of {cached.n:,} requests, {label} and {pair.truth}",
        )
    ]
    kind = "Effect on" if pair.kind == "contrast" else "Error of"
    for level in ("p50", "p90", "p99"):
        error = getattr(pair.cohorts[name].ttft, level)
        sides = [(one, getattr(result.traces[one].cohorts[name].ttft, level)) for one in (label, pair.truth)]
        said = [", ".join(f"{one} {terminal.quantile_text(value)} ms" for one, value in sides)]
        if interval := terminal.error_interval_text(error):
            said.append(f"{result.confidence:.0%} interval {interval}".replace("%", " %", 1))
        if error is not None and error.repeat_spread is not None:
            said.append(f"A/A {wording.share(error.repeat_spread)}")
        found.append(
            Card(
                f"{kind} TTFT {level}, {cohort_title(name).lower()}",
                error_text(error) if error is not None else "not judged",
                " · ".join(said),
            )
        )
    return found


def render(
    name: str,
    figures: Mapping[str, Figure],
    *,
    tool: str,
    title: str,
    headlines: Sequence[str],
    defined: str,
    **values: Any,
) -> str:
    """Return a page of template ``name``: its headlines, its figures, and everything that it needs to open offline.

    ``tool``: the command that made it; ``defined``: the document of its numbers.
    """
    environment = Environment(
        loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {
        "levels": list(LEVELS),
        "metrics": METRICS,
        "cohort_title": cohort_title,
        "cohort_id": cohort_id,
        "cohort_order": lambda cohorts: cohort_order(set(cohorts)),
        "wording": wording,
        "terminal": terminal,
        "judged_levels": JUDGED_LEVELS,
        "first_label": lambda result: next(iter(result.traces)),
        "wall_clock": _wall_clock,
    }
    environment.filters["sentence"] = wording.sentence
    return environment.get_template(name).render(
        tool=tool,
        title=title,
        headlines=headlines,
        defined=defined,
        figures=figures,
        figures_json=script_json(figures),
        plotly=Markup(_asset("plotly-basic.min.js")),
        style=Markup(_asset("page.css")),
        script=Markup(_asset("page.js")),
        **values,
    )


def _asset(name: str) -> str:
    return (files("report.pages") / name).read_text(encoding="utf-8")


def cohort_id(cohort: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in cohort)


def script_json(value: object) -> Markup:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for letter, escape in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        text = text.replace(letter, escape)
    return Markup(text)


def _wall_clock(epoch_unix_ns: int | None) -> str:
    if epoch_unix_ns is None:
        return "unknown"
    try:
        return datetime.fromtimestamp(epoch_unix_ns / 1e9, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError):  # of a misread clock
        return "unknown"
