"""What lies in deploy/ fits the project: flags, files, ports, paths, variables and times are those of the server."""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from ostinato import __version__
from ostinato.cli.main import COMMANDS, Commands
from ostinato.config import EngineConfig
from ostinato.engine.process.async_engine import SAVE_PATIENCE
from ostinato.engine.process.engine_process import SECRET_VARIABLES
from ostinato.observe.request_record import ResponseCounts
from ostinato.serve.app import make_api
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.server import GRACE
from ostinato.serve.settings import ServeSettings
from tests.support.patience import PATIENCE

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
UNIT = DEPLOY / "ostinato.service"


def settings_of(words):
    """The settings of a command line, read as the program itself reads it."""
    assert words[0] == "serve"
    with Commands(COMMANDS)["serve"].make_context("serve", list(words[1:])) as context:
        given = {name: value for name, value in context.params.items() if value is not None}
    serving = {name: value for name, value in given.items() if name in ServeSettings.model_fields}
    serving.pop("api_key_file", None)  # of another machine
    return given, ServeSettings(**{**serving, "api_key": ("k",)})


def instructions():
    """(instruction, its words) of the Dockerfile."""
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", DOCKERFILE))
    found = []
    for line in text.splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            found.append((name, rest.strip()))
    return found


def listed(name):
    [text] = [rest for each, rest in instructions() if each == name]
    return yaml.safe_load(text)


def test_the_image_is_built_from_files_that_there_are_and_that_are_not_ignored():
    kept = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source
        for name, rest in instructions()
        if name == "COPY" and not rest.startswith("--from")
        for source in shlex.split(rest)[:-1]
    }
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for pattern in (needed["readme"], *needed["license-files"]):
        found = [path.relative_to(ROOT) for path in ROOT.glob(pattern)]
        assert found, pattern
        for path in found:
            assert any(path.is_relative_to(name) for name in copied), path
    assert '".[$EXTRAS]"' in DOCKERFILE
    extras = [set(each.split(",")) for each in re.findall(r"EXTRAS=([a-z0-9,]+)", DOCKERFILE)]
    assert set.union(*extras) <= needed["optional-dependencies"].keys()
    # A CPU needs no torch: it is added by an argument alone.
    assert "ARG TORCH_INDEX=\n" in DOCKERFILE
    assert next(rest for name, rest in instructions() if name == "RUN" and "torch" in rest).startswith("if [ -n")
    assert not {"torch", "gpu"} & set.union(*extras)
    assert re.search(r"(?m)^torch==", (ROOT / "constraints.txt").read_text())


def test_the_dockerfile_says_how_each_image_that_a_manifest_names_is_built():
    for name in ("compose.yaml", "kubernetes.yaml", "kuberay.yaml"):
        for image in re.findall(r"image: (\S+)", (DEPLOY / name).read_text()):
            [build] = re.findall(rf"#   docker build ((?:.*\\\n)?.*-t {re.escape(image)} \.)", DOCKERFILE)
            assert ("ray" in re.findall("EXTRAS=(.*?) ", build + "EXTRAS= ")[0]) == (name == "kuberay.yaml")


def test_the_image_serves_where_its_health_check_asks_and_as_nobody_special():
    _, settings = settings_of(listed("CMD"))
    assert [rest for name, rest in instructions() if name == "EXPOSE"] == [str(settings.port)]
    [asked] = re.findall(r"http://127\.0\.0\.1:(\d+)(/[a-z/]+)", DOCKERFILE)
    assert asked == (str(settings.port), "/health")
    assert is_public("/health")
    assert user_of_image() != "0"
    assert listed("ENTRYPOINT") == ["ostinato"]


def is_public(path):
    return make_api(Lifecycle(EngineConfig(model="demo"), ServeSettings()), ResponseCounts()).rules.is_public(path)


def user_of_image():
    [made] = re.findall(r"--uid (\d+)", DOCKERFILE)
    [user] = [rest for name, rest in instructions() if name == "USER"]
    assert user == f"{made}:{made}"
    return made


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_the_dockerfiles_linter_has_nothing_to_say():
    told = subprocess.run(["hadolint", str(DEPLOY / "Dockerfile")], capture_output=True, text=True, timeout=PATIENCE)
    assert told.returncode == 0, told.stdout


def test_compose_starts_the_image_with_its_port_its_model_and_its_keys():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    service = compose["services"]["ostinato"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    given, settings = settings_of(service["command"])
    assert [port.rpartition(":")[2] for port in service["ports"]] == [str(settings.port)]
    mounted = [each.removesuffix(":ro").rpartition(":")[2] for each in service["volumes"]]
    assert given["model"] in mounted
    assert [each.partition(":")[0] for each in service["volumes"]][1:] == list(compose["volumes"])
    [secret] = service["secrets"]
    assert str(given["api_key_file"]) == f"/run/secrets/{secret}"
    assert list(compose["secrets"]) == [secret]
    assert int(service["stop_grace_period"].removesuffix("s")) >= seconds_to_end(settings)


def seconds_to_end(settings):
    """Requests end, what the prefix cache has is written, and answers reach their clients; a process that is killed
    meanwhile loses what it was doing."""
    return settings.drain_timeout + SAVE_PATIENCE + GRACE + 10


def kubernetes():
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    [container] = pod["spec"]["containers"]
    return deployment, pod, container, service


def test_kubernetes_asks_each_probe_where_it_is_answered():
    _, pod, container, service = kubernetes()
    _, settings = settings_of(container["args"])
    [port] = container["ports"]
    assert port["containerPort"] == settings.port
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    wanted = {"startupProbe": "/health", "readinessProbe": "/health", "livenessProbe": "/health/live"}
    for probe, path in wanted.items():
        assert container[probe]["httpGet"] == {"path": path, "port": port["name"]}
        assert is_public(path)
    scraped = pod["metadata"]["annotations"]
    assert (scraped["prometheus.io/path"], scraped["prometheus.io/port"]) == ("/metrics", str(settings.port))
    assert is_public("/metrics")


def test_kubernetes_runs_the_image_with_its_key_and_lets_it_drain():
    deployment, pod, container, service = kubernetes()
    given, settings = settings_of(container["args"])
    assert container["image"] == f"ostinato:{__version__}"
    assert str(pod["spec"]["securityContext"]["runAsUser"]) == user_of_image()
    assert [each["name"] for each in container["env"]] == [SECRET_VARIABLES["api_key"]]
    [*_, wait] = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["spec"]["terminationGracePeriodSeconds"] >= int(wait) + seconds_to_end(settings)
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts.keys() == {each["name"] for each in pod["spec"]["volumes"]}
    assert given["model"].startswith(mounts["models"])
    labels = pod["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels


def unit():
    return dict(re.findall(r"(?m)^([A-Za-z]+)=(.*)$", UNIT.read_text()))


def test_the_unit_starts_reloads_and_stops_the_server_as_it_wants_to_be():
    program, *words = shlex.split(unit()["ExecStart"])
    assert program.endswith("/ostinato")
    _, settings = settings_of(words)
    assert int(unit()["TimeoutStopSec"]) >= seconds_to_end(settings)
    assert unit()["ExecReload"].endswith("-HUP $MAINPID")
    assert unit()["KillMode"] == "mixed"
    assert settings.on_stall == "exit"  # nobody asks /health/live


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_finds_nothing_wrong_with_the_unit_and_little_exposed(tmp_path):
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/ostinato/bin/ostinato", shutil.which("true")))
    told = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=PATIENCE)
    assert (told.returncode, told.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(copy)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert told.returncode == 0, told.stdout
