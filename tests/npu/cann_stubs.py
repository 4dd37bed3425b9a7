"""Makes stand-ins for CANN's libraries, so that the published torch_npu wheel loads on a machine without them.

`python cann_stubs.py FOLDER` writes six shared libraries into FOLDER, which then belongs on LD_LIBRARY_PATH before
Python starts. What they must export is derived from the wheel that is installed beside this interpreter: its undefined
symbols, minus what torch and the system define. A function with a body in cann_stubs.c gets it, any other returns 0.

For tests only: nothing computes here, and operators give garbage.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("hccl", "ascendcl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
"""Libraries that the wheel is linked against; all six hold the same object."""
LOOKED_UP = """
    aclrtSetDeviceSatMode aclSetCompileopt aclrtGetSysParamOpt aclrtSetSysParamOpt aclrtCtxSetSysParamOpt
    aclrtSetOpExecuteTimeOut aclrtCreateEventWithFlag aclrtDestroyStreamForce aclrtHostRegister aclrtMallocAlign32
    aclrtQueryEventStatus aclrtSynchronizeStreamWithTimeout aclrtSynchronizeDevice aclrtSynchronizeDeviceWithTimeout
    aclGetCompileoptSize aclGetCompileopt aclrtMemsetAsync aclrtHostUnregister aclrtSetOpWaitTimeout
""".split()
"""Functions that the wheel looks up by name at run time; a missing one is reported as "Failed to find function X"."""


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    wheel, torch = _package("torch_npu"), _package("torch")
    users = [*(wheel / "lib" / name for name in ("libtorch_npu.so", "libtensorpipe.so", "libnpu_profiler.so"))]
    users += wheel.glob("_C*.so")
    wanted = set().union(*(_symbols(file, "--undefined-only") for file in users))
    there = set().union(*(_symbols(file, "--defined-only") for file in _definers(users, torch)))
    missing = {name for name in wanted - there if not name.startswith("Py") and not name.startswith("_Py")}
    odd = {name for name in missing if not re.fullmatch(r"(acl|Msprof|rt|Hccl)\w+", name)}
    # A symbol of another kind means that this torch is not the one that the wheel was built for.
    if odd:
        sys.exit(f"{len(odd)} symbols of the wheel are neither CANN's nor torch's: {', '.join(sorted(odd)[:5])}")
    bodies = (HERE / "cann_stubs.c").read_text("utf-8")
    rest = sorted(n for n in missing | set(LOOKED_UP) if not re.search(rf"^[\w *]+\b{n}\(", bodies, re.MULTILINE))
    source = folder / "stubs.c"
    source.write_text(bodies + "".join(f"int {name}(void) {{ return 0; }}\n" for name in rest), "utf-8")
    for name in NAMES:
        target = folder / f"lib{name}.so"
        command = ["gcc", "-shared", "-fPIC", "-O1", "-std=gnu11", "-o", target, source, f"-Wl,-soname,{target.name}"]
        subprocess.run(command, check=True)
    print(
        f"stubs of {len(missing)} linked and {len(LOOKED_UP)} looked-up functions in {folder}; bodies left out: {len(rest)}"
    )


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)  # finds it without importing it, which would need the libraries
    if spec is None or spec.origin is None:
        sys.exit(f"{name} is not installed beside {sys.executable}")
    return Path(spec.origin).parent


def _definers(users: list[Path], torch: Path) -> list[Path]:
    """Libraries that may define what the wheel needs: torch's, its own, and the system's."""
    listed = subprocess.run(["ldd", *users], capture_output=True, text=True, check=False).stdout
    system = {Path(path) for path in re.findall(r"(/\S*/(?:ld-linux|lib)\S*\.so\S*) \(0x", listed)}
    return [*sorted(system), *(torch / "lib").glob("*.so*"), *users]


def _symbols(file: Path, which: str) -> set[str]:
    listed = subprocess.run(["nm", "-D", which, file], capture_output=True, text=True, check=True).stdout
    # A weak undefined symbol (`w`) may stay undefined; versions (`memcpy@GLIBC_2.14`) are not part of the name.
    kinds = (line.split()[-2:] for line in listed.splitlines())
    return {name.partition("@")[0] for kind, name in kinds if kind not in "wv"}


if __name__ == "__main__":
    main()
