"""Files that grow with the steps of a run, read and rewritten a line at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlflow.run_rows import drop_torn_line, json_lines, keep_lines
from rlflow.runs import last_events


def test_lines_that_are_no_rows_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert list(json_lines(path)) == []
    path.write_bytes(b'{"step": 1}\n[2]\nnull\n\xff\xfe\n{"step": 3}\n{"st')
    assert list(json_lines(path)) == [{"step": 1}, {"step": 3}]
    keep_lines(path, lambda row: row["step"] > 1)
    assert path.read_text("utf-8") == '{"step": 3}\n'
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "left"),
    [("a\nb", "a\n"), ("a\nb\n", "a\nb\n"), ("", ""), ("torn", ""), ("a\n" + "b" * 200_000, "a\n")],
)
def test_only_a_torn_line_goes(tmp_path: Path, text: str, left: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text, "utf-8")
    drop_torn_line(path)
    assert path.read_text("utf-8") == left


def test_a_long_trace_is_that_of_the_last_steps(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    for rank in range(2):
        lines = [json.dumps({"step": step, "n": n}) for step in range(1, 11) for n in range(3)]
        (tmp_path / "trace" / f"main-{rank}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    assert {event["step"] for event in last_events(tmp_path, 1000)} == set(range(1, 11))
    assert sorted({event["step"] for event in last_events(tmp_path, 20)}) == [8, 9, 10]
    assert {event["step"] for event in last_events(tmp_path, 1)} == {10}
