"""Tables of benches and verdicts, as Markdown: the form of a page, and readable in a terminal."""

from collections.abc import Iterable, Sequence


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """Return a table; ``numbers``: all columns but the first are flush right."""
    rule = "|---" + ("|---:" if numbers else "|---") * (len(headings) - 1) + "|"
    first, *others = (f"| {' | '.join(cells)} |" for cells in (headings, *rows))
    return "\n".join([first, rule, *others])
