"""An evaluation's requests sent as a load, its flags, and its scores; no test here needs lm-eval."""

import json
import shlex
import sys
from pathlib import Path

import httpx
import pytest

from loadgen.__main__ import main
from loadgen.accuracy.question import Accuracy, AccuracyJob, QuestionForm, Score, accuracy_lines, scores_of
from loadgen.runs.driving import RunConfig, run_job
from tracefile import BlockHasher, InputError, Meta, load_key, load_trace

MODEL = "kvtape-sim"
SECRET, ANSWER = "a canary sings", " of its cage"


def encoded(url: str, text: str) -> list[int]:
    tokens: list[int] = httpx.post(f"{url}/tokenize", json={"prompt": text}).json()["tokens"]
    return tokens


def test_questions_are_a_load_whose_answers_reach_the_parent_alone(sim_server: str, tmp_path: Path) -> None:
    form = QuestionForm(model=MODEL, stream=True)
    context, continuation = encoded(sim_server, SECRET * 8), encoded(sim_server, ANSWER)
    free = form.generation(context, {"max_gen_toks": 12, "ignore_eos": True})
    told = httpx.post(
        f"{sim_server}{free.path}", json={**json.loads(free.body), "stream": False, "stream_options": None}
    )
    text = told.json()["choices"][0]["text"]
    stopped = form.generation(context, {"max_gen_toks": 12, "until": [text[20:24]]})
    questions = (free, stopped, form.scoring(context, continuation))
    job = AccuracyJob(questions=questions, due_ms=(None,) * 3, model=MODEL, key=load_key(), block_size=16)
    trace = tmp_path / "t.jsonl"
    config = RunConfig(job=job, url=sim_server, trace=trace, meta=Meta(source="client", block_size=16), parallel=1)
    outcome = run_job(config)
    scored = httpx.post(f"{sim_server}{questions[2].path}", content=questions[2].body).json()["choices"][0]["logprobs"]
    likelihood = sum(scored["token_logprobs"][len(context) : -1])
    assert outcome.results == {0: text, 1: text[:20], 2: (likelihood, False)}
    # The trace tells shapes and hashes, and nothing of what was said.
    _, records = load_trace(trace)
    by_id = {record.request_id: record for record in records}
    one, cut, score = (by_id[job.request_id(name)] for name in job.names())
    assert [each.prompt_logprobs for each in (one, cut, score)] == [None, None, True]
    assert (one.max_tokens, one.output_tokens, one.finish_reason) == (12, 12, "length")
    assert (cut.output_tokens, cut.finish_reason) == (6, "stop")
    assert (score.output_tokens, score.stream, score.cached_tokens, score.ttft_ms) == (1, False, 0, None)
    assert cut.cached_tokens == (len(context) - 1) // 16 * 16
    hashes = BlockHasher(load_key(), model=MODEL).hash_blocks([*context, *continuation])
    assert score.block_hashes == hashes
    assert score.output_block_hashes == []
    assert one.block_hashes == cut.block_hashes == hashes[: len(context) // 16]
    raw = trace.read_text()
    assert not any(word in raw for word in (*SECRET.split()[1:], *ANSWER.split(), *text.split()))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--limit 3", "--limit: without --lm-eval; expected both"),
        ("--lm-eval a,,b", "--lm-eval: an empty name"),
        ("--lm-eval a --limit 0", "--limit: 0; expected 1 or more"),
        ("--lm-eval a --num-fewshot -1", "--num-fewshot: -1; expected 0 or more"),
        ("--lm-eval a --resume -o t", "--resume: with --lm-eval, whose outputs are kept in memory alone"),
        ("--lm-eval a --number 3 --turns 2", "--number, --turns: with --lm-eval, whose tasks make the load"),
        ("--lm-eval a --duration 30s", "--duration: with --lm-eval, whose tasks make the load; expected without"),
        ("--lm-eval a --temperature 1", "--temperature: with --lm-eval, whose tasks make the load"),
        ("--lm-eval a --api messages", "--api: messages with --lm-eval; expected completions or chat"),
        ("--lm-eval a --pattern burst", "--pattern: burst with --lm-eval; expected one of poisson, constant, gamma"),
    ],
)
def test_flags_that_do_not_go_together(flags: str, named: str) -> None:
    with pytest.raises(InputError) as refused:
        main(["--url", "http://localhost:1", *shlex.split(flags)])
    assert str(refused.value).startswith(named)


def test_without_lm_eval_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for name in ("loadgen.accuracy.harness", "loadgen.accuracyrun"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(InputError, match=r"--lm-eval \(lm_eval\): needs lm_eval: pip install 'kvtape\[lm-eval\]'"):
        main(["--url", "http://localhost:1", "--lm-eval", "gsm8k"])


def test_scores_are_lm_evals_metrics_by_task_and_filter() -> None:
    results = {
        "results": {
            "letters": {
                **{"name": "letters", "alias": "letters", "sample_len": 4, "acc,none": 0.5, "acc_stderr,none": 0.25},
                **{"em,strict": 1, "em_stderr,strict": "N/A"},
            }
        }
    }
    scores = scores_of(results)
    assert scores == [Score("letters", "acc", "none", 0.5, 0.25), Score("letters", "em", "strict", 1.0, None)]
    accuracy = Accuracy(lm_eval="0.4.13", results="results.json", documents_left_out={"letters": 2}, scores=scores)
    assert accuracy_lines(accuracy) == [
        "lm-eval 0.4.13      results.json",
        "left out            2 documents of letters: not every output came",
        "task     metric  filter   value  stderr",
        "letters  acc     none    0.5000  0.2500",
        "letters  em      strict  1.0000       -",
    ]
