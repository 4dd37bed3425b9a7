"""Every rule of the verifier, broken once, beside a flow that breaks none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rlflow.ir.flow import Edge, EdgeKind, Flow, Layout, Placement, Stage
from rlflow.ir.ops import FrozenModel
from rlflow.ir.parser import parse_flow
from rlflow.ir.typesystem import WeightsType
from rlflow.ir.verify import RULES, broken_rules

SOUND = parse_flow(
    """\
flow @f stage=scheduled {} {
  data @d = reasoning_gym {size=9, task="t"}
  model @m = hf {path="m"} trainable
  model @r = frozen {of="m"}
  reward @e = python {function="a:b"}
  evaluation @held every=2
  pool @main = cpu ["local", "local"]
  pool @cpu = functions ["local"]
  %b = take() {count=2, data="d"} : rows<prompt 2 of b; uid:i64> on main slot=0
  %s = generate(prompts=%b) {max_new=4, model="m", n=2} \
: rows<sample 4/2 of s; text:str> on main[dp=2, tp=1, pp=1] slot=1
  %sc = score(samples=%s) {reward="e"} : rows<sample 4/2 of s; score:f32> on cpu slot=2
  %t = train(samples=%s, advantages=%sc) {loss=[], minibatch=4, model="m", optimizer={"kind": "adamw", "lr": 1.0}} \
: weights<m> on main[dp=2, tp=1, pp=1] slot=3
  %held.b = take() {count=null, data="d"} : rows<prompt ? of held.b; uid:i64> on main in @held slot=0
  weights %t -> %s tokens=1
}
"""
)


def change(flow: Flow, node_id: str, **fields: Any) -> Flow:
    return flow.with_nodes(replace(flow.nodes[node_id], **fields))


def change_op(flow: Flow, node_id: str, **fields: Any) -> Flow:
    return change(flow, node_id, op=replace(flow.nodes[node_id].op, **fields))


def with_edges(flow: Flow, *edges: Edge) -> Flow:
    return replace(flow, edges=(*flow.edges, *edges))


Change = Callable[[Flow], Flow]

BROKEN: list[tuple[str, Change, str]] = [
    (
        "_edges_end_at_nodes",
        lambda f: with_edges(f, Edge("b", "x", EdgeKind.ORDER)),
        "edge b -> x names the unknown node x",
    ),
    ("_names_resolve", lambda f: change_op(f, "s", model="x"), "s reads the unknown model x"),
    ("_names_resolve", lambda f: change_op(f, "b", data="x"), "b takes from the unknown data x"),
    ("_names_resolve", lambda f: change_op(f, "sc", reward="x"), "sc calls the unknown reward x"),
    (
        "_names_resolve",
        lambda f: replace(f, models={**f.models, "r": replace(f.models["r"], source=FrozenModel(of="x"))}),
        "model r is frozen from the unknown model x",
    ),
    (
        "_ports_are_single",
        lambda f: with_edges(f, Edge("b", "s", EdgeKind.DATA, "prompts")),
        "port prompts of s has two producers",
    ),
    (
        "_phases_are_acyclic",
        lambda f: with_edges(f, Edge("sc", "b", EdgeKind.ORDER)),
        "phase step: cycle through b, s, sc, t",
    ),
    ("_types_fit_ops", lambda f: change(f, "b", type=WeightsType("m")), "b: take gives RowsType, not weights<m>"),
    ("_types_fit_ops", lambda f: change(f, "t", type=f.nodes["b"].type), "t: train gives WeightsType, not rows<"),
    ("_evaluations_do_not_train", lambda f: change(f, "t", phase="held"), "t trains inside the evaluation held"),
    ("_everything_is_placed", lambda f: change(f, "b", placement=None), "b has no placement"),
    ("_everything_is_placed", lambda f: change(f, "b", placement=Placement("x")), "b is placed on the unknown pool x"),
    ("_models_have_layouts", lambda f: change(f, "s", placement=Placement("main")), "s has a model but no layout"),
    (
        "_layouts_fill_pools",
        lambda f: change(f, "s", placement=Placement("main", Layout(3))),
        "s: layout of 3 ranks on a pool of 2",
    ),
    ("_trained_weights_reach_readers", lambda f: replace(f, edges=f.edges[:-1]), "no weights edge from t to s"),
    (
        "_weights_edges_carry_tokens",
        lambda f: replace(f, edges=(*f.edges[:-1], replace(f.edges[-1], tokens=0))),
        "weights edge t -> s has no initial token",
    ),
    ("_slots_follow_edges", lambda f: change(f, "b", slot=None), "b has no slot"),
    ("_slots_follow_edges", lambda f: change(f, "sc", slot=4), "t (slot 3) runs before its input sc (slot 4)"),
]


def test_sound_flow_breaks_no_rule() -> None:
    assert broken_rules(SOUND) == []


@pytest.mark.parametrize(("rule", "break_it", "says"), BROKEN, ids=lambda part: part if isinstance(part, str) else "")
def test_broken_rule(rule: str, break_it: Change, says: str) -> None:
    broken = break_it(SOUND)
    assert any(problem.startswith(says) for problem in broken_rules(broken)), broken_rules(broken)
    (own,) = (r for rules in RULES.values() for r in rules if r.__name__ == rule)
    assert [p for p in own(broken) if p.startswith(says)], "reported by the rule of that name"


def test_every_rule_is_broken_once() -> None:
    assert {rule for rule, _, _ in BROKEN} == {rule.__name__ for rules in RULES.values() for rule in rules}


def test_rules_of_later_stages_do_not_apply_yet() -> None:
    logical = replace(SOUND, stage=Stage.LOGICAL, pools={})
    assert broken_rules(logical) == []
    assert broken_rules(replace(logical, stage=Stage.PLACED)) != []


def test_a_path_back_through_weights_is_no_cycle() -> None:
    assert SOUND.topological_order("step") == ["b", "s", "sc", "t"]


def test_topological_order_keeps_the_order_of_declaration() -> None:
    order = {node_id: SOUND.nodes[node_id] for node_id in ("t", "held.b", "sc", "s", "b")}
    assert replace(SOUND, nodes=order).topological_order("step") == ["b", "s", "sc", "t"]
    free = replace(SOUND, edges=())
    assert free.topological_order("step") == ["b", "s", "sc", "t"]
    assert replace(free, nodes=order).topological_order("step") == ["t", "sc", "s", "b"]
