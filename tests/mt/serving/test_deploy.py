"""The files under deploy/: what reads them accepts them, and their commands exist."""

import ipaddress
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from gshard.cli import app
from gshard.mt.serving.settings import Settings

DEPLOY = Path(__file__).parents[3] / "deploy"
DOCKERFILE = DEPLOY.parent / "Dockerfile"
COMPOSE = (DEPLOY / "compose.yaml").read_text()
UNIT = (DEPLOY / "gshard.service").read_text()


def commands():
    yield re.search(r"^ExecStart=\S+ (.*)$", UNIT, re.MULTILINE)[1]
    yield " ".join(re.search(r"command: >-\n((?:      .*\n)+)", COMPOSE)[1].split())


@pytest.mark.parametrize("command", [*commands()])
def test_their_commands_exist(command):
    name, _, *rest = shlex.split(command)
    options = {word for word in rest if word.startswith("--")}
    known = {option for p in typer.main.get_command(app).commands[name].params for option in p.opts}
    assert (name, options <= known) == ("serve", True)


def test_systemd_accepts_the_unit(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("there is no systemd here")
    unit = tmp_path / "gshard.service"
    unit.write_text(re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", UNIT))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", unit],
        capture_output=True,
        text=True,
    )
    assert "gshard.service" not in done.stderr, done.stderr
    unit.write_text(unit.read_text().replace("Restart=on-failure", "Restrt=on-failure"))
    wrong = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", unit],
        capture_output=True,
        text=True,
    )
    assert "Restrt" in wrong.stderr  # it would have told


def test_hadolint_accepts_the_dockerfile(tmp_path):
    beside = Path(sys.executable).parent
    if not (hadolint := shutil.which("hadolint", path=f"{beside}:{os.environ['PATH']}")):
        pytest.skip("hadolint is a program of the extra dev, which some machines lack")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(DOCKERFILE.read_text().replace('["gshard"]', "gshard"))
    assert subprocess.run([hadolint, wrong], capture_output=True).returncode  # it would have told


def test_compose_is_yaml_with_a_service():
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load(COMPOSE)
    service = found["services"]["gshard"]
    assert set(service["secrets"]) <= set(found["secrets"])
    names = {volume.split(":")[0] for volume in service["volumes"] if volume[0] not in "$/."}
    assert names <= set(found["volumes"])
    assert (DEPLOY / service["build"]["context"] / "Dockerfile").is_file()
    assert set(service["build"]["args"]) <= set(
        re.findall(r"(?m)^ARG (\w+)", DOCKERFILE.read_text())
    )


def test_the_containers_user_is_the_images_and_can_do_nothing_else():
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load(COMPOSE)
    service = found["services"]["gshard"]
    image = DOCKERFILE.read_text()
    user = re.findall(r"(?m)^USER (.*)$", image)[-1]
    number = user.split(":")[0]
    assert int(number) > 0
    assert service["user"] == user
    assert f"useradd --uid {number} --home-dir /cache --create-home" in image  # its volume's owner
    assert "cache:/cache" in service["volumes"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert {"mem_limit", "cpus", "pids_limit", "ulimits"} <= set(service)
    # A digest can be given, to the image and through compose; without one a version is named.
    base = re.search(r"(?m)^ARG BASE=(\S+)\nFROM \$\{BASE\}$", image)[1]
    assert re.fullmatch(r"python:\d\.\d+-slim", base)
    assert service["build"]["args"]["BASE"] == f"${{BASE:-{base}}}"


def test_only_the_proxys_own_address_is_believed():
    yaml = pytest.importorskip("yaml")
    (subnet,) = yaml.safe_load(COMPOSE)["networks"]["front"]["ipam"]["config"]
    for command in commands():
        proxies = shlex.split(command)[shlex.split(command).index("--proxies") + 1]
        proxy = ipaddress.ip_address(proxies)  # one address, and no network
        assert proxy.is_loopback or proxy in ipaddress.ip_network(subnet["subnet"])
        Settings(proxies=proxies)


def test_the_keys_are_the_services_alone():
    unit = dict(re.findall(r"(?m)^(\w+)=(.*)$", UNIT))
    name, _, path = unit["LoadCredential"].partition(":")
    assert path.startswith("/etc/")
    assert f"--keys %d/{name} " in unit["ExecStart"]
    assert path not in unit["ExecStart"]
    assert unit["CapabilityBoundingSet"] == ""
    assert {"DynamicUser": "yes", "NoNewPrivileges": "yes"}.items() <= unit.items()
    assert {"MemoryMax", "TasksMax", "LimitNOFILE"} <= set(unit)


def test_systemd_finds_little_that_the_service_could_harm():
    if not shutil.which("systemd-analyze"):
        pytest.skip("there is no systemd here")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager"]
    done = subprocess.run([*command, DEPLOY / "gshard.service"], capture_output=True, text=True)
    if "unrecognized option" in done.stderr:
        pytest.skip("systemd is older than 250")
    assert done.returncode == 0, done.stdout[-300:]  # 20 is 2.0 of 10; it was 8.3
