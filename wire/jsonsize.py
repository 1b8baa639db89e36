"""Memory that a JSON text takes once decoded, bounded before it is decoded.

A few bytes of text (``{},``) become an object of a hundred. The structure outside the strings tells how many objects
there are, and counting it takes a fraction of the decoding.
"""

LARGE_BYTES = 2 << 20
"""A shorter text takes 60 MB at most, whatever it holds, and is not looked at."""
MAX_DECODED_BYTES = 64 << 20
"""Bound for all values of one text: 1,300,000 token ids, 200,000 members."""
_ITEM_BYTES, _MEMBER_BYTES, _CONTAINER_BYTES = 48, 150, 64
_WINDOW_BYTES = 1 << 18


def fits_in_memory(text: bytes) -> bool:
    """Return whether the values of a JSON text take at most about ``MAX_DECODED_BYTES``, beside its strings' bytes."""
    if len(text) <= LARGE_BYTES or _values_bytes(text) <= MAX_DECODED_BYTES:
        return True
    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    size, inside = 0, 0
    for at in range(0, len(text), _WINDOW_BYTES):
        parts = text[at : at + _WINDOW_BYTES].split(b'"')
        size += _values_bytes(b"".join(parts[inside::2]))
        inside ^= (len(parts) - 1) & 1
    return size <= MAX_DECODED_BYTES


def _values_bytes(structure: bytes) -> int:
    """Return the memory of the values; strings' own commas and braces count as if they were structure."""
    containers = structure.count(b"{") + structure.count(b"[")
    items, members = structure.count(b","), structure.count(b":")
    return items * _ITEM_BYTES + members * _MEMBER_BYTES + containers * _CONTAINER_BYTES
