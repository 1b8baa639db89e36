"""Requests of an evaluation, and their answers: no test here needs lm-eval."""

import json
from typing import Any

import msgspec
import pytest

from engines.sglang import SGLANG
from engines.trtllm import TENSORRT_LLM
from loadgen.accuracy.question import Question, QuestionForm, likelihood, read_answer, stop_strings
from loadgen.core.plan import Response
from tracefile import Record, RequestId

FORM = QuestionForm(model="m")
ECHOED = {
    "choices": [
        {
            "logprobs": {
                "token_logprobs": [None, -1.5, -0.25, -2.0, -9.0],
                "top_logprobs": [None, {"b": -1.5}, {"c": -0.25, "x": -3.0}, {"d": -2.0, "y": -1.0}, {"z": -9.0}],
            }
        }
    ]
}
"""Four prompt tokens, of which the last is not its place's likeliest, and one output token."""


def body_of(question: Question) -> Any:
    return json.loads(question.body)


def response(text: str = "", body: bytes = b"", **fields: Any) -> Response:
    record = Record(request_id=RequestId("r"), **fields)
    return Response(record=record, end_ms=0.0, token_ids=None, prompt_token_ids=None, text=text, body=body)


def test_a_generation_ends_where_the_model_or_a_stop_string_ends_it() -> None:
    options = {"until": ["\n", "Question:"], "max_gen_toks": 24, "do_sample": False, "top_k": 5}
    question = FORM.generation([5, 6, 7], options)
    assert body_of(question) == {
        "prompt": [5, 6, 7],
        "model": "m",
        "max_tokens": 24,
        "temperature": 0,
        "seed": 1234,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,  # as the dialect has it; nothing asks to go on past the end
        "stop": ["\n", "Question:"],
        "top_k": 5,
    }
    assert (question.path, question.max_tokens, question.stream) == ("/v1/completions", 24, True)
    assert options["do_sample"] is False  # lm-eval's own object is left as it is


def test_a_task_says_temperature_and_length_or_has_lm_evals() -> None:
    assert body_of(FORM.generation("text", {}))["max_tokens"] == 256
    said = body_of(FORM.generation("text", {"temperature": 0.7, "max_tokens": 9, "max_gen_toks": 5}))
    assert (said["prompt"], said["temperature"], said["max_tokens"], "stop" in said) == ("text", 0.7, 9, False)


def test_a_chat_sends_four_stops_and_heeds_all() -> None:
    form = QuestionForm(model="m", api="chat", dialect=SGLANG, extra={"top_p": 0.5, "seed": None})
    stops = ["a", "b", "c", "d", "e"]
    question = form.generation([{"role": "user", "content": "hi"}], {"until": stops})
    said = body_of(question)
    assert (question.path, said["messages"], said["stop"]) == (
        "/v1/chat/completions",
        [{"role": "user", "content": "hi"}],
        stops[:4],
    )
    assert (said["top_p"], "seed" in said, "return_token_ids" in said) == (0.5, False, False)  # SGLang refuses these
    assert read_answer(question, response("one, two")) == "on"


def test_an_engine_gets_only_fields_that_it_knows() -> None:
    form = QuestionForm(model="m", dialect=TENSORRT_LLM, stream=False)
    assert body_of(form.generation([1], {"until": "x"})).keys() == {
        *("prompt", "model", "max_tokens", "temperature", "seed", "stream", "stop")
    }


def test_long_prompts_lose_their_beginning() -> None:
    form = QuestionForm(model="m", max_model_len=10)
    assert body_of(form.generation(list(range(20)), {"max_gen_toks": 4}))["prompt"] == [14, 15, 16, 17, 18, 19]
    question = form.scoring(list(range(8)), [90, 91, 92])
    assert body_of(question)["prompt"] == [2, 3, 4, 5, 6, 7, 90, 91, 92]
    assert question.scored_from == 6
    longer = form.scoring([1], list(range(20)))  # the whole context is gone: one token is left to condition on
    assert (len(body_of(longer)["prompt"]), longer.scored_from) == (9, 1)


def test_a_scoring_asks_for_the_prompts_log_probabilities_in_one_piece() -> None:
    question = FORM.scoring([1, 2], [3])
    assert body_of(question) == {
        "prompt": [1, 2, 3],
        "model": "m",
        "max_tokens": 1,
        "temperature": 0,
        "seed": 1234,
        "logprobs": 1,
        "echo": True,
        "stream": False,
    }
    assert (question.scored_from, question.stream) == (2, False)


def test_a_likelihood_by_hand() -> None:
    body = msgspec.json.encode(ECHOED)
    assert likelihood(body, 1, 3) == (-1.75, True)
    assert likelihood(body, 2, 4) == (-2.25, False)  # d is not the likeliest of its place
    assert read_answer(FORM.scoring([1, 2], [3, 4]), response(body=body)) == (-2.25, False)


@pytest.mark.parametrize(
    "body",
    [
        b"no JSON",
        b'{"choices": []}',
        b'{"choices": [{"text": "a", "logprobs": null}]}',
        b'{"choices": [{"logprobs": {"token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}]}}]}',
        msgspec.json.encode({"choices": [{"logprobs": {"token_logprobs": [None] * 5, "top_logprobs": [None] * 5}}]}),
    ],
    ids=["no JSON", "no choice", "no logprobs", "output alone", "no values"],
)
def test_what_tells_no_log_probabilities_is_no_answer(body: bytes) -> None:
    assert likelihood(body, 2, 4) is None


def test_a_response_that_failed_is_no_answer() -> None:
    question = FORM.generation("text", {"until": ["\n"]})
    assert read_answer(question, response("half", status="upstream_abort")) is None
    assert read_answer(question, response("whole\nthe next")) == "whole"
    assert read_answer(question, response("")) == ""


def test_stop_strings_of_any_form() -> None:
    assert stop_strings(None) == ()
    assert stop_strings("\n") == ("\n",)
    assert stop_strings(["a", "", "b"]) == ("a", "b")
