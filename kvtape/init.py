"""``kvtape init``: a TOML file with the flags of every command for an engine, found where engines usually listen."""

import argparse
import json
from pathlib import Path
from typing import Final

from engines.access import Access, add_access_arguments, read_access
from engines.control import ControlClient
from engines.readiness import readiness_notes, readiness_of, target_words
from engines.recognition import find_dialect
from tracefile.commandline.printing import printable
from tracefile.records.errors import InputError

EPILOG: Final = """\
examples:
  kvtape init
  kvtape init --url http://gpu-7:8000 -o gpu-7.toml && tap --config gpu-7.toml
"""
PORTS: Final = (8000, 30000, 8080, 11434, 1234)
"""Ports of vLLM and TensorRT-LLM, SGLang, llama.cpp and mlx_lm, Ollama, LM Studio."""
LOOK_S: Final = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``kvtape init``."""
    ports = ", ".join(map(str, PORTS))
    parser.add_argument("--url", metavar="URL", help=f"base URL of the engine (default: the first at ports {ports})")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("kvtape.toml"), metavar="FILE", help="file (default %(default)s)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    add_access_arguments(parser, "calls to the engine")


def run(flags: argparse.Namespace) -> int:
    """Find the engine, write the file, and print the next commands."""
    access = read_access(flags, url=flags.url)
    url, model = (flags.url, _model(flags.url, access)) if flags.url is not None else _found(access)
    told, notes = _look(url, model, access)
    text = config_text(url, model, told)
    try:
        with flags.output.open("w" if flags.overwrite else "x") as file:
            file.write(text)
    except FileExistsError:
        raise InputError(f"{flags.output}: exists; expected --overwrite or another -o/--output") from None
    except OSError as error:
        raise InputError(f"{flags.output}: {error.strerror or error}; expected a file to write") from None
    for line in (told, *notes, f"written: {flags.output}", *(f"  {step}" for step in _next(flags.output))):
        print(printable(line))
    return 0


def config_text(url: str, model: str, told: str) -> str:
    """Return the file: a table for each command that has settings of this engine."""
    engine, served = json.dumps(url), json.dumps(model)
    return f"""\
# Flags for {told}
# Each command reads its own table: tap --config FILE; flags of the command line come after these.

[tap]
upstream = {engine}
listen = "127.0.0.1:8001"
output = "captured.jsonl.zst"

[loadgen]  # through the tap, so that its load is captured
url = "http://127.0.0.1:8001"
model = {served}

[replay]
url = {engine}
model = {served}

[sim.run]
latency-model = "model.json"

[sim.what-if]
latency-model = "model.json"

[sim.validate]
latency-model = "model.json"
"""


def _next(file: Path) -> list[str]:
    return [
        f"tap --config {file}                 # your clients' base URL is now http://127.0.0.1:8001",
        f"loadgen --config {file} --number 50 # or a load, where there is no traffic",
        "tracefile info captured.jsonl.zst",
    ]


def _found(access: Access) -> tuple[str, str]:
    for port in PORTS:
        url = f"http://127.0.0.1:{port}"
        try:
            return url, _model(url, access)
        except InputError:
            continue
    raise InputError(f"no engine at 127.0.0.1, ports {', '.join(map(str, PORTS))}; expected --url URL")


def _model(url: str, access: Access) -> str:
    with ControlClient(url, access, timeout_s=LOOK_S) as control:
        return control.resolve_model("auto")


def _look(url: str, model: str, access: Access) -> tuple[str, list[str]]:
    with ControlClient(url, access) as control:
        found, facts = find_dialect(control, "auto"), control.facts()
        ready = readiness_of(control, found.dialect, facts)
    return ", ".join(target_words(url, model, facts, ready, found.evidence)), readiness_notes(ready)
