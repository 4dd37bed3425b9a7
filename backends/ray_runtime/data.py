"""Data sets at run time: rows of a file or of reasoning-gym, checked as a whole before the first step.

`DataSet.render` turns the prompts into token ids (`prompts.py` says how) and applies the source's `too_long`.
"""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.data_sources import (
    describe,
    gym_rows,
    jsonl_rows,
    parquet_rows,
    read_bytes,
    shorten,
)
from rlflow.backends.ray_runtime.prompts import (
    NoSystemRole,
    Prompt,
    apply_template,
    chat_of,
    decode,
    encode,
    lost_character,
    prompt_problem,
)
from rlflow.backends.ray_runtime.randomness import permutation
from rlflow.diagnostics.diagnostic import RunFailure, did_you_mean
from rlflow.ir.columns import Columns, NoColumn, column_names, column_value, find_columns, has_column
from rlflow.ir.ops import DataSource, GymData
from rlflow.ir.sources import TooLong

_DEFAULT_COLUMNS = Columns("prompt", None)


@dataclass(eq=False)
class DataSet:
    """All rows of one data source, in file order.

    `records[i]` is the row as it was, plus `prompt` (a string or a list of messages) and `answer`; where the source
    names no answer column, `answer` is the row's own column of that name, else None. `places[i]` says where the row
    is from. `fingerprint` is the sha256 (hex) of the content: equal content, equal fingerprint. `columns` are those
    that were read; `layout` in it says whose convention was recognised.
    """

    name: str
    records: list[dict[str, Any]]
    places: list[str]
    fingerprint: str
    shuffle: bool
    system: str | None = None
    too_long: TooLong = "error"
    columns: Columns = _DEFAULT_COLUMNS
    dropped: int = 0
    """Rows that `render` left out because their prompts are too long."""
    truncated: int = 0
    """Rows of whose prompts `render` kept only the last tokens."""
    prompt_ids: list[torch.Tensor] | None = field(default=None, repr=False)
    """int64 [tokens of the prompt], one per row; None before `render`"""
    prompt_texts: list[str] = field(default_factory=list, repr=False)
    _order: tuple[int, int, list[int]] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.records)

    def facts(self) -> dict[str, Any]:
        """What a run records about the data."""
        columns = {"prompt": self.columns.prompt, "answer": self.columns.answer, "layout": self.columns.layout}
        counts = {"rows": len(self), "dropped": self.dropped, "truncated": self.truncated}
        return {**counts, "sha256": self.fingerprint, "columns": columns}

    def render(self, tokenizer: Any, max_tokens: int | None) -> None:
        """Turn every prompt into token ids.

        `max_tokens`: what the model's context leaves for a prompt, None = no limit. Raises RunFailure: RLF5007 for a
        longer prompt (unless the source says to drop or truncate), RLF5002 for a prompt that the tokenizer or its
        template refuses, RLF5015 without a template or with one that has no place for a system message.
        """
        chats = [chat_of(record["prompt"], self.system) for record in self.records]
        if any(chat is not None for chat in chats) and getattr(tokenizer, "chat_template", None) is None:
            raise RunFailure(
                "RLF5015",
                f"data `{self.name}` has chat prompts, but the model's tokenizer has no chat template",
                help=("use an instruction-tuned model, or give prompts as plain strings without `system`",),
            )
        texts: list[str] = []
        ids: list[list[int]] = []
        for row, chat in enumerate(chats):
            try:
                text = self.records[row]["prompt"] if chat is None else apply_template(tokenizer, chat)
                row_ids = encode(tokenizer, text, raw=chat is None)
            except NoSystemRole as error:
                raise self._no_system_role(row, error) from None
            except Exception as error:  # templates raise their own kinds, tokenizers a bare Exception
                raise self._bad_row(row, "the tokenizer refuses the prompt", error) from None
            if not row_ids:
                raise self._bad_row(row, "the prompt has no tokens", None)
            lost = lost_character(tokenizer, text, row_ids)
            if lost is not None:
                raise self._bad_row(row, f"the tokenizer has no token for the character {lost!r} of the prompt", None)
            texts.append(text)
            ids.append(row_ids)
        if max_tokens is not None:
            texts, ids = self._fit(tokenizer, texts, ids, max_tokens)
        self.prompt_texts = texts
        self.prompt_ids = [torch.tensor(row_ids, dtype=torch.int64) for row_ids in ids]

    def take(self, cursor: int, count: int, seed: int) -> tuple[Batch, int]:
        """The `count` rows from `cursor` on of the endless stream, and the new cursor.

        Epoch e is the rows in the order `permutation(seed, e, rows)`, or in file order without shuffle. `uid` is the
        position in the stream, so it is unique over epochs.
        """
        positions = range(cursor, cursor + count)
        rows = [self._row_at(position, seed) for position in positions]
        return self._batch(rows, np.arange(cursor, cursor + count, dtype=np.int64)), cursor + count

    def all(self) -> Batch:
        """Every row once, in file order; `uid` is the row's number."""
        return self._batch(range(len(self)), np.arange(len(self), dtype=np.int64))

    def _row_at(self, position: int, seed: int) -> int:
        epoch, offset = divmod(position, len(self))
        if not self.shuffle:
            return offset
        if self._order is None or self._order[:2] != (seed, epoch):
            self._order = (seed, epoch, [int(row) for row in permutation(seed, epoch, len(self))])
        return self._order[2][offset]

    def _batch(self, rows: Sequence[int], uid: np.ndarray) -> Batch:
        assert self.prompt_ids is not None, f"data `{self.name}` is taken before it is rendered"
        return Batch(
            len(rows),
            {
                "uid": uid,
                "record": [self.records[row] for row in rows],
                "prompt_ids": Packed.from_rows([self.prompt_ids[row] for row in rows], torch.int64),
                "prompt_text": [self.prompt_texts[row] for row in rows],
            },
        )

    def _fit(
        self, tokenizer: Any, texts: list[str], ids: list[list[int]], most: int
    ) -> tuple[list[str], list[list[int]]]:
        """The prompts without those that are too long, or with only the last tokens of those."""
        fits = [len(row_ids) <= most for row_ids in ids]
        if all(fits):
            return texts, ids
        if self.too_long == "error" or most < 1 or (self.too_long == "drop" and not any(fits)):
            raise self._too_long([len(row_ids) for row_ids in ids], most)
        if self.too_long == "truncate":
            self.truncated = fits.count(False)
            cut = [row_ids[-most:] for row_ids in ids]
            return [t if fit else decode(tokenizer, i) for t, i, fit in zip(texts, cut, fits, strict=True)], cut
        kept = [row for row, fit in enumerate(fits) if fit]
        self.dropped = len(ids) - len(kept)
        self.records = [self.records[row] for row in kept]
        self.places = [self.places[row] for row in kept]
        return [texts[row] for row in kept], [ids[row] for row in kept]

    def _no_system_role(self, row: int, error: NoSystemRole) -> RunFailure:
        return RunFailure(
            "RLF5015",
            f"{self.places[row]}: the chat template of the model's tokenizer has no place for a system message",
            notes=(f"the template: {error}", f"prompt: {shorten(self.records[row]['prompt'])}"),
            help=(
                "put the text of the system message into the first message of the user",
                "use a model whose template has a system role",
            ),
        )

    def _bad_row(self, row: int, problem: str, error: Exception | None) -> RunFailure:
        notes = [f"prompt: {shorten(self.records[row]['prompt'])}"]
        if error is not None:
            notes.append(describe(error))
        trace = "" if error is None else "".join(traceback.format_exception(error))
        return RunFailure("RLF5002", f"{self.places[row]}: {problem}", notes=notes, trace=trace)

    def _too_long(self, lengths: list[int], most: int) -> RunFailure:
        rows = [row for row, length in enumerate(lengths) if length > most]
        return RunFailure(
            "RLF5007",
            f"{self.places[rows[0]]}: the prompt has {lengths[rows[0]]} tokens, but only {most} tokens "
            "of the model's context are left for a prompt",
            notes=(
                f"{len(rows)} of {len(lengths)} rows of data `{self.name}` are too long; "
                f"the longest has {max(lengths)} tokens (counted after the chat template)",
                f"prompt: {shorten(self.records[rows[0]]['prompt'])}",
            ),
            help=(
                "lower `max_new`, or use a model with a longer context",
                "`too_long = drop` leaves such rows out, `too_long = truncate` keeps the last tokens of their prompts",
            ),
        )


def open_data(source: DataSource, base_dir: Path, name: str) -> DataSet:
    """Load and check every row of `source`; paths are relative to `base_dir`.

    Raises RunFailure: RLF5002 for a bad row, RLF5015 for a source that cannot be used, RLF5012 for a missing package.
    """
    if isinstance(source, GymData):
        columns: Columns | None = Columns("question", "answer")
        shown = f'reasoning_gym("{source.task}")'
        rows: Iterable[tuple[str, dict[str, Any]]] = gym_rows(source, name)
        fingerprint = hashlib.sha256(json.dumps(rows, sort_keys=True, default=repr).encode()).hexdigest()
    else:
        shown = source.path
        columns = None if source.find else Columns(source.prompt, source.answer, source.layout)
        content = read_bytes(base_dir / source.path, shown, name)
        rows = jsonl_rows(content, shown) if source.format == "jsonl" else parquet_rows(content, shown)
        fingerprint = hashlib.sha256(content).hexdigest()
    records: list[dict[str, Any]] = []
    places: list[str] = []
    for place, row in rows:
        if columns is None:
            assert not isinstance(source, GymData)
            found = find_columns(row, source.prompt, source.answer, source.find)
            if isinstance(found, NoColumn):
                raise _no_column("RLF5015", place, found.problem, row, (found.help,))
            columns = found
        value = _check_prompt(_column(row, columns.prompt, "prompt", place, first=not records), columns.prompt, place)
        record = {"answer": None, **row, "prompt": value}
        if columns.answer is not None:
            record["answer"] = _column(row, columns.answer, "answer", place, first=not records)
        records.append(record)
        places.append(place)
    if not records or columns is None:
        raise RunFailure("RLF5015", f"data `{name}`: `{shown}` has no rows")
    return DataSet(name, records, places, fingerprint, source.shuffle, source.system, source.too_long, columns)


def _check_prompt(value: object, column: str, place: str) -> Prompt:
    """The prompt itself, message fields that are null taken out (Parquet fills them in). Raises RLF5002."""
    problem = prompt_problem(value)
    if problem is not None:
        raise RunFailure("RLF5002", f"{place}: the prompt in column `{column}` {problem}", notes=(shorten(value),))
    if isinstance(value, str):
        return value
    assert isinstance(value, list)
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def _column(row: dict[str, Any], column: str, role: str, place: str, *, first: bool) -> Any:
    """The value of a column; one that is missing from the first row is missing from the source (RLF5015), one that
    is missing later makes a bad row (RLF5002)."""
    if has_column(row, column):
        return column_value(row, column)
    near = did_you_mean(column, list(column_names(row)))
    raise _no_column(
        "RLF5015" if first else "RLF5002",
        place,
        f"has no column `{column}` for the {role}",
        row,
        () if near is None else (f"did you mean `{near}`?",),
    )


def _no_column(code: str, place: str, problem: str, row: dict[str, Any], help_: tuple[str, ...]) -> RunFailure:
    names = ", ".join(f"`{name}`" for name in column_names(row)) or "none"
    return RunFailure(code, f"{place}: the row {problem}", notes=(f"columns present: {names}",), help=help_)
