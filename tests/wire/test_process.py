"""Messages over a stream that may be cut anywhere."""

from hypothesis import given
from hypothesis import strategies as st

from wire.process import frame, split_frames

payloads = st.lists(st.binary(max_size=40), max_size=8)


@given(payloads, st.lists(st.integers(1, 17), min_size=1))
def test_frames_round_trip_at_any_split(sent: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(frame, sent))
    buffer = bytearray()
    received: list[bytes] = []
    index = 0
    while stream:
        cut = cuts[index % len(cuts)]
        buffer += stream[:cut]
        received += split_frames(buffer)
        stream = stream[cut:]
        index += 1
    assert received == sent


def test_an_unfinished_frame_waits() -> None:
    buffer = bytearray(frame(b"whole") + frame(b"cut")[:-1])
    assert split_frames(buffer) == [b"whole"]
    buffer += b"t"
    assert split_frames(buffer) == [b"cut"]
