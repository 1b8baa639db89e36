"""The figures of a comparison: survival curves with bands, cached tokens, TTFT over arrival time."""

import numpy as np

from measure.cohorts import ALL, MAIN, cohort_order
from measure.runs import UNKNOWN
from measure.survival import CENSORED
from measure.waits import first_token_waits
from report.compare.comparison import Compared
from report.compare.results import Metric
from report.pages.figures import DASHED, Survival, Trace, axis, figure, line, points, rounded, survival_figure, thinned
from report.pages.panels import Figure


def survival_figures(compared: Compared) -> dict[str, Figure]:
    cohorts = {cohort for (_, cohort, metric) in compared.cells if metric == "ttft" and cohort in MAIN}
    return {
        cohort: _curves(compared, cohort, "ttft", "TTFT (ms)", "still without a first token")
        for cohort in cohort_order(cohorts)
    }


def gap_figure(compared: Compared) -> Figure | None:
    """Survival of inter-token gaps; None if no trace has any."""
    curves = _curves(compared, ALL, "itl", "inter-token gap (ms)", "share of gaps that are longer")
    return curves if curves["data"] else None


def cached_figure(compared: Compared) -> Figure | None:
    """Cached tokens of each joined request, the truth's against the other's; None if nothing is reported."""
    slots = _slots(compared)
    data: list[Trace] = []
    smallest, largest = np.inf, 0
    for label, pair in compared.result.pairs.items():
        join = compared.joins[label]
        t = compared.runs[pair.truth].cached_tokens[join.truth_rows]
        o = compared.runs[label].cached_tokens[join.other_rows]
        reported = (t != UNKNOWN) & (o != UNKNOWN)
        if pair.kind != "error" or not reported.any():
            continue
        t, o = t[reported], o[reported]
        smallest, largest = min(smallest, int(t.min()), int(o.min())), max(largest, int(t.max()), int(o.max()))
        kept = thinned(len(t))
        data.append(
            points(
                t[kept].tolist(),
                o[kept].tolist(),
                slots[label],
                {"size": 6, "opacity": 0.55},
                name=f"{label} / {pair.truth}",
                hovertemplate="%{fullData.name}: %{y:,} for %{x:,} tokens<extra></extra>",
            )
        )
    if not data:
        return None
    margin = max(0.05 * (largest - smallest), 1.0)
    ends = [smallest - margin, largest + margin]
    diagonal = line(ends, ends, -1, width=1, hoverinfo="skip", showlegend=False)
    x_axis, y_axis = (
        axis(f"cached tokens, {side}", range=ends, tickformat=",d", nticks=6) for side in ("truth", "label")
    )
    return figure([diagonal, *data], x_axis, y_axis)


def arrival_figure(compared: Compared) -> Figure:
    """TTFT over arrival time, where saturation shows as a rise; censored waits are open triangles."""
    slots = _slots(compared)
    data: list[Trace] = []
    for label, run in compared.runs.items():
        waits = first_token_waits(run, np.arange(len(run)))
        arrival_s = (run.arrival_ms[waits.row] - np.nanmin(run.arrival_ms, initial=np.inf)) / 1e3
        for censored in (False, True):
            chosen = np.flatnonzero(((waits.end == CENSORED) == censored) & ~np.isnan(arrival_s))
            if not len(chosen):
                continue
            kept = chosen[np.argsort(arrival_s[chosen], kind="stable")][thinned(len(chosen))]
            data.append(
                points(
                    rounded(arrival_s[kept]),
                    rounded(waits.time_ms[kept]),
                    slots[label],
                    {
                        "size": 8 if censored else 5,
                        "opacity": 0.6,
                        "symbol": "triangle-up-open" if censored else "circle",
                    },
                    name=f"{label}, censored" if censored else label,
                    legendgroup=label,
                    showlegend=not censored,
                    hovertemplate="%{fullData.name}: %{y:,.1f} ms at %{x:,.1f} s<extra></extra>",
                )
            )
    return figure(data, axis("arrival after the first request (s)"), axis("TTFT (ms)", type="log"))


def _curves(compared: Compared, cohort: str, metric: Metric, x_title: str, y_title: str) -> Figure:
    truths = {pair.truth for pair in compared.result.pairs.values()}
    drawn = [
        Survival(
            name=label,
            curve=cell.curve,
            n=len(cell.waits),
            slot=slot,
            width=3.4 if label in truths else 2.2,
            dash=DASHED if compared.runs[label].meta.source == "sim" else "solid",
        )
        for label, slot in _slots(compared).items()
        if (cell := compared.cells.get((label, cohort, metric))) is not None and len(cell.waits)
    ]
    return survival_figure(drawn, x_title, y_title)


def _slots(compared: Compared) -> dict[str, int]:
    return {label: slot for slot, label in enumerate(compared.runs)}
