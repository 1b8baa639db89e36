"""Entry point of the console scripts: another package in the place of one of ours is told before it is imported.

Other distributions have a ``tap`` or a ``report``, too; of two on ``sys.path`` Python takes the first.
"""

import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, NoReturn

from tracefile.interrupt import install_handlers

if TYPE_CHECKING:
    from importlib.metadata import Distribution

install_handlers()  # kvtape has imported tracefile already, before this module told whose script runs

ROOMS: Final = ("engines", "loadgen", "measure", "replay", "report", "sim", "tap", "tracefile", "wire")
HOME: Final = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
MEND: Final = "expected an environment of its own: pipx install kvtape, or uv tool install kvtape"


def foreign_room() -> str | None:
    """Name the first package of ours that Python would import from elsewhere, and its place; None: there is none."""
    for room in ROOMS:
        spec = find_spec(room)
        paths = [*(spec.submodule_search_locations or ()), spec.origin] if spec is not None else []
        if not any(path and os.path.dirname(os.path.realpath(path)) == HOME for path in paths):
            return f"{room} is imported from {paths[0] if paths else 'nowhere'}, not from {HOME}"
    return None


def shared_room() -> str | None:
    """Name the first package of ours whose folder another distribution has written into; None: there is none."""
    from importlib.metadata import distributions  # noqa: PLC0415 - every command starts here

    written = {distribution.name: _written_by(distribution) for distribution in distributions(path=[HOME])}
    for room in ROOMS:
        owners = sorted(owner for owner, names in written.items() if room in names and owner != "kvtape")
        if owners:
            return f"{room} is a package of {', '.join(owners)}, too, in the same folder"
    return None


def _written_by(distribution: "Distribution") -> set[str]:
    """Return the names at the top of a distribution: its files are read as text, as a path of each takes a second."""
    listed = distribution.read_text("RECORD") or distribution.read_text("top_level.txt") or ""
    return {line.partition("/")[0] for line in listed.splitlines()}


def command() -> NoReturn:
    """Run the command that the script is named for."""
    program = os.path.basename(os.path.realpath(sys.argv[0])).removesuffix(".exe")  # a link may have another name
    foreign = foreign_room()
    if foreign is not None:
        print(f"{program}: error: {foreign}; {MEND}", file=sys.stderr)
        sys.exit(2)
    from kvtape.__main__ import command as run_program  # noqa: PLC0415 - it imports the rooms

    run_program(program)
