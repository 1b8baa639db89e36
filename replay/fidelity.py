"""Fidelity of a replay to its capture: token counts and prefix hits, and the account of all requests."""

from collections.abc import Mapping

import msgspec

from measure.number_format import NOTHING_CACHED
from replay.capture import Captured
from replay.survey import Survey
from tracefile.records.errors import InputError
from tracefile.records.schema import Record

NOT_SENT = "not sent: "
"""Prefix of a reason among a shard's findings."""


class Fidelity(msgspec.Struct):
    """Counts over successful requests."""

    answered: int = 0
    prompt_exact: int = 0
    """Prompts with the recorded number of tokens, as counted by the engine."""
    output_exact: int = 0
    """Outputs with the number of tokens to generate."""
    cached_reported: int = 0
    cached_nonzero: int = 0
    """Requests with a prefix hit."""
    cached_compared: int = 0
    """Requests with cached tokens reported in capture and replay."""
    cached_exact: int = 0
    without_hashes: int = 0
    """Sent without prefix sharing: no block hashes in the capture."""
    without_ids: int = 0
    """Outputs with complete blocks that cannot be substituted: the engine returned no token ids."""
    substituted_blocks: int = 0
    missed_blocks: int = 0
    not_sent: dict[str, int] = {}

    def add(self, captured: Captured, record: Record) -> None:
        self.without_hashes += not captured.has_hashes
        if record.status != "ok":
            return
        self.answered += 1
        self.prompt_exact += record.prompt_tokens == captured.prompt_tokens
        self.output_exact += record.output_tokens == captured.output_tokens
        if record.cached_tokens is None:
            return
        self.cached_reported += 1
        self.cached_nonzero += record.cached_tokens > 0
        if captured.cached_tokens is not None:
            self.cached_compared += 1
            self.cached_exact += record.cached_tokens == captured.cached_tokens

    def leave(self, count: int, failure: str) -> None:
        if count:
            self.not_sent[failure] = self.not_sent.get(failure, 0) + count

    def findings(self) -> dict[str, int]:
        counts = {name: getattr(self, name) for name in self.__struct_fields__ if name != "not_sent"}
        return counts | {NOT_SENT + reason: count for reason, count in self.not_sent.items()}


def fidelity_of(findings: Mapping[str, int]) -> Fidelity:
    not_sent = {name.removeprefix(NOT_SENT): count for name, count in findings.items() if name.startswith(NOT_SENT)}
    counts = {name: count for name, count in findings.items() if name in Fidelity.__struct_fields__}
    return msgspec.convert(counts | {"not_sent": not_sent}, Fidelity)


def fidelity_lines(fidelity: Fidelity, *, cold: bool) -> list[str]:
    answered = fidelity.answered
    lines = [
        f"lengths as captured {fidelity.prompt_exact}/{answered} prompts, {fidelity.output_exact}/{answered} outputs"
    ]
    if fidelity.cached_compared:
        lines.append(f"cached as captured  {fidelity.cached_exact}/{fidelity.cached_compared} requests, to the token")
    if cold and fidelity.cached_reported:
        of_all = f"{fidelity.cached_reported - fidelity.cached_nonzero} of {fidelity.answered}"
        lines.append(f"cold                {of_all} requests without a prefix hit")
    if fidelity.substituted_blocks or fidelity.missed_blocks:
        lines.append(
            f"substituted outputs {fidelity.substituted_blocks} prompt blocks of generated tokens, "
            f"{fidelity.missed_blocks} synthetic"
        )
    return lines


def fidelity_notes(fidelity: Fidelity, *, cold: bool, output_substitution: bool) -> list[str]:
    notes = []
    if cold and fidelity.cached_nonzero:
        notes.append(f"not cold: {fidelity.cached_nonzero} requests of {fidelity.cached_reported} hit the prefix cache")
    if cold and fidelity.answered > fidelity.cached_reported:
        unreported = fidelity.answered - fidelity.cached_reported
        notes.append(f"cold not verified: the engine reported no cached tokens for {unreported} requests")
    if fidelity.cached_reported and not fidelity.cached_nonzero and fidelity.substituted_blocks and not cold:
        notes.append(f"cached tokens: {NOTHING_CACHED.format(fidelity.cached_reported)}")
    if fidelity.without_hashes and not cold:
        notes.append(
            f"{fidelity.without_hashes} requests have no block hashes in the capture: sent without shared prefixes; "
            "record with tap --tokenizer PATH to hash text prompts"
        )
    if fidelity.without_ids and not cold and output_substitution:
        notes.append(
            f"the engine returned no token ids for {fidelity.without_ids} outputs: later turns cannot hit their blocks"
        )
    if not output_substitution and fidelity.missed_blocks:
        notes.append(
            f"--no-output-substitution: {fidelity.missed_blocks} prompt blocks of captured outputs "
            "have synthetic tokens"
        )
    return notes


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Accounting of requests: sent, left out and not sent add up to ``requests``."""

    requests: int
    sent: int
    left_out: Mapping[str, int]
    not_sent: Mapping[str, int]
    """Counts by reason: the failed request before them, or the end of the run."""

    def check_integrity(self) -> None:
        accounted = self.sent + sum(self.left_out.values()) + sum(self.not_sent.values())
        assert accounted == self.requests, f"{accounted} of {self.requests} requests accounted for"


def account_of(survey: Survey, fidelity: Fidelity, *, sent: int, stopped: str | None) -> Account:
    """Account for the requests of a finished run. Raises InputError if requests are missing for an unknown reason."""
    not_sent = {f"after {failure}": count for failure, count in fidelity.not_sent.items()}
    missing = survey.selected - sent - sum(not_sent.values())
    if missing and stopped is None:
        raise InputError(f"{survey.path}: {missing} requests neither sent nor left out; expected an unchanged trace")
    if missing:
        not_sent[f"stopped ({stopped})"] = missing
    return Account(requests=survey.total, sent=sent, left_out=dict(sorted(survey.left_out.items())), not_sent=not_sent)


def account_lines(account: Account) -> list[str]:
    lines = [f"requests            {account.requests} in the trace, {account.sent} sent"]
    for title, reasons in (("left out", account.left_out), ("not sent", account.not_sent)):
        if reasons:
            counts = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            lines.append(f"{title:<19} {counts}")
    return lines
