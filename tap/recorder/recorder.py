"""Recorder process: reads finished exchanges from the workers, builds records and writes the trace.

A separate process, because tokenizing holds the interpreter lock in proportion to the prompt length. It exits when the
supervisor and all workers have closed their sockets, never by a signal, so that no received exchange is lost.
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
    CapturedExchange,
    EngineChanged,
    Progress,
    Ready,
    RecorderSetup,
    RecordNumbers,
    Refused,
    RequestCount,
    encode_frame,
    log_line,
)
from tap.prompts.enginetokenizer import EngineTokenizer
from tap.prompts.prompt import prompt_hasher
from tap.recorder.recording import RecordBuilder, RecordResult
from tap.recorder.segments import SegmentedTrace
from tap.recorder.upload import Uploader
from tracefile.hashing.hashkey import HashKey
from tracefile.records.errors import InputError, failure_words
from tracefile.records.schema import Engine, Record, Status
from tracefile.sessions import SessionIndex
from tracefile.storage.segments import manifest_path
from wire.process import parent_socket, split_frames

READ_BYTES = 1 << 20
"""Largest read from one worker, so that all workers are served in turn."""
BACKLOG = 128


class Inbox:
    """Frames from the supervisor and all workers. Frames are read to the end even after their sender has exited."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._listener: socket.socket | None = None
        self._buffers: dict[socket.socket, bytearray] = {control: bytearray()}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def listen(self, path: str) -> None:
        """Listen for workers on a unix socket at ``path``; replace the socket of an earlier recorder."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def batches(self, idle_s: float) -> Iterator[list[bytes]]:
        """Yield the batch of payloads of each read, and an empty batch after ``idle_s``, until all sides close."""
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
        """Return the frames that one read completes; at end of stream close the socket and drop an incomplete frame."""
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
"""Bound of the label sets of ``kvtape_tap_requests_total``: paths may vary endlessly."""
_WAIT_MS = tuple(bound * 1e3 for bound in WAIT_S)
_GAP_MS = tuple(bound * 1e3 for bound in GAP_S)


class RecordMeter:
    """Request counts, TTFT and ITL histograms and token totals for the admin pages."""

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
"""Last records of a resumed trace that are matched with new prompts, so that conversations keep their sessions."""
GC_ALLOCATIONS = 20_000
BEHIND_NS = 1_000_000_000
"""Lag of the recorder from which it competes with the workers for a core."""
NICENESS = 10
"""Nice value of the recorder: without an idle core, workers have priority over a recorder that is behind."""

decode_message = msgspec.msgpack.Decoder(RecorderSetup | CapturedExchange | EngineChanged).decode


class Recorder:
    """Writer of a trace: builds a record with token counts, TTFT and block hashes from each exchange."""

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
        earlier_count = self._trace.recorded if setup.carry.earlier_records is None else setup.carry.earlier_records
        self._before = min(earlier_count, self._trace.recorded)
        """Records of earlier runs in the trace files."""
        earlier = list(self._trace.last_records(RELINKED_RECORDS)) if self._trace.recorded else []
        epoch_ns = setup.carry.epoch_ns
        if epoch_ns is None:
            epoch_ns = _epoch_ns(setup, self._trace, earlier)
        self._builder = RecordBuilder(
            key,
            hasher,
            epoch_ns=epoch_ns,
            hash_model=settings.model,
            loras=settings.loras,
            keep_headers=settings.keep_headers,
            dialect=setup.dialect,
            max_body_bytes=settings.max_body_bytes,
        )
        for record in earlier:
            self._sessions.recall(record)
            self._builder.remember(record.request_id)
        self._meter = RecordMeter()
        self._counts = copy.deepcopy(setup.carry)
        """Counts of the received exchanges. ``_flushed`` holds the counts of records that are in the files."""
        self._counts.earlier_records, self._counts.epoch_ns = self._before, epoch_ns
        self._dropped = Counter(setup.carry.dropped)
        self._count_unreported(earlier)
        self._flushed = copy.deepcopy(self._counts)
        self._is_news = False
        for sentence in self._trace.repaired:
            log_line(sentence)

    def record(self, exchange: CapturedExchange) -> None:
        """Record an exchange; a failure is counted by its kind, and recording continues."""
        self._is_news = True
        self._counts.received += 1
        try:
            result = self._builder.build(exchange)
            record = self._sessions.link(result.record, result.chat_ids)
            self._meter.observe(record)
            self._trace.write(record)
        except InputError:
            self._dropped["trace_unwritable"] += 1
        except Exception as error:  # one malformed exchange must not stop the recorder
            self._dropped[f"recorder_failed:{type(error).__name__}"] += 1
        else:
            self._count(result)

    def change_engine(self, engine: Engine | None) -> None:
        self._trace.change_meta(msgspec.structs.replace(self._trace.meta, engine=engine))
        self._sessions.engine_block_size = _block_size(engine) or self._sessions.block_size

    def tick(self) -> bool:
        """Flush records, rotate and upload segments; return True if the counts have changed."""
        self._trace.replace_lost_file()
        news = self._is_news or self._trace.failing
        if news and self._trace.flush():
            self._is_news = False
            self._flushed = copy.deepcopy(self._counts)
        news = self._account_for_lost_files() or news
        if self._trace.rotate_if_due():
            news = True
            if gone := self._trace.delete_expired():
                log_line(f"--keep: deleted {', '.join(gone)}")
        return self._follow_uploads() or news

    def progress(self) -> Progress:
        recorded = self._recorded()
        return msgspec.structs.replace(
            self._flushed,
            hashed=min(self._flushed.hashed, recorded),
            received=self._counts.received,
            dropped=dict(self._dropped),
            earlier_records=self._before,
            recorded=recorded,
            segments=self._trace.segments,
            deleted=self._trace.deleted,
            uploaded=sum(segment.uploaded is not None for segment in self._trace.manifest.segments),
            upload_failed=self._counts.upload_failed + (self._uploader.failed if self._uploader is not None else 0),
            writing=not self._trace.failing,
            numbers=self._meter.numbers(),
        )

    def close(self) -> Progress:
        complete = self._trace.close()
        self._account_for_lost_files()
        recorded = self._recorded()
        if not complete:
            self._dropped["trace_unwritable"] += self._counts.recorded - recorded
        self._flushed = self._counts
        self._flushed.hashed = min(self._flushed.hashed, recorded)
        return self.progress()

    def finish_uploads(self) -> Progress:
        self._follow_uploads()
        if self._uploader is not None:
            deadline_s = time.monotonic() + UPLOAD_AT_END_S
            self._uploader.flush(UPLOAD_AT_END_S)
            self._follow_uploads()  # the manifest is last: it lists the URLs of its segments
            self._uploader.flush(max(0.0, deadline_s - time.monotonic()))
            self._follow_uploads()
        return self.progress()

    def _recorded(self) -> int:
        return self._trace.recorded - self._before

    def _account_for_lost_files(self) -> bool:
        """Subtract the records of files that another process deleted, moved or changed."""
        lost_files = self._trace.lost_files()
        for lost in lost_files:
            log_line(f"WARNING: {lost}")
            lost_before = min(self._before, lost.inherited)
            self._before -= lost_before
            self._lose(lost.records - lost_before)
        return bool(lost_files)

    def _lose(self, records: int) -> None:
        """Count records of this run as lost; subtract hashed and checked prompts in proportion."""
        if records:
            counts = self._counts
            share = 1 - records / max(records, counts.recorded)
            counts.recorded -= records
            self._dropped["trace_lost"] += records
            counts.hashed = round(counts.hashed * share)
            counts.prompt_counts_checked = round(counts.prompt_counts_checked * share)
            counts.prompt_counts_matched = round(counts.prompt_counts_matched * share)
            counts.unhashed = {reason: round(count * share) for reason, count in counts.unhashed.items()}

    def _count(self, result: RecordResult) -> None:
        counts = self._counts
        counts.recorded += 1
        if result.record.block_hashes is None:
            reason = result.unhashed or "unknown"
            counts.unhashed[reason] = counts.unhashed.get(reason, 0) + 1
        else:
            counts.hashed += 1
        if result.prompt_count_matches is not None:
            counts.prompt_counts_checked += 1
            counts.prompt_counts_matched += result.prompt_count_matches

    def _count_unreported(self, earlier: Sequence[Record]) -> None:
        """Count the last records of ``earlier``, which a crashed recorder had written but not reported."""
        counts = self._counts
        recorded = self._recorded()
        unreported = earlier[len(earlier) - max(0, recorded - counts.recorded) :]
        hashed = sum(record.block_hashes is not None for record in unreported)
        self._lose(max(0, counts.recorded - recorded))
        counts.recorded = recorded
        counts.hashed += hashed
        if hashed < len(unreported):
            reason = "recorder_restarted"
            counts.unhashed[reason] = counts.unhashed.get(reason, 0) + len(unreported) - hashed

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


def _epoch_ns(setup: RecorderSetup, trace: SegmentedTrace, earlier: Sequence[Record]) -> int:
    """Return the monotonic clock at the trace's t = 0, which may precede this machine's boot in a resumed trace.

    The wall clock gives the time since t = 0. If the wall clock was set back, the trace continues at the end of the
    earlier runs, so that arrival times never decrease.
    """
    started_ns, trace_ns = setup.meta.epoch_unix_ns, trace.meta.epoch_unix_ns
    if started_ns is None or trace_ns is None or started_ns == trace_ns:
        return setup.epoch_ns
    ended_ms = max((record.end_ms() or record.arrival_ms or 0.0 for record in earlier), default=0.0)
    return setup.epoch_ns - max(started_ns - trace_ns, round(ended_ms * 1e6))


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
    # All objects so far stay, and records create no reference cycles: there is little to collect.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 20)
    with contextlib.suppress(OSError):  # the supervisor has exited meanwhile
        sock.sendall(encode_frame(Ready()) + encode_frame(recorder.progress()))
    on_idle_cores(_record_until_closed(recorder, sock, messages))


def _record_until_closed(
    recorder: Recorder, sock: socket.socket, messages: Iterator[list[RecorderSetup | CapturedExchange | EngineChanged]]
) -> Iterator[bool]:
    """Yield after each batch whether the recorder is behind (``BEHIND_NS``); then close the trace."""
    ticked_s = reported_s = time.monotonic()
    for batch in messages:
        ended_ns = None
        for message in batch:
            if isinstance(message, CapturedExchange):
                recorder.record(message)
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
    """Send counts to the supervisor. Without a supervisor, exchanges are still written."""
    with contextlib.suppress(OSError):
        sock.sendall(encode_frame(progress))


def on_idle_cores(steps: Iterator[bool]) -> None:
    """Run the steps on a SCHED_IDLE thread, which never delays a worker; while the recorder is behind, on this thread.

    Linux preempts a SCHED_IDLE thread as soon as another thread of its session or container wakes, and an unprivileged
    thread cannot leave that class. So there are two threads, and only one of them runs at a time.
    """
    with ThreadPoolExecutor(1, "idle", initializer=_use_idle_cores) as idle:
        while idle.submit(_advance, steps, False).result() and _advance(steps, True):
            pass


def _advance(steps: Iterator[bool], behind: bool) -> bool:
    """Run steps, at least one, until their state differs from ``behind``; return False after the last step."""
    return any(is_behind != behind for is_behind in steps)


def _use_idle_cores() -> None:
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main(argv: Sequence[str]) -> int:
    sock = parent_socket(argv)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
        if hasattr(os, "SCHED_BATCH"):  # on Linux, waking the recorder then does not preempt a worker
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        with sock:
            record_exchanges(sock)
    except Exception as error:  # a traceback could quote a prompt; the supervisor restarts the process
        print(f"tap: the recorder process failed ({failure_words(error)})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
