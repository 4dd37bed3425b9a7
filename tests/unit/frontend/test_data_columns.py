"""Columns of data files while compiling: found by convention, checked, and compared with what rewards ask for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlflow.diagnostics import CompileError, SourceFile
from rlflow.frontend.lower import Lowered, lower
from rlflow.grammar.parse import parse
from rlflow.ir.ops import FileData, GymData, PythonReward
from rlflow.ir.parser import parse_flow
from rlflow.ir.printer import print_flow

FLOW = """\
flow f {
  data d = DATA
  model m = tiny(qwen3, alphabet = "0123456789+=")
  reward r = python("rewards:exact"ON_ERROR)
  step {
    s = m.generate(d.take(2 prompts), n = 2, max_new = 4 tokens)
    m.train(s, advantages = group_normalize(r(s)), loss = ppo_clip(), optimizer = adamw(1e-3))
  }
}
"""
CHAT = [{"role": "user", "content": "1+1="}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text("def exact(response, answer): return 1.0\n")
    return tmp_path


def lowered(folder: Path | None, data: str = 'jsonl("d.jsonl")', on_error: str = "") -> Lowered:
    text = FLOW.replace("DATA", data).replace("ON_ERROR", on_error)
    return lower(parse(SourceFile("f.rlflow", text)), folder)


def source(folder: Path | None, row: Any = None, data: str = 'jsonl("d.jsonl")') -> FileData:
    if folder is not None and row is not None:
        (folder / "d.jsonl").write_text(row if isinstance(row, str) else json.dumps(row) + "\n", "utf-8")
    found = lowered(folder, data).flow.data["d"].source
    assert isinstance(found, FileData)
    return found


def error(folder: Path, data: str = 'jsonl("d.jsonl")', on_error: str = "") -> Any:
    with pytest.raises(CompileError) as caught:
        lowered(folder, data, on_error)
    (found,) = caught.value.diagnostics
    return found


# --- found --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "prompt", "answer", "layout"),
    [
        ({"data_source": "x", "prompt": CHAT, "reward_model": {"ground_truth": "2"}, "extra_info": {}}, "prompt", "reward_model.ground_truth", "verl"),
        ({"messages": CHAT, "answer": "2"}, "messages", "answer", "areal"),
        ({"prompt": CHAT, "labels": "2"}, "prompt", "labels", "mindspeed_rl"),
        ({"prompt": CHAT, "solution": "2"}, "prompt", "solution", "trl"),
        ({"prompt": "1+1="}, "prompt", None, "trl"),
    ],
)  # fmt: skip
def test_columns_are_found_while_compiling(
    folder: Path, row: Any, prompt: str, answer: str | None, layout: str
) -> None:
    found = source(folder, row)
    assert (found.prompt, found.answer, found.find, found.layout) == (prompt, answer, (), layout)


def test_named_columns_win(folder: Path) -> None:
    row = {"prompt": "a", "messages": CHAT, "answer": "2", "solution": "3", "question": "b"}
    found = source(folder, row, 'jsonl("d.jsonl", prompt = "question", answer = "solution")')
    assert (found.prompt, found.answer, found.find, found.layout) == ("question", "solution", (), None)
    found = source(folder, row, 'jsonl("d.jsonl", prompt = "prompt", answer = none)')
    assert (found.prompt, found.answer, found.find, found.layout) == ("prompt", None, (), None)


def test_what_cannot_be_read_is_left_to_the_run(folder: Path) -> None:
    assert source(None).find == ("prompt", "answer")
    assert source(folder, "not json").find == ("prompt", "answer")
    assert source(folder, '\ufeff{"prompt": "a", "labels": "b"}\n').answer == "labels"


@pytest.mark.parametrize(
    ("row", "says", "help"),
    [
        ({"prompt": "a", "messages": CHAT}, "`d.jsonl` has several columns that could be the prompt: `prompt` and `messages`", '`prompt = "prompt"`'),
        ({"prompt": "a", "answer": 1, "solution": 2}, "could be the answer: `answer` and `solution`", "`answer = none`"),
        ({"question": "a"}, "`d.jsonl` has no column `prompt` or `messages` for the prompt", '`prompt = "question"`'),
    ],
)  # fmt: skip
def test_not_clear(folder: Path, row: Any, says: str, help: str) -> None:
    (folder / "d.jsonl").write_text(json.dumps(row) + "\n")
    found = error(folder)
    assert (found.code, found.span.text) == ("RLF1008", '"d.jsonl"')
    assert says in found.message
    assert help in found.help[0]
    assert found.notes[0] == "its columns are " + ", ".join(f"`{name}`" for name in row)


def test_nested_columns_are_checked(folder: Path) -> None:
    (folder / "d.jsonl").write_text('{"prompt": "a", "meta": {"truth": 1}}\n')
    found = error(folder, 'jsonl("d.jsonl", answer = "meta.thruth")')
    assert found.code == "RLF1008"
    assert found.help == ("did you mean `meta.truth`?",)


# --- Parquet ------------------------------------------------------------------------------------------------------


def test_a_parquet_header_is_checked_and_the_run_finds_the_columns(folder: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row = {"prompt": CHAT, "reward_model": {"ground_truth": "2", "style": "rule"}}
    pq.write_table(pa.Table.from_pylist([row]), folder / "d.parquet")
    found = source(folder, data='parquet("d.parquet")')
    assert (found.prompt, found.answer, found.find, found.layout) == ("prompt", None, ("prompt", "answer"), None)
    assert source(folder, data='parquet("d.parquet", answer = "reward_model.style")').find == ("prompt",)
    wrong = error(folder, 'parquet("d.parquet", answer = "reward_model.truth")')
    assert wrong.code == "RLF1008"
    assert "`reward_model.ground_truth`" in wrong.notes[0]
    pq.write_table(pa.Table.from_pylist([{"question": "a"}]), folder / "d.parquet")
    assert error(folder, 'parquet("d.parquet")').help == ('name it: `prompt = "question"`',)
    (folder / "d.parquet").write_bytes(b"PAR1 nonsense")
    assert source(folder, data='parquet("d.parquet")').find == ("prompt", "answer")


@pytest.mark.parametrize("row", [None, {"messages": CHAT, "answer": "2"}])
def test_what_is_open_and_what_was_found_survive_the_text_form(folder: Path, row: Any) -> None:
    source(folder if row else None, row)
    flow = lowered(folder if row else None, on_error=", on_error = drop").flow
    again = parse_flow(print_flow(flow))
    assert {name: data.source for name, data in again.data.items()} == {"d": flow.data["d"].source}
    assert again.rewards["r"].source == flow.rewards["r"].source


def test_jsonl_does_not_load_pyarrow(folder: Path) -> None:
    (folder / "d.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "f.rlflow").write_text(FLOW.replace("DATA", 'jsonl("d.jsonl")').replace("ON_ERROR", ""))
    code = "import sys; from rlflow.driver import check; check(sys.argv[1]); print('pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, folder / "f.rlflow"], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# --- rules --------------------------------------------------------------------------------------------------------


def test_too_long(folder: Path) -> None:
    assert source(folder, {"prompt": "a"}).too_long == "error"
    assert source(folder, {"prompt": "a"}, 'jsonl("d.jsonl", too_long = drop)').too_long == "drop"
    gym = lowered(folder, 'reasoning_gym("chain_sum", size = 3, too_long = truncate)').flow.data["d"].source
    assert isinstance(gym, GymData)
    assert gym.too_long == "truncate"
    assert gym.options == ()
    assert error(folder, 'jsonl("d.jsonl", too_long = cut)').code == "RLF1001"


@pytest.mark.parametrize(
    ("written", "retries", "rule"),
    [
        ("", 0, "fail"),
        ("fail", 0, "fail"),
        ("drop", 0, "drop"),
        ("retry(2)", 2, "fail"),
        ("retry(2, then = drop)", 2, "drop"),
        ("retry(then = drop)", 1, "drop"),
    ],
)
def test_on_error(folder: Path, written: str, retries: int, rule: str) -> None:
    (folder / "d.jsonl").write_text('{"prompt": "a"}\n')
    reward = lowered(folder, on_error=f", on_error = {written}" if written else "").flow.rewards["r"].source
    assert isinstance(reward, PythonReward)
    assert (reward.retries, reward.on_error) == (retries, rule)


@pytest.mark.parametrize("written", ["skip", "retry(2, then = skip)", "retry(2, drop, 3)", "0"])
def test_other_rules_are_refused(folder: Path, written: str) -> None:
    (folder / "d.jsonl").write_text('{"prompt": "a"}\n')
    assert error(folder, on_error=f", on_error = {written}").code in ("RLF1001", "RLF1003", "RLF1007")


# --- columns that a reward asks for (K7) --------------------------------------------------------------------------

ROW = {"prompt": "a", "answer": "b", "difficulty": 1, "meta": {"source": "x"}}


@pytest.mark.parametrize(
    ("function", "missing", "help"),
    [
        ("def exact(response, dificulty): return 1.0", "dificulty", "did you mean `difficulty`?"),
        ("async def exact(response, *, source): return 1.0", "source", "`meta.source` is nested: take `meta` as the parameter"),
        ("def exact(prompts, completions, response): return 1.0", "response", ""),
        ("def exact(zebra, difficulty): return 1.0", "zebra", "name a column, or give the parameter a default"),
    ],
)  # fmt: skip
def test_a_column_that_no_data_has(folder: Path, function: str, missing: str, help: str) -> None:
    (folder / "d.jsonl").write_text(json.dumps(ROW) + "\n")
    (folder / "rewards.py").write_text(function + "\n")
    found = error(folder)
    assert (found.code, found.span.text) == ("RLF1008", '"rewards:exact"')
    assert f"a parameter `{missing}`, and the data has no such column" in found.message
    assert found.notes == ("columns of the data: `prompt`, `answer`, `difficulty`, `meta`",)
    assert help in found.help[0]


@pytest.mark.parametrize(
    "function",
    [
        "def exact(response, difficulty, other = 1, *, more = 2, **columns): return 1.0",
        "def exact(data_source, solution_str, ground_truth, extra_info = None): return 1.0",
        "def exact(prompt, completions, prompt_ids, completion_ids, **columns): return 1.0",
        "def exact(prompts, completions, difficulty, **columns): return 1.0",
        "def exact(record, tokens): return 1.0",
        "@wrap\ndef exact(zebra): return 1.0",
        "if True:\n    from elsewhere import exact",
        "exact = print",
        "def exact(zebra): return 1.0\ndef exact(response): return 1.0",
    ],
)
def test_no_column_is_missing_or_that_cannot_be_said(folder: Path, function: str) -> None:
    (folder / "d.jsonl").write_text(json.dumps(ROW) + "\n")
    (folder / "rewards.py").write_text(function + "\n")
    lowered(folder)


def test_nothing_is_said_where_some_columns_are_unknown(folder: Path) -> None:
    (folder / "rewards.py").write_text("def exact(zebra): return 1.0\n")
    (folder / "d.jsonl").write_text("not json")
    lowered(folder)
    found = error(folder, 'reasoning_gym("chain_sum", size = 3)')
    assert found.notes == ("columns of the data: `question`, `answer`, `metadata`",)


# --- documentation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["data", "rewards"])
def test_the_declarations_of_the_page_compile(page: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / f"{page}.md").read_text("utf-8")
    declarations = re.findall(r"^  (?:data|reward) .*$", text, re.MULTILINE)
    assert len(declarations) >= 2
    if page == "rewards":
        declarations.insert(0, '  data tasks = reasoning_gym("chain_sum", size = 9)')
    whole = FLOW.replace("DATA", 'jsonl("d.jsonl")').replace("ON_ERROR", "")
    whole = whole.replace("  model", "\n".join(declarations) + "\n  model", 1)
    assert len(lower(parse(SourceFile("f.rlflow", whole)), None).flow.rewards) >= 1
