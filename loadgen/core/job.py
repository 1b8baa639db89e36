"""Plans and jobs: requests with send times and follow-ups, and a load as each worker opens it.

In an open loop a send has no follow-ups; a session is a chain of follow-ups; a branch is a ``then`` with several.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from loadgen.core.request import PlannedRequest
from tracefile.records.schema import Record

DIGEST_BITS = 256


class Response(msgspec.Struct, frozen=True):
    """Result of a request: record, token ids, text."""

    record: Record
    end_ms: float
    """Time since the run's start."""
    token_ids: list[int] | None
    """Null: not returned by the engine."""
    prompt_token_ids: list[int] | None
    """Reported by the engine; null: not returned."""
    text: str
    """Stays in memory, never written."""

    @property
    def ok(self) -> bool:
        """True if the response is complete; a failed turn ends its session."""
        return self.record.status == "ok"


def no_follow_ups(response: Response) -> Sequence["Send"]:
    return ()


def plain_record(response: Response) -> Record:
    return response.record


class Send(msgspec.Struct, frozen=True):
    """Request with its send time and its follow-ups."""

    due_ms: float | None
    """From t = 0 in a plan; from the parent's end in a follow-up. Null: as soon as the limit on requests in flight
    allows, in plan order; that moment is its scheduled time."""
    build: Callable[[], PlannedRequest]
    """Builds the request; called once, shortly before it is due."""
    then: Callable[[Response], Sequence["Send"]] = no_follow_ups
    """Returns the follow-ups; called once the request has ended, with any status."""
    describe: Callable[[Response], Record] = plain_record
    """Returns the record with the plan's data (block hashes, sessions); called after ``then``."""
    until_ms: float | None = None
    """Latest start from t = 0; later: not sent, no record. Null: no limit."""


Plan = Iterable[Send]
"""Sends in order of ``due_ms``; may be generated lazily."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Subset of sessions: groups with number ≡ ``index`` mod ``count``; a common first prompt makes a group."""

    index: int
    count: int

    def has(self, group: int) -> bool:
        return group % self.count == self.index

    def share_of(self, limit: int | None) -> int | None:
        """Return this shard's share of a limit; null: no limit. The shares of all shards add up to the limit."""
        return None if limit is None else len(range(self.index, limit, self.count))


UNSHARDED = Shard(0, 1)


class OpenJob(Protocol):
    """Job opened for one shard, in the process that runs it."""

    def plan(self) -> Plan:
        """Sends of the shard, roots in order of time. Called once."""

    def planned(self) -> int | None:
        """Number of requests of the shard; null: unknown."""

    def last_send_ms(self) -> float | None:
        """Planned time of the last send, think times included; null: responses decide."""

    def digest_share(self) -> int:
        """Sum of one SHA-256 a session, modulo 2**256; the shares of all shards add up to the workload digest."""

    def findings(self) -> dict[str, int]:
        """Counts that add up over shards; read at the end."""


class Job(Protocol):
    """Load before it is opened: frozen values that can be pickled."""

    def open(self, shard: Shard) -> OpenJob: ...


def add_shares(shares: Collection[int]) -> str:
    """Workload digest in hex, from the digest shares of all shards."""
    return f"{sum(shares) % (1 << DIGEST_BITS):064x}"
