"""A tap from start to end: reach the upstreams, start the processes, keep them running, drain, account for everything.

The supervisor touches no traffic. It binds the sockets, learns what the engine says of itself, hears the signals,
starts again what dies, and adds up what became of every request.
"""

import asyncio
import contextlib
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from tap.account import Account, Ledger, keep_account
from tap.childprocess import ChildProcess
from tap.config import TapConfig, read_upstreams
from tap.control import Cut, Drain, Drained, Reload
from tap.enginefacts import EngineFacts, learn_engine_facts, reach_upstreams
from tap.exchange import Ready, RecorderSetup, Refused
from tap.keeper import Keeper
from tap.listening import bind_listeners
from tap.recorderprocess import RecorderProcess
from tap.setups import Runtime, recorder_setup, worker_setup
from tracefile.blockhash import load_key
from tracefile.errors import InputError
from wire.url import Origin

REPORT_INTERVAL_S = 30.0
FLUSH_TIMEOUT_S = 60.0
"""How long workers may take to hand over what is left, and the recorder to write it."""
LEAVE_S = 5.0
"""How long a process with nothing left to do may take to leave."""

_worker_replies = msgspec.msgpack.Decoder(Ready | Refused | Drained)


async def serve(config: TapConfig) -> None:
    """Relay and record until SIGTERM or SIGINT. Raises InputError if it cannot start."""
    end_before_the_start()
    listeners = bind_listeners("--listen", *config.listen, count=config.workers)
    key = load_key(config.key_file)
    reached = await reach_upstreams(config.upstreams, config.wait_s)
    for origin in set(config.upstreams).difference(reached):
        _say(f"upstream {origin} cannot be reached; it gets requests once it can")
    facts = await learn_engine_facts(reached[0]) if config.engine_facts else EngineFacts()
    with runtime_folder() as runtime, contextlib.ExitStack() as sockets:
        for listener in listeners:
            sockets.enter_context(listener)
        ledger = Ledger(runtime.map_counts(config.workers), config.workers)
        async with recording(recorder_setup(config, key, facts, runtime), ledger) as recorder:
            service = Service(config, facts, runtime, ledger, [listener.fileno() for listener in listeners])
            await service.start()
            signals = Signals()
            _announce(config, listeners[0].getsockname()[1])
            await service.run(signals, recorder)
            sockets.close()
            await service.drain(signals)


def end_before_the_start() -> None:
    """Let SIGTERM and SIGINT end what is being started, while nothing is at stake."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)


class Signals:
    """SIGTERM and SIGINT from now on, as they come, and SIGHUP."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.stops: asyncio.Queue[None] = asyncio.Queue()
        self.reloads: asyncio.Queue[None] = asyncio.Queue()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stops.put_nowait, None)
        loop.add_signal_handler(signal.SIGHUP, self.reloads.put_nowait, None)


class Service:
    """The workers and the admin process of a tap, and the upstreams that they are to use."""

    def __init__(
        self, config: TapConfig, facts: EngineFacts, runtime: Runtime, ledger: Ledger, listen_fds: Sequence[int]
    ) -> None:
        self._config, self._facts, self._runtime, self._ledger = config, facts, runtime, ledger
        self._listen_fds = listen_fds
        self._upstreams = config.upstreams
        self._cut = 0
        self._workers = [self._worker(number) for number in range(config.workers)]

    def _worker(self, number: int) -> Keeper:
        name = "worker" if self._config.workers == 1 else f"worker {number + 1}"
        return Keeper(
            name,
            partial(self._start_worker, number),
            on_message=self._drained,
            on_death=partial(self._ledger.worker_died, number),
            consequence="the requests it had are lost, those that come for it wait",
        )

    async def _start_worker(self, number: int) -> ChildProcess:
        listen_fd = self._listen_fds[number]
        setup = worker_setup(
            self._config, self._facts, self._runtime, number=number, listen_fd=listen_fd, upstreams=self._upstreams
        )
        return await ChildProcess.start("tap.worker", setup, _worker_replies, [listen_fd])

    def _drained(self, message: Drained) -> None:
        self._cut += message.cut

    async def start(self) -> None:
        """Start every worker. Raises InputError if one refuses."""
        await asyncio.gather(*(worker.start() for worker in self._workers))

    async def run(self, signals: Signals, recorder: RecorderProcess) -> None:
        """Follow signals and the engine until it is time to end."""
        tasks = [
            asyncio.create_task(self._report_regularly()),
            asyncio.create_task(self._reload_when_told(signals)),
        ]
        try:
            await signals.stops.get()
        finally:
            for task in tasks:
                task.cancel()

    async def drain(self, signals: Signals) -> None:
        """Let what is in flight end, for ``--drain-s`` or until a second signal; then it is cut."""
        drain_s = self._config.drain_s
        _say(f"ending: no new connections; {self._ledger.in_flight} recorded requests in flight have {drain_s:g} s")
        for worker in self._workers:
            worker.send(Drain(drain_s))
        leaving = asyncio.create_task(self._left(drain_s + FLUSH_TIMEOUT_S + LEAVE_S))
        second = asyncio.create_task(signals.stops.get())
        await asyncio.wait([leaving, second], return_when=asyncio.FIRST_COMPLETED)
        second.cancel()
        for worker in self._workers:
            worker.send(Cut())
        await leaving
        if self._cut:
            _say(f"{self._cut} responses were cut")

    async def _left(self, timeout_s: float) -> None:
        if not all(await asyncio.gather(*(worker.left(timeout_s) for worker in self._workers))):
            _say("a worker did not leave in time and was killed")

    def reload(self) -> None:
        """Read the file of upstreams again; one that is wrong changes nothing."""
        file = self._config.upstreams_file
        if file is None:
            _say("SIGHUP: the upstreams are flags; expected --upstreams FILE to read again")
            return
        try:
            upstreams = read_upstreams(file)
        except InputError as error:
            _say(f"SIGHUP: {error}; THE UPSTREAMS STAY AS THEY WERE")
            return
        self._upstreams = upstreams
        for worker in self._workers:
            worker.send(Reload(list(map(str, upstreams))))
        _say(f"SIGHUP: upstreams are now {_names(upstreams)}")

    async def _reload_when_told(self, signals: Signals) -> None:
        while True:
            await signals.reloads.get()
            self.reload()

    async def _report_regularly(self) -> None:
        """A line on stderr now and then, while there is news."""
        reported = 0
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            account = self._ledger.account()
            if account.offered != reported:
                reported = account.offered
                _say(account.line())


@contextlib.asynccontextmanager
async def recording(setup: RecorderSetup, ledger: Ledger) -> AsyncIterator[RecorderProcess]:
    """A recorder that is ready; at the end it has written everything, and the account is printed and kept."""
    recorder = RecorderProcess(setup, ledger)
    await recorder.keeper.start()
    try:
        yield recorder
    finally:
        if not await recorder.keeper.finish(FLUSH_TIMEOUT_S):
            _say(f"the recorder did not finish within {FLUSH_TIMEOUT_S:.0f} s; what it had left is lost")
        _close_account(setup.trace, ledger.account(ended=True))


@contextlib.contextmanager
def runtime_folder() -> Iterator[Runtime]:
    """A folder for the length of the run; short, since a socket's path may have no more than a hundred letters."""
    with tempfile.TemporaryDirectory(prefix="tap-") as folder:
        yield Runtime(Path(folder))


def _close_account(trace: str, account: Account) -> None:
    print(f"tap: {account.line()}; trace: {trace}", flush=True)
    if account.other_tokens:
        _say("WARNING: prompts are longer or shorter than the engine says: is this its tokenizer and chat template?")
    try:
        keep_account(trace, account)
    except InputError as error:
        _say(f"the account could not be kept beside the trace: {error}")


def _announce(config: TapConfig, port: int) -> None:
    address = Origin("http", config.listen[0], port)
    upstreams = _names(config.upstreams)
    print(f"tap: listening on {address}, recording to {config.trace}, upstream {upstreams}", flush=True)


def _names(origins: Sequence[Origin]) -> str:
    return ", ".join(map(str, origins))


def _say(text: str) -> None:
    print(f"tap: {text}", file=sys.stderr, flush=True)
