"""Argument parser of all commands: an error is one line that suggests the nearest valid word, and exit code 2."""

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from tracefile.commandline.configfile import CONFIG, config_words
from tracefile.commandline.durations import duration, seconds

VERSION: Final = "0.1.0"
REMOVED: Final = Path(__file__).with_name("removed.toml")


def removed(kind: Literal["commands", "flags"]) -> Mapping[str, Any]:
    """Return the replacements of removed commands, or of removed flags by command."""
    table: Mapping[str, Any] = tomllib.loads(REMOVED.read_text(encoding="utf-8"))[kind]
    return table


def same_named(kind: type, source: object) -> dict[str, Any]:
    """Return the fields of ``kind`` that ``source`` (parsed flags or settings) also has."""
    return {name: getattr(source, name) for name in kind.__annotations__ if hasattr(source, name)}


def seed(text: str) -> int:
    """Parse a random seed, as the ``type`` of a flag; raises ArgumentTypeError."""
    number = int(text) if text.isdecimal() else -1
    if not 0 <= number <= MAX_INTEGER:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number from 0 to {MAX_INTEGER}")
    return number


class _Help(argparse.HelpFormatter):
    """Help with the default of every flag that has a value; lines of examples are not joined."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return _METAVARS.get(action.type) or super()._get_default_metavar_for_optional(action)

    def _get_default_metavar_for_positional(self, action: argparse.Action) -> str:
        return action.dest.upper()

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.nargs == 0 or not action.option_strings or _HAS_DEFAULT.search(text):
            return text
        return f"{text[:-1]}; {_default(action)})" if text.endswith(")") else f"{text} ({_default(action)})"


def _default(action: argparse.Action) -> str:
    value = action.default
    if action.required:
        return "required"
    if value in (None, argparse.SUPPRESS, []):
        return "default: none"
    return f"default {value:g}" if isinstance(value, float) else f"default {value}".replace("%", "%%")


_METAVARS: Final[Mapping[Any, str]] = {int: "N", seed: "N", float: "X", duration: "TIME", seconds: "TIME", Path: "FILE"}
_HAS_DEFAULT: Final = re.compile(r"\bdefault\b|\brequired\b")
_NEGATIVE_NUMBER: Final = re.compile(r"-\.?\d")
"""Start of a negative value, such as ``-1s``: no flag begins with a digit."""
MAX_INTEGER: Final = 2**63 - 1
"""Largest integer of a flag: arrays, files and clocks are 64-bit."""
_TYPE_NAMES: Final = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """Parser without abbreviations and with one-line errors; ``commands`` are handled before flags are parsed."""

    def __init__(
        self,
        prog: str | None = None,
        *,
        description: str | None = None,
        epilog: str | None = None,
        commands: Iterable[str] = (),
        **newer: Any,  # arguments that newer versions of argparse pass to subparsers: color in 3.14
    ) -> None:
        super().__init__(
            prog, description=description, epilog=epilog, formatter_class=_Help, allow_abbrev=False, **newer
        )
        self._handled_before = tuple(commands)
        self.config_only: dict[str, str] = {}
        """Help texts, by flag, of settings that only a ``--config`` file can set."""
        self.add_argument("--version", action="version", version=f"kvtape {VERSION}", help="print the version and exit")
        self._negative_number_matcher = _NEGATIVE_NUMBER  # argparse's pattern accepts no units
        self._config = self.add_argument(
            CONFIG,
            type=Path,
            default=argparse.SUPPRESS,
            metavar="FILE",
            help="TOML file with flags in a table per command, such as [sim.run]; command-line flags override it",
        )

    def add_setting(self, flag: str, **settings: Any) -> None:
        """Add a setting that only a ``--config`` file can set; hidden from the help."""
        action = self.add_argument(flag, **settings)
        self.config_only[flag] = self._get_formatter()._expand_help(action)
        action.help = argparse.SUPPRESS

    def add_subparsers(self, **settings: Any) -> Any:
        """Add subcommands; each subcommand has a ``--config`` flag instead of the parser."""
        self._optionals._remove_action(self._config)
        del self._option_string_actions[CONFIG]
        return super().add_subparsers(**settings)

    def parse_known_args(  # type: ignore[override]  # argparse overloads it by the type of the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse all of ``args``; unlike argparse, unknown arguments of a subcommand are an error."""
        words = list(sys.argv[1:] if args is None else args)
        self._check_words(words)
        words = self.configured(words)
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(_unexpected(unknown[0], words))
        return parsed, []

    def configured(self, words: list[str]) -> list[str]:
        """Replace ``--config FILE`` by the arguments in the file, before all others."""
        if CONFIG not in self._option_string_actions or not any(word.startswith(CONFIG) for word in words):
            return words
        only = argparse.ArgumentParser(self.prog, add_help=False, allow_abbrev=False)
        only.add_argument(CONFIG, type=Path, nargs="?")
        parsed, remaining = only.parse_known_args(words)
        if parsed.config is None:
            return words
        return [*config_words(parsed.config, self.prog, self._option_string_actions), *remaining]

    def hide_flags(self) -> None:
        """Hide the flags added so far from the help; a later flag of the same name replaces its hidden flag."""
        for group in self._action_groups:
            group.description = None
        for action in self._actions:
            if action.dest not in {"help", "version"}:
                action.help = argparse.SUPPRESS
        self.conflict_handler = "resolve"

    def error(self, message: str) -> NoReturn:
        text = re.sub(r"^argument (\S+): ", r"\1: ", message)
        text = re.sub(
            r"invalid (\w+) value: (.*)",
            lambda match: f"{match[2]}; expected {_TYPE_NAMES.get(match[1], match[1])}",
            text,
        )
        text = text.replace("the following arguments are required: ", "missing: ")
        hint = "" if _HINTED.search(text) else f"; see {self.prog} --help"
        self.exit(2, f"{self.prog}: error: {text}{hint}\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        value = super()._get_value(action, arg_string)
        if action.type is int and abs(value) > MAX_INTEGER:
            raise argparse.ArgumentError(action, f"{arg_string!r}; expected at most {MAX_INTEGER}")
        return value

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = ", ".join(map(str, action.choices))
        near = get_close_matches(str(value), [str(choice) for choice in action.choices], 1)
        nearest = f"; did you mean {near[0]}?" if near else ""
        raise argparse.ArgumentError(action, f"{value!r}; expected one of {choices}{nearest}")

    def _check_words(self, words: Sequence[str]) -> None:
        """Report an unknown flag or subcommand before argparse reports missing arguments."""
        subcommands = self._subcommands()
        if self._handled_before and words and not _is_flag(words[0]):
            self.error(self._unknown_command(words[0], self._handled_before))
        for word in words:
            if word == "--":
                return
            if _is_flag(word):
                self._check_flag(word.partition("=")[0])
            elif subcommands:
                if word not in subcommands:
                    self.error(self._unknown_command(word, subcommands))
                return

    def _check_flag(self, flag: str) -> None:
        known = self._option_string_actions
        if flag in self.config_only:
            self.error(f"{flag}: expected {flag[2:]} in table [{self.prog.replace(' ', '.')}] of a {CONFIG} file")
        if flag in known or (not flag.startswith("--") and flag[:2] in known):
            return
        if (replacement := removed("flags").get(self.prog, {}).get(flag)) is not None:
            self.error(f"{flag}: {replacement}")
        near = get_close_matches(flag, known, 1)
        self.error(f"{flag}: no such flag" + (f"; did you mean {near[0]}?" if near else ""))

    def _unknown_command(self, word: str, commands: Sequence[str]) -> str:
        if (replacement := removed("commands").get(f"{self.prog} {word}")) is not None:
            return f"{self.prog} {word} is now {replacement}"
        near = get_close_matches(word, commands, 1)
        return f"{word}: no such command; " + (
            f"did you mean {near[0]}?" if near else f"expected one of {', '.join(commands)}"
        )

    def _subcommands(self) -> list[str]:
        groups = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return [name for choices in groups for name in choices]


_HINTED: Final = re.compile(r" is now |did you mean|expected|missing a value")


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and " " not in word and not _NEGATIVE_NUMBER.match(word)


def _unexpected(word: str, words: Sequence[str]) -> str:
    at = words.index(word) if word in words else 0
    if at and words[at - 1] == "--json":
        return f"--json takes no file, its object goes to stdout; expected --json > {word}"
    return f"{word!r}: one argument too many"
