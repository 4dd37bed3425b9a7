"""The pages for Ascend hosts, in two languages: their files compile, and they say the same things."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from rlflow.backends.ray_runtime.kernels import table
from rlflow.device_rules import PORT_RANGES, TIMEOUTS, worker_environment
from rlflow.diagnostics import CODES
from rlflow.driver import compile

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("ascend.md", "ascend.zh.md")


def text(page: str) -> str:
    return (DOCS / page).read_text("utf-8")


def fences(page: str, language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", text(page), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(body) for _, body in found]


@pytest.mark.parametrize("number", range(2))
def test_schedules_compile(number: int, tmp_path: Path) -> None:
    file = tmp_path / "sums.rlflow"
    file.write_text(fences(PAGES[0], "rlflow")[number], "utf-8")
    plan = compile(file)
    assert {pool.device for pool in plan.pools} == {"npu", "functions"}
    worker = worker_environment(plan, plan.pools[0], {})
    for page in PAGES:
        assert [name for name in (*worker, *PORT_RANGES, *TIMEOUTS) if f"`{name}`" not in text(page)] == []


def test_both_pages_have_the_same_code_and_names() -> None:
    english, chinese = PAGES
    for language in ("rlflow", "sh"):
        assert fences(english, language) == fences(chinese, language) != []
    names = [set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text(page), flags=re.DOTALL))) for page in PAGES]
    assert names[0] == names[1]
    assert [text(page).count("\n## ") for page in PAGES] == [6, 6]


@pytest.mark.parametrize("page", PAGES)
def test_names_are_those_of_the_sources(page: str) -> None:
    assert [name for name in table.__all__ if f"`{name}`" not in text(page)] == []
    assert set(re.findall(r"RLF\d{4}", text(page))) <= set(CODES)
