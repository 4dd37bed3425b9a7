"""The orders of all phases at once, against the definition: at every step the first node that waits for none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.ir.flow import Edge, EdgeKind, Flow, Node, Stage
from rlflow.ir.ops import Take
from rlflow.ir.order import phase_orders
from rlflow.ir.typesystem import WeightsType
from rlflow.ir.verify import broken_rules

PHASES = ("step", "held", "test")


@st.composite
def flows(draw: st.DrawFn) -> Flow:
    """Small flows of any shape: cycles, edges between phases, to nowhere, double, from a node to itself."""
    ids = draw(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8))
    ends = st.sampled_from([*ids, "nowhere"])
    nodes = {i: Node(i, Take(data="d", count=None), WeightsType("m"), phase=draw(st.sampled_from(PHASES))) for i in ids}
    edge = st.builds(Edge, ends, ends, st.sampled_from(EdgeKind), st.sampled_from(["", "p"]), st.integers(0, 1))
    edges = tuple(draw(st.lists(edge, max_size=10)))
    return Flow("f", Stage.LOGICAL, {}, {}, {}, nodes, edges)


def plainly(flow: Flow, phase: str) -> tuple[list[str], list[str]]:
    """The order as far as it goes, and the ids that are left."""
    left = [node.id for node in flow.nodes.values() if node.phase == phase]
    order: list[str] = []
    while True:
        waits = {
            e.dst
            for e in flow.edges
            if e.kind is not EdgeKind.WEIGHTS and e.tokens == 0 and e.src in left and e.dst in left
        }
        free = [node_id for node_id in left if node_id not in waits]
        if not free:
            return order, sorted(left)
        order.append(free[0])
        left.remove(free[0])


@settings(max_examples=200, deadline=None)
@given(flows())
def test_orders_are_those_of_the_definition(flow: Flow) -> None:
    orders, stuck = phase_orders(flow)
    for phase in (*PHASES, "none"):
        order, left = plainly(flow, phase)
        if left:
            assert stuck[phase] == left
            assert phase not in orders
            with pytest.raises(ValueError, match="cycle through " + ", ".join(left)):
                flow.topological_order(phase)
        else:
            assert orders.get(phase, []) == order == flow.topological_order(phase)
            assert phase not in stuck


def test_the_verifier_names_the_phase_and_the_cycle() -> None:
    nodes = {i: Node(i, Take(data="d", count=None), WeightsType("m")) for i in "ab"}
    flow = Flow(
        "f", Stage.LOGICAL, {}, {}, {}, nodes, (Edge("a", "b", EdgeKind.DATA, "p"), Edge("b", "a", EdgeKind.ORDER))
    )
    assert "phase step: cycle through a, b" in broken_rules(flow)
    assert not any("cycle" in rule for rule in broken_rules(replace(flow, edges=flow.edges[:1])))
