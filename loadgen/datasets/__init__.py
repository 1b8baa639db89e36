"""Datasets for loads: one module and one function for each format."""

from pathlib import Path

from loadgen.datasets.aiperf import read_aiperf
from loadgen.datasets.openaimessages import read_messages
from loadgen.datasets.session import Dataset
from loadgen.datasets.sharegpt import read_sharegpt
from loadgen.datasets.swesmith import read_swe_smith
from loadgen.datasets.traces import read_trace, read_trie
from tracefile import InputError

SHIPPED = ("agentic-coding", "code-qa", "office-work")
"""Look-alikes of the workloads in an article on agents: its means and tails, none of its data."""


def shipped_path(name: str) -> Path:
    return Path(__file__).parent / "workloads" / f"{name}.jsonl.zst"


RANDOM = "random"
"""Sessions drawn by the flags alone, from no file."""

DATASETS: dict[str, Dataset] = {
    "sharegpt": Dataset(read_sharegpt, has_texts=True),
    "messages": Dataset(read_messages, has_texts=True, has_tools=True),
    "swe-smith": Dataset(read_swe_smith, has_texts=True, has_tools=True, cuts_turns=True),
    "aiperf": Dataset(read_aiperf, has_texts=True),
    "trie": Dataset(read_trie, has_texts=False, has_tools=True),
    "mooncake": Dataset(read_trace("mooncake"), has_texts=False),
    "bailian": Dataset(read_trace("bailian"), has_texts=False),
    "trace": Dataset(read_trace(), has_texts=False),
}
"""Every dataset that is a file, by the name that ``--dataset NAME:PATH`` calls it."""


def parse_dataset(text: str) -> tuple[str, Path | None]:
    """Return a dataset's name and file, of ``NAME:PATH``; raises InputError."""
    name, _, path = text.partition(":")
    if name == RANDOM and not path:
        return RANDOM, None
    if name not in DATASETS:
        raise InputError(f"--dataset: {text!r}; expected {RANDOM}, or NAME:PATH with NAME one of {', '.join(DATASETS)}")
    if not path:
        raise InputError(f"--dataset: {name} without a file; expected {name}:PATH")
    if name == "trie" and path in SHIPPED:
        return name, shipped_path(path)
    if not Path(path).exists():
        raise InputError(f"--dataset: {path}: not there; expected a file of sessions")
    return name, Path(path)


__all__ = ["DATASETS", "RANDOM", "Dataset", "parse_dataset"]
