"""Check of every prompt against its plan, in the target's tokens, as the engine reports them.

Two prompts share exactly their intended prefix if each is, token by token, the template and the planned words.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import msgspec
import numpy as np

from loadgen.core.draws import TokenIds
from tracefile.records.schema import Record

IDS = "ids"
"""Tokenizer name of token-id prompts; no tokenizer is asked."""
DATASET_TEXTS = "a dataset's texts: what they share is theirs"
"""Reason to check nothing of a dataset's texts."""
FINDINGS = "prompt_check."


@dataclass(slots=True)
class PromptTokenCounts:
    """Counts over requests that ended well and whose length the engine reported."""

    planned: int = 0
    unplanned: int = 0
    exact: int = 0
    """Planned prompts that were as long as planned."""
    off_tokens: int = 0
    """Tokens more, less or different in the other planned prompts; changed outputs are not counted."""
    ids_reported: int = 0
    """Planned prompts with token ids from the engine."""
    ids_exact: int = 0
    """Of these, prompts with exactly the planned ids."""
    outputs: int = 0
    """Outputs that a later prompt carried as text, and that could be compared."""
    outputs_changed: int = 0
    """Of these, outputs encoded as other tokens than were generated."""
    shared_tokens: int = 0
    """Tokens repeated from the turn before (prompt and output), in full blocks."""
    shared_cached: int = 0
    """Of these, tokens cached by the engine."""

    def check_prompt(self, planned: int | None, record: Record, *, after_output: bool) -> int:
        """Return how many tokens the prompt is longer than planned."""
        if record.status != "ok" or record.tokens_source != "usage" or record.prompt_tokens is None:
            return 0
        if planned is None:
            self.unplanned += 1
            return 0
        self.planned += 1
        longer = record.prompt_tokens - planned
        self.exact += longer == 0
        if not after_output:
            self.off_tokens += abs(longer)
        return longer

    def check_ids(self, planned: TokenIds | None, reported: TokenIds, *, after_output: bool) -> bool:
        """Return whether the tokens are known to differ from the plan."""
        if planned is None:
            return False
        exact = np.array_equal(planned, reported)
        self.ids_reported += 1
        self.ids_exact += exact
        if not after_output and len(planned) == len(reported):  # a difference in length has been counted
            self.off_tokens += int(np.count_nonzero(planned != reported))
        return not exact

    def check_cached(self, shared: int, block_size: int, record: Record) -> None:
        if record.status == "ok" and record.cached_tokens is not None:
            full = shared // block_size * block_size
            self.shared_tokens += full
            self.shared_cached += min(full, record.cached_tokens)

    def findings(self) -> dict[str, int]:
        return {FINDINGS + name: count for name, count in asdict(self).items()}


def prompt_token_counts(findings: Mapping[str, int]) -> PromptTokenCounts:
    counts = {name.removeprefix(FINDINGS): count for name, count in findings.items() if name.startswith(FINDINGS)}
    return PromptTokenCounts(**counts)


class PromptTokenReport(msgspec.Struct, frozen=True):
    """For the summary."""

    verdict: str
    """``exact``, ``off …``, ``as given …`` or ``not known …``."""
    tokenizer: str | None
    """``ids``: token ids were sent. Null: none was asked."""
    counts: PromptTokenCounts


def report_check(tokenizer: str | None, unknown: str | None, findings: Mapping[str, int]) -> PromptTokenReport:
    """``unknown``: reason why no tokenizer proves the prompts' lengths; null: one does."""
    counts = prompt_token_counts(findings)
    return PromptTokenReport(_verdict(tokenizer, unknown, counts), tokenizer, counts)


def check_lines(report: PromptTokenReport) -> list[str]:
    lines, counts = [f"prompt tokens       {report.verdict}"], report.counts
    if counts.outputs:
        survived = counts.outputs - counts.outputs_changed
        lines.append(f"outputs as text     {survived} of {counts.outputs} came back as the tokens that were generated")
    if counts.shared_tokens:
        share = counts.shared_cached / counts.shared_tokens
        lines.append(f"context             {share:.1%} of the {counts.shared_tokens} tokens of turns before was cached")
    return lines


def check_notes(report: PromptTokenReport) -> list[str]:
    notes, counts = [], report.counts
    if report.verdict.startswith("off"):
        notes.append(f"prompt tokens {report.verdict}: how much prompts share is not what was asked for")
    elif report.verdict.startswith("not known"):
        notes.append(f"prompt tokens {report.verdict}: prompts may share more or less than was asked for")
    if counts.outputs_changed:
        notes.append(
            f"{counts.outputs_changed} answers of {counts.outputs} are other tokens as text than as generated: "
            "blocks that they filled cannot hit (--api completions sends them as generated)"
        )
    return notes


def _verdict(tokenizer: str | None, unknown: str | None, counts: PromptTokenCounts) -> str:
    by_engine = f"{counts.exact} of {counts.planned} by usage"
    if counts.ids_reported:
        by_engine = f"the engine reported the tokens of {counts.ids_reported}"
    elif not counts.planned:
        by_engine = "the engine reported no prompt's length"
    if unknown == DATASET_TEXTS:
        return f"as given ({DATASET_TEXTS}; {by_engine})"
    if unknown is not None:
        return f"not known ({unknown})"
    if counts.off_tokens:
        return f"off by {counts.off_tokens} tokens in all ({counts.exact} of {counts.planned} prompts by usage)"
    if tokenizer != IDS and not counts.planned:
        return f"not known ({by_engine})"
    return f"exact ({'token ids are sent; ' if tokenizer == IDS else ''}{by_engine})"
