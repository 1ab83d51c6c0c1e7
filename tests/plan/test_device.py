"""The catalogue of devices, and detection in a made-up file system."""

from __future__ import annotations

import os
import stat
from importlib import metadata
from pathlib import Path

import pytest

from ostinato.errors import ConfigError
from ostinato.plan.device import detect as device_module
from ostinato.plan.device import kernel_support
from ostinato.plan.device.detect import detect, find_device
from ostinato.plan.device.gpu_catalogue import CATALOGUE
from ostinato.plan.device.kernel_support import NativeFacts
from ostinato.plan.device.linux import core_limit, memory_limit
from ostinato.plan.device.measured_rates import cache_directory
from tests.support.folders import lock

MEMINFO = "MemFree: 1 kB\nMemTotal:       16777216 kB\nCached: 5 kB\n"
GIB = 2**30
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 16 GiB, no cgroup limits and no GPU."""
    write(tmp_path, "proc/meminfo", MEMINFO)
    write(tmp_path, "proc/cpuinfo", "processor : 0\nmodel name : Fast CPU 9000\n")
    write(tmp_path, "proc/self/cgroup", "0::/jobs/a\n")
    return tmp_path


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


@pytest.fixture
def torch_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module.metadata, "version", lambda name: "9.9.9" if name == "triton" else "2.13.0")


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def fake_nvidia_smi(monkeypatch: pytest.MonkeyPatch, directory: Path, answer: str) -> Path:
    """A program of that name that notes its arguments and prints `answer`."""
    program, noted = directory / "bin" / "nvidia-smi", directory / "arguments"
    write(directory, "bin/nvidia-smi", f'#!/bin/sh\necho "$@" > {noted}\necho "{answer}"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return noted


def test_the_catalogue_has_what_is_promised() -> None:
    promised = {"a100-80gb", "h100-80gb", "h200-141gb", "b200-192gb", "l4-24gb", "l40s-48gb", "rtx4090-24gb"}
    assert promised <= set(CATALOGUE)
    for name, spec in CATALOGUE.items():
        nominal = int(name.rsplit("-", 1)[1].removesuffix("gb"))
        assert 0.88 * nominal * 10**9 < spec.memory_bytes < 1.08 * nominal * 10**9
        assert (spec.name, spec.kind) == (name, "cuda")
        assert find_device(name) is spec


def test_an_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="h200-141gb") as error:
        find_device("h200")
    assert "cpu" in error.value.message


def test_this_machines_cpu_has_memory_and_cores() -> None:
    spec = find_device("cpu")
    assert spec.kind == "cpu"
    assert spec.memory_bytes > 2**20
    assert 1 <= spec.cores <= len(os.sched_getaffinity(0))


@pytest.mark.usefixtures("no_gpu")
def test_without_limits_a_cpu_has_all_its_memory_and_the_cores_of_the_process(root: Path) -> None:
    spec = detect("auto", root, {})
    assert (spec.name, spec.kind, spec.memory_bytes) == ("cpu", "cpu", 16 * GIB)
    assert spec.cores == len(os.sched_getaffinity(0))
    assert spec.source == "this machine (Fast CPU 9000)"


def test_native_kernels_are_looked_for_on_the_cpu_of_this_machine_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "detect_native", lambda where: NativeFacts("x86_64_v3", f"found below {where}"))
    assert detect("cpu", root, NO_GPU).native == NativeFacts("x86_64_v3", f"found below {root}")
    assert all(gpu.native.isa is None for gpu in CATALOGUE.values())


@pytest.mark.parametrize(
    ("files", "memory"),
    [
        ({"sys/fs/cgroup/jobs/a/memory.max": "max"}, 16 * GIB),
        ({"sys/fs/cgroup/jobs/a/memory.max": str(2 * GIB)}, 2 * GIB),
        ({"sys/fs/cgroup/jobs/memory.max": str(3 * GIB)}, 3 * GIB),
        ({"sys/fs/cgroup/memory.max": str(4 * GIB)}, 4 * GIB),
        (
            {
                "sys/fs/cgroup/jobs/a/memory.max": str(6 * GIB),
                "sys/fs/cgroup/jobs/memory.max": str(5 * GIB),
            },
            5 * GIB,
        ),
        ({"sys/fs/cgroup/jobs/a/memory.max": str(99 * GIB)}, 16 * GIB),
        (
            {
                "proc/self/cgroup": "4:memory:/box\n0::/\n",
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(7 * GIB),
            },
            7 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/box\n",
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "9223372036854771712",
            },
            16 * GIB,
        ),
    ],
)
def test_memory_is_the_smaller_of_ram_and_the_cgroups_limit(root: Path, files: dict, memory: int) -> None:
    for path, text in files.items():
        write(root, path, text + "\n")
    spec = detect("cpu", root, NO_GPU)
    assert spec.memory_bytes == memory
    assert ("cgroup" in spec.source) == (memory < 16 * GIB)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"sys/fs/cgroup/jobs/a/cpu.max": "max 100000"}, None),
        ({"sys/fs/cgroup/jobs/a/cpu.max": "150000 100000"}, 2),
        ({"sys/fs/cgroup/jobs/cpu.max": "50000 100000"}, 1),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/box\n",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/box\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
            },
            None,
        ),
    ],
)
def test_a_cpu_quota_is_worth_whole_cores(root: Path, files: dict, cores: int | None) -> None:
    for path, text in files.items():
        write(root, path, text + "\n")
    assert core_limit(root) == cores


def test_a_machine_without_cgroups_has_no_limits(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    assert core_limit(tmp_path) is None


@pytest.mark.usefixtures("torch_with_cuda")
def test_a_known_gpu_gets_its_rates_and_its_own_memory(root, monkeypatch) -> None:
    fake_nvidia_smi(monkeypatch, root, "NVIDIA H200, 140000, 9.0")
    spec = detect("auto", root, {})
    assert (spec.name, spec.kind, spec.memory_bytes) == ("h200-141gb", "cuda", 140000 * 2**20)
    assert spec.bandwidth == CATALOGUE["h200-141gb"].bandwidth
    assert detect("cuda", root, {}) == spec
    assert detect("cpu", root, {}).kind == "cpu"


@pytest.mark.usefixtures("torch_with_cuda")
def test_an_unknown_gpu_keeps_its_name(root, monkeypatch) -> None:
    fake_nvidia_smi(monkeypatch, root, "NVIDIA A100-SXM4-40GB, 40960, 8.0")
    spec = detect("auto", root, {})
    assert (spec.name, spec.kind, spec.memory_bytes) == ("NVIDIA A100-SXM4-40GB", "cuda", 40 * GIB)
    assert spec.peak_rates is None
    assert spec.capability == 80


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA B200", "b200-192gb"),
        ("NVIDIA L4", "l4-24gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
    ],
)
@pytest.mark.usefixtures("torch_with_cuda")
def test_products_are_found_in_the_catalogue(root, monkeypatch, product, name) -> None:
    fake_nvidia_smi(monkeypatch, root, f"{product}, 30000, 9.0")
    assert detect("cuda", root, {}).name == name


@pytest.mark.usefixtures("torch_with_cuda")
def test_the_first_visible_gpu_is_asked_for(root, monkeypatch) -> None:
    noted = fake_nvidia_smi(monkeypatch, root, "NVIDIA L4, 23034, 8.9")
    detect("cuda", root, {"CUDA_VISIBLE_DEVICES": "3,1"})
    assert "--id=3" in noted.read_text()


@pytest.mark.parametrize("hidden", ["", "-1"])
@pytest.mark.usefixtures("torch_with_cuda")
def test_a_hidden_gpu_is_not_used(root, monkeypatch, hidden: str) -> None:
    fake_nvidia_smi(monkeypatch, root, "NVIDIA L4, 23034, 8.9")
    assert detect("auto", root, {"CUDA_VISIBLE_DEVICES": hidden}).kind == "cpu"


@pytest.mark.usefixtures("no_gpu", "torch_with_cuda")
def test_without_nvidia_smi_the_driver_says_which_gpu_it_is(root) -> None:
    write(root, "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t NVIDIA L4\nIRQ: 9\n")
    spec = detect("auto", root, {})
    assert (spec.name, spec.memory_bytes) == ("l4-24gb", CATALOGUE["l4-24gb"].memory_bytes)
    assert "driver" in spec.source


@pytest.mark.usefixtures("no_gpu")
def test_cuda_without_a_gpu_is_refused(root) -> None:
    with pytest.raises(ConfigError, match="no NVIDIA GPU"):
        detect("cuda", root, {})


def test_a_gpu_that_torch_cannot_use_is_not_used_and_named(root, monkeypatch) -> None:
    fake_nvidia_smi(monkeypatch, root, "NVIDIA L4, 23034, 8.9")
    monkeypatch.setattr(device_module.metadata, "version", lambda _: "2.13.0+cpu")
    spec = detect("auto", root, {})
    assert spec.kind == "cpu"
    assert "l4-24gb is not used" in spec.source
    with pytest.raises(ConfigError, match="built for the CPU"):
        detect("cuda", root, {})


@pytest.mark.usefixtures("torch_with_cuda")
def test_a_gpu_too_old_for_triton_and_a_missing_triton_are_told(root, monkeypatch) -> None:
    fake_nvidia_smi(monkeypatch, root, "Tesla T4, 15360, 7.5")
    assert detect("cuda", root, {}).triton.reason.endswith("this GPU has 7.5")

    def version(name: str) -> str:
        if name == "triton":
            raise metadata.PackageNotFoundError(name)
        return "2.13.0"

    fake_nvidia_smi(monkeypatch, root, "NVIDIA L4, 23034, 8.9")
    monkeypatch.setattr(kernel_support, "missing_for_launcher", lambda environ: None)
    assert detect("cuda", root, {}).triton.reason == "Triton 9.9.9 is installed"
    monkeypatch.setattr(device_module.metadata, "version", version)
    assert not (facts := detect("cuda", root, {}).triton).is_usable
    assert "pip install triton" in facts.reason


@pytest.mark.usefixtures("torch_with_cuda")
def test_what_triton_needs_to_build_its_launcher_is_told_where_it_is_missing(root, monkeypatch) -> None:
    fake_nvidia_smi(monkeypatch, root, "NVIDIA L4, 23034, 8.9")
    (root / "without").mkdir()
    facts = detect("cuda", root, {"PATH": str(root / "without")}).triton
    assert not facts.is_usable
    assert facts.reason.endswith("there is no C compiler: apt install gcc, or set CC")
    monkeypatch.setattr(kernel_support.sysconfig, "get_paths", lambda: {"include": str(root)})
    assert detect("cuda", root, {"CC": "tcc"}).triton.reason.endswith("Python.h: apt install python3-dev")
    write(root, "Python.h", "")
    assert detect("cuda", root, {"CC": "tcc"}).triton.is_usable


def test_a_home_that_may_not_be_searched_and_no_home_hold_no_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with monkeypatch.context() as locked:
        lock(locked, tmp_path / "home")
        assert detect("cpu").rates == ()
    assert cache_directory({}) == tmp_path / "home" / ".cache" / "ostinato"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert cache_directory({}) == Path("/nonexistent/.cache/ostinato")
    assert cache_directory({"XDG_CACHE_HOME": "here"}) == Path("/nonexistent/.cache/ostinato")
    assert detect("cpu").rates == ()
