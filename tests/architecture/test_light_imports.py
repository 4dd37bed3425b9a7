"""`check` starts fast: the command line loads heavy packages only for the verb that needs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("ray", "torch", "transformers", "networkx", "pydantic", "numpy", "pyarrow")


def loaded_by(code: str) -> list[str]:
    """The heavy packages loaded after running code in a fresh interpreter."""
    report = f"import sys\n{code}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", report], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize("module", ["rlflow", "rlflow.cli", "rlflow.diagnostics", "rlflow.ir.ops", "rlflow.grammar"])
def test_module_is_light(module: str) -> None:
    assert loaded_by(f"import {module}") == []


def test_help_of_check_is_light() -> None:
    code = (
        "import contextlib, io\nfrom rlflow.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    main(['check', '--help'])"
    )
    assert loaded_by(code) == []


def test_visualizers_are_light_until_they_draw() -> None:
    """pydantic comes with the plan; networkx only when the fallback drawing is asked for."""
    names = "graph, summary, trace, curves, progress"
    assert loaded_by(f"from rlflow.backends.visualizers import {names}") == ["pydantic"]
