"""Lines of the tap's processes for the user."""

import sys


def say(text: str) -> None:
    """Print a line on stderr, at once: a process may be killed next."""
    print(f"tap: {text}", file=sys.stderr, flush=True)
