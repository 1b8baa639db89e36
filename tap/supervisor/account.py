"""The account: each request to be recorded is recorded, or dropped for a named reason.

Offered requests, and the drops of workers, are counted in memory that outlives the workers; records by the recorder in
the files themselves. The rest was lost with a process that died.
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
    """Counts of requests; once the tap has ended, offered = recorded + the sum of dropped."""

    offered: int = 0
    recorded: int = 0
    not_injected: int = 0
    """Requests and responses that ``--inject`` left unchanged."""
    unrecorded: int = 0
    """POSTs, not among the offered, to paths that are only relayed."""
    hashed: int = 0
    prompt_counts_checked: int = 0
    prompt_counts_matched: int = 0
    segments: int = 0
    deleted: int = 0
    """Segments among them that ``--keep`` deleted; their records are among ``recorded``."""
    uploaded: int = 0
    upload_failed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    unhashed: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        line = f"{self.recorded} of {self.offered} requests recorded"
        if self.unrecorded and not self.offered:
            line += f" ({self.unrecorded} POSTs to other paths than /v1/… were relayed alone)"
        if self.dropped:
            line += f", dropped: {_by_reason(self.dropped)}"
        if self.not_injected:
            line += f", {self.not_injected} passed by injection"
        line += f"; hashed {_share(self.hashed, self.recorded)}"
        if self.unhashed:
            line += f" (not: {_by_reason(self.unhashed)})"
        matched, checked = self.prompt_counts_matched, self.prompt_counts_checked
        return f"{line}; prompt token counts equal the engine's in {_share(matched, checked)} of {checked}"

    @property
    def other_tokens(self) -> bool:
        """True if our prompt ids are not the engine's: their hashes do not describe its cache."""
        return self.prompt_counts_matched < TRUSTED_SHARE * self.prompt_counts_checked


class Ledger:
    """Sources of the account: counts of workers, alive and dead, and the recorder's progress."""

    def __init__(self, counts: WorkerCounts, workers: int) -> None:
        self._counts, self._workers = counts, workers
        self._dead: Counter[int] = Counter()
        """Sum of the cells of dead workers."""
        self.progress = Progress()

    @property
    def in_flight(self) -> int:
        return self._counts.in_flight()

    def worker_died(self, worker: int) -> None:
        self._dead.update(dict(enumerate(self._counts.take(worker))))

    def account(self, *, ended: bool = False) -> Account:
        """Return the account so far. ``ended``: nothing is on its way, so missing requests are lost."""
        cells = Counter(self._dead)
        for worker in range(self._workers):
            cells.update(dict(enumerate(self._counts.row(worker))))
        progress = self.progress
        dropped = Counter(progress.dropped)
        dropped.update({reason: cells[cell] for reason, cell in DROP_CELLS.items() if cells[cell]})
        if ended:
            missing = cells[OFFERED] - progress.recorded - dropped.total()
            unsent = cells[OFFERED] - cells[SENT] - sum(cells[cell] for cell in DROP_CELLS.values())
            with_workers = min(unsent, missing)
            dropped.update({"worker_died": with_workers, "recorder_died": missing - with_workers})
        made = {
            "offered": cells[OFFERED],
            "not_injected": cells[NOT_INJECTED],
            "unrecorded": cells[UNRECORDED],
            "dropped": Counter({reason: count for reason, count in dropped.items() if count}),
            "unhashed": Counter(progress.unhashed),
        }
        return Account(**(same_named(Account, progress) | made))


def keep_account(trace: str, account: Account) -> None:
    path = Path(f"{trace}.summary.json")
    facts = msgspec.to_builtins(account)
    try:
        replace_durably(path, msgspec.json.format(msgspec.json.encode(facts)) + b"\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None


def _by_reason(counts: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"
