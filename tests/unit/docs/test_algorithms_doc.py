"""docs/algorithms.md says what the files say: line counts, quoted lines, names of functions and of examples."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from rlflow import driver

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
ALGORITHMS = ROOT / "backends" / "ray_runtime" / "algorithms"
TEXT = (ROOT / "docs" / "algorithms.md").read_text("utf-8")

NAMES = sorted(path.name for path in EXAMPLES.glob("*.rlflow"))
ROWS = re.findall(r"^\| [^|]+ \| `(\w+\.rlflow)` \| (\d+) \| (\d+) \| [^|]+ \| (\d+) \|$", TEXT, re.MULTILINE)
SECTIONS = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
SAME_ALGORITHM = {"grpo_smollm2.rlflow", "grpo_lora.rlflow", "async_grpo.rlflow", "pangu_ultra_moe.rlflow"}
"""Examples without a row of their own: another one in the table has the same algorithm."""


def code_lines(text: str) -> list[str]:
    """The lines that are neither blank nor comments only, stripped."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def fenced(text: str) -> list[str]:
    return [block.strip("\n") for block in re.findall(r"^ *```rlflow\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)]


def declared(kind: str, text: str) -> list[str]:
    return re.findall(rf"^  {kind}\s+(\w+)\s*=", text, re.MULTILINE)


def schedule(text: str) -> str:
    """The schedule block of the document, for another flow: its name, its models and its rewards."""
    found = re.search(r"^flow (\w+)", text, re.MULTILINE)
    assert found is not None
    rewards = declared("reward", text)
    lines = [
        f"schedule {found[1]} on node {{",
        "  pool main = 8 devices",
        f"  place {', '.join(declared('model', text))} on main with dp = 8",
        *([f"  place {', '.join(rewards)} on cpu with workers = 8"] if rewards else []),
        "}",
        "",
        "cluster node {",
        "  host = 8 * ascend_910b { memory = 1 TiB }",
        "}",
    ]
    return "\n".join(lines) + "\n"


def test_every_example_is_in_the_table_and_every_listed_one_exists() -> None:
    assert sorted(name for name, *_ in ROWS) == [name for name in NAMES if name not in SAME_ALGORITHM]
    assert set(re.findall(r"\w+\.rlflow", TEXT)) == set(NAMES)


def test_every_example_has_a_section() -> None:
    described = {name for _, body in SECTIONS for name in re.findall(r"`examples/(\w+\.rlflow)`", body)}
    assert described == set(NAMES)


@pytest.mark.parametrize(("name", "lines", "scheduled"), [(name, int(a), int(b)) for name, a, b, _ in ROWS])
def test_line_counts(name: str, lines: int, scheduled: int) -> None:
    text = (EXAMPLES / name).read_text("utf-8")
    assert len(code_lines(text)) == lines
    assert len(code_lines(text + schedule(text))) == scheduled


@pytest.mark.parametrize("name", [name for name, *_ in ROWS])
def test_the_counted_schedule_places_the_example(name: str, tmp_path: Path) -> None:
    for entry in EXAMPLES.iterdir():
        if entry.suffix != ".rlflow":
            (tmp_path / entry.name).symlink_to(entry)
    text = (EXAMPLES / name).read_text("utf-8")
    (tmp_path / name).write_text(f"{text}\n{schedule(text)}", "utf-8")
    plan = driver.compile(tmp_path / name, driver.Options(cluster="node"))
    assert len(next(pool for pool in plan.pools if pool.name == "main").ranks) == 8


def test_the_schedule_in_the_document_is_the_counted_one() -> None:
    shown = next(block for block in fenced(TEXT) if "schedule" in block)
    counted = schedule((EXAMPLES / "grpo_arithmetic.rlflow").read_text("utf-8"))
    assert [line.split() for line in code_lines(shown)] == [line.split() for line in code_lines(counted)]


@pytest.mark.parametrize(("title", "body"), [s for s in SECTIONS if s[0] != "Lines"], ids=lambda text: text[:12])
def test_quoted_lines_are_in_the_file(title: str, body: str) -> None:
    """A block stands in the section's first example, line after line."""
    found = re.search(r"`examples/(\w+\.rlflow)`", body)
    assert found is not None, title
    example = (EXAMPLES / found[1]).read_text("utf-8")
    assert fenced(body), title
    for block in fenced(body):
        assert f"\n{block}\n" in example


@pytest.mark.parametrize("file", sorted(set(re.findall(r"`algorithms/([a-z_]+)\.py", TEXT))))
def test_named_functions_exist(file: str) -> None:
    tree = ast.parse((ALGORITHMS / f"{file}.py").read_text("utf-8"))
    there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert set(re.findall(rf"`algorithms/{file}\.py:(\w+)`", TEXT)) <= there
