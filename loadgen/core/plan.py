"""Plans: requests, their times, and their follow-up requests. Every load is an iterable of ``Send``.

Sends of an open loop have no follow-ups; a session is a chain of them; branches are a ``then`` with several.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from loadgen.core.request import PlannedRequest
from tracefile import Record


class Response(msgspec.Struct, frozen=True):
    """Result of a request."""

    record: Record
    end_ms: float
    """End from the plan's t = 0: the trace's, unless the run continues an earlier one."""
    token_ids: list[int] | None
    """Null: the engine did not return them."""
    prompt_token_ids: list[int] | None
    """As the engine saw them; null: not returned."""
    text: str
    """Kept in memory only."""
    body: bytes = b""
    """Whole body of a response that was not streamed; kept in memory only."""

    @property
    def ok(self) -> bool:
        """True if the response is complete; a failed turn ends its session."""
        return self.record.status == "ok"


def nothing_more(response: Response) -> Sequence["Send"]:
    return ()


def as_it_is(response: Response) -> Record:
    return response.record


class Send(msgspec.Struct, frozen=True):
    """Request with its time."""

    due_ms: float | None
    """From t = 0 in a plan; from the parent's end in a follow-up. Null: as soon as the limit on requests in flight has
    room, in the order of the plan; that moment is its scheduled time."""
    build: Callable[[], PlannedRequest]
    """Makes the request; called once, shortly before it is due."""
    then: Callable[[Response], Sequence["Send"]] = nothing_more
    """Gives the follow-ups; called once the request has ended, in whatever way."""
    describe: Callable[[Response], Record] = as_it_is
    """Gives the record, with the data of the plan (hashes, sessions); called after ``then``."""
    until_ms: float | None = None
    """Latest start from t = 0; later: not sent, no record. Null: sent however late."""
    from_start: bool = False
    """Of a follow-up: ``due_ms`` counts from t = 0. It is a session that arrived then; if that was before the parent's
    end, it was queued."""


Plan = Iterable[Send]
"""Sends in order of ``due_ms``; may be made lazily."""
