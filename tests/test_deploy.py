"""What deploy/ and the documentation tell people to run is what the tap takes."""

import argparse
import configparser
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tap.__main__ import parser, read_settings
from tap.admin import pages
from tap.supervisor import processes, service

ROOT = Path(__file__).parent.parent
FINISH_S = processes.WORKER_FLUSH_S + service.FLUSH_TIMEOUT_S + pages.LEAVE_S
"""After the drain: the workers hand over what is left, they leave, the recorder writes it. At worst."""
DEPLOY = ROOT / "deploy"
PAGES = [*ROOT.glob("*.md"), *DEPLOY.rglob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]


def parsed(arguments: Sequence[str], position: str) -> argparse.Namespace:
    """The arguments as ``tap`` reads them; an unknown or a missing flag fails and names the place."""
    try:
        return parser().parse_args(arguments)
    except SystemExit:
        pytest.fail(f"{position}: tap does not take {shlex.join(arguments)}")


def dockerfile() -> str:
    return (DEPLOY / "container" / "Dockerfile").read_text()


def image_arguments() -> list[str]:
    """What the image itself gives to ``tap``, before what whoever runs it adds."""
    results = re.search(r"^ENTRYPOINT (\[.*\])$", dockerfile(), re.MULTILINE)
    assert results is not None
    program, *arguments = json.loads(results[1])
    assert program == "tap"
    return list(arguments)


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def compose_tap() -> Any:
    [compose] = documents(DEPLOY / "container" / "compose.yaml")
    return compose["services"]["tap"]


def pod() -> Any:
    deployment, _ = documents(DEPLOY / "kubernetes" / "sidecar.yaml")
    return deployment["spec"]["template"]["spec"]


def sidecar() -> Any:
    [container] = [container for container in pod()["containers"] if container["name"] == "tap"]
    return container


def unit() -> configparser.SectionProxy:
    """The unit's service section; of a setting given twice, the last."""
    text = (DEPLOY / "systemd" / "kvtape-tap.service").read_text().replace("\\\n", " ")
    read = configparser.RawConfigParser(strict=False, comment_prefixes=("#",))
    read.optionxform = str  # type: ignore[assignment,method-assign]  # settings are written as they are
    read.read_string(text)
    return read["Service"]


def unit_arguments() -> list[str]:
    program, *arguments = shlex.split(unit()["ExecStart"])
    assert Path(program).name == "tap"
    return arguments


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def test_image_is_not_root_and_has_a_health_check() -> None:
    text = dockerfile()
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    asked = re.search(r"HEALTHCHECK.*?http://127\.0\.0\.1:(\d+)/healthz", text, re.DOTALL)
    assert asked is not None
    port = parsed([*image_arguments(), "--tokenizer", "engine"], "Dockerfile").admin[1]
    assert asked[1] == str(port)
    assert {str(port), "8001"} <= set(re.search(r"^EXPOSE (.*)$", text, re.MULTILINE)[1].split())  # type: ignore[index]


def test_compose_file() -> None:
    container = compose_tap()
    args = parsed([*image_arguments(), *container["command"]], "compose.yaml")
    assert container["read_only"] is True
    assert seconds(container["stop_grace_period"]) > args.drain_s + FINISH_S


def test_kubernetes_sidecar() -> None:
    container = sidecar()
    args = parsed([*image_arguments(), *container["args"]], "sidecar.yaml")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert [("0.0.0.0", ports["http"]), ("0.0.0.0", ports["admin"])] == [args.listen, args.admin]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert [(probe["path"], probe["port"]) for probe in probes] == [
        ("/healthz", "admin"),
        ("/healthz", "admin"),
        ("/readyz", "admin"),
    ]
    python, _, program = container["lifecycle"]["preStop"]["exec"]["command"]
    assert python == "python", "the image has neither a shell nor sleep"
    pause = int(program.removeprefix("import time; time.sleep(").removesuffix(")"))
    assert pod()["terminationGracePeriodSeconds"] > pause + args.drain_s + FINISH_S
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod()["volumes"]}


def test_systemd_unit_stops_the_supervisor_and_waits() -> None:
    settings, args = unit(), parsed(unit_arguments(), "kvtape-tap.service")
    assert settings["KillMode"] == "mixed"
    assert int(settings["TimeoutStopSec"]) > args.drain_s + FINISH_S
    assert (str(args.key_file), settings["LoadCredential"]) == ("%d/key", "key:/etc/kvtape/key")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """All of it but the program's path, which is where the service will be installed."""
    text = (DEPLOY / "systemd" / "kvtape-tap.service").read_text().replace("/opt/kvtape/bin/tap", "/bin/true")
    (tmp_path / "kvtape-tap.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "kvtape-tap.service")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    about_it = [line for line in result.stderr.splitlines() if "kvtape-tap" in line]
    assert (result.returncode, about_it) == (0, [])


def test_deploy_has_no_conflicting_flags(tmp_path: Path) -> None:
    """Beyond their names: the settings are read as the command reads them, files of the target machine aside."""
    here = {"%d/key": str(tmp_path / "key"), "/etc/kvtape/upstreams": str(DEPLOY / "systemd" / "upstreams")}
    given = {
        "compose.yaml": [*image_arguments(), *compose_tap()["command"]],
        "sidecar.yaml": [*image_arguments(), *sidecar()["args"]],
        "kvtape-tap.service": unit_arguments(),
    }
    for name, arguments in given.items():
        local = [
            re.sub("/var/lib/kvtape|%S/kvtape", str(tmp_path), here.get(argument, argument)) for argument in arguments
        ]
        config = read_settings(local)
        assert config.resume, f"{name}: a service that is started again goes on with its trace"
        assert config.rotate_s, f"{name}: a trace that never ends a file cannot be shipped or thinned"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_exist(page: Path) -> None:
    for target in re.findall(r"\]\(((?!https?:)[^)\s]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        results = (page.parent / name).resolve() if name else page
        assert results.exists(), f"{target} leads nowhere"
        assert not anchor or anchor in anchors(results), f"{target}: no such heading"


def anchors(page: Path) -> set[str]:
    """The names by which a page's headings are linked to, as hosting services make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_alerts_fire_on_their_faults_only() -> None:
    command = ["promtool", "test", "rules", "alerts_test.yaml"]
    done = subprocess.run(command, cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
