"""Content digest of a trace: a model is never evaluated on a trace that it was fitted on."""

import hashlib
import os
import stat

from tracefile.records.decoding import is_header, is_object, parse_object
from tracefile.records.errors import InputError
from tracefile.storage.remote import given_path
from tracefile.storage.segments import open_lines, trace_files


def trace_digest(path: str | os.PathLike[str]) -> str:
    """Return the hex SHA-256 of the uncompressed record lines, each with a line end.

    Headers, blank lines and a torn last line are not hashed: changed headers, segments and recompression keep the
    digest. Another order, field or spacing changes it. Raises InputError for a pipe.
    """
    refuse_pipe(path)
    path = given_path(path)
    digest = hashlib.sha256()
    for file in trace_files(path):
        with open_lines(file) as lines:
            for line in lines:
                if lines.number == 1 and "meta" in parse_object(line, f"{file}:1"):
                    continue
                if not lines.complete and not is_object(line):
                    break
                if not is_header(line):
                    digest.update(line)
                    digest.update(b"\n")
    return digest.hexdigest()


def refuse_pipe(path: str | os.PathLike[str]) -> None:
    """Raise InputError for a pipe: it can be read only once."""
    path = given_path(path)
    if os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
        raise InputError(f"{path}: a pipe; expected a file: this command reads the trace more than once")
