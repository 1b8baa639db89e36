"""Which sessions a sample keeps: a session is recorded whole or not at all, wherever and whenever it is decided."""

from tracefile.hashing.hashkey import HashKey
from tracefile.records.schema import Record

HASH_BITS = 64


class SessionSample:
    """Keeps about ``share`` of all sessions, by a keyed hash of their ids: the same ones at every tap with this key.

    Asked once a record's session is known. A request without one is a session of its own. The samples of smaller
    shares are parts of those of larger ones.
    """

    def __init__(self, key: HashKey, share: float) -> None:
        self._key = key
        self._below = round(share * (1 << HASH_BITS))

    def keeps(self, record: Record) -> bool:
        """Whether the record's session is in the sample."""
        name = record.session_id or f"request {record.request_id}"
        digest = self._key.derive(b"session sample", HASH_BITS // 8, name.encode())
        return int.from_bytes(digest, "big") < self._below
