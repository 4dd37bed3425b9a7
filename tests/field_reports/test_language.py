"""Groups K (reward nodes), N (data) and Q (language and compiler usability) of the field reports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlflow.cli import main

# --- K and N: rewards and data -----------------------------------------------------------------------------------------


def files(folder: Path, parameters: str) -> str:
    """A flow over files of this folder whose reward function has these parameters; gives its text."""
    (folder / "sums.jsonl").write_text('{"question": "1+1", "truth": "2", "level": 3}\n', "utf-8")
    (folder / "rewards.py").write_text(f"def graded({parameters}):\n    return 0.0\n", "utf-8")
    return """\
flow f {
  data sums = jsonl("sums.jsonl", prompt = "question", answer = "truth")
  model actor = tiny(qwen3, alphabet = "0123456789+= ")
  reward graded = python("rewards:graded")
  step {
    samples = actor.generate(sums.take(4 prompts), n = 4, max_new = 8 tokens)
    score = graded(samples)
    actor.train(samples, advantages = group_normalize(score), loss = ppo_clip(0.2), optimizer = adamw(lr = 1e-4))
  }
}
"""


@pytest.mark.parametrize("parameters", ["response, solution", "response, *, solution"])
def test_K7_a_column_that_the_reward_needs_and_the_data_lacks(parameters: str, tmp_path: Path, compile_: Any) -> None:
    result = compile_(files(tmp_path, parameters), base_dir=tmp_path)
    assert "RLF1008" in result.codes
    assert "`solution`" in result.words
    assert "`level`" in result.words, "the columns that are there are listed"


@pytest.mark.parametrize(
    "parameters", ["response, answer", "response, level", "response, solution = None", "response, **columns"]
)
def test_K7_columns_that_are_there_or_need_not_be(parameters: str, tmp_path: Path, compile_: Any) -> None:
    assert compile_(files(tmp_path, parameters), base_dir=tmp_path).codes == []


def test_K7_a_prompt_column_that_is_not_there(tmp_path: Path, compile_: Any) -> None:
    text = files(tmp_path, "response, answer").replace('"question"', '"questions"')
    result = compile_(text, base_dir=tmp_path)
    assert result.codes == ["RLF1008"]
    assert "did you mean `question`?" in result.words
    assert "its columns are `question`, `truth`, `level`" in result.words


def test_K3_as_many_workers_as_asked_for(compile_: Any) -> None:
    flow = compile_(schedule="place exact on cpu with workers = 32").flow
    assert len(flow.pools["cpu"].host_of_rank) == 32
    assert len(compile_().flow.pools["cpu"].host_of_rank) == 1


@pytest.mark.parametrize("rule", ["error", "drop", "truncate"])
def test_N1_what_to_do_with_long_prompts_is_said(rule: str, compile_: Any) -> None:
    result = compile_(edit=("size = 1000", f"size = 1000, too_long = {rule}"))
    assert result.codes == []
    assert result.flow.data["sums"].source.too_long == rule
    assert compile_(edit=("size = 1000", "size = 1000, too_long = cut")).codes == ["RLF1001"]


# --- Q: usability ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field", ["val", "logprob", "__class__", "__dict__", "fields", "type", "values", "items", "self"]
)
def test_Q1_only_what_is_declared_is_found(field: str, compile_: Any) -> None:
    """Also for names that the compiler's own objects, or Python's, have."""
    result = compile_(before=f"x = samples.{field}")
    assert result.codes == ["RLF1008"]
    assert result.places == [field]
    assert f"unknown field `{field}`" in result.words
    assert ("did you mean `logprobs`?" in result.words) == (field == "logprob")


@pytest.mark.parametrize("word", ["scores", "print", "Block", "__import__", "samples.scores", "len"])
def test_Q1_names_and_functions(word: str, compile_: Any) -> None:
    assert compile_(advantages=word).codes[0] in ("RLF1001", "RLF1008")
    assert compile_(advantages=f"{word.replace('.', '_')}(score)").codes == ["RLF1001"]


MISSPELT = [
    (("max_new = 16", "max_nwe = 16"), "RLF1003", "max_new"),
    (("lr = 1e-4", "lr = 1e-4, wieght_decay = 0"), "RLF1003", "weight_decay"),
    (("context = 256 tokens", "contxt = 256 tokens"), "RLF1003", "context"),
    (("cpus = 64", "cpu = 64"), "RLF1003", "cpus"),
    (("ppo_clip(0.2)", "ppo_clip(0.2, hihg = 0.3)"), "RLF1003", "high"),
    (("group_normalize(score)", "group_normalize(score, stdd = false)"), "RLF1003", "std"),
    (("pool main = 1 devices", "pool main = 1 devices { memroy = 3 GiB }"), "RLF1003", "memory"),
    (("pool main = 1 devices", "pool main = 1 devices place actor on main with ddp = 1"), "RLF1003", "dp"),
    (("pool main = 1 devices", "pool main = 1 devices place exact on cpu with worker = 1"), "RLF1003", "workers"),
]


@pytest.mark.parametrize(("edit", "code", "meant"), MISSPELT, ids=lambda value: str(value)[:50])
def test_Q2_a_misspelt_key_is_never_ignored(edit: tuple[str, str], code: str, meant: str, compile_: Any) -> None:
    result = compile_(edit=edit)
    assert code in result.codes
    assert result.flow is None
    assert f"did you mean `{meant}`?" in result.words or not meant


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("samples.temprature=1", "samples.temperature"),
        ("sample.n=2", "samples.n"),
        ("actor.contxt=2", "actor.context"),
        ("actor.train.minibtach=4", "actor.train.minibatch"),
    ],
)
def test_Q2_nor_in_an_override(override: str, meant: str, compile_: Any) -> None:
    result = compile_(overrides=[override])
    assert result.codes == ["RLF1011"]
    assert f"did you mean `{meant}`?" in result.words
    good = {"samples.temperature": "0.5", "samples.n": "2", "actor.context": "128", "actor.train.minibatch": "16"}
    assert compile_(overrides=[f"{meant}={good[meant]}"]).codes == []


BAD = {
    "syntax": ("step {", "step"),
    "name": ("exact(samples)", "exakt(samples)"),
    "units": ("8 prompts", "8"),
    "divide": ("lr = 1e-4)", "lr = 1e-4), minibatch = 5 samples"),
    "devices": ("pool main = 1 devices", "pool main = 999 devices"),
    "ranks": ("pool main = 1 devices", "pool main = 3 devices"),
    "later version": ("pool main = 1 devices", "pool main = 1 devices staleness actor = 1 step"),
}


@pytest.mark.parametrize("name", BAD)
def test_Q3_run_refuses_nothing_that_check_accepts(
    name: str, tmp_path: Path, compile_: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every verb gives the same text and exit code for a file that is wrong."""
    items = "allow actor staleness <= 1 steps" if name == "later version" else ""
    file = tmp_path / "f.rlflow"
    file.write_text(compile_(edit=BAD[name], items=items).text, "utf-8")
    answers = set()
    for verb in ("check", "compile", "show", "graph", "run"):
        with pytest.raises(SystemExit) as end:
            main([verb, str(file)])
        shown = capsys.readouterr()
        answers.add((end.value.code, shown.err))
        assert shown.out == ""
    assert len(answers) == 1
    assert next(iter(answers))[0] == 1


@pytest.mark.parametrize(
    ("edit", "second"),
    [
        (("pool main = 1 devices", "pool main = 1 devices pool main = 2 devices"), "pool main = 1 devices"),
        (("model actor =", 'model actor = hf("x") model actor ='), "actor"),
        (("score = exact", "score = exact(samples) score = exact"), "score"),
        (("  hosts =", "  host = 2 * ascend_910b hosts ="), None),
    ],
)
def test_Q4_two_things_of_one_name(edit: tuple[str, str], second: str | None, compile_: Any) -> None:
    (error,) = compile_(edit=edit).found
    assert error.code == "RLF1002"
    if second is not None:
        assert [label.span.text for label in error.labels if not label.primary] == [second]
        assert error.labels[0].span.start > error.labels[1].span.start, "the second is the mistake"


BROKEN = [
    "step step",
    "score = ",
    "score = exact(samples",
    "= 3",
    "score = exact samples)",
    "a = 3 +",
    "x = @",
    '"',
    "allow",
    "}",
]


@pytest.mark.parametrize("line", BROKEN)
def test_Q6_messages_speak_the_users_words(line: str, compile_: Any) -> None:
    result = compile_(before=line)
    assert result.flow is None
    unquoted = re.sub(r"`[^`]*`", "", result.words)
    assert not re.search(r"__ANON|\b_?[A-Z]{3,}\b|[{}\[\]]|Token|\$END", unquoted), result.words
    assert all(place for place in result.places) or result.codes == ["RLF0002"]


def test_Q7_a_file_that_is_cut(compile_: Any) -> None:
    text = compile_().text
    for end in (text.index("n = 4,"), text.index("score)") + 5):
        cut = text[:end]
        (error,) = compile_(cut).found
        assert error.code == "RLF0002"
        assert error.message == "the file ends in the middle of a statement"
        line, column = error.span.line, error.span.column
        assert (line, column) == (cut.count("\n") + 1, len(cut.rpartition("\n")[2].rstrip()) + 1)


def test_Q8_models_that_are_copies_of_each_other(compile_: Any) -> None:
    result = compile_(declare="model a = frozen(b)\n  model b = frozen(a)")
    assert result.codes == ["RLF1007"]
    assert "`b` is made from itself: `b` -> `a` -> `b`" in result.words


def test_Q8_a_value_before_it_is_made(compile_: Any) -> None:
    """Within a step there is no cycle to write: a value is used after its line."""
    result = compile_(edit=("score = exact(samples)", "score = exact(late)"), after="late = samples")
    assert result.codes[0] == "RLF1001"
    assert "unknown name `late`" in result.words


def test_Q8_the_cycle_over_the_weights_is_no_mistake(compile_: Any) -> None:
    """train -> generate -> train holds the first weights as a token, which is written into the flow."""
    flow = compile_().flow
    edges = [edge for edge in flow.edges if edge.src == "actor.train"]
    assert {edge.dst for edge in edges} >= {"samples"}
    assert all(edge.tokens == 1 for edge in edges if edge.dst == "samples")


@pytest.mark.parametrize("unused", ["reward extra = python()", "model extra = hf()", "data extra = jsonl()"])
def test_Q9_what_is_not_used_may_be_incomplete(unused: str, compile_: Any) -> None:
    result = compile_(declare=unused)
    assert result.flow is not None
    assert result.codes == ["RLF1004"]
    assert "`extra` is not used" in result.words
    used = compile_(edit=("scorer(sums)", "scorer()"))
    assert (used.flow, used.codes) == (None, ["RLF1004"])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("staleness actor = 1 step", "staleness needs rollout and training on separate pools"),
        ("trigger samples at 75%", "a trigger needs rollout and training on separate pools"),
    ],
)
def test_Q12_what_can_have_no_effect_is_refused(line: str, says: str, compile_: Any) -> None:
    result = compile_(schedule=line, items="allow actor staleness <= 1 steps")
    assert result.codes == ["RLF2006"]
    assert says in result.words
    assert result.places == [line] or result.places == [line.partition("with ")[2]]
