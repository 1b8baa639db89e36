"""``python -m scripts.commands_page``: write docs/commands.md from the commands' own help."""

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
"""A flag with the same meaning in so many commands is described once."""
HEAD = """# Commands and their flags

After this page you know every flag of every command. `python -m scripts.commands_page` makes it of the commands' help.

```sh
kvtape sim curve --help     # the same as: sim curve --help
kvtape --version
```

| exit code | means |
|---|---|
| 0 | the work is done |
| 1 | a gate failed, or no request or file succeeded |
| 2 | bad input: one line names the file, line, flag or field, and what to use instead |
| 130 | Ctrl-C; finished work is saved |

A trace is never overwritten without `--overwrite`. A `TRACE` may also be a trace in segments: its folder, its manifest
(`NAME.segments.json`), or the name given to the tap; `-` is stdin. Durations take a unit: `250ms`, `30s`, `5m`,
`1.5h`. Thresholds of gates and searches: [metrics.md](metrics.md#gates). `--json` prints one object on stdout;
everything else goes to stderr.
"""


def flags_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Actions of a parser that are flags, without those that every command has."""
    return [action for action in parser._actions if action.option_strings and action.dest not in ("help", "version")]


def shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Flags of the help: a command that takes another's flags shows its own."""
    return [action for action in flags_of(parser) if action.help != argparse.SUPPRESS]


def help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """A flag's help, with the flags in it as code."""
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return re.sub(r"(?<![\w`-])--[a-z][\w-]*", lambda found: f"`{found[0]}`", text)


def row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """A flag's row of the table."""
    shape = parser._get_formatter()
    usual = shape._get_default_metavar_for_optional(action)
    value = "" if action.nargs == 0 else f" {shape._format_args(action, usual)}"
    invocation = f"{', '.join(action.option_strings)}{value}".replace("|", "\\|")
    return f"| `{invocation}` | {help_of(parser, action).replace('|', chr(92) + '|')} |"


def examples_of(parser: argparse.ArgumentParser) -> str:
    """Lines of the help after its last heading, ``examples:``."""
    return (parser.epilog or "").rpartition("examples:\n")[2]


def name_of(line: str) -> str:
    """The flag of a row: the first of its names."""
    return line.split("`")[1].split(maxsplit=1)[0].rstrip(",")


def spans(lines: Sequence[str], table: Sequence[str]) -> list[str]:
    """Names of a table's rows in its order; more than three in a row are the first to the last."""
    names: list[str] = []
    for _, run in groupby(enumerate(lines), key=lambda numbered: table.index(numbered[1]) - numbered[0]):
        flags = [f"`{name_of(line)}`" for _, line in run]
        names += flags if len(flags) <= 3 else [f"{flags[0]} to {flags[-1]}"]
    return names


def section(command: str, parser: argparse.ArgumentParser, shared: Sequence[str]) -> str:
    """A command's part of the page."""
    rows = [row(parser, action) for action in shown(parser)]
    lines = [f"## `{command}`", ""]
    if parser.description:
        text = " ".join(parser.description.split()).replace("``", "`").rstrip(".?")
        lines += [f"{text[0].upper()}{text[1:]}.", ""]
    lines += ["```sh", *(line.strip() for line in examples_of(parser).splitlines()), "```", ""]
    takes = [action for action in parser._actions if not action.option_strings]
    lines += [f"- `{action.metavar or action.dest.upper()}`: {help_of(parser, action)}" for action in takes]
    lines += [""] if takes else []
    own = [line for line in rows if line not in shared]
    if own:
        lines += ["| flag | meaning |", "|---|---|", *own, ""]
    if isinstance(parser, Parser) and parser.config_only:
        lines += [
            f"In `[{parser.prog.replace(' ', '.')}]` of a `--config` file alone:",
            "",
            "| setting | meaning |",
            "|---|---|",
        ]
        lines += [f"| `{flag[2:]}` | {text.replace('|', chr(92) + '|')} |" for flag, text in parser.config_only.items()]
        lines += [""]
    others = spans([line for line in shared if line in rows], shared)
    if others:
        lines += [f"[Shared](#shared-flags): {', '.join(others)}.", ""]
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    parsers = {command: parser_of(command) for command in commands()}
    counts = Counter(line for parser in parsers.values() for line in {row(parser, one) for one in shown(parser)})
    every = dict.fromkeys(row(parser, action) for parser in parsers.values() for action in shown(parser))
    common = {name_of(line): line for line in sorted(every, key=lambda line: counts[line])}
    shared = [line for line in every if counts[line] >= MANY and common[name_of(line)] == line]
    sections = [section(command, parser, shared) for command, parser in parsers.items()]
    table = "\n".join(["## Shared flags", "", "| flag | meaning |", "|---|---|", *shared])
    return f"{HEAD}\n{''.join(text + chr(10) for text in sections)}{table}\n"


if __name__ == "__main__":
    PAGE.write_text(page())
