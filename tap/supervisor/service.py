"""A tap from start to end: reach the upstreams, start the processes, keep them running, drain, close the account."""

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
from tap.ipc.messages import RecorderSetup, say
from tap.ipc.settings import Settings, read_upstreams
from tap.ipc.sharedmemory import RECORDER_SOCKET, WorkerCounts
from tap.supervisor.account import Account, Ledger, keep_account
from tap.supervisor.processes import RecorderProcess, Workers
from tap.supervisor.startup import probe_engine, recorder_setup, spoken_dialect, worker_setup
from tap.supervisor.upstreams import Fleet, reach_upstreams, try_upstreams
from tracefile.hashing.hashkey import key_path, load_key
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine
from wire.url import Origin

BACKLOG = 1024


def bind_listeners(flag: str, host: str, port: int, count: int = 1) -> list[socket.socket]:
    """Return sockets that share an address, one for each process. Raises InputError if the address is not free.

    The kernel spreads connections over them, and keeps those that wait for the successor of a dead process.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sockets = [_bind(family, address, share=False)]
        if count > 1:
            # Bound alone first: a shared port is shared with all processes of its user, so another tap would not show.
            with sockets[0] as first:
                address = first.getsockname()
            sockets = [_bind(family, address, share=True) for _ in range(count)]
        for sock in sockets:
            sock.listen(BACKLOG)
    except OSError as error:
        raise InputError(
            f"{flag} {host}:{port}: {error.strerror or error}; expected a free address of this machine"
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
    """SIGTERM and SIGINT cancel the task until it has started, and are ``stops`` from then on; SIGHUP is a reload.

    SIGUSR1 and SIGUSR2 are ignored: to other servers they mean "open the logs again".
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
"""Bytes of a ``sockaddr_un`` path on every system."""


@contextlib.contextmanager
def runtime_folder() -> Iterator[str]:
    """Make a folder for the processes' socket and shared memory that only its user can enter."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="kvtap-")
    except OSError as error:
        raise InputError(f"no folder for temporary files ({error.strerror}); expected a writable $TMPDIR") from None
    with folder as path:
        if len(recorder_socket(path)) > MAX_SOCKET_PATH:
            raise InputError(f"{path}: too long a path for sockets; expected a shorter $TMPDIR")
        yield path


def recorder_socket(folder: str) -> str:
    """Return the path of the unix socket for the workers' exchanges."""
    return f"{folder}/{RECORDER_SOCKET}"


POLL_S = 30.0


async def watch_engines(
    origins: Callable[[], Sequence[Origin]],
    known: Engine | None,
    changed: Callable[[Engine], None],
    *,
    every_s: float = POLL_S,
    access: Access = OPEN,
    learnt: Callable[[Origin, EngineFacts], None] = lambda *_: None,
) -> None:
    """Ask all engines every ``every_s``, for ever; ``changed`` gets the new engine of the header.

    ``learnt`` gets the facts of each upstream. The first upstream that answers stands for all; one that differs from
    it is reported on stderr, once.
    """
    others: dict[Origin, Engine] = {}
    while True:
        await asyncio.sleep(every_s)
        asked = tuple(origins())
        answers = await asyncio.gather(*(learn_engine_facts(origin, access) for origin in asked))
        known_engines = []
        for origin, facts in zip(asked, answers, strict=True):
            learnt(origin, facts)
            if facts.known_engine is not None:
                known_engines.append((origin, facts.known_engine))
        if not known_engines:
            continue
        (first_origin, first), *rest = known_engines
        now = changed_engine(known, first)
        if now is not None:
            known = now
            changed(now)
        for origin, engine in rest:
            if engine not in (first, others.get(origin)):
                others[origin] = engine
                say(f"upstream {origin} is another engine than {first_origin}")


def changed_engine(known: Engine | None, learnt: Engine | None) -> Engine | None:
    """Return the engine as it is now if it differs from ``known``, else null; an absent field is no change."""
    if learnt is None:
        return None
    reported = {name: value for name, value in msgspec.structs.asdict(learnt).items() if value not in (None, {})}
    now = msgspec.structs.replace(known or Engine(), **reported)
    return None if now == known else now


FLUSH_TIMEOUT_S = 60.0


async def serve(settings: Settings) -> None:
    signals = Signals()
    listeners = bind_listeners("--listen", *settings.listen, count=settings.workers)
    admin = bind_listeners("--admin", *settings.admin)[0] if settings.admin is not None else None
    key = load_key(None if settings.key_file is None else Path(settings.key_file))
    service = Service(settings)
    async with watched(service, admin):
        settings, reached = await reach_upstreams(settings, signals.reloads, listeners)
        facts, *others = await learn(settings, reached)
        settings, line, notes = await probe_engine(settings, facts, reached[0])
        with runtime_folder() as folder:
            ledger = Ledger(WorkerCounts(folder, settings.workers), settings.workers)
            setup = recorder_setup(settings, key, facts, recorder_socket(folder))
            async with recording(setup, ledger) as recorder:
                first = worker_setup(settings, key, facts, folder)
                dialect = settings.dialect if settings.inject_auto else spoken_dialect(settings, facts)
                fleet = Fleet(settings.upstreams, first.board.slots, dialect)
                for origin, told in zip(reached, (facts, *others), strict=False):
                    fleet.learn(origin, told.dialect)
                workers = Workers(first, fleet, ledger, listeners)
                service.begin(settings, fleet, recorder, workers, facts.known_engine)
                try:
                    await workers.start()
                    signals.started()
                    _announce(settings, listeners[0].getsockname()[1], admin, line, setup.block_size)
                    for note in notes:
                        say(f"note: {note}")
                    await service.run(signals)
                    await service.end(signals)
                except BaseException:
                    await workers.drain(0.0, asyncio.Queue())
                    raise


@contextlib.asynccontextmanager
async def watched(service: "Service", listener: socket.socket | None) -> AsyncIterator[None]:
    """Serve the admin pages on ``listener``; null: none."""
    if listener is None:
        yield
        return
    probing = asyncio.create_task(service.probe_upstreams())
    try:
        async with serving_pages(listener, service.stats):
            yield
    finally:
        probing.cancel()


async def learn(settings: Settings, reached: Sequence[Origin]) -> Sequence[EngineFacts]:
    """Return facts of the first upstream, and with ``--inject auto`` those of the others that were reached."""
    for origin in settings.upstreams:
        if origin not in reached:
            say(f"upstream {origin} cannot be reached; it gets requests once it can")
    if not settings.engine_facts:
        return [EngineFacts(origin=reached[0])]
    asked = reached if settings.inject_auto else reached[:1]
    facts = await asyncio.gather(*(learn_engine_facts(origin, settings.access) for origin in asked))
    if facts[0].problem is not None:
        say(f"upstream {reached[0]}{facts[0].problem}; until then the trace's header lacks what this page tells")
    return facts


LOG_INTERVAL_S = 30.0
"""Between lines of the account while there is news."""
PROBE_INTERVAL_S = 5.0
UNREACHED_INTERVAL_S = 0.1
"""Between tries while no upstream takes connections."""


class Service:
    """A tap: its tasks beside the traffic until it is told to end."""

    _ledger: Ledger
    _fleet: Fleet
    _recorder: RecorderProcess
    _workers: Workers

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._engine: Engine | None = None
        self._begun = self._draining = False
        self._reachable: dict[str, bool] = {}
        """Upstreams that were tried for the admin pages, and whether they took a connection."""

    def begin(
        self, settings: Settings, fleet: Fleet, recorder: RecorderProcess, workers: Workers, engine: Engine | None
    ) -> None:
        """Take over the processes, once an upstream is there."""
        self._settings, self._fleet, self._engine = settings, fleet, engine
        self._recorder, self._workers, self._begun = recorder, workers, True
        self._ledger = recorder.ledger

    async def run(self, signals: Signals) -> None:
        settings = self._settings
        running = [self._reload_when_told(signals), self._report_regularly()]
        if settings.engine_facts:
            running.append(
                watch_engines(
                    lambda: self._fleet.origins,
                    self._engine,
                    self._engine_changed,
                    access=settings.access,
                    learnt=self._learnt,
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
        say(f"ending: no new connections; {self._ledger.in_flight} recorded requests in flight have {drain_s:g} s")
        await self._workers.drain(drain_s, signals.stops)

    @property
    def _origins(self) -> Sequence[Origin]:
        return self._fleet.origins if self._begun else self._settings.upstreams

    async def probe_upstreams(self) -> None:
        """Try a connection to each upstream, for ever: a tap without traffic learns nothing of them otherwise."""
        while True:
            tries = await try_upstreams(self._origins, self._settings.access.tls)
            self._reachable = {str(origin): failure is None for origin, failure in tries}
            await asyncio.sleep(PROBE_INTERVAL_S if any(self._reachable.values()) else UNREACHED_INTERVAL_S)

    def stats(self) -> TapStats:
        upstreams = list(map(str, self._origins))
        reachable = {name: reached for name, reached in self._reachable.items() if name in upstreams}
        if not self._begun:
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
            recorder_silent_s=monotonic() - recorder.heard_s,
            offered=account.offered,
            dropped=account.dropped,
            draining=self._draining,
            worker_stats=list(workers.stats.values()),
            progress=self._ledger.progress,
        )

    def reload(self) -> None:
        file = self._settings.upstreams_file
        if file is None:
            say("SIGHUP: nothing to read again; expected a tap with --upstreams FILE")
            return
        try:
            self._fleet.reload(read_upstreams(file))
            say(f"SIGHUP: upstreams are now {', '.join(map(str, self._fleet.origins))}")
        except InputError as error:
            say(f"SIGHUP: {error}; THE UPSTREAMS STAY AS THEY WERE")
        self._workers.reload()

    def _learnt(self, origin: Origin, facts: EngineFacts) -> None:
        """Ask another upstream for what ``--inject auto`` adds, or one that is another engine for that one's."""
        if self._settings.inject_auto and self._fleet.learn(origin, facts.dialect):
            say(f"--inject auto: upstream {origin} is {facts.dialect}")
            self._workers.reload()

    def _engine_changed(self, engine: Engine) -> None:
        self._recorder.engine_changed(engine)
        say("the engine has changed: its version or its cache configuration is another")

    async def _reload_when_told(self, signals: Signals) -> None:
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
                say(account.line())


@contextlib.asynccontextmanager
async def recording(setup: RecorderSetup, ledger: Ledger) -> AsyncIterator[RecorderProcess]:
    recorder = RecorderProcess(setup, ledger)
    await recorder.child.start()
    try:
        yield recorder
    finally:
        if not await recorder.child.finish(FLUSH_TIMEOUT_S):
            say(f"the recorder did not finish within {FLUSH_TIMEOUT_S:.0f} s; its last exchanges are lost")
        _close_account(setup.settings.trace, ledger.account(ended=True))


def _close_account(trace: str, account: Account) -> None:
    print(f"tap: {account.line()}; trace: {trace}", flush=True)
    if account.other_tokens:
        say("WARNING: prompts are longer or shorter than the engine says: is this its tokenizer and chat template?")
    try:
        keep_account(trace, account)
    except InputError as error:
        say(f"the account could not be kept beside the trace: {error}")


def _announce(settings: Settings, port: int, admin: socket.socket | None, engine: str, block_size: int) -> None:
    address = Origin("http", settings.listen[0], port)
    upstreams = ", ".join(map(str, settings.upstreams))
    line = f"tap: listening on {address}, recording to {settings.trace}, upstream {upstreams}"
    if admin is not None and settings.admin is not None:
        line += f", admin pages on {Origin('http', settings.admin[0], admin.getsockname()[1])}"
    key = f"hashes of {block_size}-token blocks keyed by {settings.key_file or key_path()}; Ctrl-C or SIGTERM ends it"
    print(f"{line}\ntap: {engine}\ntap: {key}", flush=True)
