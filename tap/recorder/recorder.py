"""The recorder process: takes finished exchanges off its workers' sockets, makes records of them, writes the trace.

It is a process of its own because tokenizing holds the interpreter's lock for as long as a prompt is long. It ends
when the supervisor and every worker have closed theirs, never by a signal, so that nothing taken is lost.
"""

import contextlib
import copy
import gc
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from tap.ipc.exchange import EngineChanged, ExchangeCopy, Progress, Ready, RecorderSetup, Refused, encode_frame
from tap.prompts.prompt import prompt_hasher
from tap.recorder.inbox import Inbox
from tap.recorder.meter import RecordMeter
from tap.recorder.recording import MadeRecord, RecordMaker
from tap.recorder.segments import SegmentedTrace
from tap.recorder.upload import Uploader
from tracefile.hashing.hashkey import HashKey
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine, Record
from tracefile.sessions import SessionIndex

HASH_BITS = 64


class SessionSample:
    """Keeps about ``share`` of all sessions, by a keyed hash of their ids: the same ones at every tap with this key.

    Asked once a record's session is known. A request without one is a session of its own. The samples of smaller
    shares are parts of those of larger ones.
    """

    def __init__(self, key: HashKey, share: float) -> None:
        self._key = key
        self._below = round(share * (1 << HASH_BITS))

    def keeps(self, record: Record) -> bool:
        """Whether the record's session is in the sample."""
        name = record.session_id or f"request {record.request_id}"
        digest = self._key.derive(b"session sample", HASH_BITS // 8, name.encode())
        return int.from_bytes(digest, "big") < self._below


IDLE_S = 0.2
REPORT_INTERVAL_S = 0.5
UPLOAD_AT_END_S = 20.0
"""How long the last segments may take to be uploaded once all is recorded."""
RELINKED_RECORDS = 50_000
"""Records of a resumed trace by which conversations keep their sessions."""
GC_ALLOCATIONS = 20_000
"""Between two looks through the youngest objects."""
NICENESS = 10
"""Where there is no core to spare, the workers go first."""

decode_message = msgspec.msgpack.Decoder(RecorderSetup | ExchangeCopy | EngineChanged).decode
"""A frame's payload as what it is."""


class Recorder:
    """One trace being written: an exchange in, a record out, and the counts of what became of each."""

    def __init__(self, setup: RecorderSetup) -> None:
        key = HashKey(setup.key_secret)
        hasher = prompt_hasher(setup, key)
        self._uploader = Uploader(setup.upload) if setup.upload is not None else None
        self._trace = SegmentedTrace(
            setup.trace,
            setup.meta,
            rotate_bytes=setup.rotate_bytes,
            rotate_s=setup.rotate_s,
            overwrite=setup.overwrite,
            resume=setup.resume,
        )
        self._sessions = SessionIndex(setup.block_size)
        self._before = self._trace.recorded if setup.carry.found is None else setup.carry.found
        """Records of earlier runs."""
        found = list(self._trace.last_records(RELINKED_RECORDS)) if self._trace.recorded else []
        epoch_ns = setup.carry.epoch_ns
        if epoch_ns is None:
            epoch_ns = _epoch_ns(setup, self._trace, found)
        self._maker = RecordMaker(
            key,
            hasher,
            epoch_ns=epoch_ns,
            hash_model=setup.hash_model,
            loras=frozenset(setup.loras),
            keep_headers=tuple(setup.keep_headers),
            dialect=setup.dialect,
        )
        for record in found:
            self._sessions.recall(record)
            self._maker.remember(record.request_id)
        self._sample = SessionSample(key, setup.sample) if setup.sample < 1 else None
        self._meter = RecordMeter(setup.admin_socket, os.getpid()) if setup.admin_socket is not None else None
        self._taken = copy.deepcopy(setup.carry)
        """Counts of what the trace took; ``_flushed`` trails those of records by what is not in its files yet."""
        self._taken.found, self._taken.epoch_ns = self._before, epoch_ns
        self._dropped = Counter(setup.carry.dropped)
        self._count_unreported(found)
        self._flushed = copy.deepcopy(self._taken)
        self._is_news = False
        self._say_mended()

    def take(self, exchange: ExchangeCopy) -> None:
        """Record one exchange; one that cannot be is counted by what failed, and the next is taken all the same."""
        self._is_news = True
        self._taken.received += 1
        try:
            made = self._maker.make(exchange)
            record = self._sessions.link(made.record)
            if self._meter is not None:
                head_ns = None if exchange.sent_ns is None else exchange.sent_ns - exchange.arrival_ns
                self._meter.observe(record, head_ns)
            if self._sample is not None and not self._sample.keeps(record):
                self._taken.sampled_out += 1
                return
            self._trace.write(record)
        except InputError:
            self._dropped["trace_unwritable"] += 1
        except Exception as error:  # one odd exchange must not cost the others; its kind is counted and logged
            self._dropped[f"recorder_failed:{type(error).__name__}"] += 1
        else:
            self._count(made)

    def change_engine(self, engine: Engine | None) -> None:
        """Write what comes from now on under a header that names this engine."""
        self._trace.change_meta(msgspec.structs.replace(self._trace.meta, engine=engine))

    def push(self, now_s: float) -> None:
        """Tell the admin process what is due; without one, nothing."""
        if self._meter is not None:
            self._meter.push_if_due(now_s, self.progress, writing=not self._trace.failing)

    def tick(self) -> Progress | None:
        """Bring what was taken to the files, rotate, upload; the counts, if there is anything to tell."""
        retrying = self._trace.failing
        news = self._is_news or retrying
        if news and self._trace.flush():
            self._is_news = False
            self._flushed = msgspec.structs.replace(self._taken, unhashed=dict(self._taken.unhashed))
        news = self._trace.rotate_if_due() or news
        news = self._follow_uploads() or news
        return self.progress() if news else None

    def progress(self) -> Progress:
        """The counts, those of records only as far as the files have them."""
        return msgspec.structs.replace(
            self._flushed,
            received=self._taken.received,
            sampled_out=self._taken.sampled_out,
            dropped=dict(self._dropped),
            recorded=self._trace.recorded - self._before,
            segments=self._trace.segments,
            uploaded=sum(segment.uploaded is not None for segment in self._trace.manifest.segments),
            upload_failed=self._taken.upload_failed + (self._uploader.failed if self._uploader is not None else 0),
        )

    def close(self) -> Progress:
        """End the trace; what the disk would not take even now is dropped, not recorded."""
        whole = self._trace.close()
        recorded = self._trace.recorded - self._before
        if not whole:
            self._dropped["trace_unwritable"] += self._taken.recorded - recorded
        self._flushed = self._taken
        self._flushed.hashed = min(self._flushed.hashed, recorded)
        return self.progress()

    def finish_uploads(self) -> Progress:
        """Send the segments that were closed last, as far as there is time, once the trace has ended."""
        self._follow_uploads()
        if self._uploader is not None:
            self._uploader.close(UPLOAD_AT_END_S)
            self._follow_uploads()
        if self._meter is not None:
            self._meter.close(self.progress())
        return self.progress()

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

    def _count_unreported(self, found: Sequence[Record]) -> None:
        """Count what the recorder before had written and not told: the last records of those found."""
        taken = self._taken
        recorded = self._trace.recorded - self._before
        unreported = found[len(found) - max(0, recorded - taken.recorded) :]
        hashed = sum(record.block_hashes is not None for record in unreported)
        taken.recorded = recorded
        taken.hashed += hashed
        if hashed < len(unreported):
            reason = "recorder_restarted"
            taken.unhashed[reason] = taken.unhashed.get(reason, 0) + len(unreported) - hashed

    def _follow_uploads(self) -> bool:
        """Offer what was closed, note what is sent; whether anything was."""
        if self._uploader is None:
            return False
        for segment in self._trace.manifest.segments:
            if segment.uploaded is None:
                self._uploader.offer(self._trace.path.with_name(segment.name))
        sent = self._uploader.uploaded()
        for name, where in sent:
            self._trace.mark_uploaded(name, where)
        return bool(sent)

    def _say_mended(self) -> None:
        for sentence in self._trace.mended:
            print(f"tap: {sentence}", file=sys.stderr, flush=True)


def _epoch_ns(setup: RecorderSetup, trace: SegmentedTrace, found: Sequence[Record]) -> int:
    """The monotonic clock at the trace's t = 0; of a resumed trace, that may be before this machine was started.

    The wall clock says how long ago it was. If it was set back since the earlier runs, the trace goes on where those
    had ended: time never runs backwards in it.
    """
    ours, theirs = setup.meta.epoch_unix_ns, trace.meta.epoch_unix_ns
    if ours is None or theirs is None or ours == theirs:
        return setup.epoch_ns
    ended_ms = max((record.end_ms() or record.arrival_ms or 0.0 for record in found), default=0.0)
    return setup.epoch_ns - max(ours - theirs, round(ended_ms * 1e6))


def record_exchanges(sock: socket.socket) -> None:
    """Serve one supervisor over ``sock``: its setup, then its workers' exchanges until all have closed their sides."""
    inbox = Inbox(sock)
    messages = _messages_of(inbox)
    setup = next((batch[0] for batch in messages if batch), None)
    if not isinstance(setup, RecorderSetup):
        return
    try:
        recorder = Recorder(setup)
    except InputError as error:
        sock.sendall(encode_frame(Refused(str(error))))
        return
    if setup.socket:
        inbox.listen(setup.socket)
    # What is loaded by now stays, and what records leave behind holds no cycles: there is little to look through.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 20)
    with contextlib.suppress(OSError):  # a supervisor that was told to end meanwhile
        sock.sendall(encode_frame(Ready()) + encode_frame(recorder.progress()))
    _record_until_closed(recorder, sock, messages)


def _messages_of(inbox: Inbox) -> Iterator[list[RecorderSetup | ExchangeCopy | EngineChanged]]:
    return (list(map(decode_message, batch)) for batch in inbox.batches(IDLE_S))


def _record_until_closed(
    recorder: Recorder, sock: socket.socket, messages: Iterator[list[RecorderSetup | ExchangeCopy | EngineChanged]]
) -> None:
    ticked_at = time.monotonic()
    for batch in messages:
        for message in batch:
            if isinstance(message, ExchangeCopy):
                recorder.take(message)
            elif isinstance(message, EngineChanged):
                recorder.change_engine(message.engine)
        now = time.monotonic()
        if not batch or now - ticked_at >= REPORT_INTERVAL_S:
            _tell(sock, recorder.tick())
            ticked_at = now
        recorder.push(now)
    _tell(sock, recorder.close())
    _tell(sock, recorder.finish_uploads())


def _tell(sock: socket.socket, progress: Progress | None) -> None:
    """A supervisor that was killed hears nothing, and what its workers had sent is written all the same."""
    if progress is not None:
        with contextlib.suppress(OSError):
            sock.sendall(encode_frame(progress))


def main(argv: Sequence[str]) -> int:
    """``python -m tap.recorder.recorder FD``: started by the supervisor, with its end of a socket pair."""
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
