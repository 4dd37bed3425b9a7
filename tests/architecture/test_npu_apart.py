"""torch_npu is for NPUs: nothing imports it before an NPU computes, and the ordinary tests never do."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def imports_of(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def test_it_is_imported_inside_functions_only() -> None:
    users = 0
    for file in (ROOT / "backends").rglob("*.py"):
        tree = ast.parse(file.read_text("utf-8"))
        inside = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
        for node in ast.walk(tree):
            if "torch_npu" in imports_of(node):
                users += 1
                assert id(node) in inside, f"{file}: an import of torch_npu when the module is loaded"
    assert users > 10


def test_its_tests_are_collected_by_make_test_npu_alone() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RLFLOW_NPU_STUBS"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/npu"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5, done.stdout  # nothing collected
    assert "no tests" in done.stdout
