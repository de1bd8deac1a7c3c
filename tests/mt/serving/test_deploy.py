"""The files under deploy/: what reads them accepts them, and their commands exist."""

import ipaddress
import json
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


def linter(name):
    """A program of the extras dev and slow."""
    installed = Path(sys.executable).parent
    found = shutil.which(name, path=f"{installed}:{os.environ['PATH']}")
    return found or pytest.skip(f"{name} is not there: pip install 'gshard[dev,slow]'")


def test_hadolint_accepts_the_dockerfile(tmp_path):
    hadolint = linter("hadolint")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(DOCKERFILE.read_text().replace('["gshard"]', "gshard"))
    assert subprocess.run([hadolint, wrong], capture_output=True).returncode  # it would have told


@pytest.mark.slow
def test_kubernetes_schemas_accept_the_manifests(tmp_path):
    validate = [linter("kubernetes-validate"), "--strict", "--quiet"]
    good = DEPLOY / "kubernetes.yaml"
    done = subprocess.run([*validate, good], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "kubernetes.yaml"
    wrong.write_text(good.read_text().replace("replicas: 2", "replcas: 2"))
    assert subprocess.run([*validate, wrong], capture_output=True).returncode


def test_compose_lint_finds_only_what_is_intended(tmp_path):
    compose_lint = linter("compose-lint")

    def found(text):
        (tmp_path / "compose.yaml").write_text(text)
        command = [compose_lint, "check", "--format", "json", tmp_path / "compose.yaml"]
        done = subprocess.run(command, capture_output=True, text=True)
        return {each["rule_id"] for each in json.loads(done.stdout)["findings"]}

    # The port is public on purpose; the proxy's image is named by version, or by CADDY.
    assert found(COMPOSE) == {"CL-0005", "CL-0019"}
    assert "CL-0006" in found(COMPOSE.replace("cap_drop: [ALL]", "cap_dorp: [ALL]"))


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


def test_the_proxy_of_compose_is_the_one_believed_and_reaches_the_server():
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load(COMPOSE)["services"]
    proxy, command = services["proxy"], services["gshard"]["command"].split()
    address = proxy["networks"]["front"]["ipv4_address"]
    assert address == command[command.index("--proxies") + 1]
    port = command[command.index("--port") + 1]
    assert proxy["command"].endswith(f"--to gshard:{port}")
    inside = re.search(r"--from \S+:(\d+) ", proxy["command"])[1]
    assert proxy["ports"] == [f"${{PORT:-443}}:{inside}"]
    assert int(inside) > 1023  # a user that is not root may listen there
    assert int(proxy["user"].split(":")[0]) > 0
    assert proxy["cap_drop"] == ["ALL"]
    assert "ports" not in services["gshard"]


def test_kubernetes_runs_the_image_as_its_user_and_the_service_leads_to_it():
    yaml = pytest.importorskip("yaml")
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    assert (deployment["kind"], service["kind"]) == ("Deployment", "Service")
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    pod = template["spec"]
    (container,) = pod["containers"]
    (port,) = container["ports"]
    assert {p["targetPort"] for p in service["spec"]["ports"]} == {port["name"]}
    name, _, *rest = container["args"]
    given = dict(word.removeprefix("--").split("=") for word in rest)
    known = {o for p in typer.main.get_command(app).commands[name].params for o in p.opts}
    assert {f"--{option}" for option in given} <= known
    assert int(given["port"]) == port["containerPort"]
    user = re.findall(r"(?m)^USER (\d+):(\d+)$", DOCKERFILE.read_text())[-1]
    context = pod["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"]) == tuple(map(int, user))
    assert context["runAsNonRoot"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert given["keys"].startswith(mounts["keys"] + "/")
    probes = {
        container[f"{n}Probe"]["httpGet"]["path"] for n in ("startup", "readiness", "liveness")
    }
    assert probes == {"/ready", "/health"}
    assert pod["terminationGracePeriodSeconds"] > 60


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
