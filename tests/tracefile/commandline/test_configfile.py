"""``--config FILE``: flags of a command from its table; flags of the command line win."""

import argparse
from pathlib import Path

import pytest

from tracefile.commandline.configfile import given_flags, refuse_beside, refuse_without
from tracefile.commandline.parser import Parser
from tracefile.records.errors import InputError


def parser(prog: str = "loadgen") -> Parser:
    made = Parser(prog=prog)
    made.add_argument("--rate", type=float, default=1.0)
    made.add_argument("--url", required=True)
    made.add_argument("--slo", action="append", default=[])
    made.add_argument("--ignore-eos", action="store_true")
    made.add_argument("--noise", action=argparse.BooleanOptionalAction, default=True)
    return made


def parsed(tmp_path: Path, toml: str, *words: str, prog: str = "loadgen") -> dict[str, object]:
    file = tmp_path / "kvtape.toml"
    file.write_text(toml)
    return vars(parser(prog).parse_args(["--config", str(file), *words]))


def test_mutually_exclusive_flags_error() -> None:
    given = argparse.Namespace(trace="a", by=None, steps=False, sample=0.0, block_size=8)
    assert given_flags(given, ("by", "sample", "steps", "block_size", "no_such")) == ["--sample", "--block-size"]
    with pytest.raises(InputError, match=r"^--block-size: given with --by; expected only one of the two$"):
        refuse_beside("--by", given, ("steps", "block_size", "sample"))
    refuse_beside("--by", given, ("by", "steps"))


def test_missing_required_flag_error() -> None:
    given = argparse.Namespace(by=None, steps=False, sample=0.0)
    with pytest.raises(InputError, match=r"^--sample: without --by; expected both flags$"):
        refuse_without("--by", given, ("steps", "sample"))
    refuse_without("--by", given, ("by", "steps"))


def test_command_line_overrides_the_config_table(tmp_path: Path) -> None:
    toml = (
        '[tap]\nrate = 9\n[loadgen]\nurl = "http://a"\nrate = 2\nslo = ["x", "y"]\nignore-eos = true\n'
        "[loadgen.sweep]\nz = 1\n"
    )
    assert parsed(tmp_path, toml, "--rate", "3", "--slo=z") == {
        "url": "http://a",
        "rate": 3.0,
        "slo": ["x", "y", "z"],
        "ignore_eos": True,
        "noise": True,
    }
    assert parsed(tmp_path, '[loadgen]\nurl = "-u"\nignore_eos = false\n')["ignore_eos"] is False


@pytest.mark.parametrize("policy", ["evil.py:pick", "cost,evil.py:pick:seed=1", "./evil.py"])
def test_config_file_runs_no_code(policy: str, tmp_path: Path) -> None:
    made = parser()
    made.add_argument("--route")
    (tmp_path / "kvtape.toml").write_text(f'[loadgen]\nurl = "a"\nroute = "{policy}"\n')
    given = ["--config", str(tmp_path / "kvtape.toml")]
    with pytest.raises(InputError, match=r"kvtape.toml: \[loadgen\] route: '.*': a policy file is accepted only by"):
        made.parse_args(given)
    (tmp_path / "kvtape.toml").write_text('[loadgen]\nurl = "a"\nroute = "overlap:overlap-weight=2"\n')
    assert made.parse_args(given).route == "overlap:overlap-weight=2"


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[loadgen]\nrat = 1", "[loadgen] rat: no such flag; did you mean rate?"),
        ("[loadgen]\nrate = true", "[loadgen] rate: True; expected a string or a number"),
        ("[tap]\nrate = 1", "expected a table [loadgen] with flags of loadgen"),
    ],
)
def test_config_error_has_file_and_key(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        parsed(tmp_path, toml)
    assert str(refused.value).startswith(f"{tmp_path / 'kvtape.toml'}: ")
    assert message in str(refused.value)
