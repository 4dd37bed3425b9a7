"""Python, packages, torch, Graphviz."""

from __future__ import annotations

import re

from rlflow.backends.ray_runtime.doctor.environment import PYTHON, Environment, Ran
from rlflow.backends.ray_runtime.doctor.findings import Found, not_applicable, ok, problem, warning
from rlflow.backends.ray_runtime.doctor.versions import declared, is_within, release

IMPORT_TORCH = "import torch; print(torch.__version__)"
SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
_CANN_LIBRARY = re.compile(r"lib(hccl|ascendcl|acl_\w+|ge_runner|graph|opapi|msprofiler\w*)\w*\.so")
_RUN_EXTRAS = ("ray", "torch")


def check_python(machine: Environment) -> Found:
    found = machine.requirements()
    if found is None:
        return not_applicable("rlflow is not installed as a package, so it declares no range")
    if not is_within(machine.python, found[0]):
        return problem(f"Python {machine.python}", found[0], "make an environment with a Python of that range")
    return ok(f"Python {machine.python}", found[0])


def check_packages(machine: Environment) -> Found:
    found = machine.requirements()
    if found is None:
        return not_applicable("rlflow is not installed as a package, so it declares no ranges")
    wanted = declared(found[1], _RUN_EXTRAS)
    have = {name: machine.installed(name) for name in wanted}
    outside = {
        name: version for name, version in have.items() if version is None or not is_within(version, wanted[name])
    }
    if outside:
        shown = ", ".join(f"{name} {version or 'is not installed'}" for name, version in outside.items())
        ranges = ", ".join(f"{name} {wanted[name]}".strip() for name in outside)
        return problem(shown, ranges, 'pip install "rlflow-dsl[run]"')
    main = [f"{name} {have[name]}" for name in ("ray", "torch", "transformers") if have.get(name)]
    return ok(f"{len(have)} packages, with " + ", ".join(main), "the ranges that rlflow declares")


def check_torch(machine: Environment) -> Found:
    """Importing torch imports every installed device package, and one of those may break it."""
    if machine.installed("torch") is None:
        return not_applicable("torch is not installed")
    ran = machine.run(PYTHON, "-c", IMPORT_TORCH)
    assert ran is not None
    wanted = "`import torch` works"
    if ran.code == 0:
        off = machine.variables.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0"
        note = ", without device packages (TORCH_DEVICE_BACKEND_AUTOLOAD=0)" if off else ""
        return ok(f"torch {ran.output.strip().splitlines()[-1]} is imported{note}", wanted)
    if ran.code == -1:
        return problem("`import torch` does not end within 3 minutes", wanted, "look at the disk that it is read from")
    library = _CANN_LIBRARY.search(ran.output)
    if machine.installed("torch-npu") is not None and (library or "torch_npu" in ran.output):
        missing = f"`{library[0]}` is not found" if library else "torch_npu cannot be loaded"
        return problem(
            f"`import torch` fails: torch_npu is installed, and of CANN {missing}",
            wanted,
            f"on a host with NPUs: `{SET_ENV}`; on a host without: `pip uninstall torch-npu`, or "
            "`export TORCH_DEVICE_BACKEND_AUTOLOAD=0`, which keeps torch from loading it",
        )
    return problem(f"`import torch` fails: {_last_line(ran)}", wanted, "install the torch build of this machine again")


def check_torch_npu(machine: Environment) -> Found:
    """torch_npu uses C++ symbols of torch: both must be of one minor version, and torch a build for CPUs."""
    plugin, torch = machine.installed("torch-npu"), machine.installed("torch")
    has_npu = bool(machine.paths("/dev/davinci[0-9]*"))
    if plugin is None:
        if has_npu:
            return problem(
                "this host has NPUs, and torch_npu is not installed",
                "torch_npu of torch's minor version",
                f"pip install torch-npu=={_minor(torch)}.*" if torch else "install torch and torch-npu",
            )
        return not_applicable("no torch_npu, and no NPU")
    if torch is None:
        return problem(f"torch_npu {plugin} without torch", f"torch {_minor(plugin)}", f"pip install torch=={plugin}")
    pair = f"torch {torch} with torch_npu {plugin}"
    if release(torch)[:2] != release(plugin)[:2]:
        return problem(pair, "one minor version", f"pip install torch-npu=={_minor(torch)}.* (or another torch)")
    if "+cu" in torch or "+rocm" in torch:
        return problem(
            pair, "a CPU build of torch", f"install torch {release_text(torch)} from the index of its CPU builds"
        )
    if has_npu and machine.variables.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return problem(
            f"{pair}, but TORCH_DEVICE_BACKEND_AUTOLOAD=0", "torch loads torch_npu by itself", "unset the variable"
        )
    return ok(pair, "one minor version")


def check_graphviz(machine: Environment) -> Found:
    ran = machine.run("dot", "-V")
    if ran is None or ran.code != 0:
        return warning(
            "no `dot`",
            "Graphviz, for `rlflow graph -o FILE.svg`",
            "install Graphviz (`apt install graphviz`); without it a simpler layout is drawn",
        )
    return ok(ran.output.strip().removeprefix("dot - "), "Graphviz")


def release_text(version: str) -> str:
    return version.partition("+")[0]


def _minor(version: str | None) -> str:
    return ".".join(str(number) for number in (*release(version or ""), 0, 0)[:2])


def _last_line(ran: Ran) -> str:
    lines = [line.strip() for line in ran.output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"exit code {ran.code}"
