"""`check` starts fast: the command line loads heavy packages only for the verb that needs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = "examples/grpo_arithmetic.rlflow"
HEAVY = ("ray", "torch", "transformers", "networkx", "pydantic", "numpy", "scipy", "pyarrow", "lark", "rich", "jinja2")


def loaded_by(code: str) -> list[str]:
    """The heavy packages loaded after running code in a fresh interpreter."""
    report = f"import sys\n{code}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", report], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def check_then(report: str) -> str:
    """Code that checks an example in silence and goes on."""
    return (
        "import contextlib, io\nfrom rlflow.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    main(['check', {EXAMPLE!r}])\n{report}"
    )


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


def test_a_check_is_light() -> None:
    assert loaded_by(check_then("assert 'rlflow.passes.schedule' in sys.modules")) == []


def test_help_loads_no_compiler() -> None:
    code = (
        "import contextlib, io, sys\nfrom rlflow.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    main(['--help'])\n"
        "print(*[name for name in ('rlflow.driver', 'rlflow.ir', 'rlflow.grammar', 'rlflow.passes') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_values_of_a_check_are_made_cheaply() -> None:
    """Frozen dataclasses that every check loads come from rlflow.values: the standard ones take half a millisecond each."""
    report = (
        "import dataclasses\n"
        "found = {c for n, m in list(sys.modules.items()) if n.startswith('rlflow.') for c in vars(m).values()\n"
        "         if isinstance(c, type) and dataclasses.is_dataclass(c) and c.__module__.startswith('rlflow.')}\n"
        "frozen = [c for c in found if c.__dataclass_params__.frozen]\n"
        "assert len(frozen) > 100\n"
        "print(*sorted(f'{c.__module__}.{c.__name__}' for c in frozen if not c.__eq__.__code__.co_filename.endswith('values.py')))"
    )
    code = "import sys\n" + check_then(report)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], "use `from rlflow.values import dataclass`"


def test_visualizers_are_light_until_they_draw() -> None:
    """pydantic comes with the plan; networkx only when the fallback drawing is asked for."""
    names = "graph, summary, trace, curves, progress"
    assert loaded_by(f"from rlflow.backends.visualizers import {names}") == ["pydantic"]
