"""Traces at URLs supported by fsspec: uploaded segments are read in place."""

import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import unquote

from tracefile.records.errors import InputError
from tracefile.records.extras import missing_package

BUFFER_BYTES = 1 << 20

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.+)")
T = TypeVar("T")


def given_path(path: str | os.PathLike[str]) -> str:
    """Return a local path, or a URL with the slash that ``Path`` removed.

    ``file://`` becomes a local path, and ``-`` stdin.
    """
    text = os.fspath(path)
    url = _URL.fullmatch(text)
    if os.path.exists(text):
        return text
    if url is None:
        return "/dev/stdin" if text == "-" else text
    scheme, location = url.groups()
    return "/" + unquote(location) if scheme == "file" else f"{scheme}://{location}"


def is_url(path: str) -> bool:
    """Return whether a path is a URL."""
    return "://" in path


def bare_url(url: str) -> str:
    """Return a URL without credentials."""
    scheme, separator, location = url.partition("://")
    return f"{scheme}{separator}{location.rpartition('@')[2].partition('?')[0]}"


def file_system(url: str, expected: str) -> tuple[Any, str]:
    """Return the file system and path of a URL; raises InputError with ``expected``."""
    # A top-level import would take two fifths of the recorder's start time, and few commands need it.
    import fsspec  # noqa: PLC0415

    try:
        files, path = fsspec.url_to_fs(url)
    except ImportError as error:
        reason = f"needs a package that is not installed ({error.name or error})"
        raise InputError(
            f"{bare_url(url)}: {missing_package('s3fs') if url.startswith(('s3:', 's3a:')) else reason}"
        ) from None
    except (ValueError, OSError) as error:
        raise InputError(f"{bare_url(url)}: {type(error).__name__}; expected {expected}") from None
    return files, path.rstrip("/")


def open_file(path: str) -> IO[bytes]:
    """Open a file (raises OSError) or a URL (raises InputError) for reading."""
    if is_url(path):
        return io.BufferedReader(_on_file_system(path, lambda files, inner: files.open(inner, "rb")), BUFFER_BYTES)
    return open(path, "rb")


def read_small(path: str) -> bytes | None:
    """Return the content of a small file or URL; None if it does not exist. Raises InputError."""
    if is_url(path):
        return _on_file_system(path, lambda files, inner: files.cat_file(inner) if files.isfile(inner) else None)
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected a readable file") from error


def names_at(path: str) -> list[str] | None:
    """Return the names in a folder at a path or URL, empty if it does not exist; None: it is a file."""

    def list_names(files: Any, inner: str) -> list[str] | None:
        if files.isfile(inner):
            return None
        names = files.ls(inner, detail=False) if files.isdir(inner) else []
        return [name.rpartition("/")[2] for name in names]

    if is_url(path):
        return _on_file_system(path, list_names)
    try:
        return os.listdir(path) if os.path.isdir(path) else None if os.path.exists(path) else []
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected a folder of segments") from error


def _on_file_system(url: str, operation: Callable[[Any, str], T]) -> T:
    files, path = file_system(url, "a trace, or a folder of its segments")
    try:
        return operation(files, path)
    except FileNotFoundError:
        reason = "does not exist"
    except Exception as error:  # storage libraries raise any error, whose text may hold a credential
        reason = f"cannot be read ({type(error).__name__})"
    raise InputError(f"{bare_url(url)}: {reason}; expected a trace, or a folder of its segments")
