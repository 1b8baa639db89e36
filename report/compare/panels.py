"""Page of a comparison: cached tokens, TTFT survival by cohort, tables, provenance, definitions."""

from collections.abc import Iterator, Sequence
from typing import Final

from measure.cohorts import ALL, LATER_TURNS, MAIN, cohort_order, cohort_title
from measure.number_format import NOTHING, duration_ms, share, signed_percent
from report.compare.cells import EVALUATED_LEVELS
from report.compare.comparison import Compared
from report.compare.ensembles import counted_cohorts
from report.compare.headline import error_text, ordered_labels, telling_cohort
from report.compare.results import (
    LEVELS,
    Comparison,
    Duration,
    DurationError,
    Forecast,
    Metric,
    Pair,
    Provenance,
    Quantile,
    QuantileError,
)
from report.pages.figures import DASHED, Survival, survival_figure
from report.pages.panels import Card, Cell, Check, Figure, Page, Panel, Row, Table

_DETAILED: Final[tuple[Metric, ...]] = ("tpot", "itl", "e2e")


def comparison_page(compared: Compared, brief: Sequence[Table] = ()) -> Page:
    result = compared.result
    checks = [Check("gate", gate.state, f"{gate.expression} ({gate.reason})") for gate in result.gates]
    return Page(
        tool="sim validate" if result.forecasts else "report compare",
        title=", ".join(result.traces),
        defined="docs/metrics.md",
        headlines=result.headline,
        notes=result.notes,
        cards=comparison_cards(result),
        checks=checks,
        steps=result.next_steps,
        brief=brief,
        panels=[*_survival_panels(compared), *_detail_panels(compared)],
        slots={label: slot for slot, label in enumerate(result.traces)},
        dashed=[label for label, trace in result.traces.items() if trace.source == "sim"],
    )


def _survival_panels(compared: Compared) -> Iterator[Panel]:
    """Yield TTFT survival, cached tokens, verdicts, then TTFT latency of each cohort."""
    result, survival = compared.result, survival_figures(compared)
    first = LATER_TURNS if LATER_TURNS in survival else ALL
    bands = f"Bands: {result.confidence * 100:.0f} % session bootstrap"
    bands += "; of a forecast: that share of its ensemble members." if result.forecasts else "."
    title = f"TTFT survival, {cohort_title(first).lower()}"
    yield Panel(
        chapter=title,
        title=title,
        id=_panel_id(first),
        figure=survival.get(first),
        caption="Share of requests without a first token after t. Solid: measured; dashed: predicted; "
        f"thick: reference. {bands}",
    )
    if result.pairs:
        yield from _cached_panels(compared)
    for label in result.forecasts:
        yield _verdict_panel(result, label)
    yield from filter(None, (_repeat_panel(result, label, pair) for label, pair in result.pairs.items()))
    chapter = "Time to first token"
    yield Panel(chapter=chapter, title=chapter, tables=[cohort_table(result, first, "ttft")])
    for cohort in cohort_order({name for trace in result.traces.values() for name in trace.cohorts} & set(MAIN)):
        if cohort != first:
            table, title = cohort_table(result, cohort, "ttft"), cohort_title(cohort)
            caption = f"Share of requests without a first token, {title.lower()}."
            yield Panel(title=title, id=_panel_id(cohort), figure=survival[cohort], caption=caption, tables=[table])


def _panel_id(cohort: str) -> str:
    return "survival-" + "".join(letter if letter.isalnum() else "-" for letter in cohort)


def _detail_panels(compared: Compared) -> Iterator[Panel]:
    result, gaps = compared.result, gap_figure(compared)
    present = cohort_order({name for trace in result.traces.values() for name in trace.cohorts})
    tables = [cohort_table(result, ALL, metric) for metric in _DETAILED if _has(result, ALL, metric)]
    tables += [
        cohort_table(result, name, metric, folded=True)
        for name in present
        if name in MAIN and name != ALL
        for metric in _DETAILED
        if _has(result, name, metric)
    ]
    caption = "ITL of all requests: share of inter-token gaps longer than t." if gaps else ""
    chapter = "After the first token"
    yield Panel(chapter=chapter, title=chapter, id="gaps", figure=gaps, caption=caption, tables=tables)
    buckets = [cohort_table(result, name, "ttft", folded=True) for name in present if name not in MAIN]
    if buckets:
        caption = (
            "By work: buckets of the reference, so both sides have the same requests. By load: buckets of each run."
        )
        yield Panel(chapter="By work and by load", title="By work and by load", caption=caption, tables=buckets)
    yield Panel(chapter="Provenance", title="Provenance", tables=[_provenance(result), _definitions(result)])


def _has(result: Comparison, cohort: str, metric: Metric) -> bool:
    return any(cohort in trace.cohorts and getattr(trace.cohorts[cohort], metric).n for trace in result.traces.values())


def _cached_panels(compared: Compared) -> Iterator[Panel]:
    rows: list[Row] = []
    for label, pair in compared.result.pairs.items():
        cached = pair.cohorts[ALL].cached
        shares = (cached.exact_share, cached.token_error, cached.other_hit_ratio, cached.truth_hit_ratio)
        texts = [share(value) for value in shares] if cached.evaluated else ["too few", "", "", ""]
        n = Cell(f"{cached.n:,}", f"of {cached.joined:,}" if cached.joined > cached.n else "")
        rows.append([_named(label, pair), n, *texts])
    title = "Cached tokens, request by request"
    columns = ["label", "n", "exact", "token error", "hit ratio", "reference"]
    yield Panel(
        chapter=title,
        title=title,
        caption="Engine, replay and forecast must agree on prefix hits before latencies are compared. Requests without "
        "reported cached tokens are left out; they are no misses.",
        tables=[Table(columns, rows, title)],
    )


def _named(label: str, pair: Pair | None) -> Cell:
    if pair is None:
        return Cell(label, "truth")
    return Cell(label, f"{'against' if pair.kind == 'error' else 'effect against'} {pair.truth}")


def cohort_table(result: Comparison, cohort: str, metric: Metric, *, folded: bool = False) -> Table:
    """Return a latency metric of all labels in a cohort: quantiles, errors below, distances of the curves."""
    rows = []
    for label, trace in result.traces.items():
        if cohort not in trace.cohorts or (label in result.forecasts and not getattr(trace.cohorts[cohort], metric).n):
            continue  # a forecast has no single gaps
        pair = result.pairs.get(label)
        errors = getattr(pair.cohorts[cohort], metric) if pair is not None and cohort in pair.cohorts else None
        rows.append([_named(label, pair), *_cells(getattr(trace.cohorts[cohort], metric), errors)])
    title = f"{metric.upper() if metric != 'e2e' else 'End to end'} in ms, {cohort_title(cohort).lower()}"
    columns = ["label", "n", "censored", *LEVELS, "W1", "sup", "per request"]
    return Table(columns, rows, title, narrow=3 + len(LEVELS), folded=folded)


def _cells(measured: Duration, errors: DurationError | None) -> list[Cell]:
    failed = f"{measured.failed} failed" if measured.failed else ""
    cells = [Cell(f"{measured.n:,}"), Cell(share(measured.censored_share) if measured.censored else "0", failed)]
    for level in LEVELS:
        value: Quantile = getattr(measured, level)
        error: QuantileError | None = None if errors is None else getattr(errors, level)
        below = "" if errors is None else quantile_error(error) if errors.evaluated else "too few"
        detail = "\n".join(filter(None, [interval_text(value), error_interval_text(error)]))
        cells.append(Cell(f"{quantile_text(value)}\n{below}".strip(), detail))
    if errors is None or not errors.evaluated:
        return [*cells, Cell(""), Cell(""), Cell("")]
    bias = "" if errors.bias is None else f"bias {signed_percent(errors.bias)}"
    apart = Cell(f"{duration_ms(errors.w1_ms or 0.0)} ms", f"log {errors.w1_log:.3f}")
    return [*cells, apart, Cell(f"{errors.sup:.3f}"), Cell(share(errors.median_abs_error), bias)]


def _verdict_panel(result: Comparison, label: str) -> Panel:
    """Return a forecast's latency errors and bands by cohort."""
    pair, forecast, rows = result.pairs[label], result.forecasts[label], list[Row]()
    for name, errors in _evaluated_cohorts(pair).items():
        band, truth = result.traces[label].cohorts[name].ttft, result.traces[pair.truth].cohorts[name].ttft
        cells = [
            Cell(
                f"{quantile_error(getattr(errors, level))}\n{interval_text(getattr(band, level))}",
                f"{pair.truth} {quantile_text(getattr(truth, level))}",
            )
            for level in EVALUATED_LEVELS
        ]
        verdict = errors.verdict or ""
        mood = "good" if verdict.startswith("within") else "bad" if verdict.startswith("off") else ""
        rows.append([name, f"{errors.n_truth:,}", *cells, Cell(verdict, mood=mood), per_request(errors)])
    columns = ["cohort", "n", *EVALUATED_LEVELS, "verdict", "per request; W1"]
    title = f"TTFT of {label} against {pair.truth}: errors, and the forecast's band in ms"
    lines = [f"{describe_forecast(forecast)}. {_aside(pair, result.min_cell)}"]
    tables = [Table(columns, rows, title, narrow=6)]
    chapter = "Forecast and capture" if label == next(iter(result.forecasts)) else ""
    return Panel(chapter=chapter, title=f"{label} against {pair.truth}", tables=tables, lines=lines)


def _evaluated_cohorts(pair: Pair) -> dict[str, DurationError]:
    cells = {name: pair.cohorts[name].ttft for name in cohort_order(set(pair.cohorts))}
    return {name: cell for name, cell in cells.items() if cell.evaluated}


def describe_forecast(forecast: Forecast) -> str:
    waits = "later turns wait for responses" if forecast.pacing == "sessions" else "requests at recorded times"
    state = ", saturated" if forecast.saturated else ""
    paced = "" if forecast.pace is None else f", steps at {forecast.pace:.2f} of the model's time"
    return f"{forecast.members} ensemble members, {waits}, utilization {forecast.utilization:.0%}{state}{paced}"


def _aside(pair: Pair, min_cell: int) -> str:
    sentences = []
    if pair.coverage is not None and pair.coverage.share is not None:
        undecided = f", {pair.coverage.undecided} undecided" if pair.coverage.undecided else ""
        sentences.append(
            f"Bands hold {pair.coverage.inside} of {pair.coverage.quantiles} captured quantiles{undecided}."
        )
    cells = {name: pair.cohorts[name].ttft for name in cohort_order(set(pair.cohorts))}
    small = ", ".join(f"{name} {cell.n_truth:,}" for name, cell in cells.items() if not cell.evaluated)
    if small:
        sentences.append(f"Not evaluated under {min_cell}: {small}.")
    return " ".join(sentences)


def _repeat_panel(result: Comparison, label: str, pair: Pair) -> Panel | None:
    """Return latency errors against the mean of the captures, with interval and the captures' difference."""
    if pair.kind == "contrast" and label not in result.forecasts:
        return None
    cells = {
        name: [getattr(cohort.ttft, level) for level in EVALUATED_LEVELS]
        for name, cohort in counted_cohorts(pair.cohorts).items()
    }
    captures = max((error.captures for row in cells.values() for error in row if error is not None), default=1)
    if captures < 2:
        return None
    rows = [[name, *map(repeat_text, row)] for name, row in cells.items()]
    title = f"TTFT of {label} against the mean of {captures} captures: error, its interval, A/A"
    return Panel(title=f"{label} against the mean", tables=[Table(["cohort", *EVALUATED_LEVELS], rows, title)])


def _provenance(result: Comparison) -> Table:
    rows = [[Cell(label), *_origin(trace)] for label, trace in result.traces.items()]
    columns = ["label", "trace", "written by", "engine", "model", "block", "records"]
    return Table(columns, rows, "The traces", narrow=0, words=True)


def _origin(trace: Provenance) -> list[Cell]:
    statuses = ", ".join(f"{count:,} {status}" for status, count in trace.statuses.items())
    return [
        Cell(trace.file, f"{trace.digest[:16]}…"),
        *(Cell(text or "unknown") for text in (trace.source, trace.engine, trace.model)),
        Cell(NOTHING if trace.block_size is None else f"{trace.block_size}"),
        Cell(f"{trace.records:,}", statuses),
    ]


def _definitions(result: Comparison) -> Table:
    rows = [
        ["TTFT", "from the arrival at the recorder to the first token; compare traces of the same recorder"],
        ["Survival", "Kaplan–Meier; aborts before the first token are censored, errors compete: > x is never reached"],
        ["Intervals", f"bootstrap of {result.bootstrap:,} draws (seed {result.seed}) of sessions that met in no queue"],
        ["Error", "(label − truth) / truth of a quantile; *: the largest value alone decides it"],
        ["Effect", "a difference under other conditions (cold prompts, another pace): no error"],
        ["W1, sup", "area between the curves, in ms and on ln TTFT (0.1 is about 10 %); their largest vertical gap"],
        ["Per request", "median of |label − truth| / truth; bias: Σ(label − truth) / Σ truth"],
        ["Too few", f"fewer than {result.min_cell} requests on a side"],
    ]
    if result.forecasts:
        rows.append(["Band", f"where {result.confidence:.0%} of the members have the number, each a draw of the model"])
        rows.append(
            ["Verdict", "within band: the captured p50, p90 and p99 are in it, and it is no wider than the gates"]
        )
    return Table(["word", "meaning"], rows, "Definitions", folded=True, words=True)


def comparison_cards(result: Comparison) -> list[Card]:
    """Return the first pair's cached tokens and TTFT errors, each with both values and the A/A difference."""
    labels = ordered_labels(result.traces, result.pairs)
    if not labels or not result.pairs[labels[0]].joined:
        return []
    label, pair = labels[0], result.pairs[labels[0]]
    cached, name = pair.cohorts[ALL].cached, telling_cohort(pair)
    exact = share(cached.exact_share) if cached.evaluated else "too few"
    cards = [Card("Cached tokens exact", exact, f"of {cached.n:,} requests, {label} and {pair.truth}")]
    kind = "Effect on" if pair.kind == "contrast" else "Error of"
    for level in EVALUATED_LEVELS:
        error = getattr(pair.cohorts[name].ttft, level)
        sides = [(side, getattr(result.traces[side].cohorts[name].ttft, level)) for side in (label, pair.truth)]
        texts = [", ".join(f"{side} {quantile_text(value)} ms" for side, value in sides)]
        if interval := error_interval_text(error):
            texts.append(f"{result.confidence:.0%} interval {interval}".replace("%", " %", 1))
        if error is not None and error.repeat_spread is not None:
            texts.append(f"A/A {share(error.repeat_spread)}")
        value = error_text(error) if error is not None else "too few"
        cards.append(Card(f"{kind} TTFT {level}, {cohort_title(name).lower()}", value, " · ".join(texts)))
    return cards


def quantile_text(quantile: Quantile) -> str:
    """Return the latency, ``> x`` past the end of the sample, or a dash."""
    if quantile.value_ms is not None:
        return duration_ms(quantile.value_ms) + ("*" if quantile.thin else "")
    return f"> {duration_ms(quantile.beyond_ms)}" if quantile.beyond_ms is not None else NOTHING


def interval_text(quantile: Quantile) -> str:
    """Return the latency interval in ms, open above where unbounded; empty: none."""
    if quantile.low_ms is None:
        return ""
    high = duration_ms(quantile.high_ms) if quantile.high_ms is not None else "∞"
    return f"{duration_ms(quantile.low_ms)}–{high}"


def quantile_error(error: QuantileError | None) -> str:
    return NOTHING if error is None else error_text(error)


def error_interval_text(error: QuantileError | None) -> str:
    """Return the interval of the signed latency error; ``…`` separates the signed ends."""
    if error is None or error.low is None:
        return ""
    return f"{signed_percent(error.low)} … {signed_percent(error.high) if error.high is not None else '∞'}"


def repeat_text(error: QuantileError | None) -> str:
    """Return latency error against the mean of captures, interval and A/A difference, a line each."""
    if error is None or error.repeat_error is None or error.repeat_low is None or error.repeat_high is None:
        return NOTHING
    ends = f"{signed_percent(error.repeat_low)} … {signed_percent(error.repeat_high)}"
    return f"{signed_percent(error.repeat_error)}\n{ends}\nA/A {share(error.repeat_spread or 0.0)}"


def per_request(cell: DurationError) -> str:
    return NOTHING if cell.median_abs_error is None else f"{share(cell.median_abs_error)}; {cell.w1_log:.2f}"


def survival_figures(compared: Compared) -> dict[str, Figure]:
    cohorts = {cohort for (_, cohort, metric) in compared.cells if metric == "ttft" and cohort in MAIN}
    return {
        cohort: _curves(compared, cohort, "ttft", "TTFT (ms)", "requests without a first token")
        for cohort in cohort_order(cohorts)
    }


def gap_figure(compared: Compared) -> Figure | None:
    """Return survival of inter-token latency (ITL); None without gaps."""
    curves = _curves(compared, ALL, "itl", "ITL (ms)", "gaps longer than t")
    return curves if curves["data"] else None


def _curves(compared: Compared, cohort: str, metric: Metric, x_title: str, y_title: str) -> Figure:
    truths = {pair.truth for pair in compared.result.pairs.values()}
    curves = [
        Survival(
            name=label,
            curve=cell.curve,
            n=len(cell.waits),
            slot=slot,
            width=3.4 if label in truths else 2.2,
            dash=DASHED if compared.runs[label].meta.source == "sim" else "solid",
        )
        for slot, label in enumerate(compared.runs)
        if (cell := compared.cells.get((label, cohort, metric))) is not None and len(cell.waits)
    ]
    return survival_figure(curves, x_title, y_title)
