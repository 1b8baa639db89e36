"""Life cycle of a tap: wait for the upstreams, start the processes, supervise, drain, write the account."""

import asyncio
import contextlib
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic

import msgspec

from engines.access import OPEN, Access
from engines.control import learn_engine_facts
from engines.facts import EngineFacts
from tap.admin.pages import serving_pages
from tap.admin.state import TapStats
from tap.ipc.messages import RecorderSetup, log_line
from tap.ipc.settings import Settings, read_upstreams
from tap.ipc.sharedmemory import RECORDER_SOCKET, WorkerCounts
from tap.supervisor.account import Account, Ledger, write_account
from tap.supervisor.processes import RecorderProcess, Workers
from tap.supervisor.startup import probe_engine, recorder_setup, spoken_dialect, worker_setup
from tap.supervisor.upstreams import Fleet, reach_upstreams, try_upstreams
from tracefile.hashing.hashkey import key_path, load_key
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine
from wire.url import Origin

BACKLOG = 1024


def bind_listeners(flag: str, host: str, port: int, count: int = 1) -> list[socket.socket]:
    """Return listening sockets that share an address, one per process. Raises InputError if the address is in use.

    The kernel distributes connections over the sockets, and keeps the backlog of a crashed process for its successor.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sockets = [_bind(family, address, share=False)]
        if count > 1:
            # Bound exclusively first: a shared port may be shared with another tap of the same user, unnoticed.
            with sockets[0] as first:
                address = first.getsockname()
            sockets = [_bind(family, address, share=True) for _ in range(count)]
        for sock in sockets:
            sock.listen(BACKLOG)
    except OSError as error:
        raise InputError(
            f"{flag} {host}:{port}: {error.strerror or error}; expected an unused address of this machine"
        ) from None
    return sockets


def _bind(family: int, address: tuple[object, ...], *, share: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


class Signals:
    """SIGTERM and SIGINT cancel the start, and are queued in ``stops`` after it; SIGHUP is queued in ``reloads``.

    SIGUSR1 and SIGUSR2 are ignored: for other servers they mean "reopen the logs".
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.stops: asyncio.Queue[None] = asyncio.Queue()
        self.reloads: asyncio.Queue[None] = asyncio.Queue()
        self._starting = asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        loop.add_signal_handler(signal.SIGHUP, self.reloads.put_nowait, None)

    def started(self) -> None:
        self._starting = None

    def _stop(self) -> None:
        if self._starting is None:
            self.stops.put_nowait(None)
        else:
            self._starting.cancel()


MAX_SOCKET_PATH = 103
"""Portable limit of a ``sockaddr_un`` path, in bytes."""


@contextlib.contextmanager
def runtime_folder() -> Iterator[str]:
    """Create a private folder for sockets and shared memory."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="kvtap-")
    except OSError as error:
        raise InputError(f"no temporary folder ({error.strerror}); expected a writable $TMPDIR") from None
    with folder as path:
        if len(recorder_socket(path)) > MAX_SOCKET_PATH:
            raise InputError(f"{path}: path too long for a socket; expected a shorter $TMPDIR")
        yield path


def recorder_socket(folder: str) -> str:
    return f"{folder}/{RECORDER_SOCKET}"


POLL_S = 30.0


async def watch_engines(
    origins: Callable[[], Sequence[Origin]],
    current: Engine | None,
    on_change: Callable[[Engine], None],
    *,
    interval_s: float = POLL_S,
    access: Access = OPEN,
    on_facts: Callable[[Origin, EngineFacts], None] = lambda *_: None,
) -> None:
    """Poll all engines every ``interval_s``; call ``on_change`` when the engine of the trace's header changes.

    ``on_facts`` gets the facts of each upstream. The first upstream that responds is the engine of the header; an
    upstream with another engine is reported on stderr once.
    """
    differing: dict[Origin, Engine] = {}
    while True:
        await asyncio.sleep(interval_s)
        polled = tuple(origins())
        responses = await asyncio.gather(*(learn_engine_facts(origin, access) for origin in polled))
        engines = []
        for origin, facts in zip(polled, responses, strict=True):
            on_facts(origin, facts)
            if facts.reported_engine is not None:
                engines.append((origin, facts.reported_engine))
        if not engines:
            continue
        (first_origin, first), *further = engines
        changed = changed_engine(current, first)
        if changed is not None:
            current = changed
            on_change(changed)
        for origin, engine in further:
            if engine not in (first, differing.get(origin)):
                differing[origin] = engine
                log_line(f"upstream {origin} is another engine than {first_origin}")


def changed_engine(current: Engine | None, reported: Engine | None) -> Engine | None:
    """Return the updated engine if version or KV cache settings changed, else None; absent fields are no change."""
    if reported is None:
        return None
    fields = {name: value for name, value in msgspec.structs.asdict(reported).items() if value not in (None, {})}
    updated = msgspec.structs.replace(current or Engine(), **fields)
    return None if updated == current else updated


FLUSH_TIMEOUT_S = 60.0


async def serve(settings: Settings) -> None:
    signals = Signals()
    listeners = bind_listeners("--listen", *settings.listen, count=settings.workers)
    admin = bind_listeners("--admin", *settings.admin)[0] if settings.admin is not None else None
    key = load_key(None if settings.key_file is None else Path(settings.key_file))
    service = Service(settings)
    async with admin_pages(service, admin):
        settings, reached = await reach_upstreams(settings, signals.reloads, listeners)
        facts, *further_facts = await read_facts(settings, reached)
        settings, line, notes = await probe_engine(settings, facts, reached[0])
        with runtime_folder() as folder:
            ledger = Ledger(WorkerCounts(folder, settings.workers), settings.workers)
            setup = recorder_setup(settings, key, facts, recorder_socket(folder))
            async with recording(setup, ledger) as recorder:
                first = worker_setup(settings, key, facts, folder)
                dialect = settings.dialect if settings.inject_auto else spoken_dialect(settings, facts)
                fleet = Fleet(settings.upstreams, first.board.slots, dialect)
                for origin, upstream_facts in zip(reached, (facts, *further_facts), strict=False):
                    fleet.set_dialect(origin, upstream_facts.dialect)
                workers = Workers(first, fleet, ledger, listeners)
                service.attach(settings, fleet, recorder, workers, facts.reported_engine)
                try:
                    await workers.start()
                    signals.started()
                    _announce(settings, listeners[0].getsockname()[1], admin, line, setup.block_size)
                    for note in notes:
                        log_line(f"note: {note}")
                    await service.run(signals)
                    await service.end(signals)
                except BaseException:
                    await workers.drain(0.0, asyncio.Queue())
                    raise


@contextlib.asynccontextmanager
async def admin_pages(service: "Service", listener: socket.socket | None) -> AsyncIterator[None]:
    """Serve the admin pages on ``listener``; None: no pages."""
    if listener is None:
        yield
        return
    probing = asyncio.create_task(service.probe_upstreams())
    try:
        async with serving_pages(listener, service.stats):
            yield
    finally:
        probing.cancel()


async def read_facts(settings: Settings, reached: Sequence[Origin]) -> Sequence[EngineFacts]:
    """Return the facts of the first upstream, and with ``--inject auto`` of all reachable upstreams."""
    for origin in settings.upstreams:
        if origin not in reached:
            log_line(f"upstream {origin} is unreachable; it gets requests once it is reachable")
    if not settings.engine_facts:
        return [EngineFacts(origin=reached[0])]
    queried = reached if settings.inject_auto else reached[:1]
    facts = await asyncio.gather(*(learn_engine_facts(origin, settings.access) for origin in queried))
    if facts[0].problem is not None:
        log_line(f"upstream {reached[0]}{facts[0].problem}; until then the trace's header lacks the facts of this page")
    return facts


LOG_INTERVAL_S = 30.0
"""Interval of account lines while requests arrive."""
PROBE_INTERVAL_S = 5.0
UNREACHED_INTERVAL_S = 0.1
"""Probe interval while no upstream accepts connections."""


class Service:
    """Supervision tasks of a running tap: reloads, engine polls, account lines, admin statistics."""

    _ledger: Ledger
    _fleet: Fleet
    _recorder: RecorderProcess
    _workers: Workers

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._engine: Engine | None = None
        self._is_running = self._draining = False
        self._reachable: dict[str, bool] = {}
        """Result of the last probe of each upstream, for the admin pages."""

    def attach(
        self, settings: Settings, fleet: Fleet, recorder: RecorderProcess, workers: Workers, engine: Engine | None
    ) -> None:
        self._settings, self._fleet, self._engine = settings, fleet, engine
        self._recorder, self._workers, self._is_running = recorder, workers, True
        self._ledger = recorder.ledger

    async def run(self, signals: Signals) -> None:
        settings = self._settings
        running = [self._reload_on_signal(signals), self._report_regularly()]
        if settings.engine_facts:
            running.append(
                watch_engines(
                    lambda: self._fleet.origins,
                    self._engine,
                    self._engine_changed,
                    access=settings.access,
                    on_facts=self._update_dialect,
                )
            )
        tasks = [asyncio.create_task(coroutine) for coroutine in running]
        try:
            await signals.stops.get()
        finally:
            for task in tasks:
                task.cancel()

    async def end(self, signals: Signals) -> None:
        self._draining = True
        drain_s = self._settings.drain_s
        log_line(f"ending: no new connections; {self._ledger.in_flight} recorded requests in flight have {drain_s:g} s")
        await self._workers.drain(drain_s, signals.stops)

    @property
    def _origins(self) -> Sequence[Origin]:
        return self._fleet.origins if self._is_running else self._settings.upstreams

    async def probe_upstreams(self) -> None:
        """Probe a connection to each upstream periodically: an idle tap has no other information on them."""
        while True:
            tries = await try_upstreams(self._origins, self._settings.access.tls)
            self._reachable = {str(origin): failure is None for origin, failure in tries}
            await asyncio.sleep(PROBE_INTERVAL_S if any(self._reachable.values()) else UNREACHED_INTERVAL_S)

    def stats(self) -> TapStats:
        upstreams = list(map(str, self._origins))
        reachable = {name: reached for name, reached in self._reachable.items() if name in upstreams}
        if not self._is_running:
            return TapStats(upstreams=upstreams, reachable=reachable, workers=self._settings.workers)
        account, workers, recorder = self._ledger.account(), self._workers, self._recorder
        return TapStats(
            upstreams=upstreams,
            reachable=reachable,
            workers=self._settings.workers,
            workers_up=workers.ready,
            worker_restarts=workers.restarts,
            recorder_up=recorder.child.ready,
            recorder_restarts=recorder.child.restarts,
            recorder_silent_s=monotonic() - recorder.last_report_s,
            offered=account.offered,
            dropped=account.dropped,
            draining=self._draining,
            worker_stats=list(workers.stats.values()),
            progress=self._ledger.progress,
        )

    def reload(self) -> None:
        file = self._settings.upstreams_file
        if file is None:
            log_line("SIGHUP: nothing to reload; expected a tap with --upstreams FILE")
            return
        try:
            self._fleet.reload(read_upstreams(file))
            log_line(f"SIGHUP: upstreams are now {', '.join(map(str, self._fleet.origins))}")
        except InputError as error:
            log_line(f"SIGHUP: {error}; THE UPSTREAMS DO NOT CHANGE")
        self._workers.reload()

    def _update_dialect(self, origin: Origin, facts: EngineFacts) -> None:
        """Inject by a newly detected or changed dialect of an upstream, with ``--inject auto``."""
        if self._settings.inject_auto and self._fleet.set_dialect(origin, facts.dialect):
            log_line(f"--inject auto: upstream {origin} is {facts.dialect}")
            self._workers.reload()

    def _engine_changed(self, engine: Engine) -> None:
        self._recorder.engine_changed(engine)
        log_line("the engine has changed: version or KV cache configuration")

    async def _reload_on_signal(self, signals: Signals) -> None:
        while True:
            await signals.reloads.get()
            self.reload()

    async def _report_regularly(self) -> None:
        reported = 0
        while True:
            await asyncio.sleep(LOG_INTERVAL_S)
            account = self._ledger.account()
            if account.offered != reported:
                reported = account.offered
                log_line(account.line())


@contextlib.asynccontextmanager
async def recording(setup: RecorderSetup, ledger: Ledger) -> AsyncIterator[RecorderProcess]:
    recorder = RecorderProcess(setup, ledger)
    await recorder.child.start()
    try:
        yield recorder
    finally:
        if not await recorder.child.finish(FLUSH_TIMEOUT_S):
            log_line(f"the recorder did not finish within {FLUSH_TIMEOUT_S:.0f} s; its last exchanges are lost")
        _close_account(setup.settings.trace, ledger.account(ended=True))


def _close_account(trace: str, account: Account) -> None:
    print(f"tap: {account.line()}; trace: {trace}", flush=True)
    if account.has_token_mismatch:
        log_line("WARNING: prompt tokens differ from the engine's usage; expected its tokenizer and chat template")
    try:
        write_account(trace, account)
    except InputError as error:
        log_line(f"the account could not be written: {error}")


def _announce(settings: Settings, port: int, admin: socket.socket | None, engine: str, block_size: int) -> None:
    address = Origin("http", settings.listen[0], port)
    upstreams = ", ".join(map(str, settings.upstreams))
    line = f"tap: listening on {address}, recording to {settings.trace}, upstream {upstreams}"
    if admin is not None and settings.admin is not None:
        line += f", admin pages on {Origin('http', settings.admin[0], admin.getsockname()[1])}"
    key = f"hashes of {block_size}-token blocks keyed by {settings.key_file or key_path()}; Ctrl-C or SIGTERM ends it"
    print(f"{line}\ntap: {engine}\ntap: {key}", flush=True)
