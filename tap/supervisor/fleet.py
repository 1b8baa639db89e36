"""The upstreams as the supervisor knows them: their slots in shared memory, those that drain, and checks of health."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engines.access import OPEN, Access
from engines.calls import CallError, Calls
from engines.dialect import DialectName
from engines.recognition import DIALECTS
from tap.ipc.exchange import UpstreamEntry
from tap.supervisor.upstreamlist import HealthCheck, UpstreamList
from tracefile.records.errors import InputError
from wire.url import Origin

MAX_HEALTH_BYTES = 64 << 10
OK_STATUSES = range(200, 400)


@dataclass(slots=True)
class _Health:
    """Results of an upstream's checks."""

    healthy: bool = True
    in_row: int = 0
    """Results in a row that contradict the state."""


class Fleet:
    """Upstreams of a tap."""

    def __init__(self, listed: UpstreamList, slots: int, dialect: DialectName | None = None) -> None:
        """``slots``: most upstreams, as many as the workers' shared memory has room for.

        ``dialect``: of all upstreams. Null: each one's own, once it is learnt.
        """
        self.slots, self._dialect = slots, dialect
        self._dialects: dict[Origin, DialectName] = {}
        self.origins: tuple[Origin, ...] = ()
        self.draining: frozenset[Origin] = frozenset()
        self.stopped: frozenset[Origin] = frozenset()
        self._slots: dict[Origin, int] = {}
        """Slot of each upstream, removed ones included until another needs theirs."""
        self._health: dict[Origin, _Health] = {}
        self.reload(listed)

    @property
    def unhealthy(self) -> list[Origin]:
        return [origin for origin in self.origins if not self._health[origin].healthy]

    def reload(self, listed: UpstreamList) -> None:
        """Take another list. Raises InputError if it has more upstreams than there is room for."""
        if len(listed.origins) > self.slots:
            raise InputError(
                f"{len(listed.origins)} upstreams; expected at most {self.slots}, or a tap that starts with them"
            )
        self.origins, self.draining, self.stopped = listed
        for origin in self.origins:
            self._slots[origin] = self._slot(origin)
        self._dialects = {origin: told for origin, told in self._dialects.items() if origin in self.origins}
        self._health = {origin: self._health.get(origin, _Health()) for origin in self.origins}

    def learn(self, origin: Origin, dialect: DialectName | None) -> bool:
        """Take an upstream's dialect, null if it did not tell; return True if it is another than before."""
        if dialect is None or self._dialect is not None or self._dialects.get(origin) == dialect:
            return False
        self._dialects[origin] = dialect
        return True

    def _askable(self, origin: Origin) -> DialectName | None:
        """Return the dialect of an upstream that takes additional fields."""
        dialect = self._dialect or self._dialects.get(origin)
        return dialect if dialect is not None and DIALECTS[dialect].injectable else None

    def entries(self) -> list[UpstreamEntry]:
        return [
            UpstreamEntry(
                url=str(origin),
                slot=self._slots[origin],
                draining=origin in self.draining,
                stopped=origin in self.stopped,
                healthy=self._health[origin].healthy,
                dialect=self._askable(origin),
            )
            for origin in self.origins
        ]

    def checked(self, origin: Origin, problem: str | None, check: HealthCheck) -> str | None:
        """Take the result of a check; return a line for the user if it changes the state."""
        health = self._health.get(origin)
        if health is None:  # removed meanwhile
            return None
        health.in_row = health.in_row + 1 if health.healthy == (problem is not None) else 0
        if health.in_row < (check.fall if health.healthy else check.rise):
            return None
        health.healthy, health.in_row = not health.healthy, 0
        if health.healthy:
            return f"upstream {origin} is healthy again"
        return f"upstream {origin} gets no requests: {check.path} fails ({problem})"

    def _slot(self, origin: Origin) -> int:
        if origin in self._slots:
            return self._slots[origin]
        free = sorted(set(range(self.slots)) - set(self._slots.values()))
        if free:
            return free[0]
        removed = next(known for known in self._slots if known not in self.origins)
        return self._slots.pop(removed)


async def watch_health(fleet: Fleet, check: HealthCheck, changed: Callable[[str], None], access: Access = OPEN) -> None:
    """Check all upstreams every ``check.every_s``, for ever; ``changed`` gets a line for each change."""
    calls: dict[Origin, Calls] = {}
    while True:
        for removed in calls.keys() - set(fleet.origins):
            calls.pop(removed).close()
        for origin in fleet.origins:
            calls.setdefault(origin, Calls(origin, access))
        asked: Sequence[Origin] = fleet.origins
        problems = await asyncio.gather(*(_problem(calls[origin], check) for origin in asked))
        for origin, problem in zip(asked, problems, strict=True):
            line = fleet.checked(origin, problem, check)
            if line is not None:
                changed(line)
        await asyncio.sleep(check.every_s)


async def _problem(calls: Calls, check: HealthCheck) -> str | None:
    try:
        response = await calls.call(check.path, timeout_s=check.timeout_s, max_bytes=MAX_HEALTH_BYTES)
    except CallError as error:
        return str(error)
    return None if response.status in OK_STATUSES else f"HTTP {response.status}"
