"""Upload of closed segments to ``--upload``, an fsspec URL, by a thread that retries until the upload succeeds.

Credentials come from the configuration of the storage library, never from a flag. Local files are kept.
"""

import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from tap.ipc.messages import log_line
from tracefile.records.errors import InputError
from tracefile.storage.remote import bare_url, file_system

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0


class Uploaded(NamedTuple):
    """An uploaded segment."""

    name: str
    where: str
    """URL of the segment, without credentials."""


class TruncatedUploadError(Exception):
    """The uploaded file differs in size from the segment."""


class Uploader:
    """Uploads files in order; raises InputError if the URL cannot be used."""

    def __init__(self, url: str) -> None:
        self.failed = 0
        self._files, self._folder = _target(url)
        self._waiting: SimpleQueue[Path | threading.Event] = SimpleQueue()
        self._uploaded: SimpleQueue[Uploaded] = SimpleQueue()
        self._offered: set[Path] = set()
        self._deadline = float("inf")
        self._ending = threading.Event()
        threading.Thread(target=self._send_all, name="trace-upload", daemon=True).start()

    def offer(self, path: Path, *, again: bool = False) -> None:
        """Queue a file unless it was queued before. ``again``: queue it again, since its content has changed."""
        if again or path not in self._offered:
            self._offered.add(path)
            self._waiting.put(path)

    def uploaded(self) -> list[Uploaded]:
        return [self._uploaded.get() for _ in range(self._uploaded.qsize())]

    def flush(self, timeout_s: float) -> None:
        """Upload the queued files, for at most ``timeout_s``, with short waits between retries."""
        self._deadline = time.monotonic() + timeout_s
        self._ending.set()
        sent = threading.Event()
        self._waiting.put(sent)
        sent.wait(timeout_s)

    def _send_all(self) -> None:
        while True:
            waiting = self._waiting.get()
            if isinstance(waiting, threading.Event):
                waiting.set()
            else:
                self._send_until_sent(waiting)

    def _send_until_sent(self, path: Path) -> None:
        wait_s = FIRST_WAIT_S
        while time.monotonic() < self._deadline and path.exists():
            try:
                self._uploaded.put(Uploaded(path.name, self._send(path)))
            except Exception as error:  # storage libraries raise any error; the upload is retried
                self.failed += 1
                if wait_s == FIRST_WAIT_S:  # without the error's text, which may hold a credential
                    log_line(f"{path.name}: upload failed ({type(error).__name__}); the file is kept and retried")
                if self._ending.wait(wait_s):
                    time.sleep(FIRST_WAIT_S)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            else:
                if wait_s > FIRST_WAIT_S:
                    log_line(f"{path.name}: uploaded")
                return

    def _send(self, path: Path) -> str:
        """Copy a file, check the size of the copy and return its URL."""
        target = f"{self._folder}/{path.name}"
        self._files.put_file(str(path), target)
        self._files.invalidate_cache(self._folder)
        size = path.stat().st_size
        if self._files.size(target) != size:
            raise TruncatedUploadError(target)
        return str(self._files.unstrip_protocol(target))


def _target(url: str) -> tuple[Any, str]:
    try:
        files, folder = file_system(url, "a folder to write in")
        if "file" in files.protocol:
            files.makedirs(folder, exist_ok=True)
    except InputError as error:
        raise InputError(f"--upload {error}") from None
    except OSError as error:
        raise InputError(f"--upload {bare_url(url)}: {type(error).__name__}; expected a folder to write in") from None
    return files, folder
