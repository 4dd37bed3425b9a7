"""Whole programs, and the files that a flow names: data, columns, reward functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlflow.diagnostics import CompileError, Diagnostic, SourceFile
from rlflow.frontend.lower import Lowered, lower
from rlflow.grammar.parse import parse
from rlflow.ir.ops import Generate, Score, Train

REWARDS = """\
from json import loads
def exact(response): return 1.0
async def later(response): return 1.0
class Judge: pass
alias = exact
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "1+1=", "answer": "2", "meta": {"level": 1}}\n', "utf-8")
    (tmp_path / "rewards.py").write_text(REWARDS, "utf-8")
    return tmp_path


def test_files_are_found(problems: Any, folder: Path, lower_: Any) -> None:
    assert problems(base_dir=folder) == []
    assert lower_(base_dir=folder).reward_files == (folder / "rewards.py",)


@pytest.mark.parametrize(
    ("edit", "code", "place", "says", "help"),
    [
        (('"a.jsonl"', '"b.jsonl"'), "RLF1012", '"b.jsonl"', "there is no file `b.jsonl`", "`a.jsonl`"),
        (('"a.jsonl"', '"."'), "RLF1012", '"."', "there is no file `.`", ""),
        (('"a.jsonl"', '"no/such/folder/a.jsonl"'), "RLF1012", '"no/such/folder/a.jsonl"', "there is no file", ""),
        (('"a.jsonl"', f'"{"x" * 5000}"'), "RLF1012", f'"{"x" * 5000}"', "there is no file", ""),
        (('"a.jsonl"', '"a\0b"'), "RLF1012", '"a\0b"', "there is no file", ""),
        (('answer = "answer"', 'answer = "anser"'), "RLF1008", '"anser"', "`a.jsonl` has no column `anser` for the answer", "`answer`"),
        (('answer = "answer"', 'prompt = "question"'), "RLF1008", '"question"', "no column `question` for the prompt", "name it"),
        (("rewards:exact", "rewards:exakt"), "RLF1001", '"rewards:exakt"', "`rewards.py` defines no `exakt`", "`rewards:exact`"),
        (("rewards:exact", "reward:exact"), "RLF1012", '"reward:exact"', "there is no `reward.py` beside this file", ""),
        (("rewards:exact", f"{'m' * 5000}:f"), "RLF1012", f'"{"m" * 5000}:f"', "there is no", ""),
        (("rewards:exact", "..:f"), "RLF1012", '"..:f"', "nor an installed module", ""),
    ],
    ids=lambda value: value[1][:30] if isinstance(value, tuple) else None,
)  # fmt: skip
def test_missing(
    edit: tuple[str, str], code: str, place: str, says: str, help: str, problems: Any, folder: Path
) -> None:
    (error,) = problems(edit, base_dir=folder)
    assert error.code == code
    assert error.span.text == place
    assert says in error.message
    assert help in " ".join(error.help)


@pytest.mark.parametrize(
    "edit",
    [
        ('answer = "answer"', 'answer = "meta.level"'),
        ('answer = "answer"', 'prompt = "prompt"'),
        ("rewards:exact", "rewards:later"),
        ("rewards:exact", "rewards:Judge"),
        ("rewards:exact", "rewards:alias"),
        ("rewards:exact", "rewards:comes_from_an_import"),
        ("rewards:exact", "os.path:join"),
    ],
)
def test_not_missing(edit: tuple[str, str], problems: Any, folder: Path) -> None:
    assert problems(edit, base_dir=folder) == []


@pytest.mark.parametrize("row", ["", "not json", "[1]", "[" * 100_000, '{"prompt":' * 100_000, "9" * 10_000, "\x00"])
def test_rows_that_do_not_parse_are_left_to_the_run(row: str, problems: Any, folder: Path) -> None:
    (folder / "a.jsonl").write_text(row, "utf-8")
    assert problems(base_dir=folder) == []


@pytest.mark.parametrize(
    "text", ["def exact(:", "def exact(): pass\0", "x = " + "(" * 1000 + ")" * 1000, "x = " + "-" * 100_000 + "1"]
)
def test_broken_reward_file(text: str, problems: Any, folder: Path) -> None:
    (folder / "rewards.py").write_text(text, "utf-8")
    (error,) = problems(base_dir=folder)
    assert (error.code, error.message) == ("RLF1012", "`rewards.py` is not valid Python")


def test_reward_file_is_not_imported(problems: Any, folder: Path) -> None:
    (folder / "rewards.py").write_text("raise SystemExit(3)\n" + REWARDS, "utf-8")
    assert problems(base_dir=folder) == []


# --- whole programs --------------------------------------------------------------------------------------------------

SMALL = """\
flow NAME {
  data d = reasoning_gym("chain_sum", size = 9)
  model m = hf("m")
  reward r = scorer(d)
  step {
    s = m.generate(d.take(2 prompts), n = 2, max_new = 4 tokens)
    m.train(s, advantages = group_normalize(r(s)), loss = ppo_clip(), optimizer = adamw(1e-3))
  }
}
"""


def program(text: str, **options: Any) -> Lowered:
    return lower(parse(SourceFile("x.rlflow", text)), None, **options)


def errors(text: str, **options: Any) -> list[Diagnostic]:
    with pytest.raises(CompileError) as caught:
        program(text, **options)
    return list(caught.value.diagnostics)


def test_defaults() -> None:
    lowered = program(SMALL)
    flow = lowered.flow
    assert list(flow.nodes) == ["d.take", "s", "r", "group_normalize", "m.train"]
    assert (flow.stop_steps, flow.stop_epochs, flow.save_every, flow.seed) == (None, 1, 0, 0)
    assert (lowered.cluster.name, lowered.schedule.pools) == ("local", ())
    train, sampling = flow.nodes["m.train"].op, flow.nodes["s"].op
    assert isinstance(train, Train)
    assert isinstance(sampling, Generate)
    assert train.minibatch == 4, "the whole batch"
    assert train.temperature == sampling.temperature == 1.0


def test_temperature_reaches_reference_and_training() -> None:
    flow = program(SMALL.replace("max_new", "temperature = 0.7, max_new")).flow
    train = flow.nodes["m.train"].op
    assert isinstance(train, Train)
    assert train.temperature == 0.7


def test_calls_without_names_get_numbers() -> None:
    text = SMALL.replace("s = m", "a = r(m.generate(d.take(1 prompt), max_new = 1 token)) s = m")
    nodes = program(text.replace("}\n}", "b = m.generate(d.take(1 prompt), max_new = 2 tokens) }\n}")).flow.nodes
    assert {"d.take", "d.take.2", "d.take.3"} <= set(nodes)
    assert sum(isinstance(node.op, Score) for node in nodes.values()) == 2


def test_all_rows_in_a_step_keep_the_minibatch() -> None:
    def minibatch(extra: str) -> int:
        text = SMALL.replace("d.take(2 prompts)", "d.all()").replace("adamw(1e-3)", "adamw(1e-3)" + extra)
        train = program(text).flow.nodes["m.train"].op
        assert isinstance(train, Train)
        return train.minibatch

    assert minibatch("") == 0
    assert minibatch(", minibatch = 3 samples") == 3


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("", "RLF1004", "this file has no `flow`"),
        ("# nothing", "RLF1004", "this file has no `flow`"),
        ("cluster c { a = 1 * cpu }", "RLF1004", "this file has no `flow`"),
        ("flow f { }", "RLF1004", "flow `f` has no `step` block"),
        ("flow f { step { } }", "RLF1015", "this step trains nothing"),
        (SMALL + SMALL, "RLF1002", "flow `NAME` is defined twice"),
        (SMALL + SMALL.replace("NAME", "b"), "RLF1004", "this file has 2 flows"),
        (SMALL + "schedule NAME { auto } schedule NAME { auto }", "RLF1002", "`NAME` has 2 schedules"),
        (SMALL + "schedule NAME on c { auto } cluster c { }", "RLF2003", "cluster `c` has no hosts"),
        (SMALL + "schedule NAME on c { auto } cluster c { a = 2 * a }", "RLF1001", "unknown device or host `a`"),
        (SMALL.replace("}\n}", "}\n step { } }"), "RLF1002", "flow `NAME` has two `step` parts"),
        (SMALL.replace("}\n}", "}\n evaluate e { } evaluate e { } }"), "RLF1002", "evaluation `e` is defined twice"),
        (SMALL.replace("}\n}", "}\n evaluate m { } }"), "RLF1002", "`m` names something else already"),
        (SMALL.replace("}\n}", "}\n allow m staleness <= 1 step allow m staleness <= 2 steps }"), "RLF1002", "allowed twice"),
        (SMALL.replace("flow NAME", "flow NAME(a = b, b = 1)"), "RLF1001", "unknown name `b`"),
        (SMALL.replace("flow NAME", "flow NAME(a = f(1))"), "RLF1007", "a constant is needed here"),
        (SMALL.replace("s = m", "x = 3 s = m"), "RLF1007", "a step is made of calls"),
        (SMALL.replace("s = m", "x = f.g.h(1) s = m"), "RLF1007", "this cannot be called"),
        (SMALL.replace("r(s)", "r(s.text)"), "RLF1007", "`text` holds str values"),
        (SMALL.replace("group_normalize(r(s))", "s + 1"), "RLF1007", "only columns can be added"),
    ],
    ids=lambda text: text[-40:],
)  # fmt: skip
def test_program_with_one_mistake(text: str, code: str, says: str) -> None:
    found = errors(text)
    assert code == found[0].code
    assert says in found[0].message
    assert len(found) == 1 or code == "RLF1002"


def test_flow_and_cluster_can_be_chosen() -> None:
    text = SMALL + SMALL.replace("NAME", "other")
    text += "schedule other on c { pool p = 2 devices } schedule other { auto } cluster c { a = 2 * h100 }"
    assert program(text, flow_name="NAME").flow.name == "NAME"
    assert program(text, flow_name="other", cluster_name="c").cluster.num_devices == 2
    assert program(text, flow_name="other", cluster_name="local").cluster.name == "local"
    assert errors(text, flow_name="othr")[0].help == ("did you mean `other`?",)
    assert errors(text, flow_name="other")[0].help == ("choose one with `--cluster NAME`",)
    assert errors(text, flow_name="other", cluster_name="d")[0].code == "RLF1001"


def test_hosts_are_counted() -> None:
    text = SMALL + "schedule NAME on c { auto } cluster c { a = 2 * h100 { memory = 1 GiB } b = 3 * a d = cpu }"
    hosts = program(text).cluster.hosts
    assert [(host.name, host.devices) for host in hosts] == [("a-0", 2), ("a-1", 2), ("a-2", 2), ("d", 1)]
    assert hosts[0].memory_bytes == 2**30
