"""Who waits for whom when sessions are replayed: each request's anchor, whose end it was waiting for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replay.capture import Captured
from tracefile import RequestId


@dataclass(frozen=True, slots=True)
class Link:
    """Where a request stands in a session-paced replay."""

    anchor: RequestId | None
    """The nearest ancestor that is sent again and had ended before this one came; null: a root, open loop."""
    think_ms: float
    """From the anchor's end to this one's arrival; 0 for a root."""


ROOT = Link(None, 0.0)


def link_requests(requests: Sequence[Captured]) -> dict[RequestId, Link]:
    """Every request's link, from the parents that the records name.

    A child that came before its parent had ended did not wait for it: it hangs on the next ancestor up, and becomes
    a root if there is none. So does the child of a request that cannot be sent again. Children of one parent that ran
    side by side do so again, each its own pause after the parent's end. A request that waited for several (a join) has
    one parent in a trace, the one of them that ended last: it waits for that one.
    """
    known = {request.request_id: request for request in requests}
    return {request_id: _link(request, known) for request_id, request in known.items()}


def _link(request: Captured, known: Mapping[RequestId, Captured]) -> Link:
    parent_id = request.parent_id
    while parent_id is not None and parent_id in known:
        ancestor = known[parent_id]
        if ancestor.end_ms is not None and ancestor.end_ms <= request.offset_ms:
            return Link(parent_id, request.offset_ms - ancestor.end_ms)
        parent_id = ancestor.parent_id
    return ROOT
