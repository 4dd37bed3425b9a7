"""Data sets at run time: rows of a file or of reasoning-gym, checked as a whole before the first step.

What a model sees of a prompt (`DataSet.render`):
  * a list of messages goes through the tokenizer's chat template with the generation prompt added. The template
    writes every special token itself, so the tokenizer adds none and a BOS is never doubled;
  * a string goes through the template too when the source has a `system` message: [system, user];
  * any other string is encoded as it stands, with what the tokenizer adds by default (a BOS for many models). A BOS
    that the text already spells out is not doubled, and an end token that the tokenizer adds is taken off;
  * `system` is also put before a message list, unless the list brings its own system message.
"""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Iterable, Iterator, Sequence
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
from rlflow.backends.ray_runtime.randomness import permutation
from rlflow.diagnostics.diagnostic import RunFailure, did_you_mean
from rlflow.ir.ops import DataSource, GymData

Prompt = str | list[dict[str, Any]]


@dataclass(eq=False)
class DataSet:
    """All rows of one data source, in file order.

    `records[i]` is the row as it was, plus `prompt` (a string or a list of messages) and `answer`; where the source
    names no answer column, `answer` is the row's own column of that name, else None. `places[i]` says where the row
    is from. `fingerprint` is the sha256 (hex) of the content: equal content, equal fingerprint.
    """

    name: str
    records: list[dict[str, Any]]
    places: list[str]
    fingerprint: str
    shuffle: bool
    system: str | None = None
    prompt_ids: list[torch.Tensor] | None = field(default=None, repr=False)
    """int64 [tokens of the prompt], one per row; None before `render`"""
    prompt_texts: list[str] = field(default_factory=list, repr=False)
    _order: tuple[int, int, list[int]] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.records)

    def render(self, tokenizer: Any, max_tokens: int | None) -> None:
        """Turn every prompt into token ids; see the module's text.

        `max_tokens`: what the model's context leaves for a prompt, None = no limit. Raises RunFailure: RLF5007 for a
        longer prompt, RLF5002 for a prompt that the tokenizer or its template refuses, RLF5015 without a template.
        """
        chats = [self._chat(record["prompt"]) for record in self.records]
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
                text = self.records[row]["prompt"] if chat is None else _apply_template(tokenizer, chat)
                row_ids = _encode(tokenizer, text, raw=chat is None)
            except Exception as error:  # templates raise their own kinds, tokenizers a bare Exception
                raise self._bad_row(row, "the tokenizer refuses the prompt", error) from None
            if not row_ids:
                raise self._bad_row(row, "the prompt has no tokens", None)
            lost = _lost_character(tokenizer, text, row_ids)
            if lost is not None:
                raise self._bad_row(row, f"the tokenizer has no token for the character {lost!r} of the prompt", None)
            texts.append(text)
            ids.append(row_ids)
        if max_tokens is not None:
            self._check_lengths([len(row_ids) for row_ids in ids], max_tokens)
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

    def _chat(self, prompt: Prompt) -> list[dict[str, Any]] | None:
        """The messages for the chat template, or None for a raw string."""
        if isinstance(prompt, str):
            if self.system is None:
                return None
            prompt = [{"role": "user", "content": prompt}]
        if self.system is None or any(message["role"] == "system" for message in prompt):
            return prompt
        return [{"role": "system", "content": self.system}, *prompt]

    def _bad_row(self, row: int, problem: str, error: Exception | None) -> RunFailure:
        notes = [f"prompt: {shorten(self.records[row]['prompt'])}"]
        if error is not None:
            notes.append(describe(error))
        trace = "" if error is None else "".join(traceback.format_exception(error))
        return RunFailure("RLF5002", f"{self.places[row]}: {problem}", notes=notes, trace=trace)

    def _check_lengths(self, lengths: list[int], max_tokens: int) -> None:
        too_long = [row for row, length in enumerate(lengths) if length > max_tokens]
        if too_long:
            first = too_long[0]
            raise RunFailure(
                "RLF5007",
                f"{self.places[first]}: the prompt has {lengths[first]} tokens, but only {max_tokens} tokens "
                "of the model's context are left for a prompt",
                notes=(
                    f"{len(too_long)} of {len(lengths)} rows of data `{self.name}` are too long; "
                    f"the longest has {max(lengths)} tokens (counted after the chat template)",
                    f"prompt: {shorten(self.records[first]['prompt'])}",
                ),
                help=("take these rows out, lower `max_new`, or use a model with a longer context",),
            )


def open_data(source: DataSource, base_dir: Path, name: str) -> DataSet:
    """Load and check every row of `source`; paths are relative to `base_dir`.

    Raises RunFailure: RLF5002 for a bad row, RLF5015 for a source that cannot be used, RLF5012 for a missing package.
    """
    if isinstance(source, GymData):
        prompt, shown = "question", f'reasoning_gym("{source.task}")'
        answer: str | None = "answer"
        rows: Iterable[tuple[str, dict[str, Any]]] = gym_rows(source, name)
        fingerprint = hashlib.sha256(json.dumps(rows, sort_keys=True, default=repr).encode()).hexdigest()
    else:
        prompt, answer, shown = source.prompt, source.answer, source.path
        content = read_bytes(base_dir / source.path, shown, name)
        rows = jsonl_rows(content, shown) if source.format == "jsonl" else parquet_rows(content, shown)
        fingerprint = hashlib.sha256(content).hexdigest()
    records: list[dict[str, Any]] = []
    places: list[str] = []
    for place, row in rows:
        value = _check_prompt(_column(row, prompt, "prompt", place, first=not records), prompt, place)
        record = {"answer": None, **row, "prompt": value}
        if answer is not None:
            record["answer"] = _column(row, answer, "answer", place, first=not records)
        records.append(record)
        places.append(place)
    if not records:
        raise RunFailure("RLF5015", f"data `{name}`: `{shown}` has no rows")
    return DataSet(name, records, places, fingerprint, source.shuffle, source.system)


# --- prompts -------------------------------------------------------------------------------------------------------


def _apply_template(tokenizer: Any, chat: list[dict[str, Any]]) -> str:
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    return text


def _encode(tokenizer: Any, text: str, *, raw: bool) -> list[int]:
    ids = list(tokenizer(text, add_special_tokens=raw)["input_ids"])
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if raw and bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    if raw and eos is not None and ids and ids[-1] == eos and not text.endswith(str(tokenizer.eos_token)):
        ids = ids[:-1]  # a prompt that already ends has nothing to be continued
    return ids


def _lost_character(tokenizer: Any, text: str, ids: list[int]) -> str | None:
    """The first character that became the unknown or padding token; None when nothing is lost."""
    marks = {tokenizer.unk_token_id: tokenizer.unk_token, tokenizer.pad_token_id: tokenizer.pad_token}
    for mark in (None, tokenizer.bos_token_id, tokenizer.eos_token_id):  # these may stand there by right
        marks.pop(mark, None)
    if not any(mark in ids and token not in text for mark, token in marks.items()):
        return None
    alone = ((character, tokenizer(character, add_special_tokens=False)["input_ids"]) for character in text)
    return next((character for character, own in alone if marks.keys() & set(own)), "?")


def _check_prompt(value: object, column: str, place: str) -> Prompt:
    """The prompt itself, message fields that are null taken out (Parquet fills them in). Raises RLF5002."""
    problem = _prompt_problem(value)
    if problem is not None:
        raise RunFailure("RLF5002", f"{place}: the prompt in column `{column}` {problem}", notes=(shorten(value),))
    if isinstance(value, str):
        return value
    assert isinstance(value, list)
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def _prompt_problem(value: object) -> str | None:
    if isinstance(value, str):
        return None if value else "is empty"
    if not isinstance(value, list):
        return f"is {type(value).__name__}, neither a string nor a list of messages"
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            return f"has a message (number {number}) without a string `role` and a string `content`"
    return None if value else "is an empty list of messages"


def _column(row: dict[str, Any], column: str, role: str, place: str, *, first: bool) -> Any:
    """`row[column]`; dots reach into nested columns. A column that is missing from the first row is missing from the
    source (RLF5015), one that is missing later makes a bad row (RLF5002)."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, dict) or part not in value:
            break
        value = value[part]
    else:
        return value
    names = list(_column_names(row))
    near = did_you_mean(column, names)
    raise RunFailure(
        "RLF5015" if first else "RLF5002",
        f"{place}: no column `{column}` for the {role}",
        notes=("columns present: " + (", ".join(f"`{name}`" for name in names) or "none"),),
        help=() if near is None else (f"did you mean `{near}`?",),
    )


def _column_names(row: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in row.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _column_names(value, f"{prefix}{key}.")
