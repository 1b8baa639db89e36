"""Entry point of the console scripts: detects another distribution's package before it is imported.

Other distributions also have a ``tap`` or a ``report``; Python imports the first on ``sys.path``.
"""

import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, NoReturn

from tracefile.interrupt import install_handlers

if TYPE_CHECKING:
    from importlib.metadata import Distribution

install_handlers()  # again: kvtape imported tracefile before this module identified the script

PACKAGES: Final = ("engines", "loadgen", "measure", "replay", "report", "sim", "tap", "tracefile", "wire")
HOME: Final = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
FIX: Final = "expected a separate environment: pipx install kvtape, or uv tool install kvtape"


def foreign_package() -> str | None:
    """Return an error for the first package that Python would import from another location; None: none."""
    for package in PACKAGES:
        spec = find_spec(package)
        paths = [*(spec.submodule_search_locations or ()), spec.origin] if spec is not None else []
        if not any(path and os.path.dirname(os.path.realpath(path)) == HOME for path in paths):
            return f"{package} is imported from {paths[0] if paths else 'nowhere'}, not from {HOME}"
    return None


def shared_package() -> str | None:
    """Return an error for the first package whose folder contains files of another distribution; None: none."""
    from importlib.metadata import distributions  # noqa: PLC0415 - every command starts here

    written = {distribution.name: _written_by(distribution) for distribution in distributions(path=[HOME])}
    for package in PACKAGES:
        owners = sorted(owner for owner, names in written.items() if package in names and owner != "kvtape")
        if owners:
            return f"{package} is also a package of {', '.join(owners)}, in the same folder"
    return None


def _written_by(distribution: "Distribution") -> set[str]:
    """Return the top-level names of a distribution; reads its file list as text, because ``files`` takes a second."""
    files = distribution.read_text("RECORD") or distribution.read_text("top_level.txt") or ""
    return {line.partition("/")[0] for line in files.splitlines()}


def command() -> NoReturn:
    """Run the command of the script's name."""
    program = os.path.basename(os.path.realpath(sys.argv[0])).removesuffix(".exe")  # a link may have another name
    foreign = foreign_package()
    if foreign is not None:
        print(f"{program}: error: {foreign}; {FIX}", file=sys.stderr)
        sys.exit(2)
    from kvtape.__main__ import command as run_program  # noqa: PLC0415 - it imports the rooms

    run_program(program)
