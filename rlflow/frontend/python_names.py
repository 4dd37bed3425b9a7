"""The Python name that a declaration gives, such as `rewards:exact`, found without importing anything.

User code runs only in a run, so a module beside the .rlflow file is parsed, and one elsewhere is only looked for.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from rlflow.diagnostics import Label, did_you_mean
from rlflow.frontend.bind import Bound
from rlflow.frontend.constants import Reporter
from rlflow.frontend.data_files import Row, is_file
from rlflow.ir.columns import BATCH_NAMES, SAMPLE_NAMES, column_names, is_batched
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Found:
    """`file`: the module's file beside the .rlflow file. `function`: its definition, where there is just one."""

    file: Path
    function: ast.FunctionDef | ast.AsyncFunctionDef | None


def find_python(bound: Bound, argument: str, what: str, base_dir: Path | None, report: Reporter) -> Found | None:
    """What `module:name` means; None for a module that is not beside the flow. Raises Poison after reporting."""
    text: str = bound[argument]
    label = Label(bound.spans[argument])
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise report.error("RLF1007", f"`{text}` is not `module:{what}`", label)
    if base_dir is None:
        return None
    path = base_dir / (module.replace(".", "/") + ".py")
    if not is_file(path):
        try:
            found = importlib.util.find_spec(module.partition(".")[0]) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            raise report.error(
                "RLF1012", f"there is no `{path.name}` beside this file, nor an installed module `{module}`", label
            )
        return None
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise report.error("RLF1012", f"`{path.name}` is not valid Python", label, notes=(str(error),)) from None
    names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    names += [t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)]
    has_imports = any(isinstance(n, ast.Import | ast.ImportFrom | ast.If | ast.Try) for n in tree.body)
    if name not in names:
        guess = did_you_mean(name, names)
        if guess is None and has_imports:
            return Found(path, None)  # it may come from an import; the run will tell
        raise report.error(
            "RLF1001",
            f"`{path.name}` defines no `{name}`",
            label,
            help=(f"did you mean `{module}:{guess}`?",) if guess else (),
            notes=("it defines " + ", ".join(f"`{n}`" for n in names),) if names and not guess else (),
        )
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name]
    plain = names.count(name) == 1 and functions and not functions[0].decorator_list
    return Found(path, functions[0] if plain else None)


def check_parameters(
    function: ast.FunctionDef | ast.AsyncFunctionDef, rows: Sequence[Row | None], bound: Bound, report: Reporter
) -> None:
    """A parameter without a default must be one of the names that every reward is given, or a column of some data.

    `rows`: a row of every data set of the flow, None where its columns are not known; then nothing is said.
    """
    arguments = function.args
    if arguments.posonlyargs or not rows:
        return
    defaults = len(arguments.defaults)
    required = [a.arg for a in arguments.args[: len(arguments.args) - defaults]]
    required += [a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None]
    every = {a.arg for a in (*arguments.args, *arguments.kwonlyargs)}
    offered = set(BATCH_NAMES if is_batched(every) else SAMPLE_NAMES)
    columns: dict[str, None] = {}
    for row in rows:
        if row is None:
            return
        columns.update(dict.fromkeys(row))
    missing = next((name for name in required if name not in offered and name not in columns), None)
    if missing is None:
        return
    guess = did_you_mean(missing, [*columns, *sorted(offered)])
    nested = next((n for row in rows if row is not None for n in column_names(row) if n.endswith(f".{missing}")), None)
    help_ = f"did you mean `{guess}`?" if guess else "name a column, or give the parameter a default"
    if nested is not None:
        help_ = f"`{nested}` is nested: take `{nested.partition('.')[0]}` as the parameter"
    raise report.error(
        "RLF1008",
        f"`{bound['function']}` has a parameter `{missing}`, and the data has no such column",
        Label(bound.spans["function"]),
        notes=("columns of the data: " + ", ".join(f"`{name}`" for name in columns),),
        help=(help_,),
    )
