"""What a value is: rows of prompts or samples with named fields, a column beside them, or weights."""

from __future__ import annotations

from typing import Literal

from rlflow.values import dataclass

RowKind = Literal["prompt", "sample"]
Per = Literal["row", "token"]


@dataclass(frozen=True, slots=True)
class Field:
    """One named column: `dtype` is f32, i64, bool, str or record; one entry per row or per response token."""

    name: str
    dtype: str
    per: Per = "row"

    def __str__(self) -> str:
        return f"{self.name}:{self.dtype}" + ("/token" if self.per == "token" else "")


@dataclass(frozen=True, slots=True)
class RowsType:
    """Rows of one kind. `origin` is the stage that made the rows; columns align only when origins are equal.

    `rows` is their number per step (None when it depends on the data), `group` the samples per prompt.
    """

    row: RowKind
    origin: str
    rows: int | None
    group: int
    fields: tuple[Field, ...]

    def field(self, name: str) -> Field | None:
        return next((f for f in self.fields if f.name == name), None)

    @property
    def is_column(self) -> bool:
        return len(self.fields) == 1

    def __str__(self) -> str:
        count = "?" if self.rows is None else str(self.rows)
        shape = f"{self.row} {count}" + (f"/{self.group}" if self.group > 1 else "")
        return f"rows<{shape} of {self.origin}; " + ", ".join(map(str, self.fields)) + ">"


@dataclass(frozen=True, slots=True)
class WeightsType:
    """A new version of a model's weights."""

    model: str

    def __str__(self) -> str:
        return f"weights<{self.model}>"


PROMPT_FIELDS = (
    Field("uid", "i64"),
    Field("record", "record"),
    Field("prompt_text", "str"),
    Field("prompt_ids", "i64", "token"),
)
SAMPLE_FIELDS = (
    *PROMPT_FIELDS,
    Field("group", "i64"),
    Field("sample", "i64"),
    Field("text", "str"),
    Field("truncated", "bool"),
    Field("version", "i64"),
    Field("response_ids", "i64", "token"),
    Field("logprobs", "f32", "token"),
)
