"""The file that a `data` declaration names: whether it is there, and which of its columns are read.

Of a JSON Lines file the first row is read. Of a Parquet file the header is, where pyarrow is installed; because a plan
must not depend on that, it is only checked, and columns that the flow does not name are found by the run.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlflow.diagnostics import Label, did_you_mean
from rlflow.frontend.bind import Bound
from rlflow.frontend.constants import Reporter
from rlflow.ir import ops
from rlflow.ir.columns import Columns, NoColumn, Role, column_names, find_columns, has_column

Row = Mapping[str, Any]
GYM_ROW: Row = {"question": "", "answer": "", "metadata": {}}
"""What every task of reasoning-gym has; `question` is the prompt."""


def file_data(word: str, bound: Bound, base_dir: Path | None, report: Reporter) -> tuple[ops.FileData, Row | None]:
    """The source of `jsonl(...)` or `parquet(...)`, and a row with the file's columns where they can be known.

    Raises Poison after reporting.
    """
    roles: tuple[Role, ...] = ("prompt", "answer")
    find = tuple(role for role in roles if role not in bound.spans)
    columns = Columns(bound["prompt"], bound["answer"])
    row = None
    if base_dir is not None:
        path = base_dir / bound["path"]
        _check_is_there(path, bound, report)
        row = _first_row(path) if word == "jsonl" else _parquet_header(path)
    if row is not None:
        found = find_columns(row, columns.prompt, columns.answer, find)
        if isinstance(found, NoColumn):
            raise _no_column(bound, found.role, found.problem, row, report, found.help)
        _check_columns(found, row, bound, report)
        if word == "jsonl":
            columns, find = found, ()
    source = ops.FileData(
        path=bound["path"],
        format="jsonl" if word == "jsonl" else "parquet",
        prompt=columns.prompt,
        answer=columns.answer,
        find=find,
        layout=columns.layout,
        shuffle=bound["shuffle"],
        system=bound["system"],
        too_long=bound["too_long"],
        prompt_tokens=bound["prompt_tokens"],
    )
    return source, row


def is_file(path: Path) -> bool:
    """False as well for a name that the system cannot have, such as one that is too long."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _check_is_there(path: Path, bound: Bound, report: Reporter) -> None:
    if is_file(path):
        return
    text: str = bound["path"]
    guess = did_you_mean(path.name, _names_in(path.parent)) if Path(text).name else None
    raise report.error(
        "RLF1012",
        f"there is no file `{text}` beside this one",
        Label(bound.spans["path"]),
        help=(f"did you mean `{Path(text).with_name(guess)}`?",) if guess else (),
    )


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except (OSError, ValueError):
        return []


def _first_row(path: Path) -> Row | None:
    """The first row of a JSON Lines file; None for one that does not parse, which is left to the run."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            row = json.loads(next((line for line in lines if line.strip()), ""))
    except (ValueError, OSError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _parquet_header(path: Path) -> Row | None:
    """The columns of a Parquet file, nested ones as nested mappings; None where it cannot be read here."""
    if importlib.util.find_spec("pyarrow") is None:
        return None
    try:
        schema = importlib.import_module("pyarrow.parquet").read_schema(path)
    except (ImportError, ValueError, OSError):  # pyarrow's own errors are of these kinds
        return None
    return {field.name: _nested(field.type) for field in schema}


def _nested(kind: Any) -> Any:
    fields = [kind.field(index) for index in range(kind.num_fields)]
    if not fields or str(kind).partition("<")[0] != "struct":
        return None
    return {field.name: _nested(field.type) for field in fields}


def _check_columns(columns: Columns, row: Row, bound: Bound, report: Reporter) -> None:
    roles: tuple[tuple[Role, str | None], ...] = (("prompt", columns.prompt), ("answer", columns.answer))
    for role, column in roles:
        if column is None or has_column(row, column):
            continue
        guess = did_you_mean(column, list(column_names(row)))
        help_ = f"did you mean `{guess}`?" if guess else f'name it: `{role} = "column"`'
        raise _no_column(bound, role, f"has no column `{column}` for the {role}", row, report, help_)


def _no_column(bound: Bound, role: Role, problem: str, row: Row, report: Reporter, help_: str) -> Exception:
    return report.error(
        "RLF1008",
        f"`{bound['path']}` {problem}",
        Label(bound.spans.get(role, bound.spans["path"])),
        notes=("its columns are " + ", ".join(f"`{name}`" for name in column_names(row)),),
        help=(help_,),
    )
