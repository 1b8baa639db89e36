"""Packages from a folder of wheels, for a machine without a network. Imports nothing but the standard library.

They are installed into a folder of their own, which comes before this Python's packages: its torch and CUDA stay in
use. A wheel may lie there in pieces, ``NAME.whl.00``, ``NAME.whl.01``, …, as ``split -d`` makes them.
"""

import importlib
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

SITE = Path.home() / ".cache" / "kvtape" / "wheels"


def install_wheels(wheels: Path, site: Path = SITE) -> None:
    """Install every wheel of a folder, without looking for what they need; this process and its children see them."""
    files = whole_wheels(wheels, site.with_name(f"{site.name}-joined"))
    if not files:
        sys.exit(f"--wheels {wheels}: no wheel; expected *.whl, or pieces named *.whl.00, *.whl.01, …")
    done, names = site / "ready", "\n".join(file.name for file in files)
    if not done.exists() or done.read_text() != names:
        print(f"Installing {len(files)} wheels into {site} (once) ...", flush=True)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--quiet",
            "install",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--upgrade",
        ]
        subprocess.run([*pip, "--target", site, *files], check=True)
        done.write_text(names)
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))


def whole_wheels(folder: Path, joined: Path) -> list[Path]:
    """Wheels of a folder by name; those in pieces are put together in ``joined``."""
    pieces = sorted(path for path in folder.glob("*.whl.*") if path.suffix[1:].isdigit())
    found = list(folder.glob("*.whl"))
    for name, parts in groupby(pieces, key=lambda path: path.stem):
        whole, every = joined / name, list(parts)
        if not whole.exists() or whole.stat().st_size != sum(part.stat().st_size for part in every):
            joined.mkdir(parents=True, exist_ok=True)
            with whole.open("wb") as file:
                for part in every:
                    file.write(part.read_bytes())
        found.append(whole)
    return sorted(found, key=lambda path: path.name)
