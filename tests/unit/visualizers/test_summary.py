"""The summary says what matters, in at most one screen."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from rlflow.backends.visualizers.summary import (
    MAX_LINES,
    describe_guarantee,
    describe_loss,
    describe_stale,
    summarize,
    summary_text,
)
from rlflow.ir.ops import Entropy, PpoClip, Train
from rlflow.plan import Plan, Program, RunStage, StaleReader


def train_of(plan: Plan) -> Train:
    op = plan.stage("train").op
    assert isinstance(op, Train)
    return op


@pytest.mark.parametrize(
    "words",
    [
        "flow grpo on cluster local",
        "samples.n=8",
        "cpu: 2 CPU workers for Python functions; runs score, grade",
        "weights of actor, reference",
        "generate n=8 max_new=512 temperature=1",
        "wait score",
        "examples/grpo.rlflow:13:3  + insert-weight-edges (weights-changed)",
        "staleness 0",
        "AdamW lr 1e-06",
        "ratio in [0.8, 1.28]",
        "0.001 x KL to the reference in the loss, not in the reward (estimator k3)",
        "temperature 1 in sampling and in the loss",
        "master weights and optimizer fp32, compute bf16",
        "stops after 200 steps; seed 7",
        "checkpoint after every 50 steps",
    ],
)
def test_says(plan: Plan, words: str) -> None:
    assert words in summary_text(plan, width=200)


@pytest.mark.parametrize("width", [40, 80, 112, 200])
def test_fits_the_screen(plan: Plan, width: int) -> None:
    lines = summary_text(plan, width).splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= width


def test_long_lists_are_shortened_and_the_end_stays(plan: Plan) -> None:
    run = plan.programs[0].step[1]
    assert isinstance(run, RunStage)
    step = tuple(run.model_copy(update={"id": f"run.{i}"}) for i in range(100))
    long = plan.model_copy(update={"programs": (Program(pool="main", step=step),)})
    lines = summary_text(long).splitlines()
    assert len(lines) == MAX_LINES
    missing = next(int(line.split()[1]) for line in lines if line.startswith("  ... "))
    assert missing + sum(" run samples " in line for line in lines) == 100
    assert any(line.startswith("stops after") for line in lines)


def test_terminal_and_plain_text_agree(plan: Plan) -> None:
    out = io.StringIO()
    Console(file=out, width=112, no_color=True).print(summarize(plan))
    assert out.getvalue() == summary_text(plan, 112)


def test_loss_without_kl_says_so(plan: Plan) -> None:
    loss = (PpoClip(weight=1.0, clip_low=0.2, clip_high=0.2), Entropy(weight=-0.01))
    text = describe_loss(dataclasses.replace(train_of(plan), loss=loss))
    assert "no KL term" in text
    assert "-0.01 x entropy" in text


def test_stale_channel_states_its_bound(plan: Plan) -> None:
    reader = StaleReader(
        stage="s", steps=1, permitted=3, admit="slack_edf", burst=2, trigger=0.75, carry="partial",
        guarantee="per_sample", worst_age=2, span=plan.stages[0].because.span,
    )  # fmt: skip
    text = describe_guarantee(plan.channels[0].model_copy(update={"stale": (reader,), "transport": "alias"}))
    assert "staleness 1 of 3 allowed, admit slack_edf in bursts of 2, trigger at 75% carry partial" in text
    assert "no sample is older than 2 steps (hard per sample)" in text
    assert "themselves" in text
    loose = reader.model_copy(update={"admit": "count", "guarantee": "aggregate", "worst_age": None})
    assert "no bound on the age of a sample (aggregate only)" in describe_stale(loose)
