"""A tap from start to end: reach the upstreams, start the processes, keep them running, drain, close the account."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import msgspec

from engines.access import OPEN, Access
from engines.control import learn_engine_facts, read_pages
from engines.facts import EngineFacts, parse_metrics, read_gauges
from tap.ipc.exchange import RecorderSetup, ServiceStats
from tap.ipc.stderr import say
from tap.supervisor.account import Account, Ledger, keep_account
from tap.supervisor.config import TapConfig, checked_certificate, recorder_setup, trace_under
from tap.supervisor.engineprobe import Probed, probe_engine
from tap.supervisor.fleet import watch_health
from tap.supervisor.processes import AdminProcess, RecorderProcess, Workers
from tap.supervisor.runtimefolder import runtime_folder
from tap.supervisor.signals import Signals
from tap.supervisor.upstreamlist import UpstreamList, read_upstreams
from tap.supervisor.waitingroom import reach_upstreams
from tracefile.hashing.hashkey import key_path, load_key
from tracefile.records.encoding import encode_meta
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine, Meta
from wire.url import Origin

BACKLOG = 1024


def bind_listeners(flag: str, host: str, port: int, count: int = 1) -> list[socket.socket]:
    """Return sockets that share an address, one for each process. Raises InputError if the address is not free.

    The kernel spreads connections over them, and keeps those that wait for the successor of a dead process.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        first = _bind(family, address, share=False)
        if count == 1:
            sockets = [first]
        else:
            # Bound alone first: a shared port is shared with all processes of its user, so another tap would not show.
            with first:
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

    ``learnt`` gets all that each upstream told.

    The first upstream that answers stands for all; an upstream that differs from it is reported on stderr, once.
    """
    others: dict[Origin, Engine] = {}
    while True:
        await asyncio.sleep(every_s)
        asked = tuple(origins())
        answers = await asyncio.gather(*(learn_engine_facts(origin, access) for origin in asked))
        for origin, facts in zip(asked, answers, strict=True):
            learnt(origin, facts)
        told = [
            (origin, engine) for origin, facts in zip(asked, answers, strict=True) if (engine := facts.known_engine)
        ]
        if not told:
            continue
        (_, first), *rest = told
        now = changed_engine(known, first)
        if now is not None:
            known = now
            changed(now)
        for origin, engine in rest:
            if engine not in (first, others.get(origin)):
                others[origin] = engine
                say(f"upstream {origin} is another engine than {told[0][0]}")


def changed_engine(known: Engine | None, learnt: Engine | None) -> Engine | None:
    """Return the engine as it is now if it differs from ``known``, else null; an absent field is no change."""
    if learnt is None:
        return None
    told = {name: value for name, value in msgspec.structs.asdict(learnt).items() if value not in (None, {})}
    now = msgspec.structs.replace(known or Engine(), **told)
    return None if now == known else now


class EngineSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Load of an upstream at one moment. Null: not reported."""

    at_ms: float
    """Time of the response, on the trace's clock."""
    upstream: str
    error: str | None = None
    """no_answer: none in time. Null: no error."""
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    """Share of the KV cache in use, 0 to 1."""
    prefix_queries: float | None = None
    """Prompt tokens looked up in the prefix cache since the engine's start."""
    prefix_hits: float | None = None
    preemptions: float | None = None


@dataclass(frozen=True, slots=True)
class SampleFile:
    """File beside the trace: a header like the trace's, then a sample a line; a resumed run appends its own."""

    trace: str
    meta: Meta
    epoch_ns: int
    """Monotonic clock at the trace's t = 0."""
    resume: bool

    @property
    def path(self) -> str:
        return f"{self.trace}.engine.jsonl"

    def open(self) -> BinaryIO:
        """Open it anew, or to append to; never through a link, which leads to a file of another's choice."""
        if not self.resume:
            Path(self.path).unlink(missing_ok=True)
        mode = os.O_APPEND if self.resume else os.O_EXCL
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | mode, 0o666)
        file = open(descriptor, "wb", buffering=0)  # noqa: SIM115  the caller's to close
        file.write(encode_meta(self.meta))
        return file

    def now_ms(self) -> float:
        return (time.perf_counter_ns() - self.epoch_ns) / 1e6


async def sample_engines(
    file: SampleFile, origins: Callable[[], Sequence[Origin]], every_s: float, access: Access = OPEN
) -> None:
    """Sample all upstreams every ``every_s``, for ever; samples that cannot be written are lost, with one message."""
    try:
        out = file.open()
    except OSError as error:
        say(f"{file.path}: cannot be written ({error.strerror or error}); the engine is not sampled")
        return
    with out:
        failing = False
        due = time.monotonic()
        said: set[str] = set()
        while True:
            samples = await asyncio.gather(*(_sample(file, origin, access, said) for origin in origins()))
            try:
                out.write(b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples))
                failing = False
            except OSError as error:
                if not failing:
                    say(f"{file.path}: cannot be written ({error.strerror or error}); samples of the engine are lost")
                failing = True
            due = max(due + every_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())


async def _sample(file: SampleFile, origin: Origin, access: Access, said: set[str]) -> EngineSample:
    (page,) = await read_pages(origin, ("/metrics",), access)
    at_ms = file.now_ms()
    problem = f"upstream {origin}{page.problem}; until then the engine is not sampled"
    if page.problem is not None and problem not in said:
        said.add(problem)
        say(problem)
    if not page.text:
        return EngineSample(at_ms=at_ms, upstream=str(origin), error="no_answer")
    gauges = read_gauges(parse_metrics(page.text))
    return msgspec.convert({"at_ms": at_ms, "upstream": str(origin), **gauges}, EngineSample)


FLUSH_TIMEOUT_S = 60.0


async def serve(config: TapConfig) -> None:
    signals = Signals()
    listeners = bind_listeners("--listen", *config.listen, count=config.workers)
    pages = bind_listeners("--admin", *config.admin) if config.admin is not None else []
    key = load_key(config.key_file)
    if config.resume:
        config = replace(config, trace=trace_under(key, config.trace))
    config, reached = await reach_upstreams(config, signals, listeners, pages)
    facts, *others = await learn(config, reached)
    probed = await probe_engine(config, facts, reached[0])
    config = probed.config
    with runtime_folder() as runtime:
        ledger = Ledger(runtime.map_counts(config.workers), config.workers)
        setup = recorder_setup(config, key, facts, runtime)
        admin = AdminProcess(config, pages[0], runtime) if pages else None
        async with recording(setup, ledger) as recorder:
            workers = Workers(config, facts, runtime, ledger, key=key, listeners=listeners)
            for origin, told in zip(reached, (facts, *others), strict=False):
                workers.fleet.learn(origin, told.dialect)
            service = Service(config, ledger, recorder, workers, facts.known_engine)
            try:
                await workers.start()
                if admin is not None:
                    await admin.start(service.stats)
                signals.started()
                _announce(config, listeners[0].getsockname()[1], admin, probed, setup.block_size)
                await service.run(signals, sample_file(config, setup, ledger.progress.epoch_ns))
                await service.end(signals, admin)
            except BaseException:
                await workers.drain(0.0, asyncio.Queue())
                raise
        if admin is not None:
            await admin.finish()


async def learn(config: TapConfig, reached: Sequence[Origin]) -> Sequence[EngineFacts]:
    """Return facts of the first upstream, and with ``--inject auto`` those of the others that were reached."""
    for origin in config.upstreams:
        if origin not in reached:
            say(f"upstream {origin} cannot be reached; it gets requests once it can")
    if not config.engine_facts:
        return [EngineFacts(origin=reached[0])]
    asked = reached if config.inject_auto else reached[:1]
    facts = await asyncio.gather(*(learn_engine_facts(origin, config.access) for origin in asked))
    if facts[0].problem is not None:
        say(f"upstream {reached[0]}{facts[0].problem}; until then the trace's header lacks what this page tells")
    return facts


class Service:
    """A running tap: its tasks beside the traffic until it is told to end."""

    def __init__(
        self,
        config: TapConfig,
        ledger: Ledger,
        recorder: RecorderProcess,
        workers: Workers,
        engine: Engine | None,
    ) -> None:
        self._config, self._ledger, self._recorder, self._workers = config, ledger, recorder, workers
        self._fleet = workers.fleet
        self._engine = engine
        self._draining = False

    async def run(self, signals: Signals, samples: SampleFile) -> None:
        going = [self._reload_when_told(signals)]
        if self._config.log_interval_s:
            going.append(self._report_regularly())
        if self._config.engine_facts:
            access, learnt = self._config.access, self._learnt
            going.append(
                watch_engines(self._upstreams, self._engine, self._engine_changed, access=access, learnt=learnt)
            )
        if self._config.engine_metrics_s:
            going.append(sample_engines(samples, self._upstreams, self._config.engine_metrics_s, self._config.access))
        if self._config.health_check is not None:
            watching = watch_health(self._fleet, self._config.health_check, self._health_changed, self._config.access)
            going.append(watching)
        tasks = [asyncio.create_task(one) for one in going]
        try:
            await signals.stops.get()
        finally:
            for task in tasks:
                task.cancel()

    async def end(self, signals: Signals, admin: AdminProcess | None) -> None:
        self._draining = True
        if admin is not None:
            admin.tell(self.stats())
        drain_s = self._config.drain_s
        say(f"ending: no new connections; {self._ledger.in_flight} recorded requests in flight have {drain_s:g} s")
        await self._workers.drain(drain_s, signals.stops)

    def stats(self) -> ServiceStats:
        account = self._ledger.account()
        return ServiceStats(
            upstreams=list(map(str, self._fleet.origins)),
            draining_upstreams=sorted(map(str, self._fleet.draining)),
            stopped_upstreams=sorted(map(str, self._fleet.stopped)),
            unhealthy_upstreams=list(map(str, self._fleet.unhealthy)),
            workers=self._config.workers,
            workers_up=self._workers.ready,
            worker_restarts=self._workers.restarts,
            recorder_up=self._recorder.child.ready,
            recorder_restarts=self._recorder.child.restarts,
            offered=account.offered,
            dropped=dict(account.dropped),
            draining=self._draining,
            engine=self._engine,
        )

    def reload(self) -> None:
        file, own = self._config.upstreams_file, self._config.certificate
        if file is None and own is None:
            say("SIGHUP: nothing to read again; expected a tap with --upstreams FILE or --tls-cert")
            return
        try:
            if file is not None:
                listed = read_upstreams(file)
                self._fleet.reload(listed)
                say(f"SIGHUP: upstreams are now {_names(listed)}")
        except InputError as error:
            say(f"SIGHUP: {error}; THE UPSTREAMS STAY AS THEY WERE")
        try:
            if own is not None:
                checked_certificate(own.cert, own.key)
                say(f"SIGHUP: {own.cert} is read again")
        except InputError as error:
            say(f"SIGHUP: {error}; THE CERTIFICATE STAYS AS IT WAS")
        self._workers.reload(certificate=True)

    def _health_changed(self, line: str) -> None:
        say(line)
        self._workers.reload()

    def _upstreams(self) -> Sequence[Origin]:
        return self._fleet.origins

    def _learnt(self, origin: Origin, facts: EngineFacts) -> None:
        """Ask another upstream for what ``--inject auto`` adds, or one that is another engine for that one's."""
        if self._config.inject_auto and self._fleet.learn(origin, facts.dialect):
            say(f"--inject auto: upstream {origin} is {facts.dialect}")
            self._workers.reload()

    def _engine_changed(self, engine: Engine) -> None:
        self._engine = engine
        self._recorder.engine_changed(engine)
        say("the engine has changed: its version or its cache configuration is another")

    async def _reload_when_told(self, signals: Signals) -> None:
        while True:
            await signals.reloads.get()
            self.reload()

    async def _report_regularly(self) -> None:
        reported = 0
        while True:
            await asyncio.sleep(self._config.log_interval_s)
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
        _close_account(setup.trace, ledger.account(ended=True))


def sample_file(config: TapConfig, setup: RecorderSetup, epoch_ns: int | None) -> SampleFile:
    before_ns = 0 if epoch_ns is None else setup.epoch_ns - epoch_ns
    began_ns = setup.meta.epoch_unix_ns
    meta = msgspec.structs.replace(setup.meta, epoch_unix_ns=None if began_ns is None else began_ns - before_ns)
    return SampleFile(config.trace, meta, setup.epoch_ns - before_ns, config.resume)


def _close_account(trace: str, account: Account) -> None:
    print(f"tap: {account.line()}; trace: {trace}", flush=True)
    if account.other_tokens:
        say("WARNING: prompts are longer or shorter than the engine says: is this its tokenizer and chat template?")
    try:
        keep_account(trace, account)
    except InputError as error:
        say(f"the account could not be kept beside the trace: {error}")


def _announce(config: TapConfig, port: int, admin: AdminProcess | None, probed: Probed, block_size: int) -> None:
    address = Origin("http" if config.certificate is None else "https", config.listen[0], port)
    line = f"tap: listening on {address}, recording to {config.trace}, upstream "
    line += _names(UpstreamList(config.upstreams, config.draining, config.stopped))
    if admin is not None and config.admin is not None:
        line += f", admin pages on {Origin('http', config.admin[0], admin.port)}"
    key = f"hashes of {block_size}-token blocks keyed by {config.key_file or key_path()}; Ctrl-C or SIGTERM ends it"
    print(f"{line}\ntap: {probed.line}\ntap: {key}", flush=True)
    for note in probed.notes:
        say(f"note: {note}")


def _names(listed: UpstreamList) -> str:
    states = dict.fromkeys(listed.draining, " (draining)") | dict.fromkeys(listed.stopped, " (stopped)")
    return ", ".join(f"{origin}{states.get(origin, '')}" for origin in listed.origins)
