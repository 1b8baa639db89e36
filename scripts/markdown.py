"""Markdown tables of benchmarks and verdicts."""

from collections.abc import Iterable, Sequence


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """Return a Markdown table; ``numbers``: all columns except the first are right-aligned."""
    rule = "|---" + ("|---:" if numbers else "|---") * (len(headings) - 1) + "|"
    header, *lines = (f"| {' | '.join(cells)} |" for cells in (headings, *rows))
    return "\n".join([header, rule, *lines])
