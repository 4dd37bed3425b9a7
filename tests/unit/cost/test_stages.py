"""Stages: sums of parts, properties that any machine has, errors that name what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.cluster.presets.architecture import architecture
from rlflow.cluster.spec import Cluster, Host
from rlflow.cost.decode import Speculation
from rlflow.cost.dimensions import dimensions
from rlflow.cost.errors import LayoutError, UnknownFactError, WorkloadError
from rlflow.cost.flops import forward
from rlflow.cost.lengths import Fixed, Lognormal, largest, mean
from rlflow.cost.machine import machine
from rlflow.cost.pipeline_orders import makespan, one_f_one_b
from rlflow.cost.roles import stage_cost
from rlflow.cost.roofline import HALF_SECONDS, memory_seconds
from rlflow.cost.stages import ComputeOptions, EngineOptions, Workload, functions
from rlflow.cost.training import micro_of, stage_seconds
from rlflow.ir.flow import Layout

quick = settings(max_examples=40, derandomize=True, deadline=None)
H100 = machine(Cluster("c", tuple(Host(f"h{i}", "h100", 8) for i in range(64))))
MODELS = {name: dimensions(architecture(name)) for name in ("qwen3_8b", "qwen3_30b_a3b", "deepseek_v3_671b")}
WORK = Workload(64, Fixed(100), Lognormal.of_mean(1500, 8000), samples=8, microbatch_tokens=16384)
ROLES = ("train", "logprobs", "values", "score", "generate")
LAYOUTS = st.builds(
    lambda dp, tp, pp, cp, zero, sp, recompute: Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, zero=zero, sp=sp, recompute=recompute
    ),
    st.sampled_from([1, 2, 4, 16]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(["none", "selective", "full"]),
)


@given(st.sampled_from(ROLES), LAYOUTS, st.sampled_from(["qwen3_8b", "qwen3_30b_a3b"]), st.sampled_from([1, 2, 4]))
@quick
def test_parts_are_all_there_is(role, layout, name, ep):
    if name == "qwen3_30b_a3b" and layout.dp * layout.cp * layout.tp % ep == 0:
        layout = replace(layout, ep=ep)
    cost = stage_cost(role, MODELS[name], layout, H100, WORK)
    assert cost.seconds == pytest.approx(sum(seconds for _, seconds in cost.parts))
    assert cost.seconds > 0
    assert all(seconds >= 0 for _, seconds in cost.parts)
    assert cost.peak_bytes == sum(cost.static.named().values()) > 0
    assert cost == stage_cost(role, MODELS[name], layout, H100, WORK)


@given(st.sampled_from(["train", "logprobs", "values"]), LAYOUTS)
@quick
def test_more_replicas_never_compute_longer(role, layout):
    """Products, attention and element-wise traffic with twice the data-parallel replicas."""
    model = MODELS["qwen3_8b"]
    few, many = (stage_cost(role, model, replace(layout, dp=dp), H100, WORK) for dp in (layout.dp, 2 * layout.dp))
    for name in ("products", "attention", "elementwise"):
        assert many.part(name) <= few.part(name) * (1 + 1e-9)


@given(st.sampled_from(["train", "logprobs", "values"]), LAYOUTS)
@quick
def test_more_tensor_parallel_never_computes_longer(role, layout):
    model = MODELS["qwen3_8b"]
    few, many = (stage_cost(role, model, replace(layout, tp=tp), H100, WORK) for tp in (layout.tp, 2 * layout.tp))
    for name in ("products", "attention", "elementwise"):
        assert many.part(name) <= few.part(name) * (1 + 1e-9)


@given(LAYOUTS)
@quick
def test_more_engines_never_generate_longer(layout):
    model = MODELS["qwen3_8b"]
    few, many = (stage_cost("generate", model, replace(layout, dp=dp), H100, WORK) for dp in (layout.dp, 2 * layout.dp))
    for name in ("prefill", "decode_kv", "decode_weights"):
        assert many.part(name) <= few.part(name) * 1.02


@given(LAYOUTS, st.sampled_from(["qwen3_8b", "qwen3_30b_a3b"]))
@quick
def test_products_are_at_least_the_flops(layout, name):
    """Seconds of a pass times devices are no less than its FLOPs at peak."""
    cost = stage_cost("logprobs", MODELS[name], layout, H100, WORK)
    least = forward(MODELS[name], WORK.tokens, WORK.squares) / (layout.size * 989e12)
    assert cost.part("products") + cost.part("attention") + cost.part("bubble") >= least


@given(LAYOUTS)
@quick
def test_order_of_passes(layout):
    """Training takes longer than log-probabilities, recomputing longer than keeping, a vocabulary longer than a value."""
    model = MODELS["qwen3_8b"]
    train = stage_cost("train", model, replace(layout, recompute="none"), H100, WORK)
    again = stage_cost("train", model, replace(layout, recompute="full"), H100, WORK)
    logprobs = stage_cost("logprobs", model, layout, H100, WORK)
    values = stage_cost("values", model, layout, H100, WORK)
    assert again.seconds > train.seconds > logprobs.seconds
    assert logprobs.part("products") > values.part("products")
    assert again.static.activations < train.static.activations


def test_bubble_is_that_of_the_order():
    """Stages of one pipeline, unequal by its head: the closed form is what working off 1F1B gives, within a percent."""
    model, layout = MODELS["qwen3_8b"], Layout(pp=4)
    work = Workload(64, Fixed(0), Fixed(2048), microbatch_tokens=2048)
    stages = stage_seconds(model, layout, H100, micro_of(layout, work), ComputeOptions())
    cost = stage_cost("train", model, layout, H100, work)
    order = one_f_one_b(4, 64)
    took = makespan(order, lambda kind, rank, chunk: stages[rank] * {"F": 1 / 3, "B": 2 / 3, "W": 0.0}[kind])
    once = cost.part("optimizer") + cost.part("data_parallel")
    assert cost.seconds - once == pytest.approx(took, rel=0.01)


def test_training_by_hand():
    """One replica, one micro-batch, no parallelism: products at their share of peak, an affine size of product."""
    model = MODELS["qwen3_8b"]
    work = Workload(1, Fixed(0), Fixed(8192), microbatch_tokens=8192)
    eta = H100.calibration.knobs.train_dense
    cost = stage_cost("train", model, Layout(), H100, work)
    body = 2 * 36 * (4096 * 128 * 48 + 32 * 128 * 4096 + 3 * 4096 * 12288) * 8192
    head = 2 * 4096 * 151936 * 8192
    logits = memory_seconds(8 * 8192 * 151936, 3.35e12, 0.9)
    seconds = (body / 989e12 + 4 * 36 * HALF_SECONDS + head / 989e12 + HALF_SECONDS) / eta + logits
    assert cost.part("products") == pytest.approx(3 * seconds)
    attention = (2 * 32 * 128 * 36 * 8192**2 / 989e12 + 36 * HALF_SECONDS) / eta
    assert cost.part("attention") == pytest.approx(3 * attention)
    params = architecture("qwen3_8b").params()
    assert cost.part("optimizer") == pytest.approx(params * 30 / 3.35e12 / 0.9, rel=0.01)


def test_updates():
    """Four minibatches and two epochs: eight updates, each with its optimizer."""
    model, layout = MODELS["qwen3_8b"], Layout(dp=8)
    once = stage_cost("train", model, layout, H100, replace(WORK, minibatch=128))
    all_at_once = stage_cost("train", model, layout, H100, WORK)
    twice = stage_cost("train", model, layout, H100, replace(WORK, minibatch=128, epochs=2))
    assert twice.seconds == pytest.approx(2 * once.seconds)
    assert once.part("optimizer") == pytest.approx(4 * all_at_once.part("optimizer"))
    assert once.part("products") >= all_at_once.part("products") * 0.99


def test_generation_by_hand():
    """One engine, two equal requests: 100 steps of tau(2, K) with K growing by 2, and a prefill of the shared prompt."""
    model = MODELS["qwen3_8b"]
    work = Workload(1, Fixed(50), Fixed(100), samples=2)
    cost = stage_cost("generate", model, Layout(), H100, work)
    rate = 3.35e12 * H100.calibration.knobs.decode_memory
    read = (architecture("qwen3_8b").params() - 151936 * 4096) * 2 / rate
    assert cost.part("decode_weights") == pytest.approx(100 * read)
    assert cost.part("decode_kv") == pytest.approx(147_456 / (rate * 0.74) * 2 * (50 * 100 + 100 * 100 / 2))
    knobs = H100.calibration.knobs
    assert cost.part("decode_host") == pytest.approx(100 * (36 * knobs.host_layer_s + knobs.host_step_s + 2 * 4e-6))
    alone = stage_cost("generate", model, Layout(), H100, work, engine=EngineOptions(shared_prefix=False))
    assert alone.part("prefill") == pytest.approx(2 * cost.part("prefill"), rel=1e-6)


def test_experts_are_products_of_their_own():
    """Eight times the expert ranks have an eighth of the experts: 24 more products on one stream of four, so the fixed
    part of each of 48 layers falls from 2 x 128/4 to 2 x 16/4 products, forward and twice that backward."""
    model, work = MODELS["qwen3_30b_a3b"], Workload(8, Fixed(0), Fixed(4096), microbatch_tokens=4096)
    alone, spread = (stage_cost("train", model, Layout(dp=8, ep=ep), H100, work).part("products") for ep in (1, 8))
    eta = H100.calibration.knobs.train_moe
    assert alone - spread == pytest.approx(3 * 48 * (2 * 32 - 2 * 4) * HALF_SECONDS / eta)


def test_generation_ends_with_the_longest():
    """Host and weights of a dense model cost the same in every step: steps are E[max] over all engines."""
    model = MODELS["qwen3_8b"]
    cost = stage_cost("generate", model, Layout(dp=16), H100, WORK)
    step = stage_cost("generate", model, Layout(), H100, Workload(1, Fixed(100), Fixed(1))).part("decode_weights")
    steps = largest(WORK.response, 64, 8)
    assert cost.part("decode_weights") == pytest.approx(steps * step, rel=1e-6)
    assert steps > 3 * mean(WORK.response)


def test_slots_and_cache_make_requests_wait():
    model = MODELS["qwen3_8b"]
    free = stage_cost("generate", model, Layout(), H100, WORK, engine=EngineOptions(slots=512))
    slots = stage_cost("generate", model, Layout(), H100, WORK, engine=EngineOptions(slots=64))
    assert slots.part("decode_weights") > 1.3 * free.part("decode_weights")
    tight = stage_cost("generate", model, Layout(), H100, WORK, engine=EngineOptions(slots=512, memory_share=0.35))
    assert tight.part("decode_weights") > 1.3 * free.part("decode_weights")
    assert tight.peak_bytes < free.peak_bytes <= 80e9 * 0.9


def test_a_model_that_does_not_fit_is_over_its_memory():
    cost = stage_cost("generate", MODELS["deepseek_v3_671b"], Layout(tp=8), H100, WORK)
    assert cost.peak_bytes > H100.memory_bytes


def test_samples_of_a_prompt_on_one_engine_are_less_balanced():
    model = MODELS["qwen3_8b"]
    spread, grouped = (
        stage_cost("generate", model, Layout(dp=16), H100, WORK, engine=EngineOptions(spread=flag))
        for flag in (True, False)
    )
    assert grouped.part("decode_imbalance") > spread.part("decode_imbalance") > 0


def test_speculation_shortens_decoding_only():
    model, spec = MODELS["qwen3_8b"], Speculation(2, 0.5, 0.1, 0.05)
    plain = stage_cost("generate", model, Layout(dp=8), H100, WORK)
    faster = stage_cost("generate", model, Layout(dp=8), H100, WORK, engine=EngineOptions(speculation=spec))
    assert faster.part("prefill") == plain.part("prefill")
    assert (plain.seconds - plain.part("prefill")) / (faster.seconds - faster.part("prefill")) == pytest.approx(
        spec.speed_up
    )


def test_capping_shortens():
    model = MODELS["qwen3_8b"]
    capped = WORK.capped(2000)
    assert capped.longest == 2100
    assert (
        stage_cost("generate", model, Layout(), H100, capped).seconds
        < stage_cost("generate", model, Layout(), H100, WORK).seconds
    )


def test_virtual_stages_and_zero_bubble_shrink_the_bubble():
    model, work = MODELS["qwen3_8b"], replace(WORK, microbatch_tokens=8100)
    plain = stage_cost("train", model, Layout(pp=4), H100, work)
    virtual = stage_cost("train", model, Layout(pp=4, vp=3), H100, work)
    zero = stage_cost("train", model, Layout(pp=4), H100, work, ComputeOptions(schedule="zb1p"))
    assert virtual.part("bubble") < plain.part("bubble") / 2
    assert zero.part("bubble") < plain.part("bubble") * 0.7


def test_skew_costs_time_and_memory():
    layout = Layout(dp=8, ep=8)
    even, skewed = (
        stage_cost("train", MODELS["qwen3_30b_a3b"], layout, H100, WORK, ComputeOptions(skew=s)) for s in (1.0, 2.0)
    )
    assert skewed.part("products") > even.part("products")
    assert skewed.part("expert_parallel") > even.part("expert_parallel")
    assert skewed.static.activations > even.static.activations


def test_fsdp_gathers_behind_computing():
    model = MODELS["qwen3_8b"]
    large = stage_cost("train", model, Layout(dp=64, zero=3), H100, replace(WORK, microbatch_tokens=65536))
    tiny = stage_cost(
        "train", model, Layout(dp=64, zero=3), H100, Workload(64, Fixed(10), Fixed(10), microbatch_tokens=20)
    )
    assert tiny.part("sharded_weights") > 0.5 * tiny.seconds
    assert large.part("sharded_weights") < 0.5 * large.seconds
    assert large.static.buffers > 0


def test_functions():
    cost = functions(100, 0.5, 8, call_s=0.001)
    assert cost.seconds == pytest.approx(13 * 0.5 + 0.1)
    with pytest.raises(WorkloadError):
        functions(1, 0.5, 0)


@pytest.mark.parametrize("role", ROLES)
def test_wrong_layouts_are_named(role):
    with pytest.raises(LayoutError, match="does not divide the 36 layers"):
        stage_cost(role, MODELS["qwen3_8b"], Layout(pp=5), H100, WORK)
    with pytest.raises(LayoutError, match="at least 1"):
        stage_cost(role, MODELS["qwen3_8b"], Layout(dp=0), H100, WORK)


@pytest.mark.parametrize("role", ["train", "logprobs", "generate"])
def test_missing_links_are_named(role):
    """H20's network between hosts is not known: 8 devices are enough for tp 8, not for tp 16."""
    h20 = machine(Cluster("c", (Host("a", "h20", 8), Host("b", "h20", 8))))
    assert stage_cost(role, MODELS["qwen3_8b"], Layout(tp=8), h20, WORK).seconds > 0
    with pytest.raises(UnknownFactError, match="`h20` has no fact `scaleout_bytes_per_s`"):
        stage_cost(role, MODELS["qwen3_8b"], Layout(tp=16), h20, WORK)


@pytest.mark.parametrize(
    "bad", [{"prompts": 0}, {"samples": 0}, {"minibatch": -1}, {"microbatch_tokens": 0}, {"epochs": 0}]
)
def test_impossible_batches(bad):
    with pytest.raises(WorkloadError):
        replace(WORK, **bad)


def test_imports_stay_light():
    """Nothing heavy at import: the compiler loads this for the smallest program."""
    code = "import sys, json; import rlflow.cost.roles, rlflow.cost.links, rlflow.cost.sync, rlflow.cost.pipeline_orders; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert not {"numpy", "scipy", "torch", "ray", "networkx", "statistics"} & set(loaded)
