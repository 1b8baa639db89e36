"""Exit codes of every command: 0 done, 1 a gate failed, 2 bad input in one line, 130 interrupted."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from tracefile.records.errors import InputError


def run_command(name: str, main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> NoReturn:
    """Call ``main`` with ``argv``, by default the command line, and exit with its code; InputError: one line and 2."""
    try:
        code = main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except InputError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader of our output (head, less) went away: nothing is wrong, and nothing more can be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
