"""No output destroys an input, replaces a file of another kind, or is seen half written."""

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from report.output import write_page
from report.pages.panels import Page
from sim.latency.modelfile import default_model, encode_model, save_model
from tracefile.__main__ import main as tracefile
from tracefile.files.reading import load_trace
from tracefile.records.errors import InputError
from tracefile.storage.output import free_name

HEADER = '{"meta":{"schema":"kvtape/1","block_size":4,"epoch_unix_ns":1}}\n'


def lines(count: int = 3) -> str:
    records = (
        {"request_id": f"r{n}", "arrival_ms": 10.0 * n, "ttft_ms": 5.0, "e2e_ms": 9.0, "prompt_tokens": 9}
        | {"output_tokens": 2, "block_hashes": [1, 2]}
        for n in range(count)
    )
    return HEADER + "".join(json.dumps(record) + "\n" for record in records)


def run(command: str, *argv: str) -> int:
    program, *rest = command.split()
    code: int = importlib.import_module(f"{program}.__main__").main([*rest, *argv])
    return code


COMMANDS = {
    "convert": "tracefile convert {trace} {out} --overwrite",
    "run": "sim run {trace} --latency-model {model} -o {out} --overwrite",
    "calibrate": "sim calibrate {trace} --against {other} -o {out}",
    "calibrate page": "sim calibrate {trace} --against {other} -o {model} --html {out}",
    "what-if": "sim what-if {trace} --latency-model {model} --html {out}",
    "search": "sim search {trace} --latency-model {model} --minimize num-gpu-blocks --target ttft.p90<=1s --html {out}",
    "validate": "sim validate {other} --latency-model {model} --repeat {trace} --html {out}",
    "show": "report show {trace} --html {out}",
    "compare": "report compare a={trace} b={other} --html {out}",
    "curve": "sim curve {trace} --html {out}",
    "replay": "replay {trace} --url http://127.0.0.1:1 -o {out} --overwrite",
    "loadgen": "loadgen --url http://127.0.0.1:1 --rate-series {trace} --pattern series -o {out} --overwrite",
    "tap": "tap --upstream http://127.0.0.1:1 --upstreams {trace} --listen :0 --tokenizer ids -o {out} --overwrite",
}


def same(trace: Path) -> Path:
    return trace


def other_spelling(trace: Path) -> Path:
    return trace.parent / "folder" / ".." / trace.name


def symbolic_link(trace: Path) -> Path:
    (trace.parent / "symbolic").symlink_to(trace)
    return trace.parent / "symbolic"


def hard_link(trace: Path) -> Path:
    os.link(trace, trace.parent / "hard")
    return trace.parent / "hard"


@pytest.mark.parametrize("name_of", [same, other_spelling, symbolic_link, hard_link])
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_never_overwrite_an_input(name: str, name_of: Callable[[Path], Path], tmp_path: Path) -> None:
    trace, other, model = tmp_path / "t.jsonl", tmp_path / "other.jsonl", tmp_path / "model.json"
    (tmp_path / "folder").mkdir()
    text = "t_s,rate\n0,1\n9,1\n" if name == "loadgen" else lines()
    trace.write_text(text)
    other.write_text(lines(2))
    save_model(default_model(), model)
    positions = {"trace": trace, "other": other, "model": model, "out": name_of(trace)}
    command, *rest = (word.format(**positions) for word in COMMANDS[name].split())
    with pytest.raises(InputError, match="an input of this command"):
        run(command, *rest)
    assert trace.read_text() == text


def test_segments_and_manifests_are_inputs(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"t-00000{number}.jsonl").write_text(lines().replace('"r0"', f'"r0{number}"'))
    there = sorted(tmp_path.iterdir())
    for name, message in (("t-000002.jsonl", "an input"), ("t-000003.jsonl", "a segment of the input")):
        with pytest.raises(InputError, match=message):
            tracefile(["convert", str(tmp_path), str(tmp_path / name), "--overwrite"])
    assert sorted(tmp_path.iterdir()) == there
    assert tracefile(["convert", str(tmp_path), str(tmp_path / "whole.jsonl")]) == 0
    assert len(load_trace(tmp_path / "whole.jsonl")[1]) == 6


def test_existing_model_is_replaced_only_with_the_flag(tmp_path: Path) -> None:
    """Refused before any fit; with ``--overwrite`` the fit begins, and finds too little in the trace."""
    trace, model = tmp_path / "t.jsonl", tmp_path / "model.json"
    trace.write_text(lines())
    save_model(default_model(), model)
    argv = [str(trace), "-o", str(model), "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]
    with pytest.raises(InputError, match=r"model\.json: already exists; expected a new file, or --overwrite"):
        run("sim calibrate", *argv)
    with pytest.raises(InputError) as refused:
        run("sim calibrate", *argv, "--overwrite")
    assert "already there" not in str(refused.value)
    assert model.read_bytes() == encode_model(default_model())


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.zst"])
def test_failed_conversion_keeps_the_old_file(name: str, tmp_path: Path) -> None:
    good, bad, out = tmp_path / "good.jsonl", tmp_path / "bad.jsonl", tmp_path / name
    good.write_text(lines())
    bad.write_text(lines() + "{}\n" + lines().splitlines()[1] + "\n")
    assert tracefile(["convert", str(good), str(out)]) == 0
    out.chmod(0o640)
    before = out.read_bytes()
    with pytest.raises(InputError, match="request_id: missing"):
        tracefile(["convert", str(bad), str(out), "--overwrite"])
    assert out.read_bytes() == before
    with pytest.raises(InputError, match="expected a new file, or --overwrite"):
        tracefile(["convert", str(good), str(out)])
    assert tracefile(["convert", str(good), str(out), "--overwrite"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["good.jsonl", "bad.jsonl", name])
    assert out.stat().st_mode & 0o777 == 0o640


def test_page_overwrites_pages_only(tmp_path: Path) -> None:
    trace, page = tmp_path / "t.jsonl", tmp_path / "page.html"
    trace.write_text(lines())
    with pytest.raises(InputError, match="already exists and is not an HTML page"):
        run("report compare", f"a={trace}", f"b={trace}", "--html", str(__file__))
    for title in ("one", "two"):
        write_page(page, Page(tool="", title=title, defined="", headlines=[title]))
    assert "<h1>two</h1>" in page.read_text()
    with pytest.raises(InputError, match="its folder does not exist"):
        run("report compare", f"a={trace}", f"b={trace}", "--html", str(tmp_path / "no" / "page.html"))


@pytest.mark.parametrize(
    ("there", "name"),
    [
        ([], "tap.jsonl.zst"),
        (["tap.jsonl.zst"], "tap-2.jsonl.zst"),
        (["tap.jsonl.zst", "tap-2.jsonl.zst.shard0.jsonl"], "tap-3.jsonl.zst"),
        (["tap-000001.jsonl.zst.part"], "tap-2.jsonl.zst"),
    ],
)
def test_default_output_name_is_unused(
    there: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for other in there:
        Path(other).touch()
    assert free_name("tap") == name
