"""Shell completion: click's own, as docs/editors.md says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs" / "editors.md"


def complete(**environment: str) -> str:
    code = "import sys; sys.argv[0] = 'rlflow'; from rlflow.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("shell", "mark"), [("bash", "complete -o nosort"), ("zsh", "#compdef rlflow"), ("fish", "complete --no-files")]
)
def test_script(shell: str, mark: str) -> None:
    if shell == "bash" and shutil.which("bash") is None:
        pytest.skip("click asks bash for its version")
    script = complete(_RLFLOW_COMPLETE=f"{shell}_source")
    assert mark in script
    assert "_RLFLOW_COMPLETE" in script
    assert re.search(rf"_RLFLOW_COMPLETE={shell}_source rlflow\b", DOCS.read_text("utf-8"))


def test_verbs_are_offered() -> None:
    offered = complete(_RLFLOW_COMPLETE="bash_complete", COMP_WORDS="rlflow ch", COMP_CWORD="1")
    assert offered.split() == ["plain,check"]
