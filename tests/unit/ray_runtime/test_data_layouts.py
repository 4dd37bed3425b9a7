"""Columns that a flow does not name are found in the file: by convention, and never by a guess between two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlflow.backends.ray_runtime.data import DataSet, open_data
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.columns import Columns, Role
from rlflow.ir.ops import FileData

CHAT = [{"role": "user", "content": "1+1="}]
BOTH: tuple[Role, ...] = ("prompt", "answer")

LAYOUTS = [
    (
        {
            "data_source": "gsm8k",
            "prompt": CHAT,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"split": "train", "index": 0, "answer": "1+1=2"},
        },
        Columns("prompt", "reward_model.ground_truth", "verl"),
    ),
    ({"prompt": CHAT, "solution": "2", "level": 3}, Columns("prompt", "solution", "trl")),
    ({"prompt": "1+1=", "answer": "2"}, Columns("prompt", "answer", "trl")),
    ({"prompt": "1+1="}, Columns("prompt", None, "trl")),
    ({"messages": CHAT, "answer": "2"}, Columns("messages", "answer", "areal")),
    ({"prompt": "1+1=", "labels": "2"}, Columns("prompt", "labels", "mindspeed_rl")),
    (  # verl's nested column says clearly whose file it is
        {"prompt": "1+1=", "answer": "3", "messages": CHAT, "reward_model": {"ground_truth": "2"}},
        Columns("prompt", "reward_model.ground_truth", "verl"),
    ),
]


def opened(folder: Path, row: dict[str, Any], *, find: tuple[Role, ...] = BOTH, **options: Any) -> DataSet:
    (folder / "d.jsonl").write_text(json.dumps(row) + "\n")
    return open_data(FileData(path="d.jsonl", format="jsonl", find=find, **options), folder, "sums")


@pytest.mark.parametrize(("row", "columns"), LAYOUTS)
@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_the_conventions_of_four_frameworks(tmp_path: Path, format: str, row: dict[str, Any], columns: Columns) -> None:
    if format == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "d.parquet")
        data = open_data(FileData(path="d.parquet", format="parquet", find=BOTH), tmp_path, "sums")
    else:
        data = opened(tmp_path, row)
    assert data.columns == columns
    assert data.records[0]["prompt"] in (CHAT, "1+1=")
    assert data.records[0]["answer"] == (None if columns.answer is None else "2")
    assert data.facts()["columns"] == {"prompt": columns.prompt, "answer": columns.answer, "layout": columns.layout}


def test_a_named_column_wins_and_the_other_is_still_found(tmp_path: Path) -> None:
    row = {"prompt": "no", "question": "1+1=", "answer": "2", "solution": "no"}
    assert opened(tmp_path, row, find=("prompt",), answer="answer").records[0]["prompt"] == "no"
    assert opened(tmp_path, row, find=(), prompt="question", answer="answer").records[0]["prompt"] == "1+1="
    row = {"question": "1+1=", "labels": "2"}
    data = opened(tmp_path, row, find=("answer",), prompt="question")
    assert (data.records[0]["prompt"], data.records[0]["answer"]) == ("1+1=", "2")
    data = opened(tmp_path, {"messages": CHAT, "prompt": "2"}, find=("prompt",), answer="prompt")
    assert data.columns == Columns("messages", "prompt", "areal")


@pytest.mark.parametrize(
    ("row", "says", "help"),
    [
        ({"prompt": "a", "messages": CHAT}, "could be the prompt: `prompt` and `messages`", '`prompt = "prompt"`'),
        (
            {"prompt": "a", "answer": "2", "solution": "3", "labels": "4"},
            "could be the answer: `answer` and `solution` and `labels`",
            '`answer = "answer"`, or `answer = none`',
        ),
        ({"question": "a", "answer": "2"}, "no column `prompt` or `messages`", '`prompt = "question"`'),
        ({"promt": "a"}, "no column `prompt` or `messages`", '`prompt = "promt"`'),
        ({}, "no column `prompt` or `messages`", '`prompt = "column"`'),
    ],
)
def test_what_is_not_clear_is_an_error_with_the_candidates(
    tmp_path: Path, row: dict[str, Any], says: str, help: str
) -> None:
    with pytest.raises(RunFailure) as caught:
        opened(tmp_path, row)
    assert caught.value.code == "RLF5015"
    assert caught.value.message.startswith("d.jsonl:1: ")
    assert says in caught.value.message
    assert help in caught.value.help[0]
    assert "columns present: " in caught.value.notes[0]
