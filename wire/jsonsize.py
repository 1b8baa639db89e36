"""Estimate of the memory of a JSON text once decoded, to refuse a text before decoding.

A few bytes of text (``{},``) decode to an object of 100 bytes. The estimate counts structural characters outside
strings, in a fraction of the decoding time.
"""

LARGE_BYTES = 2 << 20
"""A shorter text decodes to at most 60 MB, and is not counted."""
MAX_DECODED_BYTES = 64 << 20
"""Limit of the values of a text: 1,300,000 token ids, 200,000 members."""
_ITEM_BYTES, _MEMBER_BYTES, _CONTAINER_BYTES = 48, 150, 64
_WINDOW_BYTES = 1 << 18


def fits_in_memory(text: bytes) -> bool:
    """Return whether the values of a JSON text, without string bytes, fit into about ``MAX_DECODED_BYTES``."""
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
    """Return the memory of the values; commas and braces in strings count as structure."""
    containers = structure.count(b"{") + structure.count(b"[")
    items, members = structure.count(b","), structure.count(b":")
    return items * _ITEM_BYTES + members * _MEMBER_BYTES + containers * _CONTAINER_BYTES
