"""Events read by a template equal those read one by one, whatever the stream holds."""

from functools import partial
from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from wire.completion import Completion, parse_stream, take_data

SPOKEN = st.one_of(
    st.sampled_from(
        ['"a"', '""', '" t\\n\\"\\\\\\/\\b\\f\\r\\t"', '"\\u00e9"', '"é😀"', '"\x7f"', '"\\x"', "null", "3"]
    ),
    st.text(max_size=3).map(lambda text: msgspec.json.encode(text).decode()),
)
COUNT = st.sampled_from(["0", "7", "null", "1099511627776", "1099511627777", "-1", "01", "1.0", "1e3", "1" * 19, '"3"'])
PLAIN = st.sampled_from(
    ["null", "true", "false", "12", '"x"', "-3", "2.5", "[]", "{}", '{"a":[1]}', '"\\u0061"', "nul"]
)
NAME = st.sampled_from(["id", "logprobs", "cr\\u0065ated", "é"])


def objects(**members: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """JSON objects of some of the members, in any order, some of them twice, spaces between."""
    known = [st.tuples(st.just(name), value) for name, value in members.items()]
    member = st.one_of(*known, st.tuples(NAME, PLAIN))
    space = st.sampled_from(["", "", " ", "\t"])
    joined = st.tuples(st.lists(member, max_size=6), space)
    return joined.map(lambda told: "{" + told[1].join(join_members(told[0])) + "}")


def join_members(members: list[tuple[str, str]]) -> list[str]:
    return [f'{"," if at else ""}"{name}":{value}' for at, (name, value) in enumerate(members)]


IDS = st.sampled_from(["[1]", "[ 2, 3 ]", "[]", "null", "[1,]", "[4,null]", "[5", "[1.5]", "7"])
CHOICE = objects(
    index=st.sampled_from(["0", "0", "0", "1", "null"]),
    text=SPOKEN,
    delta=st.one_of(st.just("null"), objects(content=SPOKEN, reasoning=SPOKEN, tool_calls=st.just("[]"))),
    message=st.sampled_from(["null", '{"content":"m"}']),
    finish_reason=st.sampled_from(["null", '"stop"', '""', "1"]),
    token_ids=IDS,
    response_token_ids=IDS,
    prompt_token_ids=IDS,
)
USAGE = objects(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    prompt_tokens_details=st.one_of(st.just("null"), objects(cached_tokens=COUNT)),
)
EVENT = objects(
    choices=st.one_of(CHOICE.map("[{}]".format), st.just("[]"), st.tuples(CHOICE, CHOICE).map("[%s,%s]".__mod__)),
    usage=st.one_of(st.just("null"), USAGE),
    model=SPOKEN,
    object=st.sampled_from(['"error"', '"text_completion"', "null"]),
    error=st.sampled_from(["null", '"no"']),
    timings=st.sampled_from(["null", '{"cache_n":1,"predicted_n":2}']),
)
USUAL = (
    '{"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" é\\n",'
    '"logprobs":null,"finish_reason":null,"token_ids":[9,10]}],"usage":null}'
)
EQUAL = (
    'data: {"id":"c","model":"m","choices":[{"index":0,"text":"%s","finish_reason":null,"token_ids":[%s]}]}\n\n',
    'data: {"id": "c", "choices": [{"index": 0, "delta": {"content": "%s"}, "token_ids": null}], "n": %s}\n\n',
)
TEXT = st.sampled_from([" a", "b", "é😀", "", "\\n", "\x01", '","text":"', "token_ids", '"'])
NUMBER = st.sampled_from(["1", "1", "0", "12", "01", "1,2", "1234567890", "]"])
BLOCK = st.one_of(
    st.tuples(st.sampled_from(EQUAL), TEXT, NUMBER).map(lambda told: told[0] % told[1:]),
    st.just(f"data: {USUAL}\n\n"),
    EVENT.map("data: {}\n\n".format),
    st.sampled_from(
        ["data: [DONE]\n\n", ": ping\n\n", "data:{}\n\n", "data: {}\r\n\r\n", "data: {}\ndata: \n\n", "\n", "x"]
    ),
)


def by_events(reads: list[tuple[int, bytes]]) -> Completion:
    """All events one by one, as Python's form has it."""
    return parse_stream(reads, partial(take_data))


@given(st.lists(BLOCK, max_size=8), st.lists(st.integers(0, 400), max_size=4), st.binary(max_size=2), st.booleans())
def test_events_read_at_once_are_those_read_one_by_one(
    blocks: list[str], cuts: list[int], harm: bytes, marked: bool
) -> None:
    data = (b"\xef\xbb\xbf" if marked else b"") + "".join(blocks).encode("utf-8", "surrogatepass")
    data = data[: len(data) // 2] + harm + data[len(data) // 2 :]
    places = [0, *sorted(cuts), len(data)]
    reads = [(at, data[start:stop]) for at, (start, stop) in enumerate(pairwise(places))]
    assert parse_stream(reads) == by_events(reads)
