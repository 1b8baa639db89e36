"""A plan sent to a target with its trace written and its progress shown: what loadgen and replay both do."""

import asyncio
import contextlib
import gc
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loadgen.bodies import prepare_tables
from loadgen.plan import Plan
from loadgen.progress import shown_progress
from loadgen.request import PlannedRequest
from loadgen.sender import Sender, Transmit
from loadgen.tally import Tally
from tracefile import InputError, Meta, TraceWriter
from wire.client import Client, Exchange
from wire.errors import WireError
from wire.loop import run as run_loop
from wire.pool import ConnectError
from wire.url import Origin, parse_url

HEAD_START_S = 0.05
"""From the clock's start to t = 0, in which the first requests are built."""

WARM_CONNECTIONS = 16
"""How many connections are open before the first request; more are opened as they are needed."""

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """One run: where to, what of it is kept, and how it is bounded."""

    url: str
    trace: Path
    meta: Meta
    """The trace's header but for its clock."""
    planned: int | None
    """How many requests there will be; null: unknown."""
    parallel: int | None = None
    timeout_s: float | None = None
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Driven:
    """What came of a run."""

    tally: Tally
    stopped: str | None
    """Why it was cut short: SIGINT, SIGTERM, refused; null: it was not."""
    seconds: float
    cpu_s: float


def drive(plan: Plan, config: Drive) -> Driven:
    """Send the plan; returns when all has ended, or was cut short by a signal, with the trace complete.

    Raises InputError if the target's URL or the trace's path cannot be used.
    """
    prepare_tables()
    return run_loop(_drive(plan, config))


async def _drive(plan: Plan, config: Drive) -> Driven:
    client = Client(origin_of(config.url))
    tally = Tally()
    try:
        await _warm(client, config)
        with collector_off():  # before the clock starts: collecting for the last time takes tens of ms
            t0_ns = time.perf_counter_ns() + int(HEAD_START_S * 1e9)
            epoch_unix_ns = time.time_ns() + int(HEAD_START_S * 1e9)
            meta = msgspec.structs.replace(config.meta, epoch_unix_ns=epoch_unix_ns)
            with TraceWriter(config.trace, meta, overwrite=config.overwrite) as writer:
                cpu_before_s = time.process_time()
                transmit = transmitter(client, config.timeout_s)
                sender = Sender(plan, transmit, writer.write, tally, t0_ns=t0_ns, parallel=config.parallel)
                await _run(sender, tally, config.planned)
                seconds = (time.perf_counter_ns() - t0_ns) / 1e9
                return Driven(tally, sender.stopped, seconds, time.process_time() - cpu_before_s)
    finally:
        await client.close()


async def _run(sender: Sender, tally: Tally, planned: int | None) -> None:
    with stopped_by_signals(sender.stop):
        async with shown_progress(tally, planned):
            await sender.run()


def origin_of(url: str) -> Origin:
    """Where a ``--url`` points; raises InputError."""
    try:
        return parse_url(url.rstrip("/").removesuffix("/v1"))
    except WireError as error:
        raise InputError(f"--url: {error}") from None


async def _warm(client: Client, config: Drive) -> None:
    """Open connections ahead of need."""
    planned = WARM_CONNECTIONS if config.planned is None else config.planned
    try:
        await client.warm(min(WARM_CONNECTIONS, config.parallel or WARM_CONNECTIONS, planned))
    except ConnectError as error:
        raise InputError(f"--url: {config.url}: {error.kind}; expected an engine that accepts connections") from None


def transmitter(client: Client, timeout_s: float | None) -> Transmit:
    """Requests over a client's connections."""

    async def transmit(request: PlannedRequest) -> Exchange:
        exchange = Exchange()
        try:
            await client.request(
                "POST", request.path, request.headers, request.body, timeout_s=timeout_s, into=exchange
            )
        except asyncio.CancelledError:
            assert exchange.outcome == "client_abort"  # what came before the run was cut short is still a record
        return exchange

    return transmit


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection for a while: a full one stops the clock for tens of ms. Reference counts still free."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM stops the run; a second one ends the process as it always does."""
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        for each in INTERRUPTS:
            loop.remove_signal_handler(each)
        stop(number.name)

    for number in INTERRUPTS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in INTERRUPTS:
            loop.remove_signal_handler(number)
