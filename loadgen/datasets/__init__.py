"""Datasets for loads: one module and one function for each format."""

from loadgen.datasets.aiperf import read_aiperf
from loadgen.datasets.openaimessages import read_messages
from loadgen.datasets.session import Dataset
from loadgen.datasets.sharegpt import read_sharegpt
from loadgen.datasets.swesmith import read_swe_smith
from loadgen.datasets.traces import read_trace
from loadgen.datasets.trie import read_trie

DATASETS: dict[str, Dataset] = {
    "sharegpt": Dataset(read_sharegpt, has_texts=True),
    "messages": Dataset(read_messages, has_texts=True, has_tools=True),
    "swe-smith": Dataset(read_swe_smith, has_texts=True, has_tools=True, cuts_turns=True),
    "aiperf": Dataset(read_aiperf, has_texts=True),
    "trie": Dataset(read_trie, has_texts=False, has_tools=True),
    "mooncake": Dataset(read_trace("mooncake", "aiperf-mooncake"), has_texts=False),
    "bailian": Dataset(read_trace("bailian"), has_texts=False),
    "burstgpt": Dataset(read_trace("burstgpt"), has_texts=False),
    "azure": Dataset(read_trace("azure"), has_texts=False),
    "trace": Dataset(read_trace(), has_texts=False),
}
"""Every dataset that is a file, by the name that ``--dataset NAME:PATH`` calls it."""

__all__ = ["DATASETS", "Dataset"]
