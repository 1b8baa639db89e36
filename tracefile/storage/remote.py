"""Traces at a URL that fsspec knows: what a tap uploads is read where it is, segment by segment."""

import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import unquote

from tracefile.records.errors import InputError
from tracefile.records.extras import lacking

BUFFER_BYTES = 1 << 20

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.+)")
T = TypeVar("T")


def given_path(path: str | os.PathLike[str]) -> str:
    """Return a local path, or a URL as it was before ``Path`` took one of its slashes.

    ``file://`` is a local path, and ``-`` is stdin.
    """
    text = os.fspath(path)
    found = _URL.fullmatch(text)
    if os.path.exists(text):
        return text
    if found is None:
        return "/dev/stdin" if text == "-" else text
    scheme, rest = found.groups()
    return "/" + unquote(rest) if scheme == "file" else f"{scheme}://{rest}"


def is_url(path: str) -> bool:
    """Return whether a given path is a URL."""
    return "://" in path


def bare_url(url: str) -> str:
    """Return a URL without credentials."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2].partition('?')[0]}"


def file_system(url: str, expected: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it; raises InputError that says what was ``expected``."""
    # Imported here: it is two fifths of a recorder's start, and few commands need it.
    import fsspec  # noqa: PLC0415

    try:
        files, path = fsspec.url_to_fs(url)
    except ImportError as error:
        other = f"needs a package that is not installed ({error.name or error})"
        raise InputError(f"{bare_url(url)}: {lacking('s3fs') if url.startswith(('s3:', 's3a:')) else other}") from None
    except (ValueError, OSError) as error:
        raise InputError(f"{bare_url(url)}: {type(error).__name__}; expected {expected}") from None
    return files, path.rstrip("/")


def open_file(path: str) -> IO[bytes]:
    """Open a file or a URL for reading; raises OSError for the one, InputError for the other."""
    if is_url(path):
        return io.BufferedReader(_asked(path, lambda files, inner: files.open(inner, "rb")), BUFFER_BYTES)
    return open(path, "rb")


def read_small(path: str) -> bytes | None:
    """Return the content of a small file or URL; null if it is not there. Raises InputError."""
    if is_url(path):
        return _asked(path, lambda files, inner: files.cat_file(inner) if files.isfile(inner) else None)
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected a readable file") from error


def names_at(path: str) -> list[str] | None:
    """Return the names in a folder, at a path or a URL, none if there is no such folder; null: it is a file."""

    def list_names(files: Any, inner: str) -> list[str] | None:
        if files.isfile(inner):
            return None
        names = files.ls(inner, detail=False) if files.isdir(inner) else []
        return [name.rpartition("/")[2] for name in names]

    if is_url(path):
        return _asked(path, list_names)
    try:
        return os.listdir(path) if os.path.isdir(path) else None if os.path.exists(path) else []
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected a folder of segments") from error


def _asked(url: str, ask: Callable[[Any, str], T]) -> T:
    files, path = file_system(url, "a trace, or a folder of its segments")
    try:
        return ask(files, path)
    except FileNotFoundError:
        reason = "nothing is there"
    except Exception as error:  # storage libraries raise any error, whose text may hold a credential
        reason = f"cannot be read ({type(error).__name__})"
    raise InputError(f"{bare_url(url)}: {reason}; expected a trace, or a folder of its segments")
