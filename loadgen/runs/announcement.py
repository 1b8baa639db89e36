"""Line of a run's beginning: everything that was resolved, and what spoils the run, before anything is sent."""

import sys
from collections.abc import Iterable

from loadgen.core.runflags import STDERR, RunFlags


def announce(command: str, words: Iterable[str], notes: Iterable[str], run: RunFlags) -> None:
    """Print both on stderr, unless it is for the JSON of ``--json-progress``."""
    if run.json_progress == STDERR:
        return
    print(f"{command}: {' · '.join(words)}", file=sys.stderr)
    for note in notes:
        print(f"{command}: note: {note}", file=sys.stderr, flush=True)


def tokenizer_words(tokenizer: str | None, unknown: str | None) -> str:
    """Return the part on the prompts' tokens; ``unknown``: reason why no tokenizer proves their lengths."""
    if tokenizer is None:
        return f"prompts of text, lengths unproven ({unknown})"
    return "prompts of token ids" if tokenizer == "ids" else f"tokenizer {tokenizer}"
