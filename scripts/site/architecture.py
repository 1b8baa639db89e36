"""The architecture page and its picture, drawn from the code's imports: ``python -m scripts.site.architecture``."""

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from html import escape
from itertools import groupby
from pathlib import Path
from textwrap import wrap

from tests.test_imports import FLOORS, MAY_IMPORT, MODULES, MORE, ROOT, folder_of, module_imports

PAGE = ROOT / "docs" / "dev" / "architecture.md"
PICTURE = PAGE.with_suffix(".svg")
HEAD = """# Architecture

After this page you know which room of the code stands on which. `python -m scripts.site.architecture` draws it from
the imports, and `tests/scripts/test_site.py` holds it to them.

```sh
python -m scripts.site.architecture
```

![Rooms of the code, each above the rooms that it imports, with its folders from the ground up](architecture.svg)

An arrow is an import; one that follows from two others is left out. Rooms meet over HTTP or through trace files, and
where they import each other, only downwards. Inside a room a folder imports those before it in the list, and the
room's own files import all of them. [A request's way](../flow.md) says what each folder does,
[tap.md](../tap.md#what-it-does-to-a-request) which processes run, [the rooms](../../CONTRIBUTING.md#the-rooms) what
belongs where, and [why.md](why.md) the reasons.
"""
WIDTH, BOX, GAP, LINE = 1200, 216, 20, 15
"""Sizes in px; a box is as wide as five of a row allow."""


@cache
def room_imports() -> dict[str, set[str]]:
    """Rooms that each room's modules import."""
    found: dict[str, set[str]] = {room: set() for room in MAY_IMPORT}
    for module, names in module_imports().items():
        room = module.partition(".")[0]
        found[room] |= {name.partition(".")[0] for name in names} - {room}
    return found


def reached(graph: Mapping[str, set[str]], room: str) -> set[str]:
    """Everything below a room."""
    return graph[room].union(*(reached(graph, other) for other in graph[room]))


def arrows(graph: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Imports that do not follow from others."""
    return [
        (room, other)
        for room, others in graph.items()
        for other in sorted(others)
        if not any(other in reached(graph, between) for between in others - {other})
    ]


def height(graph: Mapping[str, set[str]], room: str) -> int:
    """Longest way down from a room."""
    return max((1 + height(graph, other) for other in graph[room]), default=0)


def rows(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Rooms by height, the highest first."""
    ranked = sorted(graph, key=lambda room: -height(graph, room))
    return [list(group) for _, group in groupby(ranked, key=lambda room: height(graph, room))]


def folders_of(room: str) -> list[str]:
    """A room's folders from the ground up, without its own files."""
    found = sorted(path.name for path in (ROOT / room).iterdir() if any(path.glob("*.py")))
    return [name for name in FLOORS.get(room, found) if name]


def lines_of(room: str) -> list[str]:
    """Folders of a room as lines of its box."""
    return wrap(", ".join(folders_of(room)), 34)


def picture() -> str:
    """The rooms and their imports as SVG."""
    graph, places, boxes, top = room_imports(), {}, [], GAP
    for row in rows(graph):
        tall = 44 + LINE * max(len(lines_of(room)) for room in row)
        left = (WIDTH - len(row) * BOX - (len(row) - 1) * GAP * 3) / 2
        for place, room in enumerate(row):
            x = left + place * (BOX + 3 * GAP)
            places[room] = (x + BOX / 2, top, top + tall)
            boxes.append(box(room, x, top, tall))
        top += tall + 56
    links = [link(places[room], places[other]) for room, other in arrows(graph)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top - 36}" font-family="sans-serif">'
    marker = '<marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    defs = f'<defs>{marker}<path d="M0 0L8 4L0 8z" fill="#607d8b"/></marker></defs>'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([head, defs, ground, *links, *boxes, "</svg>", ""])


def box(room: str, x: float, y: float, tall: float) -> str:
    """A room: its name, and its folders."""
    lines = "".join(
        f'<text x="{x + BOX / 2:g}" y="{y + 44 + LINE * number:g}" font-size="11" fill="#455a64">{escape(line)}</text>'
        for number, line in enumerate(lines_of(room))
    )
    return (
        f'<g text-anchor="middle"><rect x="{x:g}" y="{y:g}" width="{BOX}" height="{tall:g}" rx="8" fill="#eceff1"'
        f' stroke="#607d8b"/><text x="{x + BOX / 2:g}" y="{y + 25:g}" font-size="17" font-weight="bold">{room}/</text>'
        f"{lines}</g>"
    )


def link(above: tuple[float, float, float], below: tuple[float, float, float]) -> str:
    """An arrow from a room's lower edge to another's upper one."""
    (x, _, y), (to, end, _) = above, below
    bend = (y + end) / 2
    return (
        f'<path d="M{x:g} {y:g}C{x:g} {bend:g} {to:g} {bend:g} {to:g} {end:g}" fill="none" stroke="#607d8b"'
        ' stroke-width="1.4" marker-end="url(#a)"/>'
    )


def table() -> str:
    """The rooms: their folders, imports and exceptions."""
    told = dict(re.findall(r"^\| `(\w+)/` \| (.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    lines = ["| room | is | folders, from the ground up | imports |", "|---|---|---|---|"]
    for room, others in room_imports().items():
        more = {name: folder for folder, names in MORE.items() if folder.startswith(f"{room}/") for name in names}
        named = [f"`{name}`" + (f" (`{more[name]}`)" if name in more else "") for name in sorted(others)]
        folders = ", ".join(f"`{name}`" for name in folders_of(room)) or "–"
        lines.append(f"| `{room}/` | {told[room]} | {folders} | {', '.join(named) or '–'} |")
    return "\n".join(lines)


def folder_table() -> str:
    """Every folder with its modules, lines and imports, for the site: too often changed for a committed page."""
    imports: dict[str, set[str]] = defaultdict(set)
    sizes: dict[str, list[int]] = defaultdict(list)
    for module, names in module_imports().items():
        folder = folder_of(module)
        imports[folder] |= {folder_of(name) for name in names} - {folder}
        sizes[folder].append(len(MODULES[module].read_text().splitlines()))
    lines = ["## Every folder", "", "| folder | modules | lines | imports |", "|---|---:|---:|---|"]
    for folder, counted in sorted(sizes.items()):
        named = ", ".join(f"`{name}`" for name in sorted(imports[folder])) or "–"
        lines.append(f"| `{folder}/` | {len(counted)} | {sum(counted):,} | {named} |")
    return "\n".join([*lines, ""])


def page() -> str:
    """The committed page."""
    return f"{HEAD}\n## The rooms\n\n{table()}\n"


def write(path: Path, text: str) -> None:
    path.write_text(text)
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    write(PAGE, page())
    write(PICTURE, picture())
