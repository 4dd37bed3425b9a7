"""Any layout, model, machine and batch gives a cost or an error of the cost model that says what is wrong."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.cluster import presets
from rlflow.cluster.presets.architecture import architecture
from rlflow.cluster.spec import Cluster, Host
from rlflow.cost.dimensions import dimensions
from rlflow.cost.errors import CostError
from rlflow.cost.lengths import Fixed, Lognormal, Mixture, Trace
from rlflow.cost.machine import machine
from rlflow.cost.pipelines import SCHEDULES
from rlflow.cost.roles import stage_cost
from rlflow.cost.stages import ComputeOptions, EngineOptions, Workload
from rlflow.ir.flow import Layout

MACHINES = [
    machine(Cluster("c", tuple(Host(f"h{i}", device, each, supernode=supernode) for i in range(hosts))))
    for device, each, hosts, supernode in (
        ("h100", 8, 64, None),
        ("ascend_910c", 16, 48, "s"),
        ("ascend_910b", 8, 16, None),
        ("h20", 8, 1, None),
        ("h800", 3, 7, None),
    )
]
RESPONSES = [
    Fixed(0),
    Fixed(1),
    Fixed(50000.5),
    Lognormal.of_mean(1500, 8000),
    Lognormal.of_mean(30000, 32768, 2.0),
    Trace((0.0, 5.0, 4000.0)),
    Mixture(((0.5, Fixed(0)), (0.5, Lognormal.of_mean(100, 4000)))),
]


@st.composite
def layouts(draw, layers):
    """Sizes that mostly fit together, and splits with empty stages."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    layout = Layout(
        dp=pick(1, 2, 3, 8, 64), tp=pick(1, 2, 3, 8, 16), pp=pick(1, 2, 7, 61), cp=pick(1, 2, 3), ep=pick(1, 1, 2, 8),
        etp=pick(1, 1, 2), vp=pick(1, 1, 3), zero=pick(0, 1, 2, 3), sp=pick(True, False),
        recompute=pick("none", "selective", "full"),
    )  # fmt: skip
    parts = layout.pp * layout.vp
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=parts - 1, max_size=parts - 1)))
        layout = replace(layout, split=tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)))
    return layout


@given(st.data(), st.sampled_from(presets.model_names()), st.sampled_from(MACHINES), st.sampled_from(RESPONSES))
@settings(max_examples=120, derandomize=True, deadline=None)
def test_a_cost_or_an_error(data, name, here, response):
    model = dimensions(architecture(name))
    layout = data.draw(layouts(model.layers))
    work = Workload(
        data.draw(st.sampled_from([1, 3, 64, 1000])),
        data.draw(st.sampled_from([Fixed(0), Fixed(77.8), Lognormal.of_mean(100, 2000)])),
        response,
        samples=data.draw(st.sampled_from([1, 4, 16])),
        microbatch_tokens=data.draw(st.sampled_from([1, 1000, 16384, 10**6])),
        minibatch=data.draw(st.sampled_from([0, 1, 100, 10**6])),
    )
    compute = ComputeOptions(
        schedule=data.draw(st.sampled_from([None, None, *SCHEDULES])), skew=data.draw(st.sampled_from([1.0, 2.5]))
    )
    engine = EngineOptions(
        slots=data.draw(st.sampled_from([1, 7, 256])),
        buckets=data.draw(st.sampled_from([(), (1, 8), (256,)])),
        spread=data.draw(st.booleans()),
    )
    role = data.draw(st.sampled_from(["train", "logprobs", "values", "score", "generate"]))
    try:
        cost = stage_cost(role, model, layout, here, work, compute, engine)
    except CostError:
        return  # says what does not fit; any other exception fails this test
    assert isfinite(cost.seconds)
    assert all(seconds >= 0 for _, seconds in cost.parts)
    assert all(isinstance(size, int) and size >= 0 for size in cost.static.named().values())
