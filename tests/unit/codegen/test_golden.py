"""The generated texts as a whole, one golden per target. What is shipped unchanged is listed by name only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlflow import __version__


def shown(files: dict[str, bytes | Path]) -> str:
    """Every file that is generated, without what changes with the compiler: the plan, and the zip that holds it."""
    parts = []
    for name, content in files.items():
        if isinstance(content, Path) or name.endswith((".zip", "plan.json")):
            parts.append(f"=== {name} (not shown)\n")
        else:
            text = re.sub(r'job\.zip: "[A-Za-z0-9+/=]+"', 'job.zip: "ZIP"', content.decode())
            parts.append(f"=== {name}\n{text}")
    return "\n".join(parts).replace(__version__, "VERSION")


@pytest.mark.parametrize("target", ["ray-job", "kuberay", "slurm"])
@pytest.mark.parametrize("device", ["ascend_910b", "h100", None])
def test_launch_files(target: str, device: str | None, project: Any, emitted: Any, golden: Any) -> None:
    options: dict[str, str] = {"name": "async-grpo"}
    if device == "h100":
        options |= {"interface": "bond0", "run_dir": "/shared/runs/async-grpo"}
    if target == "kuberay":
        options |= {"ray_version": "2.60.0"}
    golden(shown(emitted(project(device), target, **options)))


def test_the_same_plan_gives_the_same_bytes(project: Any, emitted: Any) -> None:
    path = project()
    first, second = emitted(path, "kuberay"), emitted(path, "kuberay")
    assert first == second
    assert isinstance(first["job.zip"], bytes)
