"""The recorder process: takes finished exchanges off its workers' sockets, makes records of them, writes the trace.

It is a process of its own because tokenizing holds the interpreter's lock for as long as a prompt is long. It ends
when the supervisor and every worker have closed theirs, never by a signal, so that nothing taken is lost.
"""

import contextlib
import copy
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from tap.admin.meter import RecordMeter
from tap.exchange import EngineChanged, ExchangeCopy, Progress, Ready, RecorderSetup, Refused, encode_frame
from tap.inbox import Inbox
from tap.prompt import prompt_hasher
from tap.recording import MadeRecord, RecordMaker
from tracefile.blockhash import HashKey
from tracefile.errors import InputError
from tracefile.sessions import SessionIndex
from tracefile.writing import TraceWriter

IDLE_S = 0.2
REPORT_INTERVAL_S = 0.5
NICENESS = 10
"""Where there is no core to spare, the workers go first."""

_messages = msgspec.msgpack.Decoder(RecorderSetup | ExchangeCopy | EngineChanged)


class Recorder:
    """One trace being written: an exchange in, a record out, and the counts of what became of each."""

    def __init__(self, setup: RecorderSetup) -> None:
        key = HashKey(setup.key_secret)
        self._maker = RecordMaker(
            key,
            prompt_hasher(setup, key),
            epoch_ns=setup.epoch_ns,
            hash_model=setup.hash_model,
            loras=frozenset(setup.loras),
            keep_headers=tuple(setup.keep_headers),
            dialect=setup.dialect,
        )
        self._sessions = SessionIndex(setup.block_size)
        self._writer = TraceWriter(setup.trace, setup.meta, overwrite=setup.overwrite)
        self._received = setup.carry.received
        self._taken = copy.deepcopy(setup.carry)
        """Counts of what the writer took; ``_flushed`` trails it by what is not in the file yet."""
        self._flushed = setup.carry
        self._dropped = Counter(setup.carry.dropped)
        self._writing = True
        """The last flush reached the files."""
        self._meter = None if setup.admin_socket is None else RecordMeter(setup.admin_socket, os.getpid())

    def take(self, exchange: ExchangeCopy) -> None:
        """Record one exchange; one that cannot be is counted by what failed, and the next is taken all the same."""
        self._received += 1
        try:
            made = self._maker.make(exchange)
            record = self._sessions.link(made.record)
            self._writer.write(record)
        except InputError:
            self._dropped["trace_unwritable"] += 1
        except Exception as error:  # one odd exchange must not cost the others; its kind is counted and logged
            self._dropped[f"recorder_failed:{type(error).__name__}"] += 1
        else:
            self._count(made)
            if self._meter is not None:
                self._meter.observe(
                    record, None if exchange.sent_ns is None else exchange.sent_ns - exchange.arrival_ns
                )

    def _count(self, made: MadeRecord) -> None:
        taken = self._taken
        taken.recorded += 1
        if made.record.block_hashes is None:
            reason = made.unhashed or "unknown"
            taken.unhashed[reason] = taken.unhashed.get(reason, 0) + 1
        else:
            taken.hashed += 1
        if made.prompt_count_matches is not None:
            taken.prompt_counts_checked += 1
            taken.prompt_counts_matched += made.prompt_count_matches

    def report(self) -> Progress:
        """The counts, those of records only as far as the file has them."""
        self._writing = False
        with contextlib.suppress(InputError):
            self._writer.flush()
            self._flushed = msgspec.structs.replace(self._taken, unhashed=dict(self._taken.unhashed))
            self._writing = True
        return self._told()

    def push(self, now_s: float) -> None:
        """Tell the admin process what is due; without one, nothing."""
        if self._meter is not None:
            self._meter.push_if_due(now_s, self._told, writing=self._writing)

    def _told(self) -> Progress:
        return msgspec.structs.replace(self._flushed, received=self._received, dropped=dict(self._dropped))

    def close(self) -> Progress:
        """End the trace; what the disk would not take even now is dropped, not recorded."""
        try:
            self._writer.close()
            self._flushed = self._taken
        except InputError:
            written = max(self._flushed.recorded, whole_records(self._writer.path))
            self._dropped["trace_unwritable"] += self._taken.recorded - written
            self._flushed.recorded = written
        if self._meter is not None:
            self._meter.close(self._told())
        return self._told()


def whole_records(trace: str) -> int:
    """How many records a plain trace holds; 0 where that cannot be read off it, as off a compressed one."""
    if trace.endswith((".gz", ".zst")):
        return 0
    try:
        with open(trace, "rb") as file:
            lines = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0
    return max(0, lines - 1)


def record_exchanges(sock: socket.socket) -> None:
    """Serve one supervisor over ``sock``: its setup, then its workers' exchanges until all have closed their sides."""
    inbox = Inbox(sock)
    frames = inbox.frames(IDLE_S)
    setup = _first_message(frames)
    if setup is None:
        return
    try:
        recorder = Recorder(setup)
    except InputError as error:
        sock.sendall(encode_frame(Refused(str(error))))
        return
    if setup.socket:
        inbox.listen(setup.socket)
    sock.sendall(encode_frame(Ready()))
    _record_until_closed(recorder, sock, frames)


def _record_until_closed(recorder: Recorder, sock: socket.socket, frames: Iterator[bytes | None]) -> None:
    reported_at = time.monotonic()
    news = False
    for payload in frames:
        if payload is not None:
            message = _messages.decode(payload)
            if isinstance(message, ExchangeCopy):
                recorder.take(message)
                news = True
        now = time.monotonic()
        if news and (payload is None or now - reported_at >= REPORT_INTERVAL_S):
            _tell(sock, recorder.report())
            reported_at, news = now, False
        recorder.push(now)
    _tell(sock, recorder.close())


def _first_message(frames: Iterator[bytes | None]) -> RecorderSetup | None:
    """The setup; null if the supervisor ended before it sent one."""
    for payload in frames:
        if payload is not None:
            message = _messages.decode(payload)
            return message if isinstance(message, RecorderSetup) else None
    return None


def _tell(sock: socket.socket, progress: Progress) -> None:
    """A supervisor that was killed hears nothing, and what its workers had sent is written all the same."""
    with contextlib.suppress(OSError):
        sock.sendall(encode_frame(progress))


def main(argv: Sequence[str]) -> int:
    """``python -m tap.recorder FD``: started by the supervisor, with its end of a socket pair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
        if hasattr(os, "SCHED_BATCH"):  # on Linux: to be woken by a frame is no reason to take a worker's turn
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        with socket.socket(fileno=int(argv[0])) as sock:
            record_exchanges(sock)
    except Exception as error:  # a traceback could quote what a request said; the supervisor notices the end
        print(f"tap: the recorder process failed ({type(error).__name__})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
