"""Check of every prompt against its plan, in tokens of the target as the engine reports them.

Two prompts share exactly their intended prefix if each is, token by token, the template and the planned words.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import msgspec
import numpy as np

from loadgen.core.draws import TokenIds
from tracefile.records.schema import Record

IDS = "ids"
"""Tokenizer name of token-id prompts; no tokenizer is used."""
DATASET_TEXTS = "texts of a dataset"
"""Reason not to check prompt tokens of a dataset's texts."""
FINDINGS = "prompt_check."


@dataclass(slots=True)
class PromptTokenCounts:
    """Counts over successful requests whose prompt tokens the engine reported."""

    planned: int = 0
    unplanned: int = 0
    exact: int = 0
    """Planned prompts with the planned token count."""
    off_tokens: int = 0
    """Tokens more, less or different in other planned prompts; changed outputs are not counted."""
    ids_reported: int = 0
    """Planned prompts with token ids from the engine."""
    ids_exact: int = 0
    """Prompts among them with exactly the planned ids."""
    outputs: int = 0
    """Outputs that a later prompt repeated as text, and that could be compared."""
    outputs_changed: int = 0
    """Outputs among them with other tokens than were generated."""
    shared_tokens: int = 0
    """Tokens repeated from the previous turn (prompt and output), in full blocks."""
    shared_cached: int = 0
    """Tokens among them cached by the engine."""

    def check_prompt(self, planned: int | None, record: Record, *, after_output: bool) -> int:
        """Return by how many tokens the prompt is longer than planned."""
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
        if not after_output and len(planned) == len(reported):  # a difference in length is counted by check_prompt
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
    """Result of the prompt token check, for the summary."""

    verdict: str
    """``exact``, ``off …``, ``as given …`` or ``unknown …``."""
    tokenizer: str | None
    """``ids``: token ids were sent. Null: no tokenizer."""
    counts: PromptTokenCounts


def report_check(tokenizer: str | None, unknown: str | None, findings: Mapping[str, int]) -> PromptTokenReport:
    """``unknown``: reason why no tokenizer verifies the prompts' token counts; null: verified."""
    counts = prompt_token_counts(findings)
    return PromptTokenReport(_verdict(tokenizer, unknown, counts), tokenizer, counts)


def check_lines(report: PromptTokenReport) -> list[str]:
    lines, counts = [f"prompt tokens       {report.verdict}"], report.counts
    if counts.outputs:
        survived = counts.outputs - counts.outputs_changed
        lines.append(f"outputs as text     {survived} of {counts.outputs} re-encoded to the generated tokens")
    if counts.shared_tokens:
        share = counts.shared_cached / counts.shared_tokens
        lines.append(f"context             {share:.1%} of {counts.shared_tokens} tokens from previous turns cached")
    return lines


def check_notes(report: PromptTokenReport) -> list[str]:
    notes, counts = [], report.counts
    if report.verdict.startswith("off"):
        notes.append(f"prompt tokens {report.verdict}: shared prefixes differ from the plan; check --tokenizer")
    elif report.verdict.startswith("unknown"):
        notes.append(f"prompt tokens {report.verdict}: shared prefixes not verified; use --tokenizer PATH")
    if counts.outputs_changed:
        notes.append(
            f"{counts.outputs_changed} of {counts.outputs} outputs re-encoded to other tokens than generated: "
            "their blocks cannot hit (--api completions sends the generated tokens)"
        )
    return notes


def _verdict(tokenizer: str | None, unknown: str | None, counts: PromptTokenCounts) -> str:
    by_engine = f"{counts.exact} of {counts.planned} by usage"
    if counts.ids_reported:
        by_engine = f"the engine reported token ids of {counts.ids_reported}"
    elif not counts.planned:
        by_engine = "the engine reported no prompt tokens"
    if unknown == DATASET_TEXTS:
        return f"as given ({DATASET_TEXTS}; {by_engine})"
    if unknown is not None:
        return f"unknown ({unknown})"
    if counts.off_tokens:
        return f"off by {counts.off_tokens} tokens in total ({counts.exact} of {counts.planned} prompts by usage)"
    if tokenizer != IDS and not counts.planned:
        return f"unknown ({by_engine})"
    return f"exact ({'token ids are sent; ' if tokenizer == IDS else ''}{by_engine})"
