"""Columns of data rows: looked up with dots, and found by name where a flow names none.

The compiler settles what it can read (JSON Lines), a run the rest (Parquet), both with `find_columns`.
Candidates are those of four frameworks, in this order:

  verl           `prompt` and `reward_model.ground_truth`; wins over everything else in the row
  AReaL          `messages` and `answer`
  MindSpeed-RL   `prompt` and `labels`
  TRL            `prompt`, and `answer` or `solution` if there is one

Two candidates for one role are never guessed between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from rlflow.diagnostics.diagnostic import did_you_mean
from rlflow.values import dataclass

Role = Literal["prompt", "answer"]
Layout = Literal["verl", "areal", "mindspeed_rl", "trl"]

VERL_ANSWER = "reward_model.ground_truth"
PROMPTS = ("prompt", "messages")
ANSWERS = ("answer", "solution", "labels")
LIKELY_PROMPTS = ("question", "problem", "query", "instruction", "input")
"""Not taken, only proposed: nobody's convention."""

SAMPLE_NAMES = frozenset(
    (
        *("prompt", "response", "completion", "completions", "solution_str", "answer", "ground_truth", "record"),
        *("tokens", "completion_ids", "prompt_ids", "data_source", "extra_info"),
    )
)
"""What a reward function for one sample is given besides the columns of the data."""
BATCH_NAMES = frozenset(("prompt", "answer", "prompts", "completions", "prompt_ids", "completion_ids"))
"""What a reward function for many samples is given besides the columns of the data."""

_DEEPEST = 8


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that are read. `layout`: whose convention it is, None where the flow names all of them."""

    prompt: str
    answer: str | None
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class NoColumn:
    """A role that no column, or more than one, can play."""

    role: Role
    problem: str
    """For a message after the file's name: `has no column ...`."""
    help: str


def find_columns(row: Mapping[str, Any], prompt: str, answer: str | None, find: Collection[Role]) -> Columns | NoColumn:
    """The columns of `row` to read; `find` names the roles that are open, the others stay as they are given."""
    verl = has_column(row, VERL_ANSWER)
    if "prompt" in find:
        found = [name for name in PROMPTS if name in row and name != answer]
        if not found:
            return _no_prompt(row)
        if len(found) > 1 and not verl:
            return _unclear("prompt", found)
        prompt = found[0]
    if "answer" in find:
        found = [name for name in ANSWERS if name in row and name != prompt]
        if len(found) > 1 and not verl:
            return _unclear("answer", found)
        answer = VERL_ANSWER if verl else next(iter(found), None)
    return Columns(prompt, answer, _layout(prompt, answer) if find else None)


def is_batched(names: Collection[str]) -> bool:
    """Whether a reward function with these parameters takes lists over samples."""
    return "prompts" in names or ("completions" in names and "prompt" not in names)


def has_column(row: Mapping[str, Any], column: str) -> bool:
    """Whether the row has this column; dots reach into nested ones."""
    if column in row:
        return True
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def column_value(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column that `has_column` finds."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        value = value[part]
    return value


def column_names(row: Mapping[str, Any], prefix: str = "", depth: int = _DEEPEST) -> Iterator[str]:
    """Names of the columns, nested ones with dots."""
    for key, value in row.items():
        yield prefix + key
        if isinstance(value, Mapping) and depth:
            yield from column_names(value, f"{prefix}{key}.", depth - 1)


def _layout(prompt: str, answer: str | None) -> Layout:
    if answer == VERL_ANSWER:
        return "verl"
    if prompt == "messages":
        return "areal"
    return "mindspeed_rl" if answer == "labels" else "trl"


def _no_prompt(row: Mapping[str, Any]) -> NoColumn:
    likely = next((name for name in LIKELY_PROMPTS if name in row), None) or did_you_mean("prompt", row)
    return NoColumn(
        "prompt",
        "has no column `prompt` or `messages` for the prompt",
        f'name it: `prompt = "{likely or "column"}"`',
    )


def _unclear(role: Role, found: list[str]) -> NoColumn:
    names = " and ".join(f"`{name}`" for name in found)
    none = ", or `answer = none`" if role == "answer" else ""
    return NoColumn(
        role, f"has several columns that could be the {role}: {names}", f'name one: `{role} = "{found[0]}"`{none}'
    )
