"""What replicas may take of a machine, the files for a cluster, and how many there should be: all without ray."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from ostinato.cli.main import main
from ostinato.config import EngineConfig
from ostinato.engine.process.async_engine import SAVE_PATIENCE
from ostinato.errors import CapacityError, ConfigError, Remedy
from ostinato.plan.device.detect import detect
from ostinato.plan.device.gpu_catalogue import CATALOGUE, DeviceSpec
from ostinato.serve.ray import cluster
from ostinato.serve.ray.layout import app_name, count_gpus, deployment_options, lay_out, replicas_for, wanted_replicas
from ostinato.serve.settings import ServeSettings
from ostinato.units import GiB

ROOT = Path(__file__).parents[2]
DEMO = EngineConfig(model="demo")


def machine(cores: int = 8, memory: int = 16 * GiB) -> DeviceSpec:
    return replace(detect("cpu"), cores=cores, memory_bytes=memory)


def test_replicas_of_a_machine_share_its_cores_and_memory() -> None:
    layout = lay_out(DEMO, 4, True, machine())
    assert layout.num_cpus == layout.plan.settings.threads == 2
    assert layout.engine_settings == {"model": "demo", "threads": 2, "memory_utilization": 0.25}
    assert layout.plan.memory.available == 4 * GiB
    half = lay_out(DEMO.with_settings(memory_utilization=0.5), 4, True, machine())
    assert half.config.memory_utilization == 0.125
    assert half.plan.memory.available == 2 * GiB


def test_one_replica_and_those_of_a_cluster_have_a_machine_each() -> None:
    for count, on_one_machine in ((1, True), (5, False)):
        layout = lay_out(DEMO, count, on_one_machine, machine(cores=2))
        assert layout.engine_settings == {"model": "demo", "threads": 2}
        assert layout.num_cpus == 2


def test_threads_that_were_given_stay() -> None:
    layout = lay_out(DEMO.with_settings(threads=1), 2, True, machine())
    assert (layout.num_cpus, layout.config.threads) == (1, 1)


def test_too_many_replicas_for_the_cores_are_refused_with_numbers_that_work() -> None:
    with pytest.raises(ConfigError, match="9 replicas need 9 cores, and this machine has 8 cores") as caught:
        lay_out(DEMO, 9, True, machine())
    assert caught.value.remedies == (Remedy("replicas", 8),)
    lay_out(DEMO, 8, True, machine())


def test_ranks_count_as_devices() -> None:
    config = EngineConfig(model=str(ROOT / "benchmarks/models/granite-dense-180m"), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="3 replicas of 2 ranks each need 6 GPUs, and this machine has 4") as caught:
        lay_out(config, 3, True, CATALOGUE["h100-80gb"], num_gpus=4)
    assert caught.value.remedies == (Remedy("replicas", 2), Remedy("tensor_parallel_size", 1))
    for remedy in caught.value.remedies:
        changed = {remedy.setting: remedy.value}
        replicas = changed.pop("replicas", 3)
        layout = lay_out(config.with_settings(**changed), replicas, True, CATALOGUE["h100-80gb"], num_gpus=4)
        assert layout.num_gpus == layout.config.tensor_parallel_size
        assert layout.config.memory_utilization is None, "each has GPUs of its own"


def test_memory_that_is_too_small_for_so_many_names_how_many_fit() -> None:
    config = DEMO.with_settings(cache_memory="3GiB")
    with pytest.raises(CapacityError, match="each of 8 replicas has a part of this machine's memory") as caught:
        lay_out(config, 8, True, machine())
    fewer = next(remedy.value for remedy in caught.value.remedies if remedy.setting == "replicas")
    lay_out(config, fewer, True, machine())
    with pytest.raises(CapacityError):
        lay_out(config, fewer + 1, True, machine())


def test_gpus_are_those_that_the_process_may_use(tmp_path: Path) -> None:
    for number in range(3):
        folder = tmp_path / f"proc/driver/nvidia/gpus/{number}"
        folder.mkdir(parents=True)
        (folder / "information").touch()
    assert count_gpus(tmp_path, {}) == 3
    assert count_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": "0,2"}) == 2
    assert count_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}) == 0


def test_settings_of_replicas_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_replicas is for several engines") as caught:
        ServeSettings(max_replicas=2)
    assert caught.value.remedies == (Remedy("replicas", 2),)
    with pytest.raises(ConfigError, match="max_replicas 2 is less than replicas 3") as caught:
        ServeSettings(replicas=3, max_replicas=2)
    assert Remedy("max_replicas", 3) in caught.value.remedies
    with pytest.raises(ConfigError, match="not as its client"):
        ServeSettings(ray_address="ray://head:10001")
    with pytest.raises(ConfigError, match="routing is for several engines"):
        ServeSettings(routing="two_choices")
    assert not ServeSettings().is_replicated
    assert ServeSettings(ray_address="auto").is_replicated
    assert ServeSettings(replicas=2, max_replicas=5).most_replicas == 5


def test_without_ray_the_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'ostinato\[ray\]'"):
        cluster.ReplicatedServer(DEMO, ServeSettings(replicas=2), "demo", lambda what, done, total: None)


def test_a_token_is_where_ray_looks_for_it(tmp_path: Path) -> None:
    assert not cluster.has_token(tmp_path, {})
    assert cluster.has_token(tmp_path, {"RAY_AUTH_TOKEN": "secret"})
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("secret")
    assert cluster.has_token(tmp_path, {})


def test_options_of_a_deployment_scale_only_where_there_may_be_more() -> None:
    layout = lay_out(DEMO, 2, True, machine())
    fixed = deployment_options(layout, ServeSettings(replicas=2))
    assert (fixed["num_replicas"], "autoscaling_config" in fixed) == (2, False)
    scaled = deployment_options(layout, ServeSettings(replicas=2, max_replicas=4, drain_timeout=60))
    assert "num_replicas" not in scaled
    assert (scaled["autoscaling_config"]["min_replicas"], scaled["autoscaling_config"]["max_replicas"]) == (2, 4)
    assert scaled["graceful_shutdown_timeout_s"] > 60


def test_a_replica_that_keeps_its_cache_in_files_has_time_to_write_them() -> None:
    settings = ServeSettings(replicas=2, drain_timeout=60)
    keeps = EngineConfig(**DEMO.model_dump(exclude_unset=True), cache_offload="1GiB")
    without, writes = (deployment_options(lay_out(each, 2, True, machine()), settings) for each in (DEMO, keeps))
    assert writes["graceful_shutdown_timeout_s"] - without["graceful_shutdown_timeout_s"] == SAVE_PATIENCE


@pytest.mark.parametrize(
    ("loads", "now", "wanted"),
    [([0.8, 0.8], 2, 2), ([1.6, 1.6], 2, 4), ([0.1, 0.1], 2, 1), ([2.0, 0.0], 2, 3), ([0.0], 1, 1), ([], 3, 3)],
)
def test_so_many_replicas_bring_the_load_to_what_it_should_be(loads: list[float], now: int, wanted: int) -> None:
    assert replicas_for(loads, now) == wanted


def test_a_replica_counts_by_its_requests_or_its_memory_whichever_is_more() -> None:
    context = SimpleNamespace(
        aggregated_metrics={"requests": {"a": 0.1, "b": 1.6}, "slots": {"a": 1.6, "b": 0.2}}, current_num_replicas=2
    )
    assert wanted_replicas(context) == (4, {})
    assert wanted_replicas(SimpleNamespace(aggregated_metrics=None, current_num_replicas=2)) == (2, {})


def test_names_of_applications_are_plain() -> None:
    assert app_name("demo") == "ostinato-demo"
    assert app_name("Org/Model-8B.gguf") == "ostinato-org-model-8b-gguf"
    assert app_name("/") == "ostinato-model"


def written(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["ray-config", *arguments])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_example_for_kuberay_is_what_the_command_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    example = (ROOT / "deploy/kuberay.yaml").read_text()
    model, keys = tmp_path / "model", tmp_path / "keys"
    model.symlink_to(ROOT / "src/ostinato/demo/checkpoint")
    keys.write_text("somebody secret\n")
    [line] = [line for line in example.replace("\\\n#", "").splitlines() if line.startswith("#   ostinato ray-config")]
    words = line.removeprefix("#   ostinato ray-config").split()
    out = written(capsys, *[{"/models/model": str(model), "/etc/ostinato/keys": str(keys)}.get(w, w) for w in words])
    out = out.replace(str(model), "/models/model").replace(str(keys), "/etc/ostinato/keys")
    service = yaml.safe_load(example)
    assert service["spec"]["serveConfigV2"] == out
    engine, ingress = yaml.safe_load(out)["applications"][0]["deployments"]
    [group] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    [container] = group["template"]["spec"]["containers"]
    cores = engine["ray_actor_options"]["num_cpus"] + ingress["ray_actor_options"]["num_cpus"]
    assert int(container["resources"]["requests"]["cpu"]) >= cores
    scaling = engine["autoscaling_config"]
    assert (group["minReplicas"], group["maxReplicas"]) == (scaling["min_replicas"], scaling["max_replicas"])
    drain = engine["graceful_shutdown_timeout_s"]
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] > drain


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (("--uds", "socket"), "uds"),
        (("--max-connections", "9"), "max_connections"),
        (("--ray-address", "auto"), "ray_address"),
        (("--api-key", "secret"), "api_key"),
        (("--on-stall", "exit"), "on_stall"),
        (("--port", "0"), "port 0"),
    ],
)
def test_what_a_cluster_does_not_have_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], name: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["ray-config", "demo", *flags])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"{name} does not apply on a cluster" in told
    assert "secret" not in told


def test_no_key_of_the_environment_stands_in_the_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_API_KEY", "secret")
    with pytest.raises(SystemExit):
        main(["ray-config", "demo"])
    told = capsys.readouterr()
    assert "secret" not in told.out + told.err
    assert "api_key does not apply" in told.err


def test_the_file_is_plain_data(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--speculative", "ngram:4", "--capture-sizes", "1,2,4", "--max-num-seqs", "4", "--threads", "1"]
    config = yaml.safe_load(written(capsys, "demo", "--replicas", "2", "--ingresses", "3", *flags))
    application = config["applications"][0]
    assert json.loads(json.dumps(application)) == application
    again = EngineConfig(**application["args"]["engine"])
    assert again.num_speculative_tokens == 4
    assert list(again.capture_sizes or ()) == [1, 2, 4]
    ServeSettings(**application["args"]["server"])
    assert application["deployments"][1]["num_replicas"] == 3


@pytest.mark.parametrize("form", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}"])
def test_an_address_where_nothing_answers_is_named_before_ray_would_wait_for_it(form: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        cluster.check_reachable(form.format(port=listener.getsockname()[1]))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody else gets it, and nobody listens
        address = form.format(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"no Ray can be reached at {address}: ") as error:
            cluster.check_reachable(address)
    assert list(error.value.remedies) == [Remedy("ray_address", None)]


def test_addresses_of_other_forms_are_left_to_ray_and_odd_ports_are_refused() -> None:
    cluster.check_reachable("auto")
    cluster.check_reachable("head-node")
    with pytest.raises(ConfigError, match="no Ray can be reached"):
        cluster.check_reachable("127.0.0.1:99999")
