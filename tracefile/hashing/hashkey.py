"""Secret key of block hashes: without it, a guessed prompt cannot be tested. Equal ``key_id``: comparable hashes."""

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
"""A random key has fewer distinct bytes with probability under 10⁻²⁰."""


@dataclass(frozen=True, slots=True)
class HashKey:
    """A 32-byte secret; its repr has no secret bytes."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise InputError(f"hash key: {len(self.secret)} bytes; expected {SECRET_BYTES}")

    @property
    def key_id(self) -> str:
        """Public name of the key: 16 hex digits of a keyed hash of the empty string."""
        return self.derive(b"key id", 8).hex()

    def derive(self, purpose: bytes, size: int, data: bytes = b"") -> bytes:
        """Return keyed BLAKE2b of ``data``, ``size`` bytes, separate for each ``purpose`` (at most 16 bytes)."""
        return hashlib.blake2b(data, key=self.secret, person=purpose, digest_size=size).digest()


def keyed_id(key: HashKey, kind: str, text: str) -> str:
    """Return 24 hex digits for an external id: irreversible, and unrelated across kinds (session, …) and keys."""
    name = kind.encode()
    return key.derive(
        b"keyed id", 12, len(name).to_bytes(4, "little") + name + text.encode("utf-8", "surrogatepass")
    ).hex()


def load_key(path: Path | None = None) -> HashKey:
    """Load the key in ``path`` (else $KVTAPE_KEY_FILE, else ~/.config/kvtape/key); create it with mode 0600 if missing.

    Safe for concurrent processes: the file is created atomically, and all processes read the same key. Warns if other
    users can read the file. Raises InputError if it is not 64 random hex digits, or cannot be read or created.
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
            f"{where}: cannot create a hash key ({error.strerror or error}); "
            f"expected a writable folder, or a key file key_file by {KEY_FILE_VARIABLE}"
        ) from error


def key_path() -> Path:
    """Return the key's default path: $KVTAPE_KEY_FILE, else ~/.config/kvtape/key. Raises InputError without a home."""
    key_file = os.environ.get(KEY_FILE_VARIABLE)
    if key_file:
        return Path(key_file)
    try:
        return Path.home() / ".config" / "kvtape" / "key"
    except RuntimeError:
        raise InputError(
            f"no home folder for the hash key; expected a key file key_file by {KEY_FILE_VARIABLE}"
        ) from None


def _read_key(path: Path) -> HashKey:
    text = path.read_text(encoding="ascii").strip()
    try:
        key = HashKey(bytes.fromhex(text))
    except (ValueError, InputError):
        raise InputError(f"{path}: not a hash key; expected {2 * SECRET_BYTES} hex digits") from None
    if len(set(key.secret)) < MIN_DISTINCT_BYTES:
        raise InputError(
            f"{path}: a key that is easy to guess; expected random digits, as `openssl rand -hex 32` makes"
        )
    if readers := _other_readers(path.stat()):
        print(f"warning: {path}: {readers} can read this secret key; expected mode 0600", file=sys.stderr)
    return key


def _other_readers(status: os.stat_result) -> str:
    """Return who else can read a file; group access is accepted if another user, such as root, owns the file."""
    if status.st_mode & stat.S_IROTH:
        return "all users"
    return "its group" if status.st_mode & stat.S_IRGRP and status.st_uid == os.geteuid() else ""


def _create_key(path: Path) -> None:
    """Create a key at ``path`` unless it exists: written to a temporary file, then linked, which never overwrites."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mkstemp creates it with mode 0600
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
