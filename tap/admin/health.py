"""Whether the tap is fit to be sent traffic, in reasons why not; and whether upstreams take connections."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

from tap.admin.state import LiveState
from wire.errors import WireError
from wire.url import parse_url

PROBE_INTERVAL_S: Final = 5.0
PROBE_TIMEOUT_S: Final = 3.0
RECORDER_SILENCE_S: Final = 15.0
"""A recorder pushes once a second; it is late while it tokenizes a long prompt, never by this much."""


def reasons_against(state: LiveState, now_s: float) -> list[str]:
    """Why the tap is not ready, in sentences for people; none: it is."""
    reasons = []
    service = state.service
    if service is None:
        reasons.append("the tap has not reported yet")
    else:
        if service.draining:
            reasons.append("the tap is draining")
        if service.workers_up == 0:
            reasons.append("no worker is up")
        if not service.recorder_up:
            reasons.append("the recorder is down")
    if not any(state.reachable.values()):
        reasons.append("no upstream takes connections" if state.reachable else "no upstream has been tried yet")
    if state.recorder is None:
        reasons.append("the recorder has not reported yet")
    elif now_s - state.recorder_heard_s > RECORDER_SILENCE_S:
        reasons.append(f"the recorder has been silent for {now_s - state.recorder_heard_s:.0f} s")
    elif not state.recorder.writing:
        reasons.append("the recorder cannot write the trace")
    return reasons


async def takes_connections(origin: str) -> bool:
    """Whether a TCP connection to this server opens; nothing is sent on it, so no engine is asked for work."""
    try:
        address = parse_url(origin)
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except (OSError, TimeoutError, WireError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def probe_upstreams(state: LiveState) -> None:
    """Keep ``state.reachable`` true, for ever."""
    while True:
        origins = [] if state.service is None else state.service.upstreams
        await probe_once(state, origins)
        await asyncio.sleep(PROBE_INTERVAL_S if origins else 0.1)


async def probe_once(state: LiveState, origins: Sequence[str]) -> None:
    """Try every upstream once, all at the same time."""
    found = await asyncio.gather(*map(takes_connections, origins))
    state.reachable = dict(zip(origins, found, strict=True))
