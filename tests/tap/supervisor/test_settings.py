"""The tap's flags: settings, and errors for invalid values."""

from pathlib import Path

import pytest

from tap.__main__ import read_settings
from tracefile.records.errors import InputError
from wire.url import Origin

REQUIRED = ["--upstream", "http://a:1", "--listen", "127.0.0.1:0", "-o", "t.jsonl", "--tokenizer", "ids"]
WITHOUT_UPSTREAM = REQUIRED[2:]


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_flags_are_in_the_settings() -> None:
    flags = ["--upstream", "https://b/v2", "--route", "session", "--workers", "4", "--admin", "0.0.0.0:9000"]
    flags += ["--rotate-mb", "0.5", "--rotate-age", "60s", "--resume", "--upload", "s3://bucket/folder"]
    flags += ["--keep-header", "X-Tenant", "--keep-header", "x-tenant", "--keep-header", "X-Team"]
    flags += ["--inject", "usage,token-ids", "--dialect", "vllm"]
    settings = read_settings([*REQUIRED, *flags])
    assert settings.upstreams == (Origin("http", "a", 1), Origin("https", "b", 443, "/v2"))
    assert (settings.route, settings.workers, settings.admin) == ("session", 4, ("0.0.0.0", 9000))
    assert (settings.rotate_bytes, settings.rotate_s, settings.resume) == (1 << 19, 60.0, True)
    assert (settings.upload, settings.keep_headers) == ("s3://bucket/folder", ("x-tenant", "x-team"))
    assert (settings.inject, settings.dialect) == (frozenset({"usage", "token-ids"}), "vllm")
    assert not settings.inject_auto
    for dialect in ((), ("--dialect", "trtllm"), ("--dialect", "llamacpp")):
        settings = read_settings([*REQUIRED, "--inject", "auto", *dialect])
        assert (settings.inject, settings.inject_auto) == (frozenset({"usage", "token-ids"}), True)


def test_config_only_settings() -> None:
    Path("tap.toml").write_text('[tap]\nfile-mode = "640"\nqueue-mb = 1\n')
    settings = read_settings(["--config", "tap.toml", *REQUIRED])
    assert (settings.file_mode, settings.queue_bytes) == (0o640, 1 << 20)


@pytest.mark.parametrize(
    ("url", "base_path"),
    [
        ("http://h:8000/gate/v1", "/gate"),
        ("http://h:8000/v2", "/v2"),
    ],
)
def test_v1_in_the_base_url(url: str, base_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = read_settings(["--upstream", url, *WITHOUT_UPSTREAM])
    assert settings.upstreams == (Origin("http", "h", 8000, base_path),)
    printed = f"tap: --upstream {url}: /v1 ignored: clients send it in their paths\n"
    assert capsys.readouterr().err == (printed if "v1" in url else "")


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        pytest.param("http://a:1\nftp://b\n", "upstreams:2", id="no URL"),
        pytest.param("http://a:1\nhttp://a:1/\n", "upstreams:2: http://a:1 is listed twice", id="twice"),
    ],
)
def test_invalid_upstreams_file_is_refused_by_line(text: str | bytes | None, printed: str) -> None:
    if text is not None:
        Path("upstreams").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=printed):
        read_settings([*WITHOUT_UPSTREAM, "--upstreams", "upstreams"])


@pytest.mark.parametrize(
    ("flags", "printed"),
    [
        (["--upload", "s3://bucket"], "expected --rotate-mb or --rotate-age, too"),
        (["--inject", "usage", "--dialect", "trtllm"], "--inject usage: not supported by trtllm"),
        (["--upstreams", "x"], "both were given; expected exactly one of the two"),
    ],
)
def test_contradicting_flags_are_refused(flags: list[str], printed: str) -> None:
    with pytest.raises(InputError) as refusal:
        read_settings([*REQUIRED, *flags])
    assert printed in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "printed"),
    [
        (["--workers", "0"], "--workers: '0'; expected a whole number above 0"),
        *((["--keep-header", name], "may hold a secret") for name in ("Authorization", "Set-Cookie", "x-auth-TOKEN")),
        (["--file-mode", "0600"], "--file-mode: expected file-mode in table [tap] of a --config file"),
    ],
)
def test_invalid_value_is_refused_by_flag(flags: list[str], printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings([*REQUIRED, *flags])
    assert printed in capsys.readouterr().err


def test_missing_upstream_is_rejected() -> None:
    with pytest.raises(InputError, match="none was given; expected exactly one of the two"):
        read_settings(WITHOUT_UPSTREAM)


def test_existing_trace_is_neither_replaced_nor_continued() -> None:
    Path("t.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="--resume or --overwrite"):
        read_settings(REQUIRED)
    assert read_settings([*REQUIRED, "--resume"]).resume
    assert read_settings([*REQUIRED, "--overwrite"]).overwrite


def test_upstream_is_the_only_required_flag(tmp_path: Path) -> None:
    settings = read_settings(["--upstream", "http://a:1"])
    assert (settings.listen, settings.trace) == (("127.0.0.1", 8001), "tap.jsonl.zst")
    assert settings.tokenizer == "auto"
    (tmp_path / "tap.jsonl.zst").touch()
    assert read_settings(["--upstream", "http://a:1"]).trace == "tap-2.jsonl.zst"
    with pytest.raises(InputError, match="--resume: needs --output; expected the trace to continue"):
        read_settings(["--upstream", "http://a:1", "--resume"])
