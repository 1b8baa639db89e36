"""Account of requests: each request to record is recorded, or dropped for a named reason.

Started requests and drops of workers are counted in shared memory that outlives the workers; records are counted in the
trace files. Missing requests were lost with a crashed process.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tap.ipc.messages import Progress
from tap.ipc.sharedmemory import DROP_CELLS, NOT_INJECTED, OFFERED, SENT, UNRECORDED, WorkerCounts
from tracefile.commandline.parser import same_named
from tracefile.records.errors import InputError
from tracefile.storage.durable import replace_durably

TRUSTED_SHARE = 0.99


@dataclass(slots=True, kw_only=True)
class Account:
    """Counts of requests, hashed prompts and checked token counts; at the end, offered = recorded + dropped."""

    offered: int = 0
    recorded: int = 0
    not_injected: int = 0
    """Requests without ``--inject``, and responses that kept injected fields."""
    unrecorded: int = 0
    """POSTs to paths that are only relayed, not included in ``offered``."""
    hashed: int = 0
    prompt_counts_checked: int = 0
    prompt_counts_matched: int = 0
    segments: int = 0
    deleted: int = 0
    """Segments deleted by ``--keep``; their records are included in ``recorded``."""
    uploaded: int = 0
    upload_failed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    unhashed: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        line = f"{self.recorded} of {self.offered} requests recorded"
        if self.unrecorded and not self.offered:
            line += f" ({self.unrecorded} POSTs to paths other than /v1/… were only relayed)"
        if self.dropped:
            line += f", dropped: {_by_reason(self.dropped)}"
        if self.not_injected:
            line += f", {self.not_injected} without injection"
        line += f"; hashed {_share(self.hashed, self.recorded)}"
        if self.unhashed:
            line += f" (not: {_by_reason(self.unhashed)})"
        matched, checked = self.prompt_counts_matched, self.prompt_counts_checked
        return f"{line}; prompt token counts equal the engine's in {_share(matched, checked)} of {checked}"

    @property
    def has_token_mismatch(self) -> bool:
        """True if prompt token counts differ from the engine's: the block hashes do not describe its KV cache."""
        return self.prompt_counts_matched < TRUSTED_SHARE * self.prompt_counts_checked


class Ledger:
    """Inputs of the account: counts of live and crashed workers, and the recorder's progress."""

    def __init__(self, counts: WorkerCounts, workers: int) -> None:
        self._counts, self._workers = counts, workers
        self._crashed: Counter[int] = Counter()
        """Summed cells of crashed workers."""
        self.progress = Progress()

    @property
    def in_flight(self) -> int:
        return self._counts.in_flight()

    def add_crashed_worker(self, worker: int) -> None:
        self._crashed.update(dict(enumerate(self._counts.pop_row(worker))))

    def account(self, *, ended: bool = False) -> Account:
        """Return the current account. ``ended``: nothing is in flight, so missing requests are lost."""
        cells = Counter(self._crashed)
        for worker in range(self._workers):
            cells.update(dict(enumerate(self._counts.row(worker))))
        progress = self.progress
        dropped = Counter(progress.dropped)
        dropped.update({reason: cells[cell] for reason, cell in DROP_CELLS.items() if cells[cell]})
        if ended:
            missing = cells[OFFERED] - progress.recorded - dropped.total()
            unsent = cells[OFFERED] - cells[SENT] - sum(cells[cell] for cell in DROP_CELLS.values())
            worker_drops = min(unsent, missing)
            dropped.update({"worker_died": worker_drops, "recorder_died": missing - worker_drops})
        counts = {
            "offered": cells[OFFERED],
            "not_injected": cells[NOT_INJECTED],
            "unrecorded": cells[UNRECORDED],
            "dropped": Counter({reason: count for reason, count in dropped.items() if count}),
            "unhashed": Counter(progress.unhashed),
        }
        return Account(**(same_named(Account, progress) | counts))


def write_account(trace: str, account: Account) -> None:
    path = Path(f"{trace}.summary.json")
    facts = msgspec.to_builtins(account)
    try:
        replace_durably(path, msgspec.json.format(msgspec.json.encode(facts)) + b"\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None


def _by_reason(counts: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))


def _share(count: int, total: int) -> str:
    return f"{count / total:.1%}" if total else "none"
