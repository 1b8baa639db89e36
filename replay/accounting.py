"""The account of a replay: every request of the trace was sent, was left out, or was not sent, for a reason by name."""

from collections.abc import Mapping

import msgspec

from replay.capture import Survey
from replay.fidelity import Fidelity
from tracefile import InputError


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Requests; what was sent, left out and not sent adds up to ``requests``."""

    requests: int
    """Of the trace, once for each round."""
    sent: int
    earlier: int
    """Sent by the earlier run that this one goes on from."""
    left_out: Mapping[str, int]
    """By what makes them unfit or unwanted."""
    not_sent: Mapping[str, int]
    """By the failure before them, or by what cut the run short."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless all are accounted for."""
        accounted = self.sent + self.earlier + sum(self.left_out.values()) + sum(self.not_sent.values())
        assert accounted == self.requests, f"{accounted} of {self.requests} requests accounted for"


def account_of(
    survey: Survey, fidelity: Fidelity, *, rounds: int, sent: int, stopped: str | None, earlier: int = 0
) -> Account:
    """The account of a run that is over. ``stopped``: why it was cut short; null: it was not.

    Raises InputError if requests are missing of which nobody knows why.
    """
    not_sent = {f"after {failure}": count for failure, count in fidelity.not_sent.items()}
    missing = survey.kept * rounds - sent - earlier - sum(not_sent.values())
    if missing and stopped is None:
        raise InputError(f"{survey.path}: {missing} requests were neither sent nor left out; expected it to hold still")
    if missing:
        not_sent[f"cut short ({stopped})"] = missing
    return Account(
        requests=survey.total * rounds,
        sent=sent,
        earlier=earlier,
        left_out={reason: count * rounds for reason, count in sorted(survey.left_out.items())},
        not_sent=not_sent,
    )


def account_lines(account: Account) -> list[str]:
    """For a terminal."""
    earlier = f", {account.earlier} by an earlier run" if account.earlier else ""
    lines = [f"requests            {account.requests} in the trace, {account.sent} sent{earlier}"]
    for title, reasons in (("left out", account.left_out), ("not sent", account.not_sent)):
        if reasons:
            told = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            lines.append(f"{title:<19} {told}")
    return lines
