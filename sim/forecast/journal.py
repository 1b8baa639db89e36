"""Journal of a sweep: a line for each forecast as it ends, so that a sweep that is killed goes on."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tracefile.records.errors import InputError

SCHEMA: Final = "kvtape-grid-journal/1"


class Journal:
    """Forecasts by their key, in memory and in a file beside the sweep's results, which is theirs until it is whole."""

    def __init__(self, output: Path, about: Mapping[str, Any], *, overwrite: bool) -> None:
        self.path = output.with_name(f"{output.name}.journal")
        self._known: dict[str, Any] = {}
        self._head = {"schema": SCHEMA, **about}
        try:
            whole = 0 if overwrite else self._read()
            self._file = open(self.path, "ab")  # noqa: SIM115 - closed by __exit__
            self._file.truncate(whole)
        except OSError as error:
            raise InputError(f"--output {output}: {error.strerror}; expected a writable path") from None
        if not whole:
            self._write(self._head)

    def __len__(self) -> int:
        return len(self._known)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def get(self, key: str) -> Any:
        """Return what was put under a key, or None."""
        return self._known.get(key)

    def put(self, key: str, told: Any) -> None:
        """Keep a forecast; a kill does not lose it."""
        self._known[key] = told
        self._write([key, told])

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _write(self, line: Any) -> None:
        # The standard encoder keeps infinite numbers, of waits without an end, and every digit.
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def _read(self) -> int:
        """Read whole lines; return their length. Raises InputError for a journal of another sweep."""
        if not self.path.exists():
            return 0
        head, *lines = self.path.read_bytes().splitlines(keepends=True) or [b""]
        if not head.endswith(b"\n"):
            return 0
        if _decoded(head) != self._head:
            raise InputError(
                f"{self.path}: of a cut sweep of another trace, model, seed or pacing; expected another --output, or "
                "--overwrite"
            )
        whole = len(head)
        for line in lines:
            entry = _decoded(line)
            if not line.endswith(b"\n") or entry is None:  # torn by the kill
                break
            self._known[entry[0]] = entry[1]
            whole += len(line)
        return whole


def _decoded(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
