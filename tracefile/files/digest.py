"""A trace's name by content, so that no trace is ever both what a model was fitted on and what judges it."""

import hashlib
import os
import stat

from tracefile.records.decoding import is_header, is_object, parse_object
from tracefile.records.errors import InputError
from tracefile.storage.remote import given_path
from tracefile.storage.segments import open_lines, trace_files


def trace_digest(path: str | os.PathLike[str]) -> str:
    """Hex SHA-256 over the record lines as they stand in the file, uncompressed, each with a line end.

    Headers are left out: a note added to one makes no new trace, nor does cutting it into segments. So are blank lines
    and a torn last one. Recompressing keeps the digest; another order, field or spacing is another trace. Raises
    InputError for a pipe.
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
    """Raise InputError for a pipe: it is read once."""
    path = given_path(path)
    if os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
        raise InputError(f"{path}: a pipe, and this command reads a trace more than once; expected a file")
