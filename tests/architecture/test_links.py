"""grammar, passes and backends are one package with rlflow, through committed links, in the tree and in the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKED = ("backends", "grammar", "passes")


@pytest.mark.parametrize("name", LINKED)
def test_link_points_at_its_twin(name: str) -> None:
    link = ROOT / "rlflow" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == (ROOT / name).resolve()
    assert (ROOT / name / "__init__.py").is_file()


@pytest.mark.parametrize("name", LINKED)
def test_bare_import_is_refused(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert f"import rlflow.{name}" in done.stderr


def modules_of_the_tree() -> set[str]:
    folders = [ROOT / "rlflow", *(ROOT / name for name in LINKED)]
    files = [file for folder in folders for file in folder.rglob("*.py") if "__pycache__" not in file.parts]
    relative = {file.relative_to(ROOT) for file in files}
    return {str(file if file.parts[0] == "rlflow" else Path("rlflow") / file) for file in relative}


def test_every_folder_with_modules_is_a_package() -> None:
    """A folder without __init__.py would be missing from the wheel without a word."""
    folders = {ROOT / Path(module).parent for module in modules_of_the_tree()}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_wheel_holds_the_modules_of_the_tree(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path / "copy"
    copy.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("rlflow", *LINKED):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=copy, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if name.endswith(".py")} == modules_of_the_tree()
    assert "rlflow/py.typed" in names
    templates = (ROOT / "backends" / "codegen" / "templates").rglob("*.j2")
    assert {f"rlflow/{file.relative_to(ROOT)}" for file in templates} <= names
    report = ROOT / "backends/visualizers/report"
    drawn = [*report.glob("assets/*"), *report.glob("templates/*")]
    assert len(drawn) > 10
    assert {f"rlflow/{file.relative_to(ROOT)}" for file in drawn} <= names
    grammars = {f"rlflow/grammar/{file.name}" for file in (ROOT / "grammar").glob("*.lark")}
    assert grammars <= names
