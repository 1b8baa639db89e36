"""``kvtape init``: a TOML file with the flags of all commands for an engine, found at the default ports."""

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from engines import control, readiness
from engines.access import DEFAULT_PORTS, OPENAI_KEY, Access, read_access
from tracefile.commandline.printing import printable
from tracefile.records.errors import InputError

LOOK_S: Final = 2.0
TAP_PORT: Final = 8001
FORECASTS: Final = ("run", "what-if", "sweep", "search", "validate")


def run(flags: argparse.Namespace) -> int:
    """Find the engine, write the configuration file, and print the next commands."""
    # Without --url, default ports are tried, where any program may listen: send no key to them.
    is_explicit = flags.url is not None or flags.api_key_env is not None
    environ = {name: value for name, value in os.environ.items() if is_explicit or name != OPENAI_KEY}
    access = read_access(flags, url=flags.url, environ=environ)
    url, model = (flags.url, _model(flags.url, access)) if flags.url is not None else _find_engine(access)
    engine, notes = _describe(url, model, access)
    text = config_text(url, model, engine, access_flags(flags))
    try:
        with flags.output.open("w" if flags.overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InputError(f"{flags.output}: exists; expected --overwrite or another -o/--output") from None
    except OSError as error:
        raise InputError(f"{flags.output}: {error.strerror or error}; expected a file to write") from None
    for line in (f"written: {flags.output}, for {engine}", *notes, "next:", *_next(flags.output)):
        print(printable(line))
    return 0


def access_flags(flags: argparse.Namespace) -> dict[str, object]:
    """Return the given flags for keys and TLS: paths and names of variables, no secrets."""
    names = ("api_key_env", "header_env", "header", "ca", "cert", "key")
    return {name.replace("_", "-"): value for name in names if (value := getattr(flags, name))}


def config_text(url: str, model: str, engine: str, access: Mapping[str, object]) -> str:
    """Return the configuration file: a table per command."""
    tls = ("ca", "cert", "key")
    tables: dict[str, Mapping[str, object]] = {
        "tap": {
            "upstream": url,
            "listen": f"127.0.0.1:{TAP_PORT}",
            "output": "captured.jsonl.zst",
            "inject": "auto",
            **access,
        },
        # Through the tap, so that the load is captured; the tap serves plain HTTP.
        "loadgen": {
            "url": f"http://127.0.0.1:{TAP_PORT}",
            "model": model,
            **{name: value for name, value in access.items() if name not in tls},
        },
        "replay": {"url": url, "model": model, **access},
        "sim.calibrate": {"output": "model.json"},
        **{f"sim.{name}": {"latency-model": "model.json"} for name in FORECASTS},
        "kvtape.doctor": {"url": url, "listen": f"127.0.0.1:{TAP_PORT}", **access},
    }
    lines = [
        f"# Flags for {engine}",
        "# Each command reads its table: tap --config FILE. Command-line flags override it.",
    ]
    for name, values in tables.items():
        # A JSON string without escapes, or a list of such strings, is valid TOML.
        lines += [
            "",
            f"[{name}]",
            *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()),
        ]
    return "\n".join(lines) + "\n"


def _next(file: Path) -> list[str]:
    return [
        f"  kvtape doctor --config {file}       # check this machine and the engine",
        f"  tap --config {file}                 # base URL for clients: http://127.0.0.1:{TAP_PORT}",
        f"  loadgen --config {file} --number 50 # or synthetic load",
        "  tracefile info captured.jsonl.zst",
    ]


def _find_engine(access: Access) -> tuple[str, str]:
    for port in DEFAULT_PORTS:
        url = f"http://127.0.0.1:{port}"
        try:
            return url, _model(url, access)
        except InputError:
            continue
    raise InputError(f"no engine at 127.0.0.1, ports {', '.join(map(str, DEFAULT_PORTS))}; expected --url URL")


def _model(url: str, access: Access) -> str:
    with control.ControlClient(url, access, timeout_s=LOOK_S) as client:
        return client.resolve_model("auto")


def _describe(url: str, model: str, access: Access) -> tuple[str, list[str]]:
    with control.ControlClient(url, access) as client:
        target = readiness.inspect_engine(client, model)
    return ", ".join(target.words()), target.notes()
