"""The prefix tree as an icicle: as wide as the tokens that a prefix saves, as deep as it reaches into the prompt."""

from typing import Final

from measure.cache.prefixtree import PrefixNode, PrefixTree
from measure.wording import compact, count, round_number, share_of
from report.pages.figures import Trace, axis, figure
from report.pages.panels import Figure, Panel, Table
from report.trace.measured import Measured

_TITLE: Final = "Prefixes that save prefill"
LISTED: Final = 12
"""Prefixes in the table."""
_LABELLED: Final = 0.09
"""Least share of the width that a label needs."""


def prefix_panel(measured: Measured) -> Panel:
    study = measured.study
    if study is None:
        return Panel(title=_TITLE, missing=measured.left_out or "The trace has no block hashes.")
    if study.tree is None:
        return Panel(title=_TITLE, missing="Its block hashes are not chained: one follows different blocks.")
    if not study.tree.nodes:
        return Panel(title=_TITLE, missing="No block of a prompt came before: there is no prefix to share.")
    return Panel(
        title=_TITLE,
        id="prefixes",
        figure=prefix_figure(study.tree),
        caption="Each box is a run of prompt tokens that the same requests begin with. Its width is the prefill that "
        f"it and all below it save in an unlimited cache, {compact(study.tree.saved_tokens)} tokens together; its "
        f"height is its place in the prompt. {_own_text(study.tree, measured)}",
        tables=[prefix_table(study.tree)],
    )


def _own_text(tree: PrefixTree, measured: Measured) -> str:
    if measured.metrics.cache is None or measured.metrics.cache.own_session_share is None:
        return ""
    own = share_of(tree.own_session_tokens, tree.saved_tokens)
    return f"Caches that no two sessions share would save {own} of it."


def prefix_figure(tree: PrefixTree) -> Figure:
    """Draw every node as a bar: children side by side under their parent, the largest first."""
    lefts = left_edges(tree)
    classes: dict[tuple[str, int], list[int]] = {
        ("shared by several sessions", 1): [],
        ("in one session only", 3): [],
        ("shared by several requests", 6): [],
        ("smaller prefixes together", -1): [],
    }
    for place, node in enumerate(tree.nodes):
        classes[_class(node)].append(place)
    data = [_bars(tree, name, slot, places, lefts) for (name, slot), places in classes.items() if places]
    at = _even_ticks(tree.saved_tokens)
    x_axis = axis("prompt tokens saved", range=[0, tree.saved_tokens], tickvals=at, ticktext=[*map(round_number, at)])
    y_axis = axis("place in the prompt (tokens)", autorange="reversed", tickformat=",d")
    return figure(
        data,
        x_axis,
        y_axis,
        barmode="overlay",
        height=420,
        showlegend=True,
        uniformtext={"minsize": 10, "mode": "hide"},
    )


def _even_ticks(most: int) -> list[float]:
    """Return three to five ticks from 0 on, so that a phone has room for their labels."""
    digits = 10 ** (len(str(most)) - 1)
    step = next(part for part in (0.2, 0.25, 0.5, 1, 2, 2.5) if most / (part * digits) < 5) * digits
    return [place * step for place in range(int(most // step) + 1)]


def _class(node: PrefixNode) -> tuple[str, int]:
    if not node.name:
        return "smaller prefixes together", -1
    if node.sessions is None:
        return "shared by several requests", 6
    return ("shared by several sessions", 1) if node.sessions > 1 else ("in one session only", 3)


def left_edges(tree: PrefixTree) -> list[int]:
    """Return the left edge of each node in saved tokens: sums of smaller subtrees stand last."""
    lefts, used = [0] * len(tree.nodes), dict[int | None, int]()
    order = sorted(
        range(len(tree.nodes)), key=lambda place: (not tree.nodes[place].name, -tree.nodes[place].below_tokens)
    )
    for place in sorted(order, key=lambda place: _depth(tree, place)):
        node = tree.nodes[place]
        start = used.get(node.parent, 0 if node.parent is None else lefts[node.parent])
        lefts[place], used[node.parent] = start, start + node.below_tokens
    return lefts


def _depth(tree: PrefixTree, place: int) -> int:
    depth, parent = 0, tree.nodes[place].parent
    while parent is not None:
        depth, parent = depth + 1, tree.nodes[parent].parent
    return depth


def _bars(tree: PrefixTree, name: str, slot: int, places: list[int], lefts: list[int]) -> Trace:
    nodes = [tree.nodes[place] for place in places]
    return {
        "type": "bar",
        "name": name,
        "x": [lefts[place] + node.below_tokens / 2 for place, node in zip(places, nodes, strict=True)],
        "width": [node.below_tokens for node in nodes],
        "base": [node.from_tokens for node in nodes],
        "y": [node.to_tokens - node.from_tokens for node in nodes],
        "text": [_label(tree, node) for node in nodes],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "customdata": [_told(tree, node) for node in nodes],
        "hovertemplate": "%{customdata}<extra></extra>",
        "meta": {"slot": slot, "part": "points", "edge": 0.5, "opacity": 0.85},
    }


def _label(tree: PrefixTree, node: PrefixNode) -> str:
    if node.below_tokens < _LABELLED * tree.saved_tokens:
        return ""
    if not node.name:
        return f"{node.prefixes:,} smaller"
    length = node.to_tokens - node.from_tokens
    return f"{compact(length)} tokens<br>× {node.requests:,} requests"


def _told(tree: PrefixTree, node: PrefixNode) -> str:
    place = f"prompt tokens {node.from_tokens:,} to {node.to_tokens:,}"
    if not node.name:
        return (
            f"{node.prefixes:,} smaller prefixes, from token {node.from_tokens:,} on<br>{node.requests:,} requests<br>"
            f"save {_of(tree, node.below_tokens)}"
        )
    sessions = "" if node.sessions is None else f" of {node.sessions:,} sessions"
    return (
        f"{place}, hash {node.name}…<br>{node.requests:,} requests{sessions}<br>saves {_of(tree, node.saved_tokens)}"
        f"<br>with all below {_of(tree, node.below_tokens)}"
        f"<br>the engine served {share_of(node.served_tokens, node.saved_tokens)} of its own"
    )


def _of(tree: PrefixTree, tokens: int) -> str:
    return f"{count(tokens)} tokens ({share_of(tokens, tree.saved_tokens)})"


def prefix_table(tree: PrefixTree) -> Table:
    """List the prefixes that save the most themselves."""
    largest = sorted((node for node in tree.nodes if node.name), key=lambda node: -node.saved_tokens)[:LISTED]
    rows = [
        [
            node.name,
            f"{node.from_tokens:,}–{node.to_tokens:,}",
            f"{node.requests:,}",
            "–" if node.sessions is None else f"{node.sessions:,}",
            count(node.saved_tokens),
            share_of(node.saved_tokens, tree.saved_tokens),
            share_of(node.served_tokens, node.saved_tokens),
        ]
        for node in largest
    ]
    columns = ["prefix (hash)", "prompt tokens", "requests", "sessions", "tokens saved", "of all saved", "served"]
    return Table(columns, rows, folded=True)
