"""Every check on recorded machines: what is well, and every way in which it is not."""

from __future__ import annotations

from typing import Any

import pytest

from rlflow.backends.ray_runtime.doctor.environment import Ran
from rlflow.backends.ray_runtime.doctor.examine import CHECKS, examine
from rlflow.backends.ray_runtime.doctor.findings import Finding
from rlflow.backends.ray_runtime.doctor.python_checks import IMPORT_TORCH

NO_LIBRARY = "Traceback (most recent call last):\nImportError: libhccl.so: cannot open shared object file: No such file"
GIB = 2**30


@pytest.fixture
def found(recorded: Any) -> Any:
    """The finding of one check on a recorded machine with changes."""

    def one(check: str, machine: str = "NPU_HOST", plan: Any = None, **changes: Any) -> Finding:
        (finding,) = [
            f for f in examine(recorded.changed(getattr(recorded, machine), **changes), plan) if f.check == check
        ]
        assert bool(finding.fix) == (finding.status in ("warning", "problem")), "what is not well has a fix"
        return finding

    return one


def test_a_good_machine_has_no_problem(recorded: Any) -> None:
    for machine in (recorded.LAPTOP, recorded.NPU_HOST):
        findings = examine(machine)
        assert [f.check for f in findings] == list(CHECKS)
        assert {f.check: f.found for f in findings if f.status in ("warning", "problem")} == {}
    status = {f.check: f.status for f in examine(recorded.NPU_HOST)}
    assert [name for name, value in status.items() if value == "not applicable"] == [
        "visible-gpus",
        "cluster",
        "cluster-versions",
        "cluster-clocks",
        "cluster-shared-memory",
        "plan-resources",
    ]
    laptop = {f.check: f.status for f in examine(recorded.LAPTOP)}
    assert {laptop[name] for name in ("torch-npu", "cann", "npu-health", "hccl", "npu-allocator")} == {"not applicable"}


# --- Python ----------------------------------------------------------------------------------------------------------


def test_python_below_the_range(found: Any) -> None:
    finding = found("python", python="3.10.4")
    assert (finding.status, finding.found, finding.wanted) == ("problem", "Python 3.10.4", ">=3.11")
    assert found("python", declared=None).status == "not applicable"


@pytest.mark.parametrize(
    ("packages", "words"),
    [
        ({"ray": "2.9.3"}, "ray 2.9.3"),
        ({"ray": "3.0.0"}, "ray 3.0.0"),
        ({"ray": None}, "ray is not installed"),
        ({"torch": "2.8.0", "transformers": "4.57"}, "torch 2.8.0, transformers 4.57"),
    ],
)
def test_packages_outside_their_ranges(packages: dict[str, str | None], words: str, found: Any) -> None:
    finding = found("packages", packages=packages)
    assert finding.status == "problem"
    assert finding.found == words
    assert ">=" in finding.wanted
    assert "pytest" not in finding.found, "what tests need is no matter here"


def test_torch_npu_without_cann_breaks_torch(found: Any) -> None:
    finding = found("torch", programs={IMPORT_TORCH: Ran(1, NO_LIBRARY)})
    assert finding.status == "problem"
    assert "torch_npu is installed, and of CANN `libhccl.so` is not found" in finding.found
    assert "set_env.sh" in finding.fix
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in finding.fix
    alone = found("torch", programs={IMPORT_TORCH: Ran(1, NO_LIBRARY)}, packages={"torch-npu": None})
    assert "torch_npu" not in alone.found
    assert "libhccl.so: cannot open" in alone.found


def test_torch_that_does_not_load(found: Any) -> None:
    assert "does not end" in found("torch", programs={IMPORT_TORCH: Ran(-1, "")}).found
    assert "exit code -6" in found("torch", programs={IMPORT_TORCH: Ran(-6, "")}, packages={"torch-npu": None}).found
    assert found("torch", packages={"torch": None}).status == "not applicable"
    off = found("torch", variables={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert off.status == "ok"
    assert "without device packages" in off.found


@pytest.mark.parametrize(
    ("packages", "variables", "words"),
    [
        ({"torch-npu": "2.14.0"}, {}, "torch 2.13.0+cpu with torch_npu 2.14.0"),
        ({"torch": "2.13.0+cu128"}, {}, "torch 2.13.0+cu128 with torch_npu 2.13.0"),
        ({"torch-npu": None}, {}, "torch_npu is not installed"),
        ({"torch": None}, {}, "torch_npu 2.13.0 without torch"),
        ({}, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "TORCH_DEVICE_BACKEND_AUTOLOAD=0"),
    ],
)
def test_torch_npu_pairs(packages: Any, variables: Any, words: str, found: Any) -> None:
    finding = found("torch-npu", packages=packages, variables=variables)
    assert finding.status == "problem"
    assert words in finding.found
    assert found("torch-npu", packages={"torch-npu": "2.13.0.post2"}).status == "ok"


def test_graphviz(found: Any) -> None:
    assert found("graphviz").found == "graphviz version 2.43.0 (0)"
    assert found("graphviz", programs={"dot": None}).status == "warning"


# --- NPUs ------------------------------------------------------------------------------------------------------------


def test_cann(found: Any) -> None:
    assert found("cann").found == "CANN 8.3.RC1, driver 25.3.rc1"
    info = "/usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info"
    assert found("cann", files={info: None}).status == "problem"
    old = found("cann", files={info: "version=8.1.RC1\n"})
    assert (old.status, old.found) == ("warning", "CANN 8.1.RC1, driver 25.3.rc1")
    assert "ASCEND_HOME_PATH is not set" in found("cann", variables={"ASCEND_HOME_PATH": None}).found
    assert "no `/usr/local/Ascend/driver" in found("cann", files={"/usr/local/Ascend/driver/version.info": None}).found
    other = found(
        "cann",
        variables={"ASCEND_HOME_PATH": "/opt/cann"},
        files={info: None, "/opt/cann/version.cfg": "# version: 1.0\nrunning_version=[8.5:CANN-8.5.0]\n"},
    )
    assert other.found == "CANN 8.5.0, driver 25.3.rc1"


@pytest.mark.parametrize("health", ["Warning", "Alarm", "Critical", "UNKNOWN"])
def test_an_npu_that_is_not_well(health: str, found: Any, recorded: Any) -> None:
    finding = found("npu-health", programs={"npu-smi": Ran(0, recorded.npu_smi("OK", "OK", health, "OK"))})
    assert finding.status == "problem"
    assert finding.found == f"NPU 2 (910B3): {health}"


def test_npu_smi_itself(found: Any) -> None:
    assert found("npu-health").found == "8 NPUs are OK"
    assert found("npu-health", programs={"npu-smi": None}).found == "8 NPUs and no `npu-smi`"
    assert found("npu-health", "LAPTOP").status == "not applicable"
    assert found("npu-health", programs={"npu-smi": Ran(255, "dcmi module initialize failed. ret is -8005\n")}).status == (
        "problem"
    )  # fmt: skip
    assert found("npu-health", programs={"npu-smi": Ran(0, "")}).status == "warning"


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("0,1,2,3", "ok", "0,1,2,3"),
        ("1,0", "problem", "export ASCEND_RT_VISIBLE_DEVICES=0,1"),
        ("3,3", "problem", "export ASCEND_RT_VISIBLE_DEVICES=3"),
        ("6,7,8", "problem", "leave out 8"),
        ("a", "problem", "`a` is no number"),
        ("", "problem", "no NPU is visible"),
    ],
)
def test_visible_npus(text: str, status: str, words: str, found: Any) -> None:
    """A list that does not ascend makes torch_npu find nothing, and nothing may then take the CPU in silence."""
    finding = found("visible-npus", variables={"ASCEND_RT_VISIBLE_DEVICES": text})
    assert finding.status == status
    assert words in finding.found + finding.fix


@pytest.mark.parametrize("kind", ["ASCEND_RT", "CUDA"])
def test_ray_must_give_out_the_devices(kind: str, found: Any) -> None:
    check = "visible-npus" if kind == "ASCEND_RT" else "visible-gpus"
    variable = f"RAY_EXPERIMENTAL_NOSET_{kind}_VISIBLE_DEVICES"
    finding = found(check, variables={variable: "1"})
    assert finding.status == "problem"
    assert finding.fix.startswith(f"unset {variable}")
    assert found(check, variables={variable: "0"}).status != "problem"


def test_visible_gpus(found: Any) -> None:
    files = {"/dev/nvidia0": "", "/dev/nvidia1": "", "/dev/nvidiactl": ""}
    assert found("visible-gpus", "LAPTOP", files=files).found == "2 GPUs, all visible"
    for text, status in (("1,0", "ok"), ("GPU-8a2c", "ok"), ("2", "problem"), ("0,0", "problem"), ("", "problem")):
        finding = found("visible-gpus", "LAPTOP", files=files, variables={"CUDA_VISIBLE_DEVICES": text})
        assert finding.status == status, text


@pytest.mark.parametrize(
    ("variables", "status", "words"),
    [
        ({"HCCL_CONNECT_TIMEOUT": None}, "warning", "120 s to meet"),
        ({"HCCL_CONNECT_TIMEOUT": "60"}, "problem", "120 to 7200 s"),
        ({"HCCL_CONNECT_TIMEOUT": "ten"}, "problem", "HCCL_CONNECT_TIMEOUT=ten"),
        ({"HCCL_EXEC_TIMEOUT": "900"}, "problem", "collectives wait 900 s"),
        ({"HCCL_EXEC_TIMEOUT": "2000", "HCCL_EVENT_TIMEOUT": "1868"}, "problem", "HCCL_EVENT_TIMEOUT=2068"),
        ({"HCCL_EXEC_TIMEOUT": "0"}, "ok", ""),
        ({"HCCL_BUFFSIZE": "2048"}, "warning", "4096 MB of a device"),
        ({"HCCL_BUFFSIZE": "400"}, "ok", "buffers 400 MB"),
        ({}, "ok", "600 s to meet"),
    ],
)
def test_hccl(variables: dict[str, str | None], status: str, words: str, found: Any) -> None:
    finding = found("hccl", variables=variables)
    assert finding.status == status
    assert words in f"{finding.found} {finding.wanted} {finding.fix}"


def test_hccl_must_wait_as_long_as_the_plan_says(found: Any, plan_for: Any) -> None:
    plan = plan_for(16).model_copy(update={"collective_timeout_s": 4000})
    default = found("hccl", plan=plan)
    assert default.status == "problem"
    assert default.found == "collectives wait 1800 s (the default)"
    assert "HCCL_EXEC_TIMEOUT=4000 HCCL_EVENT_TIMEOUT=4068" in default.fix
    assert found("hccl", plan=plan, variables={"HCCL_EXEC_TIMEOUT": "4000"}).status == "ok"


def test_expandable_segments_against_swaps(found: Any, plan_for: Any) -> None:
    on = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    with_swaps, without = plan_for(4), plan_for(8)
    moves = [
        sum(i.kind in ("offload", "drop") for p in plan.programs for i in p.step) for plan in (with_swaps, without)
    ]
    assert moves[0] > 0
    assert moves[1] == 0
    assert found("npu-allocator", plan=with_swaps, variables=on).status == "problem"
    assert found("npu-allocator", plan=without, variables=on).status == "ok"
    assert found("npu-allocator", variables=on).status == "warning"
    clash = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"}
    assert "max_split_size_mb" in found("npu-allocator", plan=without, variables=clash).wanted
    assert found("npu-allocator", variables={"PYTORCH_NPU_ALLOC_CONF": None}).status == "ok"


# --- the host --------------------------------------------------------------------------------------------------------


def test_shared_memory(found: Any) -> None:
    assert found("shared-memory", "LAPTOP").wanted == "4.8 GiB, the size of Ray's object store"
    docker = found("shared-memory", "LAPTOP", disks={"/dev/shm": (64 * 2**20, 64 * 2**20)})
    assert (docker.status, docker.found) == ("problem", "/dev/shm has 64.0 MiB")
    assert "--shm-size=5g" in docker.fix
    assert found("shared-memory", "LAPTOP", disks={"/dev/shm": (2 * GIB, GIB)}).status == "warning"
    assert found("shared-memory", disks={"/dev/shm": (100 * GIB, GIB)}).wanted.startswith("186.3 GiB"), (
        "Ray takes no more"
    )
    assert found("shared-memory", disks={"/dev/shm": None}).status == "not applicable"


def test_memory(found: Any) -> None:
    assert found("memory", "LAPTOP").found == "10.0 GiB of 16.0 GiB are free"
    container = {"/sys/fs/cgroup/memory.max": f"{4 * GIB}\n", "/sys/fs/cgroup/memory.current": f"{3 * GIB}\n"}
    finding = found("memory", "LAPTOP", files=container)
    assert (finding.status, finding.found) == ("warning", "1.0 GiB of 4.0 GiB are free")
    assert found("memory", "LAPTOP", files={"/sys/fs/cgroup/memory.max": "max\n"}).status == "ok"
    assert found("memory", files={"/proc/meminfo": None}).status == "not applicable"


def test_disk(found: Any) -> None:
    full = found("disk", disks={"/tmp": (500 * GIB, 24 * GIB)})
    assert (full.status, full.found[:21]) == ("problem", "24.0 GiB of 500.0 GiB")
    assert found("disk", disks={".": (200 * GIB, 12 * GIB)}).status == "warning"
    moved = found("disk", variables={"RAY_TMPDIR": "/scratch"}, disks={"/tmp": (9, 0), "/scratch": (GIB**2, GIB**2)})
    assert moved.status == "ok", "what Ray does not use does not matter"


def test_limits(found: Any) -> None:
    assert found("limits", limits={"nofile": 1024, "memlock": None}).status == "problem"
    assert found("limits", limits={"nofile": 20_000, "memlock": None}).status == "warning"
    assert found("limits", limits={"nofile": None, "memlock": None}).found == "unlimited open files"
    locked = {"nofile": 65_536, "memlock": 64 * 1024}
    assert "64.0 KiB of locked memory" in found("limits", limits=locked).found
    assert found("limits", "LAPTOP", limits=locked).status == "ok", "nothing to pin without devices"


# --- the doctor itself -----------------------------------------------------------------------------------------------


def test_a_check_that_fails_is_a_result(found: Any) -> None:
    finding = found("limits", limits={})
    assert (finding.status, finding.found) == ("warning", "the check itself failed: KeyError: 'nofile'")
    broken = found("packages", declared=(">=3.11", ('ray=>2; extra == "ray"',)))
    assert broken.status == "warning"
    assert "the check itself failed: ValueError" in broken.found
