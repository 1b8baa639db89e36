"""Messages over a stream that may be cut anywhere."""

from hypothesis import given
from hypothesis import strategies as st

from loadgen.sending.frames import FrameReader, frame

payloads = st.lists(st.binary(max_size=40), max_size=8)


@given(payloads, st.lists(st.integers(1, 17), min_size=1))
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(sent: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(frame, sent))
    reader = FrameReader()
    received: list[bytes] = []
    index = 0
    while stream:
        cut = cuts[index % len(cuts)]
        received += reader.feed(stream[:cut])
        stream = stream[cut:]
        index += 1
    assert received == sent


def test_an_unfinished_frame_waits() -> None:
    reader = FrameReader()
    assert reader.feed(frame(b"whole") + frame(b"cut")[:-1]) == [b"whole"]
    assert reader.feed(b"t") == [b"cut"]
