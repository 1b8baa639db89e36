"""The recorder process: takes finished exchanges off the workers' sockets, makes records, and writes the trace.

It is a process of its own because tokenizing holds the interpreter's lock in proportion to the prompt. It ends when the
supervisor and all workers have closed their sockets, never by a signal, so that no exchange it took is lost.
"""

import contextlib
import copy
import gc
import os
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from measure.histogram import GAP_S, WAIT_S, HistogramCounts, add_value, add_values, empty_counts
from tap.ipc.messages import (
    STATS_INTERVAL_S,
    EngineChanged,
    ExchangeCopy,
    Progress,
    Ready,
    RecorderSetup,
    RecordNumbers,
    Refused,
    RequestCount,
    encode_frame,
    say,
)
from tap.prompts.enginetokenizer import EngineTokenizer
from tap.prompts.prompt import prompt_hasher
from tap.recorder.recording import MadeRecord, RecordMaker
from tap.recorder.segments import SegmentedTrace
from tap.recorder.upload import Uploader
from tracefile.hashing.hashkey import HashKey
from tracefile.records.errors import InputError, failure_words
from tracefile.records.schema import Engine, Record, Status
from tracefile.sessions import SessionIndex
from tracefile.storage.segments import manifest_path
from wire.process import parent_socket, split_frames

READ_BYTES = 1 << 20
"""Most bytes read from a worker before the others have their turn."""
BACKLOG = 128


class Inbox:
    """Frames from the supervisor and all workers. Frames that a worker wrote are read even if both are gone."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._listener: socket.socket | None = None
        self._buffers: dict[socket.socket, bytearray] = {control: bytearray()}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def listen(self, path: str) -> None:
        """Let workers connect to a unix socket at ``path``; replace that of an earlier recorder."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def batches(self, idle_s: float) -> Iterator[list[bytes]]:
        """Yield the payloads that each read completes, none after an idle time; end when all sides have closed."""
        while self._control in self._buffers or self._workers_left():
            ready = self._selector.select(idle_s)
            if not ready:
                yield []
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    yield self._read(key.fileobj)

    def _workers_left(self) -> bool:
        self._accept()
        return bool(self._buffers)

    def _accept(self) -> None:
        if self._listener is None:
            return
        with contextlib.suppress(BlockingIOError):
            while True:
                worker, _ = self._listener.accept()
                self._buffers[worker] = bytearray()
                self._selector.register(worker, selectors.EVENT_READ)

    def _read(self, sock: socket.socket) -> list[bytes]:
        """Return the frames that one read completes; at the end close the socket and drop an incomplete frame."""
        try:
            data = sock.recv(READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            self._selector.unregister(sock)
            del self._buffers[sock]
            if sock is not self._control:
                sock.close()
            return []
        buffer = self._buffers[sock]
        buffer += data
        return split_frames(buffer)


MAX_KINDS = 1_000
"""Kinds of requests counted apart; a bound, since paths may vary endlessly."""
_WAIT_MS = tuple(bound * 1e3 for bound in WAIT_S)
_GAP_MS = tuple(bound * 1e3 for bound in GAP_S)


class RecordMeter:
    """Numbers of records for the admin process."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, Status, int, str], int] = {}
        self._ttft_ms, self._gaps_ms = empty_counts(WAIT_S), empty_counts(GAP_S)
        self._numbers = RecordNumbers()

    def observe(self, record: Record) -> None:
        kinds, numbers = self._kinds, self._numbers
        kind = (record.endpoint or "", record.status, record.http_status or 0, record.upstream or "")
        if kind not in kinds and len(kinds) >= MAX_KINDS:
            kind = ("other", *kind[1:])
        kinds[kind] = kinds.get(kind, 0) + 1
        if record.ttft_ms is not None:
            add_value(self._ttft_ms, _WAIT_MS, record.ttft_ms)
        if record.itl_ms:
            add_values(self._gaps_ms, _GAP_MS, record.itl_ms)
        numbers.prompt_tokens += record.prompt_tokens or 0
        numbers.cached_tokens += record.cached_tokens or 0
        numbers.output_tokens += record.output_tokens or 0

    def numbers(self) -> RecordNumbers:
        return msgspec.structs.replace(
            self._numbers,
            requests=[RequestCount(*kind, count) for kind, count in self._kinds.items()],
            ttft=HistogramCounts(self._ttft_ms.counts, self._ttft_ms.total / 1e3),
            gaps=HistogramCounts(self._gaps_ms.counts, self._gaps_ms.total / 1e3),
        )


IDLE_S = 0.2
REPORT_INTERVAL_S = 0.5
UPLOAD_AT_END_S = 20.0
RELINKED_RECORDS = 50_000
"""Records of a resumed trace by which conversations keep their sessions."""
GC_ALLOCATIONS = 20_000
BEHIND_NS = 1_000_000_000
"""Age of an exchange at which the recorder takes a share of a core that a worker would use up."""
NICENESS = 10
"""Without a spare core, the workers go first; how much of it is left for a recorder that is behind."""

decode_message = msgspec.msgpack.Decoder(RecorderSetup | ExchangeCopy | EngineChanged).decode


class Recorder:
    """A trace being written: from exchanges to records, with counts of both."""

    def __init__(self, setup: RecorderSetup) -> None:
        key, settings = HashKey(setup.key_secret), setup.settings
        engine = None
        if settings.tokenizer == "engine":
            engine = EngineTokenizer(setup.engine_url, setup.dialect, settings.access)
        hasher = prompt_hasher(
            *(key, settings.tokenizer, settings.algorithm, setup.block_size), branches=setup.branches, engine=engine
        )
        self._uploader = Uploader(settings.upload) if settings.upload is not None else None
        self._trace = SegmentedTrace(
            settings.trace,
            setup.meta,
            rotate_bytes=settings.rotate_bytes,
            rotate_s=settings.rotate_s,
            overwrite=settings.overwrite,
            resume=settings.resume,
            keep_s=settings.keep_s,
            uploads=settings.upload is not None,
        )
        self._sessions = SessionIndex(setup.block_size, engine_block_size=_block_size(setup.meta.engine))
        found_before = self._trace.recorded if setup.carry.found is None else setup.carry.found
        self._before = min(found_before, self._trace.recorded)
        """Records of earlier runs in the files."""
        found = list(self._trace.last_records(RELINKED_RECORDS)) if self._trace.recorded else []
        epoch_ns = setup.carry.epoch_ns
        if epoch_ns is None:
            epoch_ns = _epoch_ns(setup, self._trace, found)
        self._maker = RecordMaker(
            key,
            hasher,
            epoch_ns=epoch_ns,
            hash_model=settings.model,
            loras=settings.loras,
            keep_headers=settings.keep_headers,
            dialect=setup.dialect,
            max_body_bytes=settings.max_body_bytes,
        )
        for record in found:
            self._sessions.recall(record)
            self._maker.remember(record.request_id)
        self._meter = RecordMeter()
        self._taken = copy.deepcopy(setup.carry)
        """Counts of the exchanges taken; ``_flushed`` lags behind by the records not yet in the files."""
        self._taken.found, self._taken.epoch_ns = self._before, epoch_ns
        self._dropped = Counter(setup.carry.dropped)
        self._count_unreported(found)
        self._flushed = copy.deepcopy(self._taken)
        self._is_news = False
        for sentence in self._trace.repaired:
            say(sentence)

    def take(self, exchange: ExchangeCopy) -> None:
        """Record an exchange; a failure is counted by its kind, and the next exchange is taken."""
        self._is_news = True
        self._taken.received += 1
        try:
            made = self._maker.make(exchange)
            record = self._sessions.link(made.record, made.chat_ids)
            self._meter.observe(record)
            self._trace.write(record)
        except InputError:
            self._dropped["trace_unwritable"] += 1
        except Exception as error:  # an odd exchange must not cost the others; its kind is counted
            self._dropped[f"recorder_failed:{type(error).__name__}"] += 1
        else:
            self._count(made)

    def change_engine(self, engine: Engine | None) -> None:
        self._trace.change_meta(msgspec.structs.replace(self._trace.meta, engine=engine))
        self._sessions.engine_block_size = _block_size(engine) or self._sessions.block_size

    def tick(self) -> bool:
        """Write what was taken, and do what is due; return True if the counts have changed."""
        self._trace.replace_lost_file()
        news = self._is_news or self._trace.failing
        if news and self._trace.flush():
            self._is_news = False
            self._flushed = copy.deepcopy(self._taken)
        news = self._account_for_lost_files() or news
        if self._trace.rotate_if_due():
            news = True
            if gone := self._trace.delete_expired():
                say(f"--keep: deleted {', '.join(gone)}")
        return self._follow_uploads() or news

    def progress(self) -> Progress:
        recorded = self._recorded()
        return msgspec.structs.replace(
            self._flushed,
            hashed=min(self._flushed.hashed, recorded),
            received=self._taken.received,
            dropped=dict(self._dropped),
            found=self._before,
            recorded=recorded,
            segments=self._trace.segments,
            deleted=self._trace.deleted,
            uploaded=sum(segment.uploaded is not None for segment in self._trace.manifest.segments),
            upload_failed=self._taken.upload_failed + (self._uploader.failed if self._uploader is not None else 0),
            writing=not self._trace.failing,
            numbers=self._meter.numbers(),
        )

    def close(self) -> Progress:
        whole = self._trace.close()
        self._account_for_lost_files()
        recorded = self._recorded()
        if not whole:
            self._dropped["trace_unwritable"] += self._taken.recorded - recorded
        self._flushed = self._taken
        self._flushed.hashed = min(self._flushed.hashed, recorded)
        return self.progress()

    def finish_uploads(self) -> Progress:
        self._follow_uploads()
        if self._uploader is not None:
            deadline_s = time.monotonic() + UPLOAD_AT_END_S
            self._uploader.settle(UPLOAD_AT_END_S)
            self._follow_uploads()  # the manifest goes last, and says where its segments are
            self._uploader.settle(max(0.0, deadline_s - time.monotonic()))
            self._follow_uploads()
        return self.progress()

    def _recorded(self) -> int:
        return self._trace.recorded - self._before

    def _account_for_lost_files(self) -> bool:
        """Take the records of files that others deleted, moved or changed out of the counts of the trace."""
        lost_files = self._trace.lost_files()
        for lost in lost_files:
            say(f"WARNING: {lost}")
            lost_before = min(self._before, lost.inherited)
            self._before -= lost_before
            self._lose(lost.records - lost_before)
        return bool(lost_files)

    def _lose(self, records: int) -> None:
        """Count records of this run as lost; what is known of them all, such as the hashed ones, in proportion."""
        if records:
            taken = self._taken
            share = 1 - records / max(records, taken.recorded)
            taken.recorded -= records
            self._dropped["trace_lost"] += records
            taken.hashed = round(taken.hashed * share)
            taken.prompt_counts_checked = round(taken.prompt_counts_checked * share)
            taken.prompt_counts_matched = round(taken.prompt_counts_matched * share)
            taken.unhashed = {reason: round(count * share) for reason, count in taken.unhashed.items()}

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
        """Count the records that an earlier recorder had written and not reported: the last ones of ``found``."""
        taken = self._taken
        recorded = self._recorded()
        unreported = found[len(found) - max(0, recorded - taken.recorded) :]
        hashed = sum(record.block_hashes is not None for record in unreported)
        self._lose(max(0, taken.recorded - recorded))
        taken.recorded = recorded
        taken.hashed += hashed
        if hashed < len(unreported):
            reason = "recorder_restarted"
            taken.unhashed[reason] = taken.unhashed.get(reason, 0) + len(unreported) - hashed

    def _follow_uploads(self) -> bool:
        if self._uploader is None:
            return False
        for segment in self._trace.manifest.segments:
            if segment.uploaded is None:
                self._uploader.offer(self._trace.path.with_name(segment.name))
        manifest = manifest_path(self._trace.path)
        sent = [uploaded for uploaded in self._uploader.uploaded() if uploaded.name != manifest.name]
        for name, where in sent:
            self._trace.mark_uploaded(name, where)
        if sent:
            self._uploader.offer(manifest, again=True)
        return bool(sent)


def _block_size(engine: Engine | None) -> int | None:
    return None if engine is None else engine.block_size


def _epoch_ns(setup: RecorderSetup, trace: SegmentedTrace, found: Sequence[Record]) -> int:
    """Return the monotonic clock at the trace's t = 0; a resumed trace's may precede this machine's start.

    The wall clock tells how long ago it was. If that clock was set back since, the trace continues at the end of
    the earlier runs: time never runs backwards in it.
    """
    ours, theirs = setup.meta.epoch_unix_ns, trace.meta.epoch_unix_ns
    if ours is None or theirs is None or ours == theirs:
        return setup.epoch_ns
    ended_ms = max((record.end_ms() or record.arrival_ms or 0.0 for record in found), default=0.0)
    return setup.epoch_ns - max(ours - theirs, round(ended_ms * 1e6))


def record_exchanges(sock: socket.socket) -> None:
    inbox = Inbox(sock)
    messages = (list(map(decode_message, batch)) for batch in inbox.batches(IDLE_S))
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
    # All objects so far stay, and records leave no cycles behind: there is little to collect.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 20)
    with contextlib.suppress(OSError):  # the supervisor was told to end meanwhile
        sock.sendall(encode_frame(Ready()) + encode_frame(recorder.progress()))
    on_idle_cores(_record_until_closed(recorder, sock, messages))


def _record_until_closed(
    recorder: Recorder, sock: socket.socket, messages: Iterator[list[RecorderSetup | ExchangeCopy | EngineChanged]]
) -> Iterator[bool]:
    """Yield after each batch whether its last exchange had ended long ago; then close the trace."""
    ticked_s = reported_s = time.monotonic()
    for batch in messages:
        ended_ns = None
        for message in batch:
            if isinstance(message, ExchangeCopy):
                recorder.take(message)
                ended_ns = message.end_ns
            elif isinstance(message, EngineChanged):
                recorder.change_engine(message.engine)
        now_s = time.monotonic()
        if not batch or now_s - ticked_s >= REPORT_INTERVAL_S:
            ticked_s = now_s
            if recorder.tick() or now_s - reported_s >= STATS_INTERVAL_S:
                reported_s = now_s
                _report(sock, recorder.progress())
        yield ended_ns is not None and time.perf_counter_ns() - ended_ns > BEHIND_NS
    _report(sock, recorder.close())
    _report(sock, recorder.finish_uploads())


def _report(sock: socket.socket, progress: Progress) -> None:
    """Send counts; a killed supervisor misses them, and its workers' exchanges are written all the same."""
    with contextlib.suppress(OSError):
        sock.sendall(encode_frame(progress))


def on_idle_cores(steps: Iterator[bool]) -> None:
    """Do all steps on a thread that never makes a worker on its core wait; while a step is behind, on this one.

    Linux preempts a SCHED_IDLE thread as soon as another of its session or container wakes, and an unprivileged thread
    cannot leave that class. So there are two threads, one at work at a time.
    """
    with ThreadPoolExecutor(1, "idle", initializer=_leave_cores_to_others) as idle:
        while idle.submit(_advance, steps, False).result() and _advance(steps, True):
            pass


def _advance(steps: Iterator[bool], behind: bool) -> bool:
    """Do steps, one at least, for as long as they are ``behind``, or are not; return False after the last."""
    return any(is_behind != behind for is_behind in steps)


def _leave_cores_to_others() -> None:
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main(argv: Sequence[str]) -> int:
    sock = parent_socket(argv)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
        if hasattr(os, "SCHED_BATCH"):  # on Linux: a frame that wakes the recorder does not preempt a worker
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        with sock:
            record_exchanges(sock)
    except Exception as error:  # a traceback could quote a request; the supervisor notices the end
        print(f"tap: the recorder process failed ({failure_words(error)})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
