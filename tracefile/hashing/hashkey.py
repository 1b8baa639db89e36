"""Secret of block hashes, without which guesses of a prompt cannot be tested; ``key_id`` says which are comparable."""

import contextlib
import hashlib
import os
import secrets
import stat
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tracefile.records.errors import InputError

KEY_FILE_VARIABLE = "KVTAPE_KEY_FILE"
SECRET_BYTES = 32
MIN_DISTINCT_BYTES = 12
"""Fewer different bytes come in no random key: the chance is under 10⁻²⁰."""


@dataclass(frozen=True, slots=True)
class HashKey:
    """A 32-byte secret; it prints as its public id only."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise InputError(f"hash key: {len(self.secret)} bytes; expected {SECRET_BYTES}")

    @property
    def key_id(self) -> str:
        """16 hex digits that name the key and, being a keyed hash of nothing, tell nothing of it."""
        return self.derive(b"key id", 8).hex()

    def derive(self, purpose: bytes, size: int, data: bytes = b"") -> bytes:
        """``size`` pseudo-random bytes for one ``purpose`` (at most 16 bytes) and ``data``: keyed BLAKE2b."""
        return hashlib.blake2b(data, key=self.secret, person=purpose, digest_size=size).digest()


def keyed_id(key: HashKey, kind: str, text: str) -> str:
    """Return 24 hex digits for an outside id, unrelated across kinds (session, …) and keys, not reversible."""
    name = kind.encode()
    return key.derive(
        b"keyed id", 12, len(name).to_bytes(4, "little") + name + text.encode("utf-8", "surrogatepass")
    ).hex()


def load_key(path: Path | None = None) -> HashKey:
    """The key in ``path`` (else $KVTAPE_KEY_FILE, else ~/.config/kvtape/key), made on first use, readable by its owner.

    Safe when several processes start at once: one of them makes the file, whole, and all read the same. Warns of a
    file that others can read. Raises InputError if it is no key (64 random hex digits), or cannot be read or made.
    """
    where = path or key_path()
    try:
        return _read_key(where)
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{where}: cannot read the hash key ({reason}); expected a file of 64 hex digits") from error
    try:
        _create_key(where)
        return _read_key(where)
    except OSError as error:
        raise InputError(
            f"{where}: cannot make a hash key ({error.strerror or error}); "
            f"expected a writable folder, or a key file named by {KEY_FILE_VARIABLE}"
        ) from error


def key_path() -> Path:
    """Return the key's default path: $KVTAPE_KEY_FILE, else ~/.config/kvtape/key. Raises InputError without a home."""
    named = os.environ.get(KEY_FILE_VARIABLE)
    if named:
        return Path(named)
    try:
        return Path.home() / ".config" / "kvtape" / "key"
    except RuntimeError:
        raise InputError(f"no home folder for the hash key; expected a key file named by {KEY_FILE_VARIABLE}") from None


def _read_key(path: Path) -> HashKey:
    text = path.read_text(encoding="ascii").strip()
    try:
        key = HashKey(bytes.fromhex(text))
    except (ValueError, InputError):
        raise InputError(f"{path}: not a hash key; expected {2 * SECRET_BYTES} hex digits") from None
    if len(set(key.secret)) < MIN_DISTINCT_BYTES:
        raise InputError(f"{path}: a key that can be guessed; expected random digits, as `openssl rand -hex 32` makes")
    if readers := _other_readers(path.stat()):
        print(f"warning: {path}: {readers} can read this secret key; expected mode 0600", file=sys.stderr)
    return key


def _other_readers(status: os.stat_result) -> str:
    """Return the others who can read a file; a group may if another user, such as root, hands the file out by it."""
    if status.st_mode & stat.S_IROTH:
        return "all users"
    return "its group" if status.st_mode & stat.S_IRGRP and status.st_uid == os.geteuid() else ""


def _create_key(path: Path) -> None:
    """Put a new key at ``path`` unless one is there: written aside, then linked, which never replaces a file."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mkstemp makes it 0600
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    finally:
        os.unlink(aside)
