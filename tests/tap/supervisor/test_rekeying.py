"""Another key while the recorder is away, and after a restart: nothing is lost, and no name is marked twice."""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tap.ipc.exchange import Progress, RecorderSetup
from tap.supervisor.account import Ledger
from tap.supervisor.processes import RecorderProcess
from tap.supervisor.service import Service
from tests.tap.recorder.test_recorder import KEY, setup
from tracefile import Engine, HashInfo, HashKey
from tracefile.files.writing import new_writer

OTHER = HashKey(hashlib.sha256(b"week five").digest())


class Sent:
    """A recorder that is not started, and the messages to it."""

    def __init__(self, given: RecorderSetup, monkeypatch: pytest.MonkeyPatch) -> None:
        ledger: Any = SimpleNamespace(progress=Progress())
        self.messages: list[Any] = []
        self.process = RecorderProcess(given, ledger)
        monkeypatch.setattr(self.process.child, "send", self.messages.append)

    def hear(self, key: HashKey) -> None:
        self.process._heard(Progress(key_id=key.key_id))

    @property
    def setups(self) -> list[str]:
        return [message.trace for message in self.messages if isinstance(message, RecorderSetup)]


def first_trace(folder: Path) -> tuple[Path, str]:
    """Write a trace under the first key; return it, and the name of the other key's."""
    trace = folder / "tap.jsonl"
    with new_writer(trace, setup(trace).meta, inputs=[]):
        pass
    return trace, str(folder / f"tap-k{OTHER.key_id[:8]}.jsonl")


def test_a_recorder_that_was_away_is_told_the_key_once_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, marked = first_trace(tmp_path)
    sent = Sent(setup(trace), monkeypatch)
    assert sent.process.rekey(OTHER, str(trace))
    sent.hear(KEY)
    sent.hear(KEY)
    assert sent.setups == [marked] * 2, "again, once: the first was to nobody"
    sent.process._died()
    sent.process.engine_changed(Engine(version="0.12"))
    sent.hear(KEY)
    assert sent.setups == [marked] * 3
    sent.hear(OTHER)
    assert (sent.process.trace, sent.process._setup.meta.engine) == (marked, Engine(version="0.12"))
    sent.process._died()
    sent.hear(OTHER)
    assert (sent.process.rekey(OTHER, str(trace)), sent.setups) == (False, [marked] * 3)


def test_a_key_on_its_way_can_be_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, marked = first_trace(tmp_path)
    sent = Sent(setup(trace), monkeypatch)
    assert [sent.process.rekey(key, str(trace)) for key in (OTHER, KEY)] == [True, True]
    sent.hear(KEY)
    assert (sent.setups, sent.process.trace) == ([marked, str(trace), str(trace)], str(trace))


def service(config: Any, recorder: RecorderProcess, named: Path) -> Service:
    others: Any = SimpleNamespace(fleet=None)
    ledger: Ledger = others
    return Service(config, ledger, recorder, others, None, named=str(named))


def test_a_name_that_has_a_mark_gets_the_next_keys_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, marked = first_trace(tmp_path)
    given = setup(Path(marked))  # resumed under a second key
    meta = msgspec.structs.replace(given.meta, hash=HashInfo(algorithm="xxh3_64", key_id=OTHER.key_id))
    with new_writer(marked, meta, inputs=[]):
        pass
    sent = Sent(msgspec.structs.replace(given, meta=meta), monkeypatch)
    third = HashKey(hashlib.sha256(b"week six").digest())
    (tmp_path / "key").write_text(third.secret.hex())
    (tmp_path / "key").chmod(0o600)
    config = SimpleNamespace(key_file=tmp_path / "key", trace=marked)
    assert service(config, sent.process, trace)._reload_key()
    assert sent.setups == [str(tmp_path / f"tap-k{third.key_id[:8]}.jsonl")]


def test_a_folder_that_may_not_be_read_ends_no_reloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refused)
    sent = Sent(setup(tmp_path / "tap.jsonl"), monkeypatch)
    assert service(SimpleNamespace(key_file=tmp_path / "key"), sent.process, tmp_path)._reload_key()
    assert (sent.setups, "THE KEY STAYS AS IT WAS" in capsys.readouterr().err) == ([], True)
