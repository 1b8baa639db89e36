"""A trace's name by content, so that no trace is ever both what a model was fitted on and what judges it."""

import hashlib
import os

from tracefile.decoding import is_object, parse_object
from tracefile.lines import LineReader


def trace_digest(path: str | os.PathLike[str]) -> str:
    """Hex SHA-256 over the record lines as they stand in the file, uncompressed, each with a line end.

    The header is left out: a note added to it makes no new trace. So are blank lines and a torn last one.
    Recompressing keeps the digest; another order, another field or another spacing is another trace.
    """
    digest = hashlib.sha256()
    with LineReader(path) as lines:
        for line in lines:
            if lines.number == 1 and "meta" in parse_object(line, f"{lines.path}:1"):
                continue
            if not lines.complete and not is_object(line):
                break
            digest.update(line)
            digest.update(b"\n")
    return digest.hexdigest()
