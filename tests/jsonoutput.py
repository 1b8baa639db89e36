"""A command run in this process with ``--json``."""

import contextlib
import io
import json
from collections.abc import Callable, Sequence
from typing import Any


def json_of(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> Any:
    """The one object that a command prints on stdout; it must succeed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main([*argv, "--json"])
    assert code == 0
    return json.loads(printed.getvalue())
