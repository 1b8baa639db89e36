"""``python -m scripts.commands_page``: write docs/commands.md from the help of all commands."""

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from kvtape.completion import commands, parser_of
from tracefile.commandline.parser import Parser

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"
MANY = 2
"""A flag with the same meaning in at least this many commands is described once."""
HEAD = """# Commands and their flags

After this page you know every flag of every command. `python -m scripts.commands_page` generates it from their help.

```sh
kvtape sim curve --help     # the same as: sim curve --help
kvtape --version
```

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | a gate failed, or no request or file succeeded |
| 2 | bad input: one line names the file, line, flag or field, and the expectation |
| 3 | a gate is too uncertain |
| 130 | Ctrl-C; finished work is saved |

A trace is overwritten only with `--overwrite`. A `TRACE` may also be a trace in segments: its folder, its manifest
(`NAME.segments.json`), or the name given to the tap; `-` is stdin. Durations need a unit: `250ms`, `30s`, `5m`,
`1.5h`. Thresholds of gates and searches: [metrics.md](metrics.md#gates). `--json` prints one object on stdout;
all other output goes to stderr.
"""


def flags_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings and action.dest not in ("help", "version")]


def shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the flags in the help: hidden flags of another command are omitted."""
    return [action for action in flags_of(parser) if action.help != argparse.SUPPRESS]


def help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the help of a flag, with flags formatted as code."""
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return re.sub(r"(?<![\w`-])--[a-z][\w-]*", lambda match: f"`{match[0]}`", text)


def row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    metavar = formatter._get_default_metavar_for_optional(action)
    value = "" if action.nargs == 0 else f" {formatter._format_args(action, metavar)}"
    invocation = f"{', '.join(action.option_strings)}{value}".replace("|", "\\|")
    return f"| `{invocation}` | {help_of(parser, action).replace('|', chr(92) + '|')} |"


def examples_of(parser: argparse.ArgumentParser) -> str:
    """Return the lines of the help after ``examples:``."""
    return (parser.epilog or "").rpartition("examples:\n")[2]


def name_of(line: str) -> str:
    return line.split("`")[1].split(maxsplit=1)[0].rstrip(",")


def spans(lines: Sequence[str], table: Sequence[str]) -> list[str]:
    """Return the names of table rows; more than three consecutive rows as first to last."""
    names: list[str] = []
    for _, run in groupby(enumerate(lines), key=lambda numbered: table.index(numbered[1]) - numbered[0]):
        flags = [f"`{name_of(line)}`" for _, line in run]
        names += flags if len(flags) <= 3 else [f"{flags[0]} to {flags[-1]}"]
    return names


def section(command: str, parser: argparse.ArgumentParser, shared: Sequence[str]) -> str:
    rows = [row(parser, action) for action in shown(parser)]
    lines = [f"## `{command}`", ""]
    if parser.description:
        text = " ".join(parser.description.split()).replace("``", "`").rstrip(".?")
        lines += [f"{text[0].upper()}{text[1:]}.", ""]
    lines += ["```sh", *(line.strip() for line in examples_of(parser).splitlines()), "```", ""]
    positionals = [action for action in parser._actions if not action.option_strings]
    lines += [f"- `{action.metavar or action.dest.upper()}`: {help_of(parser, action)}" for action in positionals]
    lines += [""] if positionals else []
    unshared = [line for line in rows if line not in shared]
    if unshared:
        lines += ["| flag | meaning |", "|---|---|", *unshared, ""]
    if isinstance(parser, Parser) and parser.config_only:
        lines += [
            f"In `[{parser.prog.replace(' ', '.')}]` of a `--config` file only:",
            "",
            "| setting | meaning |",
            "|---|---|",
        ]
        lines += [f"| `{flag[2:]}` | {text.replace('|', chr(92) + '|')} |" for flag, text in parser.config_only.items()]
        lines += [""]
    names = spans([line for line in shared if line in rows], shared)
    if names:
        lines += [f"[Shared](#shared-flags): {', '.join(names)}.", ""]
    return "\n".join(lines)


def page() -> str:
    parsers = {command: parser_of(command) for command in commands()}
    counts = Counter(line for parser in parsers.values() for line in {row(parser, action) for action in shown(parser)})
    every = dict.fromkeys(row(parser, action) for parser in parsers.values() for action in shown(parser))
    common = {name_of(line): line for line in sorted(every, key=lambda line: counts[line])}
    shared = [line for line in every if counts[line] >= MANY and common[name_of(line)] == line]
    sections = [section(command, parser, shared) for command, parser in parsers.items()]
    table = "\n".join(["## Shared flags", "", "| flag | meaning |", "|---|---|", *shared])
    return f"{HEAD}\n{''.join(text + chr(10) for text in sections)}{table}\n"


if __name__ == "__main__":
    PAGE.write_text(page())
