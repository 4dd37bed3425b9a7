"""Published runs. The Megatron rows must agree within 10 % under one knob; of the RL rows the lengths' variances, the
recomputation and the micro-batches are not published, so they bound the model more loosely. Row ids are those in
calibration.toml."""

from __future__ import annotations

import pytest

from rlflow.cluster.presets.architecture import architecture
from rlflow.cluster.spec import Cluster, Host
from rlflow.cost.dimensions import dimensions
from rlflow.cost.knobs import calibration
from rlflow.cost.lengths import Fixed, Lognormal
from rlflow.cost.machine import machine
from rlflow.cost.roles import stage_cost, synchronous_step
from rlflow.cost.stages import ComputeOptions, EngineOptions, Workload
from rlflow.ir.flow import Layout

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def supernode(hosts):
    return machine(Cluster("c", tuple(Host(f"h{i}", "ascend_910c", 16, supernode="s") for i in range(hosts))))


@pytest.mark.parametrize(
    ("h", "l", "n", "layout", "sequences", "budget", "hosts", "full", "selective"),
    [
        (6144, 48, 64, {"tp": 8}, 4, 4 * 2048, 1, 1.42, 1.10),
        (20480, 105, 128, {"tp": 8, "pp": 35, "vp": 3}, 280, 2048, 35, 49.05, 37.83),
    ],
    ids=["G1", "G3"],
)
def test_megatron(plain_gpt, h, l, n, layout, sequences, budget, hosts, full, selective):  # noqa: E741
    """Seconds of an iteration, with full recompute and with selective recompute and sequence parallelism."""
    a100 = machine(Cluster("c", tuple(Host(f"h{i}", "a100", 8) for i in range(hosts))))
    work = Workload(sequences, Fixed(0), Fixed(2048), microbatch_tokens=budget)
    options = ComputeOptions(flash=False)
    gpt = plain_gpt(h, l, n)
    ours = stage_cost("train", gpt, Layout(**layout, recompute="full"), a100, work, options)
    assert ours.seconds == pytest.approx(full, rel=0.10)
    ours = stage_cost("train", gpt, Layout(**layout, recompute="selective", sp=True), a100, work, options)
    assert ours.seconds == pytest.approx(selective, rel=0.10)


C1 = Workload(512, Fixed(77.8), Lognormal.of_mean(1576.6, 3072), samples=16, microbatch_tokens=4096)
C3 = Workload(512, Fixed(73.7), Lognormal.of_mean(7344.973, 32768), samples=16, microbatch_tokens=32768)
CANN = [
    # model, work, hosts of 16 dies, train layout, rollout layout and slots; seconds: update, reference, rollout
    pytest.param(
        "deepseek_v3_671b", C1, 16,
        {"dp": 8, "tp": 4, "pp": 8, "ep": 8, "split": (7, 7, 8, 8, 8, 8, 8, 7)},
        Layout(dp=128, tp=2, ep=128), 64, 319.3, 144.5, 373.65, id="C1",
    ),
    pytest.param(
        "qwen3_235b_a22b", C3, 8,
        {"dp": 2, "tp": 4, "pp": 4, "cp": 4, "ep": 32, "split": (24, 24, 23, 23)},
        Layout(dp=32, tp=4, ep=128), 256, 2353.23, 1262.269, 4065.71, id="C3",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "work", "hosts", "train", "rollout", "slots", "update", "reference", "generated"), CANN
)
def test_rl_steps(name, work, hosts, train, rollout, slots, update, reference, generated):
    model, here = dimensions(architecture(name)), supernode(hosts)
    least, most = (
        stage_cost("train", model, Layout(**train, sp=True, zero=1, recompute=again), here, work).seconds
        for again in ("none", "full")
    )
    assert least * 0.9 < update < most  # some of the layers are computed again
    # What C3 computes again is not published, so neither is how its update and its reference pass go together.
    assert stage_cost("logprobs", model, Layout(**train, sp=True), here, work).seconds == pytest.approx(
        reference, rel=0.30
    )
    # Of C1's rollout less than 60 % was the model's own computation, and that is what is modelled.
    ours = stage_cost("generate", model, rollout, here, work, engine=EngineOptions(slots=slots, buckets=BUCKETS))
    assert 0.55 < ours.seconds / generated < 1.05


def rollout(layout, work, slots, buckets):
    model = dimensions(architecture("qwen3_235b_a22b"))
    return stage_cost(
        "generate", model, layout, supernode(8), work, engine=EngineOptions(slots=slots, buckets=buckets)
    ).seconds


def test_tensor_parallel_rollouts():
    """C5, C6: tp4 of 32 engines takes 1369 s, tp1 of 128 1614 s."""
    work = Workload(64, Fixed(76.3), Lognormal.of_mean(6345, 32768), samples=16)
    split = rollout(Layout(dp=32, tp=4, ep=128), work, 32, BUCKETS)
    whole = rollout(Layout(dp=128, tp=1, ep=128), work, 8, BUCKETS)
    assert split == pytest.approx(1369.4, rel=0.3)
    assert whole == pytest.approx(1614.2, rel=0.3)
    assert whole / split == pytest.approx(1614.2 / 1369.4, rel=0.1)


def test_slots_and_graph_buckets_of_rollouts():
    """C9, C10, C7, C8: 48, 64 and 256 slots without buckets 9123, 8145, 6836 s; 256 with buckets 4919 s.

    What slots and buckets save is right within 15 %, separately. (Not together: here 256 slots without buckets are as
    slow as 48; docs/validation.md says why, and why the level is half of the published one.)
    """
    work = Workload(512, Fixed(73.7), Lognormal.of_mean(7100, 30720), samples=16)
    layout = Layout(dp=32, tp=4, ep=128)
    few, more, padded, bucketed = (
        rollout(layout, work, slots, buckets)
        for slots, buckets in ((48, (48,)), (64, (64,)), (256, (256,)), (256, BUCKETS))
    )
    assert few / more == pytest.approx(9123.3 / 8145, rel=0.15)
    assert padded / bucketed == pytest.approx(6836.2 / 4918.9, rel=0.15)
    assert bucketed < more
    for mine, theirs in ((few, 9123.3), (more, 8145), (padded, 6836.2), (bucketed, 4918.9)):
        assert 0.4 < mine / theirs < 1.1


@pytest.mark.parametrize(
    ("family", "stages", "step"),
    [
        ("ascend", (373.65, 144.5, 5.0, 0.21, 319.3, 11.5, 5.5), 859.68),
        ("ascend", (4065.71, 1262.269, 21.538, 1.654, 2353.23), 7780.36),
        ("nvidia", (357.41, 107.71, 269.8), 790.1),
        ("nvidia", (177.85, 53.92, 113.81), 356.3),
        ("nvidia", (348.05, 28.73, 20.86, 86.27), 497.89),
        ("nvidia", (321, 88, 286), 749),
        ("nvidia", (207, 119, 344), 699),
    ],
    ids=["C1", "C3", "V1", "V3", "V10", "V12", "V14"],
)
def test_steps_from_published_stages(family, stages, step):
    """Synchronous steps: what is in no stage is 0 to 7 % of the step."""
    assert synchronous_step(stages, calibration(family)) == pytest.approx(step, rel=0.05)
    assert synchronous_step(stages, calibration(family).override(step_residual=0.0)) <= step
