"""Readiness of the tap: reasons against serving, apart from reasons for missing records, and the state of upstreams."""

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
"""Silence after which the recorder counts as down; it pushes once a second, later only during a long tokenization."""


def reasons_against(state: LiveState) -> list[str]:
    """Return the reasons against serving, in words; none: ready."""
    reasons = []
    service = state.service
    if service is None:
        reasons.append("the tap has not reported yet")
    else:
        if service.draining:
            reasons.append("the tap is draining")
        if service.workers_up == 0:
            reasons.append("no worker is up")
    if service is not None and service.upstreams and not set(service.upstreams) - set(service.unhealthy_upstreams):
        reasons.append("no upstream is healthy")
    if not any(state.reachable.values()):
        reasons.append("no upstream takes connections" if state.reachable else "no upstream has been tried yet")
    return reasons


def reasons_not_recording(state: LiveState, now_s: float) -> list[str]:
    """Return the reason why served requests leave no records, in words; none: they do."""
    if state.service is not None and not state.service.recorder_up:
        return ["the recorder is down"]
    if state.recorder is None:
        return ["the recorder has not reported yet"]
    if now_s - state.recorder_heard_s > RECORDER_SILENCE_S:
        return [f"the recorder has been silent for {now_s - state.recorder_heard_s:.0f} s"]
    return [] if state.recorder.writing else ["the recorder cannot write the trace"]


async def takes_connections(origin: str) -> bool:
    """Return whether a TCP connection to this server opens; nothing is sent on it."""
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
    while True:
        origins = [] if state.service is None else state.service.upstreams
        await probe_once(state, origins)
        await asyncio.sleep(PROBE_INTERVAL_S if origins else 0.1)


async def probe_once(state: LiveState, origins: Sequence[str]) -> None:
    found = await asyncio.gather(*map(takes_connections, origins))
    state.reachable = dict(zip(origins, found, strict=True))
