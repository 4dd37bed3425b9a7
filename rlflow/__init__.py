"""rlflow: a workflow language and compiler for reinforcement-learning post-training of language models.

`rlflow.compile(path)` gives a `Plan`; `rlflow.run(plan)` runs it. Names are loaded on first use, so that importing
the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "Diagnostic": ("rlflow.diagnostics", "Diagnostic"),
    "Options": ("rlflow.driver", "Options"),
    "Plan": ("rlflow.plan", "Plan"),
    "check": ("rlflow.driver", "check"),
    "compile": ("rlflow.driver", "compile"),
    "run": ("rlflow.runs", "run_path"),
}

__all__ = ["Diagnostic", "Options", "Plan", "__version__", "check", "compile", "run"]

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
