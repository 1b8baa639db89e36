"""Jobs: the content of a run in a form that can be sent to its processes, and opened in each shard."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from loadgen.core.plan import Plan
from tracefile import RequestId

DIGEST_BITS = 256


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a run's sessions: groups with number ≡ ``index`` mod ``count``; a session is a group of its own, if none
    shares its first prompt."""

    index: int
    count: int

    def has(self, group: int) -> bool:
        return group % self.count == self.index


WHOLE = Shard(0, 1)


class OpenJob(Protocol):
    """A job in the process that runs it, cut to its shard."""

    def plan(self) -> Plan:
        """The shard's sends, roots in order of time. Called once."""

    def planned(self) -> int | None:
        """Number of requests to come, without resumed ones; null: unknown."""

    def last_send_ms(self) -> float | None:
        """Time of the last send that the plan knows, think times included; null: responses decide."""

    def digest_share(self) -> int:
        """Sum of one SHA-256 per session, modulo 2**256; the shares of all shards add up to the run's digest."""

    def resume(self, ended: Mapping[RequestId, bool]) -> Collection[RequestId]:
        """Leave ended sessions out of the plan, before ``plan``; return their requests. ``ended``: True: ended well."""

    def findings(self) -> dict[str, int]:
        """Counts that add up over shards; read at the end."""


class Job(Protocol):
    """Plain frozen values, for it is pickled."""

    def open(self, shard: Shard) -> OpenJob: ...


def add_shares(shares: Collection[int]) -> str:
    """Digest shares of all shards (or of all sessions) as the run's digest, in hex."""
    return f"{sum(shares) % (1 << DIGEST_BITS):064x}"
