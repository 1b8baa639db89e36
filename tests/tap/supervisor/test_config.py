"""The tap's flags: what they become, and how each wrong one is refused, by its name and with what was expected."""

from dataclasses import replace
from pathlib import Path

import pytest

from engines.facts import EngineFacts
from tap.__main__ import read_config
from tap.ipc.exchange import CacheFeed
from tap.supervisor.config import Runtime, recorder_setup
from tap.supervisor.upstreamlist import HealthCheck
from tracefile.hashing.hashkey import HashKey
from tracefile.records.errors import InputError
from wire.url import Origin

REQUIRED = ["--upstream", "http://a:1", "--listen", "127.0.0.1:0", "-o", "t.jsonl", "--tokenizer", "ids"]
WITHOUT_UPSTREAM = REQUIRED[2:]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_what_is_not_said_has_its_default() -> None:
    config = read_config(REQUIRED)
    assert config.upstreams == (Origin("http", "a", 1),)
    assert (config.upstreams_file, config.route, config.workers, config.admin) == (None, "round-robin", 1, None)
    assert (config.rotate_bytes, config.rotate_s, config.resume, config.overwrite) == (None, None, False, False)
    assert (config.sample, config.keep_headers, config.upload) == (1.0, (), None)
    assert (config.inject, config.dialect, config.engine_metrics_s) == (frozenset(), None, 0.0)
    assert (config.draining, config.route_bytes, config.health_check) == (frozenset(), 16 << 10, None)
    assert config.eject_after == 5
    assert (config.wait_s, config.file_mode, config.admin_names) == (None, 0o600, ())


def test_what_is_said_is_in_the_settings() -> None:
    flags = ["--upstream", "https://b/v2", "--route", "session", "--workers", "4", "--admin", "0.0.0.0:9000"]
    flags += [
        "--rotate-mb",
        "0.5",
        "--rotate-age",
        "60s",
        "--resume",
        "--upload",
        "s3://bucket/folder",
        "--sample",
        "0.1",
    ]
    flags += ["--keep-header", "X-Tenant", "--keep-header", "x-tenant", "--keep-header", "X-Team"]
    flags += ["--inject", "usage,token-ids", "--dialect", "sglang", "--engine-metrics-interval", "2s"]
    config = read_config([*REQUIRED, *flags])
    assert config.upstreams == (Origin("http", "a", 1), Origin("https", "b", 443, "/v2"))
    assert (config.route, config.workers, config.admin) == ("session", 4, ("0.0.0.0", 9000))
    assert (config.rotate_bytes, config.rotate_s, config.resume) == (1 << 19, 60.0, True)
    assert (config.upload, config.sample, config.keep_headers) == ("s3://bucket/folder", 0.1, ("x-tenant", "x-team"))
    assert (config.inject, config.dialect) == (frozenset({"usage", "token-ids"}), "sglang")
    assert (config.engine_metrics_s, config.inject_auto) == (2.0, False)
    for dialect in ((), ("--dialect", "trtllm"), ("--dialect", "llamacpp")):
        config = read_config([*REQUIRED, "--inject", "auto", *dialect])
        assert (config.inject, config.inject_auto) == (frozenset({"usage", "token-ids"}), True)
    config = read_config([*REQUIRED, "--wait", "0s", "--file-mode", "640", "--admin-name", "Tap.Example.com"])
    assert (config.wait_s, config.file_mode, config.admin_names) == (0.0, 0o640, ("tap.example.com",))
    flags = ["--route", "prefix", "--route-kb", "64", "--health-check", "/health", "--health-interval", "500ms"]
    config = read_config([*REQUIRED, *flags, "--health-fall", "1", "--health-rise", "4", "--eject-after", "0"])
    assert (config.route, config.route_bytes, config.eject_after) == ("prefix", 64 << 10, 0)
    assert config.health_check == HealthCheck("/health", 0.5, fall=1, rise=4)
    config = read_config([*REQUIRED, "--route", "overlap", "--kv-events", "http://a:1/v1=tcp://a:5557,tcp://a:5558"])
    assert config.kv_events == ((Origin("http", "a", 1), "tcp://a:5557", "tcp://a:5558"),)


@pytest.mark.parametrize(
    ("url", "base_path"),
    [
        ("http://h:8000/v1", ""),
        ("http://h:8000/v1/", ""),
        ("http://h:8000/gate/v1", "/gate"),
        ("http://h:8000/v2", "/v2"),
    ],
)
def test_the_v1_of_a_base_url_is_that_of_the_paths(
    url: str, base_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_config(["--upstream", url, *WITHOUT_UPSTREAM])
    assert config.upstreams == (Origin("http", "h", 8000, base_path),)
    said = f"tap: --upstream {url}: /v1 is left out, since it is in the clients' paths\n"
    assert capsys.readouterr().err == (said if "v1" in url else "")


def test_a_file_of_upstreams_has_comments_and_empty_lines() -> None:
    Path("upstreams").write_text("# the fleet\nhttp://a:1\n\n  http://b:2/base  # the second\n")
    config = read_config([*WITHOUT_UPSTREAM, "--upstreams", "upstreams"])
    assert config.upstreams == (Origin("http", "a", 1), Origin("http", "b", 2, "/base"))
    assert config.upstreams_file == Path("upstreams")
    assert config.draining == frozenset()


def test_an_upstream_is_drained_by_a_word_before_its_url() -> None:
    Path("upstreams").write_text("http://a:1\ndrain http://b:2/base  # for its upgrade\nstop http://c:3\n")
    config = read_config([*WITHOUT_UPSTREAM, "--upstreams", "upstreams"])
    assert config.upstreams == (Origin("http", "a", 1), Origin("http", "b", 2, "/base"), Origin("http", "c", 3))
    assert config.stopped == frozenset({Origin("http", "c", 3)})
    assert config.draining == frozenset({Origin("http", "b", 2, "/base")})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("http://a:1\nftp://b\n", "upstreams:2", id="no URL"),
        pytest.param("# nothing\n", "names no upstream", id="empty"),
        pytest.param("http://a:1\nhttp://a:1/\n", "upstreams:2: http://a:1 is named twice", id="twice"),
        pytest.param(
            "drain http://a:1\n", "names no upstream for new sessions; expected one that is neither", id="drained"
        ),
        pytest.param("http://a:1\ndrain\n", "upstreams:2: 'drain' is not a URL", id="nothing drained"),
        pytest.param(b"\xff\xfe", "not UTF-8", id="no text"),
        pytest.param(None, "No such file", id="no file"),
    ],
)
def test_a_wrong_file_of_upstreams_is_refused_by_its_line(text: str | bytes | None, said: str) -> None:
    if text is not None:
        Path("upstreams").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=said):
        read_config([*WITHOUT_UPSTREAM, "--upstreams", "upstreams"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--workers", "0"], "--workers 0: expected 1 or more"),
        (["--workers", "99999"], "--workers 99999: expected "),
        (["-o", "none/t"], "--output none/t: cannot be written; expected a folder that is there and writable"),
        (["-o", "t.parquet"], "--output t.parquet: lines are recorded; expected .jsonl"),
        (["--rotate-mb", "0"], "--rotate-mb 0: expected more than 0"),
        (["--rotate-mb", "inf"], "--rotate-mb inf: expected 4294967296 at most"),
        (["--queue-mb", "1e300"], "--queue-mb 1e+300: expected 4294967296 at most"),
        (["--block-size", "9" * 18], "--block-size 1e+18: expected 4294967296 at most"),
        (["--rotate-age", "0"], "--rotate-age 0: expected more than 0"),
        (["--sample", "0"], "--sample 0: expected more than 0 and at most 1"),
        (["--sample", "1.5"], "--sample 1.5: expected"),
        (["--sample", "nan"], "--sample nan: expected"),
        (["--keep-header", "Authorization"], "--keep-header Authorization: may hold a secret"),
        (["--keep-header", "Set-Cookie"], "may hold a secret"),
        (["--keep-header", "X-Api-Key"], "may hold a secret"),
        (["--keep-header", "x-auth-TOKEN"], "may hold a secret"),
        (["--keep-header", "X-Client-Secret"], "may hold a secret"),
        (["--keep-header", "X: y"], "expected the name of one header"),
        (["--upload", "s3://bucket"], "expected --rotate-mb or --rotate-age beside it"),
        (["--keep", "30d"], "--keep: about closed segments; expected --rotate-mb or --rotate-age beside it"),
        (["--keep-gb", "0", "--rotate-mb", "1"], "--keep-gb 0: expected more than 0"),
        (["--upload", "bucket", "--rotate-age", "1s"], "--upload bucket: expected a URL"),
        (["--inject", "logprobs"], "--inject logprobs: expected auto, usage or token-ids"),
        (["--inject", "auto,usage"], "--inject auto: asks for all that the engine has; expected it alone"),
        (["--inject", "usage", "--dialect", "trtllm"], "TensorRT-LLM refuses fields"),
        (["--admin", "9000"], "--admin: '9000': expected HOST:PORT"),
        (["--file-mode", "0400"], "--file-mode 0400: expected permissions that let the owner read and write"),
        (["--file-mode", "rw"], "--file-mode rw: expected"),
        (["--resume", "--overwrite"], "--overwrite, --resume: both were given"),
        (["--upstreams", "x"], "both were given; expected exactly one of the two"),
        (["--upstream", "http://a:1/"], "http://a:1 is named twice"),
        (["--route-kb", "0.1"], "--route-kb 0.1: expected 0.5 or more"),
        (["--health-check", "health"], "--health-check health: expected a path, such as /health"),
        (["--health-fall", "0"], "--health-fall 0: expected 1 or more"),
        (["--health-interval", "0"], "--health-interval 0s: expected more than 0"),
        (["--eject-after", "-1"], "--eject-after -1: expected 0 or more"),
        (["--kv-events", "http://a:1"], "--kv-events http://a:1: '' is not a URL"),
        (["--kv-events", "http://a:1=a:5557"], "'a:5557' is no address of ZeroMQ's: expected tcp://HOST:PORT"),
        (["--kv-events", "http://b:1=tcp://a:5557"], "expected each of the upstreams once at most"),
        (
            ["--kv-events", "http://a:1=tcp://a:5557"],
            "--kv-events: --route round-robin uses no caches; expected a policy",
        ),
    ],
)
def test_a_wrong_flag_is_refused_by_its_name(flags: list[str], said: str) -> None:
    with pytest.raises(InputError) as refusal:
        read_config([*REQUIRED, *flags])
    assert said in str(refusal.value)


def test_no_upstream_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="none was given; expected exactly one of the two"):
        read_config(WITHOUT_UPSTREAM)


def test_a_trace_that_is_there_is_neither_replaced_nor_continued_unasked() -> None:
    Path("t.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="--resume or --overwrite"):
        read_config(REQUIRED)
    assert read_config([*REQUIRED, "--resume"]).resume
    assert read_config([*REQUIRED, "--overwrite"]).overwrite


def test_an_upstream_alone_is_enough(tmp_path: Path) -> None:
    config = read_config(["--upstream", "http://a:1"])
    assert (config.listen, config.trace) == (("127.0.0.1", 8001), "tap.jsonl.zst")
    assert (config.tokenizer, config.log_interval_s) == ("auto", 30.0)
    (tmp_path / "tap.jsonl.zst").touch()
    assert read_config(["--upstream", "http://a:1", "--log-interval", "0"]).trace == "tap-2.jsonl.zst"
    with pytest.raises(InputError, match="--resume: without --output; expected the trace to go on with"):
        read_config(["--upstream", "http://a:1", "--resume"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tokenizer", "bytes"], "--tokenizer bytes has no token ids"),
        (["--tokenizer", "ids"], "expected --model NAME"),
    ],
)
def test_kv_events_need_token_ids_and_the_models_name(flags: list[str], said: str, tmp_path: Path) -> None:
    config = read_config([*REQUIRED, "--route", "overlap", "--kv-events", "http://a:1=tcp://a:5557", *flags])
    with pytest.raises(InputError, match=f"--kv-events: .*{said}"):
        recorder_setup(config, HashKey(b"k" * 32), EngineFacts(), Runtime(tmp_path))
    setup = recorder_setup(
        replace(config, tokenizer="ids", model="m"), HashKey(b"k" * 32), EngineFacts(), Runtime(tmp_path)
    )
    assert setup.cache_feeds == [CacheFeed("http://a:1", 0, "tcp://a:5557")]


def test_kv_events_of_an_upstream_that_a_reload_removed_are_left_out(tmp_path: Path) -> None:
    flags = ["--upstream", "http://b:1", "--route", "overlap", "--model", "m"]
    flags += ["--kv-events", "http://a:1=tcp://a:5557", "--kv-events", "http://b:1=tcp://b:5557"]
    config = read_config([*REQUIRED, *flags])
    setup = recorder_setup(
        replace(config, upstreams=config.upstreams[1:]), HashKey(b"k" * 32), EngineFacts(), Runtime(tmp_path)
    )
    assert [feed.slot for feed in setup.cache_feeds] == [0]
