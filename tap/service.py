"""A tap from start to end: reach the upstream, start the recorder, serve, drain, account for every request."""

import asyncio
import contextlib
import gc
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from tap.config import NAMED_TOKENIZERS, TapConfig
from tap.enginefacts import EngineFacts, learn_engine_facts, reach_upstream
from tap.exchange import RecorderSetup
from tap.recorderlink import Counts, RecorderLink
from tap.relay import Upstream
from tap.sidecopy import CopyBudget
from tracefile.blockhash import DEFAULT_BLOCK_SIZE, HashKey, load_key
from tracefile.errors import InputError
from tracefile.schema import HashInfo, Meta
from wire.pool import ConnectionPool
from wire.server import Server
from wire.url import Origin

MAX_IDLE_S = 3.0
"""Upstream connections idle for longer are not used again: servers close them (uvicorn after 5 s), and a request that
crosses that close on the wire would be lost."""
MAX_IDLE_CONNECTIONS = 1024
REPORT_INTERVAL_S = 30.0
FLUSH_TIMEOUT_S = 60.0
TRUSTED_SHARE = 0.99


async def serve(config: TapConfig) -> None:
    """Relay and record until SIGTERM or SIGINT. Raises InputError if it cannot start."""
    check_port_is_free(*config.listen)
    key = load_key(config.key_file)
    pool = ConnectionPool(config.upstreams[0], max_idle=MAX_IDLE_CONNECTIONS, max_idle_s=MAX_IDLE_S)
    (await reach_upstream(pool, config.upstreams[0], config.wait_s)).abort()
    facts = await learn_engine_facts(config.upstreams[0]) if config.engine_facts else EngineFacts()
    budget = CopyBudget(config.queue_bytes)
    async with recording(recorder_setup(config, key, facts), budget) as link:
        stopping = _stop_signals()
        upstream = Upstream(config.upstreams[0], pool, link, budget, config.max_body_bytes)
        server = Server(upstream.new_relay)
        port = await _listen(server, *config.listen)
        # Everything loaded so far stays: looking through it for garbage again would stall every stream for 40 ms.
        gc.collect()
        gc.freeze()
        _announce(config, port)
        reports = asyncio.create_task(_report_regularly(link))
        await stopping.get()
        reports.cancel()
        await drain(server, upstream, stopping, config.drain_s)
        pool.close()


@contextlib.asynccontextmanager
async def recording(setup: RecorderSetup, budget: CopyBudget) -> AsyncIterator[RecorderLink]:
    """A recorder that is ready; at the end it has written everything, and the account is printed and kept."""
    link = RecorderLink(setup, budget)
    await link.start()
    try:
        yield link
    finally:
        await link.finish(FLUSH_TIMEOUT_S)
        counts = link.counts()
        print(f"tap: {summary(counts)}; trace: {', '.join(link.traces)}", flush=True)
        _warn_of_other_tokens(counts)
        _keep_summary(setup.trace, counts, link.traces)


async def drain(server: Server, upstream: Upstream, stopping: "asyncio.Queue[None]", drain_s: float) -> None:
    """Let what is in flight end, for ``drain_s`` or until a second signal; then cut it."""
    _say(f"ending: no new connections; {upstream.in_flight} recorded requests in flight have {drain_s:g} s")
    draining = asyncio.create_task(server.drain(drain_s))
    second = asyncio.create_task(stopping.get())
    timer = asyncio.get_running_loop().call_later(drain_s, _mark_ending, upstream)
    await asyncio.wait([draining, second], return_when=asyncio.FIRST_COMPLETED)
    timer.cancel()
    second.cancel()
    if not draining.done():
        draining.cancel()
        _mark_ending(upstream)
        draining = asyncio.create_task(server.drain(0))
    cut = await draining
    if cut:
        _say(f"{cut} responses were cut")


def recorder_setup(config: TapConfig, key: HashKey, facts: EngineFacts) -> RecorderSetup:
    """What the recorder is told, the trace's header included."""
    engine_block = facts.engine.block_size if facts.engine is not None else None
    block_size = config.block_size or min(DEFAULT_BLOCK_SIZE, engine_block or DEFAULT_BLOCK_SIZE)
    if engine_block and engine_block % block_size:
        _say(f"blocks of {block_size} tokens do not divide the engine's {engine_block}: hits cannot be counted exactly")
    epoch_unix_ns, epoch_ns = time.time_ns(), time.perf_counter_ns()
    is_directory = config.tokenizer not in NAMED_TOKENIZERS
    meta = Meta(
        source="tap",
        model=config.model or facts.model,
        tokenizer=Path(config.tokenizer).resolve().name if is_directory else config.tokenizer,
        block_size=block_size,
        hash=HashInfo(algorithm=config.algorithm, key_id=key.key_id),
        epoch_unix_ns=epoch_unix_ns,
        engine=facts.engine,
    )
    return RecorderSetup(
        trace=config.trace,
        overwrite=config.overwrite,
        meta=meta,
        tokenizer=config.tokenizer,
        key_secret=key.secret,
        algorithm=config.algorithm,
        block_size=block_size,
        hash_model=config.model,
        loras=list(config.loras),
        epoch_ns=epoch_ns,
    )


def summary(counts: Counts) -> str:
    """One line: what became of the requests, and how far the hashes can be trusted."""
    line = f"{counts.recorded} of {counts.offered} requests recorded"
    if counts.dropped:
        line += f", dropped: {_by_reason(counts.dropped)}"
    line += f"; hashed {_share(counts.hashed, counts.recorded)}"
    if counts.unhashed:
        line += f" (not: {_by_reason(counts.unhashed)})"
    matched, checked = counts.prompt_counts_matched, counts.prompt_counts_checked
    return f"{line}; prompt ids number what the engine reports in {_share(matched, checked)} of {checked}"


def check_port_is_free(host: str, port: int) -> None:
    """Raise InputError if nothing can listen there; asked before a trace is begun."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise _cannot_listen(host, port, error) from None


async def _listen(server: Server, host: str, port: int) -> int:
    try:
        return await server.listen(host, port)
    except OSError as error:
        raise _cannot_listen(host, port, error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> InputError:
    return InputError(f"--listen {host}:{port}: {error.strerror or error}; expected a free address of this machine")


def _stop_signals() -> "asyncio.Queue[None]":
    """Gets an item for each SIGTERM and SIGINT from now on; before, while nothing is at stake, they just end it."""
    loop = asyncio.get_running_loop()
    stopping: asyncio.Queue[None] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.put_nowait, None)
    return stopping


async def _report_regularly(link: RecorderLink) -> None:
    """A line on stderr now and then, while there is news."""
    reported = 0
    while True:
        await asyncio.sleep(REPORT_INTERVAL_S)
        counts = link.counts()
        if counts.offered != reported:
            reported = counts.offered
            _say(summary(counts))


def _announce(config: TapConfig, port: int) -> None:
    address = Origin("http", config.listen[0], port)
    print(
        f"tap: listening on {address}, recording to {config.trace}, upstream {', '.join(map(str, config.upstreams))}",
        flush=True,
    )


def _warn_of_other_tokens(counts: Counts) -> None:
    """Hashes of ids that are not the engine's say nothing of its cache; the counts are how that shows."""
    if counts.prompt_counts_matched < TRUSTED_SHARE * counts.prompt_counts_checked:
        _say("WARNING: prompts are longer or shorter than the engine says: is this its tokenizer and chat template?")


def _keep_summary(trace: str, counts: Counts, traces: list[str]) -> None:
    """The counts beside the trace, whose header was written before they were known."""
    facts = {**msgspec.to_builtins(counts), "traces": [Path(path).name for path in traces]}
    try:
        Path(f"{trace}.summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(facts)) + b"\n")
    except OSError as error:
        _say(f"the summary could not be kept beside the trace ({error.strerror})")


def _mark_ending(upstream: Upstream) -> None:
    upstream.ending = True


def _by_reason(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def _say(text: str) -> None:
    print(f"tap: {text}", file=sys.stderr, flush=True)
