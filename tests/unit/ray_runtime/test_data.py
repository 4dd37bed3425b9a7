"""Data rows: every wrong file gives a failure that names the place, every right one gives the rows it has."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlflow.backends.ray_runtime.data import DataSet, open_data
from rlflow.backends.ray_runtime.models import load_model
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import FileData, GymData, TinyModel

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE, *, eos_too: bool = False) -> Any:
    """One token per character; like many models it puts a BOS before a text by default."""
    alphabet = ["<s>", "</s>", *sorted(set("abcdefghijklmnopqrstuvwxyz0123456789+= <>/"))]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(alphabet)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if eos_too else "<s> $A", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    return fast


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def jsonl(path: str = "d.jsonl", **options: Any) -> FileData:
    return FileData(path=path, format="jsonl", **options)


def rendered(tmp_path: Path, rows: list[Any], tokenizer: Any = None, **options: Any) -> DataSet:
    write(tmp_path / "d.jsonl", rows)
    data = open_data(jsonl(**options), tmp_path, "questions")
    data.render(tokenizer or make_tokenizer(), None)
    return data


def failure(source: FileData | GymData, base_dir: Path) -> RunFailure:
    with pytest.raises(RunFailure) as caught:
        open_data(source, base_dir, "questions")
    return caught.value


# --- reading --------------------------------------------------------------------------------------------------------


def test_rows_keep_their_columns_and_gain_prompt_and_answer(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", [{"question": "1+1=", "info": {"truth": "2"}, "level": 3}])
    data = open_data(jsonl(prompt="question", answer="info.truth"), tmp_path, "questions")
    assert data.records == [{"question": "1+1=", "info": {"truth": "2"}, "level": 3, "prompt": "1+1=", "answer": "2"}]


def test_without_an_answer_column_the_answer_is_the_rows_own_or_none(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", [{"prompt": "a"}, {"prompt": "b", "answer": "x"}])
    assert [r["answer"] for r in open_data(jsonl(), tmp_path, "q").records] == [None, "x"]


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \n{"prompt": "b"}')
    data = open_data(jsonl(), tmp_path, "q")
    assert [r["prompt"] for r in data.records] == ["a", "b"]
    assert data.places == ["d.jsonl:1", "d.jsonl:4"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": "b",}', "not JSON"),
        (b'{"prompt": "b"', "not JSON"),
        (b"[1, 2]", "the row is list, not an object"),
        (b'{"prompt": 5}', "is int, neither a string nor a list of messages"),
        (b'{"prompt": ""}', "is empty"),
        (b'{"prompt": []}', "empty list of messages"),
        (b'{"prompt": [{"role": "user"}]}', "(number 1) without"),
        (b'{"prompt": null}', "is NoneType"),
        (b'{"question": "b"}', "no column `prompt`"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b"[" * 5000, "not JSON"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", "not JSON"),
    ],
)
def test_a_bad_row_is_named_by_path_and_line(tmp_path: Path, line: bytes, says: str) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'{"prompt": "a"}\n\n' + line + b"\n")
    error = failure(jsonl(), tmp_path)
    assert error.code == "RLF5002"
    assert error.message.startswith("d.jsonl:3: ")
    assert says in error.message
    assert error.notes
    assert all(len(note) < 200 for note in error.notes)


def test_a_json_array_gets_a_hint(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('[\n  {"prompt": "a"}\n]\n')
    error = failure(jsonl(), tmp_path)
    assert error.code == "RLF5002"
    assert "one object on each line" in error.help[0]


def test_a_missing_column_lists_the_columns_present_and_the_closest(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", [{"prompt": "a", "reward_model": {"ground_truth": "1", "style": "rule"}}])
    error = failure(jsonl(answer="reward_model.groundtruth"), tmp_path)
    assert error.code == "RLF5015"
    assert "`reward_model.groundtruth`" in error.message
    assert "`prompt`, `reward_model`, `reward_model.ground_truth`" in error.notes[0]
    assert error.help == ("did you mean `reward_model.ground_truth`?",)


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "arithmetic.jsonl", [{"prompt": "a"}])
    error = failure(jsonl("aritmetic.jsonl"), tmp_path)
    assert (error.code, error.help) == ("RLF5015", ("did you mean `arithmetic.jsonl`?",))
    (tmp_path / "d.jsonl").write_text("\n \n")
    assert "is empty" in failure(jsonl(), tmp_path).message
    assert failure(jsonl("."), tmp_path).code == "RLF5015"


def test_parquet_rows_are_plain_python(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "1+1"}], [{"role": "user", "content": "2+2"}]]
    table = pa.table({"prompt": messages, "reward_model": [{"ground_truth": "2"}, {"ground_truth": "4"}]})
    pq.write_table(table, tmp_path / "d.parquet")
    source = FileData(path="d.parquet", format="parquet", answer="reward_model.ground_truth")
    data = open_data(source, tmp_path, "q")
    assert [r["answer"] for r in data.records] == ["2", "4"]
    assert data.records[0]["prompt"] == messages[0]
    json.dumps(data.records)


def test_a_parquet_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "d.parquet").write_bytes(b"PAR1 nonsense")
    error = failure(FileData(path="d.parquet", format="parquet"), tmp_path)
    assert error.code == "RLF5015"
    assert "not a readable Parquet file" in error.message
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "d.parquet")
    assert "has no rows" in failure(FileData(path="d.parquet", format="parquet"), tmp_path).message


def test_reasoning_gym_rows_and_their_mistakes(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    source = GymData(task="basic_arithmetic", size=5, seed=3, options=(("max_digits", 2),))
    data = open_data(source, tmp_path, "q")
    assert len(data) == 5
    assert data.records[0]["prompt"] == data.records[0]["question"]
    assert data.records[0]["answer"] is not None
    assert data.fingerprint == open_data(source, tmp_path, "q").fingerprint
    assert data.fingerprint != open_data(GymData(task="basic_arithmetic", size=5), tmp_path, "q").fingerprint

    error = failure(GymData(task="basic_arithmetics", size=5), tmp_path)
    assert (error.code, error.help) == ("RLF5015", ("did you mean `basic_arithmetic`?",))
    error = failure(GymData(task="basic_arithmetic", size=5, options=(("max_digit", 2),)), tmp_path)
    assert (error.code, error.help) == ("RLF5015", ("did you mean `max_digits`?",))
    error = failure(GymData(task="basic_arithmetic", size=5, options=(("min_digits", -1),)), tmp_path)
    assert error.code == "RLF5015"
    assert "min_digits must be positive" in error.notes[-1]


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", [{"prompt": "a"}])
    first = open_data(jsonl(), tmp_path, "q").fingerprint
    write(tmp_path / "d.jsonl", [{"prompt": "b"}])
    assert open_data(jsonl(), tmp_path, "q").fingerprint != first
    assert len(first) == 64


# --- rendering ------------------------------------------------------------------------------------------------------


def decode(data: DataSet, row: int = 0) -> str:
    assert data.prompt_ids is not None
    return "".join(make_tokenizer().convert_ids_to_tokens(data.prompt_ids[row].tolist()))


@pytest.mark.parametrize(
    ("prompt", "system", "text"),
    [
        ("1+1=", None, "<s>1+1="),
        ("1+1=", "add", "<s><system>add<user>1+1=<assistant>"),
        ([{"role": "user", "content": "hi"}], None, "<s><user>hi<assistant>"),
        ([{"role": "user", "content": "hi"}], "add", "<s><system>add<user>hi<assistant>"),
        (
            [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}],
            "add",
            "<s><system>own<user>hi<assistant>",
        ),
        ("<s>1+1=", None, "<s>1+1="),
    ],
)
def test_exactly_one_bos_whatever_the_prompt_is(tmp_path: Path, prompt: Any, system: str | None, text: str) -> None:
    data = rendered(tmp_path, [{"prompt": prompt}], system=system)
    assert decode(data) == text


def test_an_end_token_that_the_tokenizer_adds_is_taken_off(tmp_path: Path) -> None:
    data = rendered(tmp_path, [{"prompt": "ab"}], make_tokenizer(eos_too=True))
    assert decode(data) == "<s>ab"


def test_a_chat_without_a_template_is_refused_and_a_string_is_not(tmp_path: Path) -> None:
    assert decode(rendered(tmp_path, [{"prompt": "a"}], make_tokenizer(None))) == "<s>a"
    with pytest.raises(RunFailure) as caught:
        rendered(tmp_path, [{"prompt": "a"}], make_tokenizer(None), system="add")
    assert caught.value.code == "RLF5015"


def test_a_template_that_refuses_a_system_message_names_the_row(tmp_path: Path) -> None:
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}a"
    with pytest.raises(RunFailure) as caught:
        rendered(tmp_path, [{"prompt": "a"}], make_tokenizer(strict), system="add")
    assert caught.value.code == "RLF5015"
    assert caught.value.message.startswith("d.jsonl:1: ")
    assert "no system role" in caught.value.notes[0]


def test_a_character_the_tokenizer_does_not_know_names_the_row(tmp_path: Path) -> None:
    with pytest.raises(RunFailure) as caught:
        rendered(tmp_path, [{"prompt": "ab"}, {"prompt": "a?"}])
    assert caught.value.code == "RLF5002"
    assert caught.value.message.startswith("d.jsonl:2: ")


def test_a_character_outside_a_tiny_models_alphabet_names_row_and_character(tmp_path: Path) -> None:
    tokenizer = load_model(TinyModel(architecture="qwen3", alphabet="0123456789+= "), tmp_path).tokenizer
    data = rendered(tmp_path, [{"prompt": "1+2="}], tokenizer)
    assert data.prompt_texts == ["1+2="]
    with pytest.raises(RunFailure) as caught:
        rendered(tmp_path, [{"prompt": "1+2="}, {"prompt": "1-2="}], tokenizer)
    assert caught.value.code == "RLF5002"
    assert caught.value.message.startswith("d.jsonl:2: ")
    assert "'-'" in caught.value.message


def test_a_prompt_that_is_too_long_names_row_and_both_numbers(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", [{"prompt": "a" * 511}, {"prompt": "a" * 599}, {"prompt": "a" * 700}])
    data = open_data(jsonl(), tmp_path, "questions")
    with pytest.raises(RunFailure) as caught:
        data.render(make_tokenizer(), 512)
    assert caught.value.code == "RLF5007"
    assert caught.value.message.startswith("d.jsonl:2: the prompt has 600 tokens, but only 512 tokens")
    assert "2 of 3 rows" in caught.value.notes[0]
    data.render(make_tokenizer(), 701)


# --- the stream -----------------------------------------------------------------------------------------------------


def test_the_stream_wraps_over_epochs_and_goes_on_from_any_cursor(tmp_path: Path) -> None:
    data = rendered(tmp_path, [{"prompt": str(i)} for i in range(10)])
    whole, cursor = data.take(0, 25, seed=7)
    assert cursor == 25
    assert whole.array("uid").tolist() == list(range(25))
    texts = whole.items("prompt_text")
    assert sorted(texts[:10]) == sorted(texts[10:20]) == [str(i) for i in range(10)]
    assert texts[:10] != texts[10:20]

    pieces: list[str] = []
    cursor = 0
    for count in (3, 9, 1, 12):
        batch, cursor = rendered(tmp_path, [{"prompt": str(i)} for i in range(10)]).take(cursor, count, seed=7)
        pieces += batch.items("prompt_text")
    assert pieces == texts
    assert data.take(0, 25, seed=8)[0].items("prompt_text") != texts


def test_without_shuffle_the_order_is_the_files(tmp_path: Path) -> None:
    data = rendered(tmp_path, [{"prompt": str(i)} for i in range(3)], shuffle=False)
    batch, _ = data.take(2, 5, seed=7)
    assert batch.items("prompt_text") == ["2", "0", "1", "2", "0"]
    assert batch.array("uid").tolist() == [2, 3, 4, 5, 6]


def test_all_gives_every_row_once_in_file_order(tmp_path: Path) -> None:
    data = rendered(tmp_path, [{"prompt": str(i), "answer": i} for i in range(4)])
    batch = data.all()
    assert batch.rows == 4
    assert batch.array("uid").tolist() == [0, 1, 2, 3]
    assert [r["answer"] for r in batch.items("record")] == [0, 1, 2, 3]
    assert batch.packed("prompt_ids").lengths.tolist() == [2, 2, 2, 2]


# --- any file -------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.text(max_size=40).map(lambda text: json.dumps({"prompt": text}).encode()),
            st.recursive(
                st.none() | st.booleans() | st.floats() | st.text(max_size=5),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
                max_leaves=6,
            ).map(lambda value: json.dumps({"prompt": value}).encode()),
        ),
        max_size=4,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_rows_or_a_failure_with_a_place(lines: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "d.jsonl").write_bytes(b"\n".join(lines))
        try:
            data = open_data(jsonl(), Path(folder), "q")
            data.render(make_tokenizer(), 100)
            failed = None
        except RunFailure as error:
            failed = error
    if failed is None:
        assert len(data) == data.all().rows > 0
    else:
        assert failed.code in ("RLF5002", "RLF5007", "RLF5015")
        assert "d.jsonl" in failed.message
