"""Workloads that come with the package, by name: trie rows that ``scripts/lookalikes.py`` drew."""

from pathlib import Path

SHIPPED = ("agentic-coding", "code-qa", "office-work")
"""Look-alikes of the workloads in an article on agents: its means and tails, none of its data."""


def shipped_path(name: str) -> Path:
    """File of a shipped workload."""
    return Path(__file__).parent / "workloads" / f"{name}.jsonl.zst"
