"""Plans and jobs: requests with their times and follow-ups, and a load in a form that each worker opens for itself.

Sends of an open loop have no follow-ups; a session is a chain of them; branches are a ``then`` with several.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from loadgen.core.request import PlannedRequest
from tracefile.records.schema import Record

DIGEST_BITS = 256


class Response(msgspec.Struct, frozen=True):
    """Result of a request."""

    record: Record
    end_ms: float
    """End from t = 0."""
    token_ids: list[int] | None
    """Null: the engine did not return them."""
    prompt_token_ids: list[int] | None
    """As the engine saw them; null: not returned."""
    text: str
    """Kept in memory only."""

    @property
    def ok(self) -> bool:
        """True if the response is complete; a failed turn ends its session."""
        return self.record.status == "ok"


def no_follow_ups(response: Response) -> Sequence["Send"]:
    return ()


def plain_record(response: Response) -> Record:
    return response.record


class Send(msgspec.Struct, frozen=True):
    """Request with its time."""

    due_ms: float | None
    """From t = 0 in a plan; from the parent's end in a follow-up. Null: as soon as the limit on requests in flight has
    room, in the order of the plan; that moment is its scheduled time."""
    build: Callable[[], PlannedRequest]
    """Makes the request; called once, shortly before it is due."""
    then: Callable[[Response], Sequence["Send"]] = no_follow_ups
    """Gives the follow-ups; called once the request has ended, in whatever way."""
    describe: Callable[[Response], Record] = plain_record
    """Gives the record, with the data of the plan (hashes, sessions); called after ``then``."""
    until_ms: float | None = None
    """Latest start from t = 0; later: not sent, no record. Null: sent however late."""


Plan = Iterable[Send]
"""Sends in order of ``due_ms``; may be made lazily."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a run's sessions: groups with number ≡ ``index`` mod ``count``; a session is a group of its own, if none
    shares its first prompt."""

    index: int
    count: int

    def has(self, group: int) -> bool:
        return group % self.count == self.index

    def share_of(self, limit: int | None) -> int | None:
        """Return this part's share of a limit; null: no limit. The shares of all parts add up to it."""
        return None if limit is None else len(range(self.index, limit, self.count))


UNSHARDED = Shard(0, 1)


class OpenJob(Protocol):
    """A job in the process that runs it, cut to its shard."""

    def plan(self) -> Plan:
        """The shard's sends, roots in order of time. Called once."""

    def planned(self) -> int | None:
        """Number of requests to come; null: unknown."""

    def last_send_ms(self) -> float | None:
        """Time of the last send that the plan knows, think times included; null: responses decide."""

    def digest_share(self) -> int:
        """Sum of one SHA-256 per session, modulo 2**256; the shares of all shards add up to the run's digest."""

    def findings(self) -> dict[str, int]:
        """Counts that add up over shards; read at the end."""


class Job(Protocol):
    """Plain frozen values, for it is pickled."""

    def open(self, shard: Shard) -> OpenJob: ...


def add_shares(shares: Collection[int]) -> str:
    """Digest shares of all shards (or of all sessions) as the run's digest, in hex."""
    return f"{sum(shares) % (1 << DIGEST_BITS):064x}"
