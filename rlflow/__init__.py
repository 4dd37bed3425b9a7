"""rlflow: a workflow language and compiler for reinforcement-learning post-training of language models.

`rlflow.compile(path)` gives a `Plan`, `rlflow.simulate(plan)` its `Schedule`, `rlflow.run(plan)` a `Run`, and
`rlflow.resume(folder)` goes on with one: see docs/python.md. Names are loaded on first use, so that importing the
package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlflow.api import Run, Schedule, check, compile, resume, run, simulate
    from rlflow.diagnostics import CompileError, Diagnostic, RunFailure
    from rlflow.driver import Checked as Program
    from rlflow.driver import Options
    from rlflow.plan import Plan
    from rlflow.reports import report

__version__ = "0.1.0"

_LAZY = {
    "CompileError": ("rlflow.diagnostics", "CompileError"),
    "Diagnostic": ("rlflow.diagnostics", "Diagnostic"),
    "Options": ("rlflow.driver", "Options"),
    "Plan": ("rlflow.plan", "Plan"),
    "Program": ("rlflow.driver", "Checked"),
    "Run": ("rlflow.api", "Run"),
    "RunFailure": ("rlflow.diagnostics", "RunFailure"),
    "Schedule": ("rlflow.api", "Schedule"),
    "check": ("rlflow.api", "check"),
    "compile": ("rlflow.api", "compile"),
    "report": ("rlflow.reports", "report"),
    "resume": ("rlflow.api", "resume"),
    "run": ("rlflow.api", "run"),
    "simulate": ("rlflow.api", "simulate"),
}
"""Name to where it is; a line here makes it a part of the Python interface."""

__all__ = [
    "CompileError",
    "Diagnostic",
    "Options",
    "Plan",
    "Program",
    "Run",
    "RunFailure",
    "Schedule",
    "__version__",
    "check",
    "compile",
    "report",
    "resume",
    "run",
    "simulate",
]

if not (Path(__file__).parent / "grammar" / "__init__.py").is_file():
    raise ImportError(
        "rlflow/grammar is not a folder: this copy of the sources lost its symbolic links. Install the wheel, or use "
        "a git clone or a tar archive, on a system that allows symbolic links."
    )


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'rlflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
