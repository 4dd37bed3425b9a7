"""Machines as the doctor sees them, recorded: what variables, files, programs and limits say there."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlflow.backends.ray_runtime.doctor.environment import Ran
from rlflow.backends.ray_runtime.doctor.python_checks import IMPORT_TORCH

GIB = 2**30
REQUIREMENTS = (
    "lark<2,>=1.3",
    'ray[default]<3,>=2.56; extra == "ray"',
    'torch>=2.9; extra == "torch"',
    'transformers<6,>=5.5; extra == "torch"',
    'pytest>=9; extra == "test"',
)
NPU_SMI_ROW = "| {number}     910B3               | {health:<13} | 92.4        46                0    / 0             |"
NPU_SMI = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.3.rc1                 Version: 25.3.rc1                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
{rows}
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
"""


def npu_smi(*health: str) -> str:
    """The table of `npu-smi info`: two lines for every NPU."""
    rows = []
    for number, word in enumerate(health):
        rows.append(NPU_SMI_ROW.format(number=number, health=word))
        rows.append(
            "| 0                         | 0000:C1:00.0  | 0           0    / 0          3432 / 65536         |"
        )
    return NPU_SMI.format(rows="\n".join(rows))


@dataclass(frozen=True)
class Recorded:
    """Fulfils the doctor's `Environment`. `programs`: by the first word, and python by what it is asked to run."""

    variables: Mapping[str, str] = field(default_factory=dict)
    python: str = "3.11.9"
    cpus: int = 192
    packages: Mapping[str, str] = field(default_factory=dict)
    declared: tuple[str, tuple[str, ...]] | None = (">=3.11", REQUIREMENTS)
    programs: Mapping[str, Ran] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    disks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    limits: Mapping[str, int | None] = field(default_factory=dict)

    def installed(self, package: str) -> str | None:
        return self.packages.get(package)

    def requirements(self) -> tuple[str, tuple[str, ...]] | None:
        return self.declared

    def run(self, *command: str, seconds: float = 0.0) -> Ran | None:
        return self.programs.get(command[2] if command[0] == "python" else command[0])

    def text(self, path: str) -> str | None:
        return self.files.get(path)

    def paths(self, pattern: str) -> list[str]:
        return sorted(path for path in self.files if fnmatch.fnmatch(path, pattern))

    def disk(self, path: str) -> tuple[int, int] | None:
        return self.disks.get(path)

    def limit(self, name: str) -> int | None:
        return self.limits[name]


LAPTOP = Recorded(
    cpus=8,
    packages={"lark": "1.3.1", "ray": "2.60.0", "torch": "2.13.0+cpu", "transformers": "5.23.0"},
    programs={IMPORT_TORCH: Ran(0, "2.13.0+cpu\n"), "dot": Ran(0, "dot - graphviz version 2.43.0 (0)\n")},
    files={"/proc/meminfo": f"MemTotal:  {16 * 2**20} kB\nMemFree: 1 kB\nMemAvailable:  {10 * 2**20} kB\n"},
    disks={"/dev/shm": (8 * GIB, 8 * GIB), "/tmp": (500 * GIB, 100 * GIB), ".": (500 * GIB, 100 * GIB)},
    limits={"nofile": 1048576, "memlock": 8 * 2**20},
)
NPU_HOST = replace(
    LAPTOP,
    cpus=192,
    variables={
        "ASCEND_HOME_PATH": "/usr/local/Ascend/ascend-toolkit/latest",
        "HCCL_CONNECT_TIMEOUT": "600",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False",
    },
    packages={**LAPTOP.packages, "torch-npu": "2.13.0"},
    programs={**LAPTOP.programs, "npu-smi": Ran(0, npu_smi(*["OK"] * 8))},
    files={
        "/proc/meminfo": f"MemTotal:  {1536 * 2**20} kB\nMemAvailable:  {1400 * 2**20} kB\n",
        "/usr/local/Ascend/driver/version.info": "Version=25.3.rc1\nascendhal_version=7.35.23\n",
        "/usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info": "package_name=Ascend-cann-toolkit\nversion=8.3.RC1\narch=aarch64\n",
        **{f"/dev/davinci{number}": "" for number in range(8)},
        "/dev/davinci_manager": "",
    },
    disks={**LAPTOP.disks, "/dev/shm": (768 * GIB, 768 * GIB)},
    limits={"nofile": 1048576, "memlock": None},
)


def changed(machine: Recorded, **fields: Any) -> Recorded:
    """With entries of the mappings replaced; a value of None takes the entry away."""
    new = {}
    for name, value in fields.items():
        if isinstance(value, dict) and name != "limits":
            merged = {**getattr(machine, name), **value}
            value = {key: item for key, item in merged.items() if item is not None}
        new[name] = value
    return replace(machine, **new)
