"""Every code has a page that says what the compiler does: its wrong example gives that very code, its right one not."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlflow.diagnostics import CODES, CompileError, Diagnostic, Severity, SourceFile
from rlflow.diagnostics.codes import PAGES, WARNINGS, page_text
from rlflow.diagnostics.suppress import apply_suppressions
from rlflow.driver import context_of
from rlflow.frontend.lower import lower
from rlflow.grammar.parse import parse
from rlflow.passes.pipeline import run_pipeline

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "errors"
RUNTIME = (
    "RLF3007",
    "RLF4001",
    "RLF4002",
    "RLF4004",
    "RLF4005",
    "RLF4006",
    "RLF4007",
    "RLF4008",
    "RLF4009",
    "RLF4010",
    "RLF4011",
    "RLF4012",
    "RLF4020",
    *(code for code in CODES if code >= "RLF5"),
)
"""Codes that no .rlflow text gives by itself."""

COMPILED = sorted(set(CODES) - set(RUNTIME))
_FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """A fence of a page: ```rlflow bad --set a.b=1```"""

    text: str
    overrides: tuple[str, ...]


def examples(code: str, kind: str) -> list[Example]:
    found = []
    for fence in _FENCE.finditer(page_text(code)):
        words = shlex.split(fence["info"])
        if words[:2] == ["rlflow", kind]:
            assert all(word == "--set" for word in words[2::2])
            found.append(Example(fence["body"], tuple(words[3::2])))
    return found


def findings(code: str, example: Example, folder: Path) -> list[Diagnostic]:
    """What the compiler says about an example, with the files of the page beside it."""
    for fence in _FENCE.finditer(page_text(code)):
        words = fence["info"].split()
        if words[1:2] == ["file"]:
            (folder / words[2]).write_text(fence["body"], "utf-8")
    source = SourceFile("example.rlflow", example.text)
    try:
        lowered = lower(parse(source), folder, overrides=example.overrides)
        context = context_of(lowered)
        run_pipeline(lowered.flow, context)
    except CompileError as error:
        return apply_suppressions(source, error.diagnostics)
    return apply_suppressions(source, [*lowered.warnings, *context.diagnostics])


@pytest.mark.parametrize("code", COMPILED)
def test_wrong_example_gives_its_code_and_no_other(code: str, tmp_path: Path) -> None:
    (example,) = examples(code, "bad")
    found = findings(code, example, tmp_path)
    errors = {diagnostic.code for diagnostic in found if diagnostic.severity is Severity.ERROR}
    if code in WARNINGS:
        assert errors == set()
        assert {diagnostic.code for diagnostic in found} == {code}
    else:
        assert errors == {code}


@pytest.mark.parametrize("code", COMPILED)
def test_right_example_is_sound(code: str, tmp_path: Path) -> None:
    (example,) = examples(code, "good")
    assert findings(code, example, tmp_path) == []


@pytest.mark.parametrize("code", sorted(RUNTIME))
def test_runtime_page_names_its_test_or_says_why_there_is_none(code: str) -> None:
    page = page_text(code)
    assert not examples(code, "bad")
    assert not examples(code, "good")
    why = ["Why this is a warning"] if code in WARNINGS else []
    headings = ["What you see", "Likely causes", *why, "What to do", "Test"]
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == headings
    assert f"[{code}]" in page.partition("## What you see")[2].partition("## Likely causes")[0]
    said = page.partition("## Test\n\n")[2]
    pointers = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", said)
    assert pointers or said.startswith("None")
    for file, name in pointers:
        text = (ROOT / file).read_text("utf-8")
        _, found, rest = text.partition(f"def {name}(")
        assert found, f"{file} has no test {name}"
        assert code in re.split(r"^(?:@|def |class )", rest, maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("code", sorted(CODES))
def test_page_has_the_title_of_its_code(code: str) -> None:
    title, meaning, *_ = page_text(code).split("\n\n")
    assert title == f"# {code}: {CODES[code]}"
    assert not meaning.startswith(("#", "```"))
    assert ("## Why this is a warning" in page_text(code)) == (code in WARNINGS)


def test_pages_and_codes_agree() -> None:
    assert {file.name for file in FOLDER.iterdir()} == {f"{code}.md" for code in CODES} | {"README.md"}


def test_index_lists_every_page() -> None:
    index = (FOLDER / "README.md").read_text("utf-8")
    listed = re.findall(r"^\| \[(RLF\d{4})\]\((RLF\d{4})\.md\) \| ([a-z-]+)", index, re.MULTILINE)
    assert listed == [(code, code, name) for code, name in CODES.items()]


def test_links_between_pages_lead_somewhere() -> None:
    for page in FOLDER.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
            assert (FOLDER / target).is_file(), f"{page.name} links to {target}"


def test_warnings_of_the_table_are_the_warnings_of_the_sources() -> None:
    """`report.warning("RLF1013", ...)`, `context.warn(...)` and `severity=Severity.WARNING`: nothing else makes a warning."""
    found = set()
    for folder in ("rlflow", "grammar", "passes", "backends"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text("utf-8")
            found |= set(re.findall(r"\.warn(?:ing)?\(\s*\"(RLF\d{4})\"", text))
            for made in re.findall(r"Diagnostic\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*Severity\.WARNING", text):
                found |= set(re.findall(r"RLF\d{4}", made)[:1])
    assert found == WARNINGS


def test_link_to_the_pages() -> None:
    assert PAGES.is_symlink()
    assert PAGES.resolve() == FOLDER.resolve()


def test_wheel_holds_the_pages(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path / "copy"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(FOLDER, copy / "docs" / "errors")
    for name in ("rlflow", "backends", "grammar", "passes"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=copy, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"rlflow/diagnostics/pages/{code}.md" for code in CODES} <= names
