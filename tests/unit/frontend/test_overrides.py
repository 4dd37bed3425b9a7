"""`--set path=value`: every kind of path, and what is said about paths that lead nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlflow.frontend.lower import Lowered
from rlflow.ir import ops


def op(lowered: Lowered, node: str) -> Any:
    return lowered.flow.nodes[node].op


def train(lowered: Lowered) -> ops.Train:
    found = op(lowered, "actor.train")
    assert isinstance(found, ops.Train)
    return found


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("group=2", lambda x: op(x, "samples").n, 2),
        ("batch.count=4", lambda x: op(x, "batch").count, 4),
        ("batch.count=4 prompts", lambda x: op(x, "batch").count, 4),
        ("batch.count = 2 * 2", lambda x: op(x, "batch").count, 4),
        ("samples.max_new=9", lambda x: op(x, "samples").max_new, 9),
        ("samples.temperature=0.5", lambda x: op(x, "samples").temperature, 0.5),
        ("samples.top_k=5", lambda x: op(x, "samples").top_k, 5),
        ("adv.std=false", lambda x: op(x, "adv").std, False),
        ("actor.train.minibatch=8", lambda x: train(x).minibatch, 8),
        ("actor.train.epochs=2", lambda x: train(x).epochs, 2),
        ("actor.train.aggregate=seq_mean_token_sum", lambda x: train(x).aggregate, "seq_mean_token_sum"),
        ("actor.train.optimizer.lr=1e-5", lambda x: train(x).optimizer.lr, 1e-5),
        ("actor.train.optimizer.warmup=3", lambda x: train(x).optimizer.warmup, 3),
        ("actor.train.optimizer=adamw(lr = 0.5)", lambda x: train(x).optimizer.lr, 0.5),
        ("actor.train.loss=ppo_clip(0.1) + kl(k1)", lambda x: train(x).loss[0].clip_low, 0.1),
        ("actor.train.loss=-2 * entropy() + kl()", lambda x: train(x).loss[0].weight, -2.0),
        ("heldout.every=3", lambda x: x.flow.evaluations[0].every, 3),
        ("heldout.every=3 steps", lambda x: x.flow.evaluations[0].every, 3),
        ("heldout.answers.max_new=5", lambda x: op(x, "heldout.answers").max_new, 5),
        ("heldout.answers.n=2", lambda x: op(x, "heldout.answers").n, 2),
        ("questions.path=b.jsonl", lambda x: x.flow.data["questions"].source.path, "b.jsonl"),
        ("questions.path=../data/b c.jsonl", lambda x: x.flow.data["questions"].source.path, "../data/b c.jsonl"),
        ('questions.path="b.jsonl"', lambda x: x.flow.data["questions"].source.path, "b.jsonl"),
        ("questions.answer=none", lambda x: x.flow.data["questions"].source.answer, None),
        ("questions.system=Be brief", lambda x: x.flow.data["questions"].source.system, "Be brief"),
        ("questions.shuffle=false", lambda x: x.flow.data["questions"].source.shuffle, False),
        ("puzzles.size=7", lambda x: x.flow.data["puzzles"].source.size, 7),
        ("puzzles.min_terms=3", lambda x: x.flow.data["puzzles"].source.options, (("min_terms", 3),)),
        ("actor.layers=3", lambda x: x.flow.models["actor"].source.layers, 3),
        ("actor.context=64", lambda x: x.flow.models["actor"].source.context, 64),
        ("actor.alphabet=a=b", lambda x: x.flow.models["actor"].source.alphabet, "a=b"),
        ("exact.timeout=2 s", lambda x: x.flow.rewards["exact"].source.timeout_us, 2_000_000),
        ("exact.on_error=retry(3)", lambda x: x.flow.rewards["exact"].source.retries, 3),
        ("exact.function=other:f", lambda x: x.flow.rewards["exact"].source.function, "other:f"),
        ("seed=3", lambda x: x.flow.seed, 3),
        ("stop.steps=3", lambda x: (x.flow.stop_steps, x.flow.stop_epochs), (3, None)),
        ("stop.epochs=2", lambda x: (x.flow.stop_steps, x.flow.stop_epochs), (None, 2)),
        ("save.every=2", lambda x: x.flow.save_every, 2),
    ],
)
def test_path(override: str, read: Callable[[Lowered], Any], value: Any, lower_: Any) -> None:
    before, after = lower_(), lower_(overrides=[override])
    assert read(after) == value
    assert read(before) != value


def test_later_overrides_win(lower_: Any) -> None:
    assert op(lower_(overrides=["batch.count=2", "batch.count=4"]), "batch").count == 4


def test_same_name_of_value_and_reward_means_the_value(lower_: Any) -> None:
    """`actor.train.minibatch` is the call in the step, `actor.layers` the declaration."""
    lowered = lower_(overrides=["actor.train.minibatch=8", "actor.layers=1"])
    assert train(lowered).minibatch == 8
    assert lowered.flow.models["actor"].source.layers == 1


@pytest.mark.parametrize(
    ("override", "says", "help"),
    [
        ("bach.count=8", "`--set`: there is no `bach`", "did you mean `batch.count`?"),
        ("batch.cuont=8", "`--set`: there is no `cuont` in `batch`", "did you mean `batch.count`?"),
        (
            "actor.train.optimizer.l=1",
            "there is no `l` in `actor.train.optimizer`",
            "did you mean `actor.train.optimizer.lr`?",
        ),
        (
            "actor.train.optimzer.lr=1",
            "there is no `optimzer` in `actor.train`",
            "did you mean `actor.train.optimizer.lr`?",
        ),
        ("heldout.anwsers.n=1", "there is no `anwsers` in `heldout`", "did you mean `heldout.answers.n`?"),
        ("stop.step=1", "there is no `step` in `stop`", "did you mean `stop.steps`?"),
        ("stop=1", "`--set stop=...` needs a key: `stop.steps`", ""),
        ("batch=1", "`--set batch=...` needs the argument to set, such as `batch.NAME`", ""),
        ("seed.x=1", "there is no `x` in `seed`", ""),
        ("exact.on_error.times=3", "`exact.on_error` is not written in the file", "`exact.on_error=VALUE`"),
        ("batch", "`--set batch` is not `path=value`", "for example `--set batch.count=8`"),
        ("batch.count=", "is not `path=value`", "for example"),
        ("=3", "is not `path=value`", "for example"),
        ("..=3", "there is no ``", ""),
    ],
)
def test_unknown_path(override: str, says: str, help: str, problems: Any) -> None:
    (error,) = problems(overrides=[override])
    assert error.code == "RLF1011"
    assert says in error.message
    assert help in " ".join(error.help)
    assert bool(help) == bool(error.help)
    assert error.span.file.name == f"--set {override}"
    assert str(error.span) == f"--set {override}:1:1"


@pytest.mark.parametrize(
    ("override", "code", "place"),
    [
        ("batch.count=8 samples", "RLF1005", "8 samples"),
        ("samples.n=8 samples", "RLF1005", "8 samples"),
        ("exact.timeout=5", "RLF1005", "5"),
        ("samples.n=0", "RLF1010", "0"),
        ("samples.n=1e400", "RLF1010", "1e400"),
        ("seed=-1", "RLF1010", "-1"),
        ("seed=1 step", "RLF1005", "1 step"),
        ("group=x", "RLF1001", "x"),
        ("adv.std=flase", "RLF1001", "flase"),
        ("samples.temperature=((", "RLF0002", "(("),
        ('samples.temperature="', "RLF0004", '"'),
        ("samples.temperature=1 1", "RLF0001", "1 1"),
        ("samples.temperature=" + "+".join(["1"] * 3000), "RLF0001", "+".join(["1"] * 3000)),
        ("actor.train.optimizer=3", "RLF1007", "3"),
        ("actor.train.loss=entropi()", "RLF1001", "entropi"),
        ("save.every=0", "RLF1010", "0"),
        ("heldout.every=1 prompt", "RLF1005", "1 prompt"),
    ],
    ids=lambda value: value[:40],
)
def test_bad_value_is_shown_on_the_command_line(override: str, code: str, place: str, problems: Any) -> None:
    (error,) = problems(overrides=[override])
    assert error.code == code
    assert error.span.file.name == f"--set {override}"
    assert error.span.text.strip() == place


def test_every_bad_override_is_reported(problems: Any) -> None:
    assert [d.code for d in problems(overrides=["a=1", "batch.x=1", "seed=1"])] == ["RLF1011", "RLF1011"]


def test_units_may_be_left_out_on_the_command_line_only(problems: Any) -> None:
    assert problems(overrides=["batch.count=4"]) == []
    assert [d.code for d in problems(("8 prompts", "8"))] == ["RLF1005"]


PATHS = [
    "batch",
    "samples",
    "actor",
    "train",
    "optimizer",
    "lr",
    "loss",
    "heldout",
    "answers",
    "every",
    "seed",
    "stop",
    "steps",
    "x",
    "",
]
VALUES = [
    "1",
    "-1",
    "0",
    "1e400",
    "8 prompts",
    "x",
    '"',
    "((",
    "none",
    "true",
    "adamw(lr = 1)",
    "kl()",
    "[1]",
    "a.b",
    "é",
    "1 1",
    "=",
    " ",
]


@given(st.lists(st.sampled_from(PATHS), max_size=4), st.sampled_from(VALUES), st.sampled_from(["=", "==", "", " = "]))
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_override_is_answered(problems: Any, path: list[str], value: str, equals: str) -> None:
    found = problems(overrides=[".".join(path) + equals + value])
    assert all(d.labels for d in found)
    assert all(d.span.file.name.startswith("--set ") for d in found[:1])
