"""The files under deploy/: what reads them accepts them, and their commands exist."""

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
    assert (DEPLOY / service["build"] / "Dockerfile").is_file()
