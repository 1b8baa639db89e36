"""Check of text prompts against their plan, in the target's tokens: a sample before the run, then every prompt.

Two prompts share exactly their intended prefix if each is, token by token, the template and the planned words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import msgspec
import numpy as np

from loadgen.core.draws import TokenIds
from tracefile import Record

IDS = "ids"
"""Tokenizer name of token-id prompts; no tokenizer is asked."""
GIVEN = "a dataset's texts: what they share is theirs"
"""Reason to prove nothing of a dataset's texts."""
FINDINGS = "prefix_truth."


@dataclass(slots=True)
class PrefixTruth:
    """Counts over requests that ended well and whose length the engine told."""

    planned: int = 0
    unplanned: int = 0
    exact: int = 0
    """Planned prompts that were as long as planned."""
    off_tokens: int = 0
    """Tokens more, less or different in the other planned prompts; changed outputs are not counted."""
    ids_told: int = 0
    """Planned prompts with token ids from the engine."""
    ids_exact: int = 0
    """Of these, prompts with exactly the planned ids."""
    outputs: int = 0
    """Outputs that a later prompt carried as text, and that could be compared."""
    outputs_changed: int = 0
    """Of these, outputs encoded as other tokens than were generated."""
    shared_tokens: int = 0
    """Tokens repeated from the turn before (prompt and output), in whole blocks."""
    shared_cached: int = 0
    """Of these, tokens cached by the engine."""

    def check_prompt(self, planned: int | None, record: Record, *, after_output: bool) -> int:
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

    def check_ids(self, planned: TokenIds | None, told: TokenIds, *, after_output: bool) -> bool:
        """Return whether the tokens are known to differ from the plan."""
        if planned is None:
            return False
        exact = np.array_equal(planned, told)
        self.ids_told += 1
        self.ids_exact += exact
        if not after_output and len(planned) == len(told):  # a difference in length has been counted
            self.off_tokens += int(np.count_nonzero(planned != told))
        return not exact

    def check_output(self, *, changed: bool) -> None:
        self.outputs += 1
        self.outputs_changed += changed

    def check_cached(self, shared: int, block_size: int, record: Record) -> None:
        if record.status == "ok" and record.cached_tokens is not None:
            whole = shared // block_size * block_size
            self.shared_tokens += whole
            self.shared_cached += min(whole, record.cached_tokens)

    def findings(self) -> dict[str, int]:
        return {FINDINGS + name: count for name, count in asdict(self).items()}


def truth_of(findings: Mapping[str, int]) -> PrefixTruth:
    found = {name.removeprefix(FINDINGS): count for name, count in findings.items() if name.startswith(FINDINGS)}
    return PrefixTruth(**found)


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """Result of encoding a sample of prompts with the target's tokenizer before the run."""

    tokenizer: str | None = None
    prompts: int = 0
    exact: int = 0
    """Prompts that are exactly the template and the planned words."""
    most_off: int = 0
    """Largest difference in length; 1 if only tokens differ."""
    template_tokens: int | None = None
    shared_planned: int | None = None
    """Planned shared tokens of two sampled sessions, with the template; null: no two."""
    shared_measured: int | None = None
    unknown: str | None = None
    """Reason for no examination; null: examined."""


class TruthReport(msgspec.Struct, frozen=True):
    """For the summary."""

    verdict: str
    """``exact``, ``off …`` or ``not known …``."""
    before: Examination
    counts: PrefixTruth


def examine(
    planned: Sequence[TokenIds | None],
    encoded: Sequence[TokenIds],
    pair: tuple[int, int] | None,
    *,
    tokenizer: str | None,
    template_tokens: int | None,
) -> Examination:
    """Compare prompts with the tokenizer's encoding; ``pair``: two that share a planned prefix."""
    off = [_distance(plan, real) for plan, real in zip(planned, encoded, strict=True)]
    shared_planned = shared_measured = None
    if pair is not None:
        first, second = pair
        plans = planned[first], planned[second]
        shared_measured = common_prefix(encoded[first], encoded[second])
        if plans[0] is not None and plans[1] is not None:
            shared_planned = common_prefix(plans[0], plans[1])
    return Examination(
        tokenizer=tokenizer,
        prompts=len(off),
        exact=sum(distance == 0 for distance in off),
        most_off=max(off, default=0),
        template_tokens=template_tokens,
        shared_planned=shared_planned,
        shared_measured=shared_measured,
    )


def common_prefix(first: TokenIds, second: TokenIds) -> int:
    size = min(len(first), len(second))
    different = np.flatnonzero(first[:size] != second[:size])
    return int(different[0]) if len(different) else size


def report_truth(before: Examination, counts: PrefixTruth) -> TruthReport:
    return TruthReport(_verdict(before, counts), before, counts)


def truth_lines(report: TruthReport) -> list[str]:
    lines = [f"prefix truth        {report.verdict}"]
    counts, before = report.counts, report.before
    if before.shared_measured is not None and before.prompts:
        planned = before.shared_planned
        lines.append(f"shared prefix       {before.shared_measured} tokens of two sampled prompts, {planned} planned")
    if counts.outputs:
        survived = counts.outputs - counts.outputs_changed
        lines.append(f"outputs as text     {survived} of {counts.outputs} came back as the tokens that were generated")
    if counts.shared_tokens:
        share = counts.shared_cached / counts.shared_tokens
        lines.append(f"context             {share:.1%} of the {counts.shared_tokens} tokens of turns before was cached")
    return lines


def truth_notes(report: TruthReport) -> list[str]:
    notes = []
    if report.verdict.startswith("off"):
        notes.append(f"prefix truth {report.verdict}: how much prompts share is not what was asked for")
    elif report.before.unknown is not None and report.before.unknown != GIVEN:
        notes.append(f"prefix truth {report.verdict}: prompts may share more or less than was asked for")
    counts = report.counts
    if counts.outputs_changed:
        notes.append(
            f"{counts.outputs_changed} answers of {counts.outputs} are other tokens as text than as generated: "
            "blocks that they filled cannot hit (--api completions --chat-template sends them as generated)"
        )
    return notes


def _verdict(before: Examination, counts: PrefixTruth) -> str:
    if before.tokenizer == IDS:
        return _verdict_of_ids(counts)
    if before.unknown == GIVEN:
        return f"as given ({GIVEN}; {_told(counts)})"
    if before.unknown is not None:
        return f"not known ({before.unknown})"
    sampled = f"{before.exact} of {before.prompts} sampled prompts by the tokenizer"
    if before.exact < before.prompts:
        return f"off by up to {before.most_off} tokens ({sampled})"
    if counts.off_tokens:
        return f"off by {counts.off_tokens} tokens in all ({sampled}; {counts.exact} of {counts.planned} by usage)"
    return f"exact ({sampled}; {_told(counts)})"


def _told(counts: PrefixTruth) -> str:
    if counts.ids_told:
        return f"the engine told the tokens of {counts.ids_told}"
    return f"{counts.exact} of {counts.planned} by usage" if counts.planned else "the engine told no prompt's length"


def _verdict_of_ids(counts: PrefixTruth) -> str:
    if counts.off_tokens:
        return f"off by {counts.off_tokens} tokens in all ({counts.exact} of {counts.planned} prompts by usage)"
    return f"exact (token ids are sent; {_told(counts)})"


def _distance(planned: TokenIds | None, real: TokenIds) -> int:
    if planned is None:
        return len(real)
    if np.array_equal(planned, real):
        return 0
    return max(1, abs(len(planned) - len(real)))
