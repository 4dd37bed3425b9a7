"""Devices, hosts and model architectures that ship with rlflow, read from the TOML files beside this one.

The files carry the source of every number. A fact that is not known is left out there, and reading it is a KeyError:
nothing is made up.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _file(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text("utf-8"))


def device_names() -> tuple[str, ...]:
    """Every name a cluster may use for a device: `cpu`, the presets and their short names."""
    hardware = _file("hardware.toml")
    return ("cpu", *hardware["devices"], *hardware["aliases"])


def device(name: str) -> dict[str, Any]:
    """Facts of a device (SI units, in the key names). KeyError for an unknown name."""
    hardware = _file("hardware.toml")
    facts: dict[str, Any] = hardware["devices"][hardware["aliases"].get(name, name)]
    return facts


def torch_device(name: str) -> str:
    """The torch device type of a device name: cpu, npu or cuda. KeyError for an unknown name."""
    return "cpu" if name == "cpu" else str(device(name)["torch_device"])


def model_names() -> tuple[str, ...]:
    return tuple(_file("models.toml")["models"])


def model(name: str) -> dict[str, Any]:
    """Architecture of a model preset. KeyError for an unknown name."""
    facts: dict[str, Any] = _file("models.toml")["models"][name]
    return facts


def hosts() -> dict[str, dict[str, Any]]:
    """Host types by name."""
    found: dict[str, dict[str, Any]] = _file("hardware.toml")["nodes"]
    return found


def supernodes() -> dict[str, dict[str, Any]]:
    """Supernode types by name: so many hosts of one type."""
    found: dict[str, dict[str, Any]] = _file("hardware.toml")["supernodes"]
    return found


def shipped_names() -> tuple[str, ...]:
    """Names of the .rlflow files that ship with rlflow, for `import "rlflow:NAME"`."""
    return tuple(sorted(file.stem for file in Path(__file__).parent.glob("*.rlflow")))


def shipped_text(name: str) -> str:
    """The text of a .rlflow file that ships with rlflow. KeyError for an unknown name."""
    if name not in shipped_names():
        raise KeyError(name)
    return Path(__file__).with_name(f"{name}.rlflow").read_text("utf-8")
