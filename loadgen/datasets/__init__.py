"""Datasets for loads: sessions from files."""

from pathlib import Path

from loadgen.datasets.conversations import read_messages, read_sharegpt
from loadgen.datasets.session import Dataset
from loadgen.datasets.traces import read_trace
from tracefile import InputError

RANDOM = "random"
"""Sessions drawn by the flags alone, from no file."""

DATASETS: dict[str, Dataset] = {
    "sharegpt": Dataset(read_sharegpt, has_texts=True),
    "messages": Dataset(read_messages, has_texts=True),
    "trace": Dataset(read_trace, has_texts=False),
}
"""Every dataset that is a file, by the name that ``--dataset NAME:PATH`` calls it."""
GONE = {
    **dict.fromkeys(("mooncake", "bailian", "trie"), "trace"),
    **dict.fromkeys(("swe-smith", "aiperf"), "messages"),
}


def parse_dataset(text: str) -> tuple[str, Path | None]:
    """Return a dataset's name and file, of ``NAME:PATH``; raises InputError."""
    name, _, path = text.partition(":")
    if name == RANDOM and not path:
        return RANDOM, None
    if name in GONE:
        raise InputError(f"--dataset: {name}: gone; expected {GONE[name]}:PATH, which reads sessions of more kinds")
    if name not in DATASETS:
        raise InputError(f"--dataset: {text!r}; expected {RANDOM}, or NAME:PATH with NAME one of {', '.join(DATASETS)}")
    if not path:
        raise InputError(f"--dataset: {name} without a file; expected {name}:PATH")
    if not Path(path).exists():
        raise InputError(f"--dataset: {path}: not there; expected a file of sessions")
    return name, Path(path)
