"""Ascend NPUs: CANN and the driver, health, visible devices, HCCL, the allocator. And CUDA's visible devices."""

from __future__ import annotations

import re

from rlflow.backends.ray_runtime.doctor.environment import Environment
from rlflow.backends.ray_runtime.doctor.findings import Found, not_applicable, ok, problem, warning
from rlflow.backends.ray_runtime.doctor.python_checks import SET_ENV
from rlflow.backends.ray_runtime.doctor.versions import release
from rlflow.plan import COLLECTIVE_TIMEOUT_S, MoveObject, Plan

_ROOT = "/usr/local/Ascend"
CANN_FILES = (
    "{home}/version.cfg",
    "{home}/*-linux/ascend_toolkit_install.info",
    "{home}/ascend_toolkit_install.info",
    "{home}/../../version.cfg",
)
DRIVER_FILE = f"{_ROOT}/driver/version.info"
_IPC = ((8, 3), (25, 3))
"""Tensors are shared between processes from CANN 8.3.RC1 and driver 25.3.RC1 on."""
_CONNECT_S = (120, 7200)
"""HCCL's default and largest HCCL_CONNECT_TIMEOUT."""
_EXEC_DEFAULT_S = COLLECTIVE_TIMEOUT_S
_BUFFER_MB = 200
_LARGE_BUFFER_MB = 1024
_ROW = re.compile(r"^\|\s*(\d+)\s+(\S+)\s*\|\s*(\w+)\s*\|\s*[\d.-]+")
"""Of `npu-smi info`: number, name, health, power."""


def devices(machine: Environment) -> int:
    """NPUs that this host has; a container sees those that it was given."""
    return len([path for path in machine.paths("/dev/davinci[0-9]*") if re.fullmatch(r"/dev/davinci\d+", path)])


def check_cann(machine: Environment) -> Found:
    if not devices(machine) and machine.installed("torch-npu") is None:
        return not_applicable("no NPU, and no torch_npu")
    cann, driver = _cann(machine), _version(machine.text(DRIVER_FILE))
    wanted = "CANN and its driver, of the versions that torch_npu names"
    if cann is None:
        return problem("CANN is not found", wanted, f"install the CANN toolkit, then `{SET_ENV}`")
    if devices(machine) and driver is None:
        return warning(
            f"CANN {cann}, and no `{DRIVER_FILE}`", wanted, "mount /usr/local/Ascend/driver into the container"
        )
    shown = f"CANN {cann}" + (f", driver {driver}" if driver else "")
    if "ASCEND_HOME_PATH" not in machine.variables:
        return warning(f"{shown}, and ASCEND_HOME_PATH is not set", "CANN's environment", f"`{SET_ENV}`")
    if release(cann) < _IPC[0] or (driver is not None and release(driver) < _IPC[1]):
        return warning(
            shown, "CANN 8.3 and driver 25.3 for tensors shared between processes", "update CANN and the driver"
        )
    return ok(shown, wanted)


def check_npu_health(machine: Environment) -> Found:
    count = devices(machine)
    ran = machine.run("npu-smi", "info")
    if ran is None:
        if count:
            return warning(
                f"{count} NPUs and no `npu-smi`", "their health", "mount or install the driver's tools (`npu-smi`)"
            )
        return not_applicable("no NPU")
    if ran.code != 0:
        last = ran.output.strip().splitlines()[-1:] or [f"exit code {ran.code}"]
        return problem(f"`npu-smi info` fails: {last[0][:200]}", "every NPU is OK", "check the driver: `npu-smi info`")
    chips = [found for line in ran.output.splitlines() if (found := _ROW.match(line))]
    if not chips:
        return warning(
            "`npu-smi info` lists no NPU", "every NPU is OK", "check that the devices are given to this host"
        )
    ill = [
        f"{number} ({name}): {health}" for number, name, health in (chip.groups() for chip in chips) if health != "OK"
    ]
    if ill:
        return problem(
            "NPU " + ", ".join(ill),
            "every NPU is OK",
            "take the host out, or leave these out with ASCEND_RT_VISIBLE_DEVICES; `npu-smi info -t health` says more",
        )
    return ok(f"{len(chips)} NPUs are OK", "every NPU is OK")


def check_visible_npus(machine: Environment) -> Found:
    return _visible(machine, "ASCEND_RT_VISIBLE_DEVICES", devices(machine), "NPU", ascending=True)


def check_visible_gpus(machine: Environment) -> Found:
    count = len([path for path in machine.paths("/dev/nvidia[0-9]*") if re.fullmatch(r"/dev/nvidia\d+", path)])
    return _visible(machine, "CUDA_VISIBLE_DEVICES", count, "GPU", ascending=False)


def _visible(machine: Environment, variable: str, count: int, kind: str, ascending: bool) -> Found:
    noset = f"RAY_EXPERIMENTAL_NOSET_{variable}"
    if machine.variables.get(noset, "0").lower() not in ("", "0", "false"):
        return problem(
            f"{noset} is set",
            f"Ray sets {variable} in every worker",
            f"unset {noset}: with it all ranks of a host would use its first {kind}",
        )
    text = machine.variables.get(variable)
    if text is None:
        if not count:
            return not_applicable(f"no {kind}")
        return ok(f"{count} {kind}s, all visible", f"{variable} unset, or numbers of devices")
    words = [word.strip() for word in text.split(",") if word.strip()]
    wanted = f"numbers of devices{', ascending' if ascending else ''}, each once"
    if not ascending and words and not all(word.isdecimal() for word in words):
        return ok(f"{variable}={text}", wanted)  # CUDA takes UUIDs too
    wrong = [word for word in words if not word.isdecimal()]
    if wrong:
        return problem(f"{variable}={text}: `{wrong[0]}` is no number", wanted, f"export {variable}={_all(count)}")
    numbers = [int(word) for word in words]
    sorted_text = ",".join(str(number) for number in sorted(set(numbers)))
    if len(set(numbers)) != len(numbers) or (ascending and numbers != sorted(numbers)):
        reason = "torch_npu then finds no device, and the run would take the CPU" if ascending else "a device twice"
        return problem(f"{variable}={text}: {reason}", wanted, f"export {variable}={sorted_text}")
    beyond = [number for number in numbers if count and number >= count]
    if beyond:
        return problem(
            f"{variable}={text}, and this host has {count} {kind}s, numbered from 0",
            wanted,
            f"leave out {', '.join(map(str, beyond))}",
        )
    if not numbers:
        return (not_applicable if not count else _none_visible)(f"{variable} is empty: no {kind} is visible")
    return ok(f"{variable}={text}", wanted)


def _none_visible(found: str) -> Found:
    return problem(found, "the devices that the run may use", f"unset {found.partition(' ')[0]}")


def _all(count: int) -> str:
    return ",".join(map(str, range(max(count, 1))))


def check_hccl(machine: Environment, plan: Plan | None) -> Found:
    if not devices(machine) and not (plan and _uses_npus(plan)):
        return not_applicable("no NPU, and no plan for NPUs")
    numbers = {}
    for name in ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT", "HCCL_EVENT_TIMEOUT", "HCCL_BUFFSIZE"):
        text = machine.variables.get(name)
        if text is not None and not text.strip().isdecimal():
            return problem(f"{name}={text}", "a whole number", f"export {name} with a number, or unset it")
        numbers[name] = None if text is None else int(text)
    connect = numbers["HCCL_CONNECT_TIMEOUT"]
    execute, event = numbers["HCCL_EXEC_TIMEOUT"], numbers["HCCL_EVENT_TIMEOUT"]
    needed = plan.collective_timeout_s if plan else COLLECTIVE_TIMEOUT_S
    limit = _EXEC_DEFAULT_S if execute is None else execute
    if 0 < limit < needed:
        return problem(
            f"collectives wait {limit} s ({'the default' if execute is None else 'HCCL_EXEC_TIMEOUT'})",
            f"{needed} s, since ranks of the plan may be that far apart" if plan else f"{needed} s, the default",
            f"export HCCL_EXEC_TIMEOUT={needed} HCCL_EVENT_TIMEOUT={needed + 68} on all hosts",
        )
    if event and execute and event <= execute:
        return problem(
            f"HCCL_EVENT_TIMEOUT={event}, HCCL_EXEC_TIMEOUT={execute}",
            "the first above the second",
            f"export HCCL_EVENT_TIMEOUT={execute + 68}",
        )
    if connect is not None and not _CONNECT_S[0] <= connect <= _CONNECT_S[1]:
        return problem(
            f"HCCL_CONNECT_TIMEOUT={connect}",
            f"{_CONNECT_S[0]} to {_CONNECT_S[1]} s",
            "export HCCL_CONNECT_TIMEOUT=600",
        )
    buffer = numbers["HCCL_BUFFSIZE"]
    if buffer is not None and buffer > _LARGE_BUFFER_MB:
        return warning(
            f"HCCL_BUFFSIZE={buffer}: {2 * buffer} MB of a device for every group that it is in",
            f"at most {_LARGE_BUFFER_MB} MB; {_BUFFER_MB} is the default",
            f"export HCCL_BUFFSIZE={_BUFFER_MB}, or leave the plan less memory: `pool p = ... {{ memory = ... }}`",
        )
    if connect is None:
        return warning(
            f"HCCL_CONNECT_TIMEOUT is not set: ranks have {_CONNECT_S[0]} s to meet",
            "more than loading the models takes",
            "export HCCL_CONNECT_TIMEOUT=600 on all hosts (the files of `rlflow emit` do)",
        )
    return ok(f"ranks have {connect} s to meet, collectives wait {limit} s, buffers {buffer or _BUFFER_MB} MB", "")


def check_allocator(machine: Environment, plan: Plan | None) -> Found:
    """Expandable segments keep memory that a swap should give back; the NPU's allocator takes them alone."""
    text = machine.variables.get("PYTORCH_NPU_ALLOC_CONF", "")
    if not devices(machine) and not text and not (plan and _uses_npus(plan)):
        return not_applicable("no NPU, and no plan for NPUs")
    settings = dict(part.strip().partition(":")[::2] for part in text.split(",") if part.strip())
    expandable = settings.get("expandable_segments", "").lower() == "true"
    clash = sorted(set(settings) & {"max_split_size_mb", "garbage_collection_threshold"})
    if expandable and clash:
        return problem(
            f"PYTORCH_NPU_ALLOC_CONF={text}",
            f"expandable_segments without {' and '.join(clash)}",
            "take one of them out",
        )
    off = "export PYTORCH_NPU_ALLOC_CONF=expandable_segments:False"
    if expandable and plan is not None and swaps(plan):
        return problem(
            "expandable_segments:True, and the plan swaps", "False: sleeping weights would not give memory back", off
        )
    if expandable and plan is None:
        return warning("expandable_segments:True", "False for plans that swap", f"{off}, if yours does")
    return ok(text or "PYTORCH_NPU_ALLOC_CONF is not set", "")


def swaps(plan: Plan) -> bool:
    return any(isinstance(instruction, MoveObject) for program in plan.programs for instruction in program.step)


def _uses_npus(plan: Plan) -> bool:
    return any(pool.device == "npu" for pool in plan.pools)


def _cann(machine: Environment) -> str | None:
    home = machine.variables.get("ASCEND_HOME_PATH") or f"{_ROOT}/ascend-toolkit/latest"
    for pattern in CANN_FILES:
        for path in machine.paths(pattern.format(home=home)):
            found = _version(machine.text(path))
            if found is not None:
                return found
    return None


def _version(text: str | None) -> str | None:
    """Of `version=8.1.RC1`, `Version=25.2.0` or `[CANN-8.1.RC1]`."""
    found = re.search(r"^\s*version\s*=\s*([\w.]+)", text or "", re.IGNORECASE | re.MULTILINE)
    found = found or re.search(r"CANN-(\d[\w.]*)", text or "")
    return found[1] if found else None
