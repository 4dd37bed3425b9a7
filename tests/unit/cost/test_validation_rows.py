"""Published runs: what the file promises, how rows are read, what is assumed of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.validation.compose import step_of
from benchmarks.validation.hardware import machine_of, model_named
from benchmarks.validation.layouts import devices_of, engine_options, even_split, rollout_layout, train_layout
from benchmarks.validation.lengths import implied
from benchmarks.validation.observe import compare
from benchmarks.validation.predict import logprob_passes, predict
from benchmarks.validation.runs import Run, run, runs
from benchmarks.validation.workloads import workload_of
from rlflow.cost.knobs import calibration
from rlflow.cost.lengths import mean
from rlflow.ir.flow import Layout


def changed(name: str, **columns: str) -> Run:
    return Run({**run(name).text, **columns})


def test_rows_agree_with_themselves():
    """Throughputs follow from tokens and steps, and stages fit into their step."""
    assert len(runs()) == 48
    for each in runs():
        prompt, response = each.number("mean_prompt_tokens"), each.number("mean_response_tokens")
        step, rate = each.number("step_s"), each.number("throughput_tokens_per_s_per_device")
        if prompt and response and step and rate and each.id not in ("N6", "N16", "N19"):
            batch = (each.count("prompts_per_step") or 0) * (each.count("samples_per_prompt") or 0)
            ours = batch * (prompt + response) / step / (each.count("n_devices") or 1)
            assert ours == pytest.approx(rate, rel=0.01), each.id
        if each.is_synchronous and step and each.text["placement"] == "colocated":
            assert sum(each.published.values()) <= step, each.id
        wait = each.number("trainer_wait_s")
        if wait is not None and step and each.id != "V4":
            stages = each.published
            assert wait + stages.get("old_logprob", 0) + stages["update"] <= step, each.id


def layouts(name: str) -> tuple[Layout, Layout]:
    each = run(name)
    model = model_named(each.text["model"])
    assert model is not None
    return rollout_layout(each, model), train_layout(each, model)


def test_layouts_that_rows_state():
    engine, trainer = layouts("C1")
    assert engine == Layout(dp=128, tp=2, ep=128)
    assert trainer == Layout(dp=8, tp=4, pp=8, ep=8, split=(7, 7, 8, 8, 8, 8, 8, 7), sp=True, zero=1, recompute="full")
    engine, trainer = layouts("N9")
    assert (engine.dp, engine.tp, engine.etp, engine.ep) == (32, 2, 2, 1)
    assert (trainer.dp, trainer.ep) == (128, 8)
    assert layouts("G3")[1] == Layout(tp=8, pp=35, vp=3, sp=True, zero=1, recompute="full")


def test_layouts_that_rows_leave_open():
    """7B weights take 16 % of an H20, 30B 64 %: one and two devices an engine. FSDP shards over all trainers."""
    assert layouts("V1") == (Layout(dp=32), Layout(dp=32, zero=3, recompute="full"))
    engine, trainer = layouts("V10")
    assert (engine.dp, engine.tp) == (64, 2)
    assert (trainer.dp, trainer.ep) == (128, 8)
    assert layouts("C7")[0] == Layout(dp=32, tp=4, ep=128)
    # 16 devices for both sides, and experts over 16 trainers: halves, and as many as there are.
    assert devices_of(run("N18"), "train") == devices_of(run("N18"), "rollout") == 8
    assert layouts("N18")[1].ep == 8


def test_engines():
    model = model_named("Qwen3-235B-A22B")
    assert model is not None
    whole, some, few = (engine_options(run(name), model) for name in ("C7", "C8", "C6"))
    assert whole.buckets == (256,)
    assert some.buckets[0] == 1
    assert some.buckets[-1] == some.slots == 256
    assert not some.spread
    assert few.slots == few.buckets[-1] == 8
    assert few.spread  # 64 prompts, 128 engines


@given(st.integers(1, 200), st.integers(1, 40))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_even_splits(layers, parts):
    split = even_split(layers, parts)
    assert len(split) == parts
    assert sum(split) == layers
    assert max(split) - min(split) <= 1
    assert split[0] == min(split)


def test_batches():
    work = workload_of(run("N9"))
    assert work is not None
    assert (work.rows, work.minibatch, work.microbatch_tokens) == (2048, 512, 4096)
    assert mean(work.response) == pytest.approx(3206, rel=1e-3)
    assert work.response.maximum == 4096 - 109
    work = workload_of(run("G1"))
    assert work is not None
    assert work.tokens == 4 * 2048  # no prompts, and every sequence is full
    work = workload_of(run("V1"), 1500.0)
    assert work is not None
    assert work.minibatch == 32 * 16
    assert workload_of(run("V1")) is None
    assert workload_of(run("V12"), 1500.0) is None


def test_machines():
    """A card of the 910C is two dies of one supernode; GB200 has hosts of 4 in racks of 72."""
    assert devices_of(run("C1"), "train") == 256
    assert machine_of(run("C1"), 256).supernode_devices == 256
    rack = machine_of(run("N11"), 128)
    assert (rack.host_devices, rack.supernode_devices) == (4, 72)
    with pytest.raises(ValueError, match="no facts of the device TPU"):
        machine_of(changed("C1", device="TPU"), 8)


def test_passes():
    assert logprob_passes(run("C1")) == ("ref_logprob",)
    assert logprob_passes(run("N1")) == ("old_logprob", "ref_logprob")
    assert logprob_passes(run("V1")) == ("old_logprob",)
    assert logprob_passes(run("V5")) == ()


def test_steps_by_hand():
    """Rollout 100, training 60, sync 6, nothing outside of stages."""
    stages, free = {"rollout": 100.0, "update": 60.0, "reshard": 6.0}, calibration("nvidia").override(step_residual=0.0)
    steps = {
        ("synchronous", "0"): 166,
        ("one_step_off", "1"): 106,
        ("bounded_async", "1"): 83,
        ("bounded_async", "2"): 66,  # the trainer's own cycle
        ("fully_async", "0.5"): 166 / 1.5,
        ("streaming", "0"): 100 + 60 / 16 + 6,
    }
    for (mode, bound), expected in steps.items():
        row = changed("V5", mode=mode, staleness_batches=bound)
        assert step_of(row, stages, free) == pytest.approx(expected), mode
    assert step_of(changed("N6", staleness_batches="1"), stages, free) == 100  # one batch under way
    assert step_of(changed("V5"), stages, free, saturated=300.0) == 300
    assert step_of(run("V5"), {"rollout": 100.0}, free) is None
    assert step_of(changed("V5", mode="synchronous"), stages, free.override(step_residual=0.2)) == pytest.approx(207.5)


def test_mean_lengths_from_a_published_time():
    """The anchor's prediction is its published time, for every row of the workload in one placement."""
    found = implied(run("V1"))
    assert found is not None
    assert (found.anchor, found.column) == ("V1", "update_s")
    assert predict(run("V1"), None, found.tokens).stages["update"] == pytest.approx(269.8, rel=1e-3)
    assert implied(run("V3")) == found
    other = implied(run("V7"))
    assert other is not None
    assert other.anchor == "V5"
    assert implied(run("C1")) is None
    assert implied(run("V12")) is None  # no batch


def test_speculation_and_precision_matter():
    """Multi-token prediction shortens a rollout by less than what is accepted; 8-bit weights are read faster."""
    with_it = predict(run("N1")).stages["rollout"]
    without = predict(changed("N1", note="")).stages["rollout"]
    assert 1.0 < without / with_it < 1.85
    assert predict(run("N10")).stages["rollout"] < predict(changed("N10", rollout_dtype="bf16")).stages["rollout"]


def test_recomputing_some_layers():
    """4 layers of each of 8 stages of 61: between none and all."""
    some, every, none = (
        predict(changed("C1", note=note)).stages["update"]
        for note in ("4 layers recomputed", "", "0 layers recomputed")
    )
    assert some == pytest.approx(none + 32 / 61 * (every - none))


def test_a_row_that_the_model_refuses_keeps_the_reason():
    found = compare(changed("C1", rollout_layout="dp128 tp2 ep100"))
    assert found.step is None
    assert found.stages == ()
    assert "ep 100" in found.problem
    assert compare(run("C1")).problem == ""
