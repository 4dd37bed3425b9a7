"""Bounds against all groups of devices; the same plan in every process; nothing heavy imported before it is needed."""

from __future__ import annotations

import subprocess
import sys
from itertools import chain, combinations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlflow.reshard.atoms import AtomClass, Part
from rlflow.reshard.bounds import lower_bounds
from rlflow.reshard.endpoint import Fabric
from rlflow.reshard.routes import deliveries
from rlflow.reshard.sources import choose_sources

quick = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@st.composite
def flows(draw):
    n = draw(st.integers(2, 6))
    some = st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True).map(lambda d: tuple(sorted(d)))
    sizes = draw(st.lists(st.integers(64, 2000), min_size=1, max_size=4))
    classes = tuple(AtomClass(draw(some), draw(some), (Part(("w",), (((0, size),),)),)) for size in sizes)
    node_of = tuple(device // draw(st.sampled_from([2])) for device in range(n))
    speeds = tuple(draw(st.sampled_from([1.0, 2.0, 4.0])) for _ in range(n))
    return classes, Fabric(node_of, speeds, {node: draw(st.sampled_from([1.0, 3.0])) for node in sorted(set(node_of))})


def subsets(items):
    return chain.from_iterable(combinations(items, size) for size in range(1, len(items) + 1))


def exhaustive(classes, bandwidth, holders, needers):
    """The largest bytes / bandwidth over all groups: what only the group holds and somebody outside it needs."""
    best = 0.0
    for group in map(set, subsets(sorted(bandwidth))):
        size = sum(c.elements for c in classes if holders(c) <= group and needers(c) - group)
        best = max(best, size / sum(bandwidth[m] for m in group))
    return best


@quick
@given(flows())
def test_the_source_bound_is_valid_and_no_weaker_than_each_class_alone(case):
    classes, fabric = case
    devices, nodes = dict(enumerate(fabric.device_bandwidth)), dict(fabric.node_bandwidth)

    def held(c):
        return set(c.holders)

    def wanted(c):
        return set(c.needers) - held(c)

    def held_nodes(c):
        return {fabric.node_of[d] for d in c.holders}

    def wanted_nodes(c):
        return {fabric.node_of[d] for d in c.needers} - held_nodes(c)

    bounds = lower_bounds(classes, fabric, 1)
    true = max(exhaustive(classes, devices, held, wanted), exhaustive(classes, nodes, held_nodes, wanted_nodes))
    assert bounds.source_seconds <= true * (1 + 1e-12)
    for c in classes:
        if wanted(c):
            assert bounds.source_seconds >= c.elements / sum(devices[d] for d in c.holders) * (1 - 1e-12)
        if wanted_nodes(c):
            assert bounds.source_seconds >= c.elements / sum(nodes[n] for n in held_nodes(c)) * (1 - 1e-12)


@quick
@given(flows(), st.booleans())
def test_what_sources_send_is_near_the_fractional_optimum(case, multicast):
    """First-hand sending only: the linear program is solved again, densely and by itself."""
    from scipy.optimize import linprog

    classes, fabric = case
    found = deliveries(classes, fabric)
    if not found:
        return
    routes, loads, method = choose_sources(classes, found, fabric, multicast=multicast, min_elements=1)
    for route in routes:
        assert [share.low for share in route.shares] == [0, *(share.high for share in route.shares[:-1])]
        assert route.shares[-1].high == 1 << 16
    if multicast or method == "forced":
        return
    columns = [(i, s) for i, d in enumerate(found) for s in d.sources]
    rows = []
    for device in range(len(fabric.node_of)):
        rows.append(
            [found[i].receivers / fabric.device_bandwidth[device] if s == device else 0.0 for i, s in columns] + [-1.0]
        )
    for node, speed in fabric.node_bandwidth.items():
        rows.append(
            [found[i].receivers / speed if fabric.node_of[s] == node and found[i].remote else 0.0 for i, s in columns]
            + [-1.0]
        )
    equal = [[float(i == d) for i, _ in columns] + [0.0] for d in range(len(found))]
    sizes = [classes[d.number].elements for d in found]
    best = linprog([0.0] * len(columns) + [1.0], rows, [0.0] * len(rows), equal, sizes).fun
    sent = max(
        *(n / fabric.device_bandwidth[d] for d, n in loads.device_out.items()),
        *(n / fabric.node_bandwidth[n_] for n_, n in loads.node_out.items()),
        0.0,
    )
    received = max(
        max(n / fabric.device_bandwidth[d] for d, n in loads.device_in.items()),
        max((n / fabric.node_bandwidth[n_] for n_, n in loads.node_in.items()), default=0.0),
    )
    assert sent >= best - 1e-6
    assert max(sent, received) <= max(best, received) + 8 * len(found)  # rows and shares are whole numbers


PLAN = """
import hashlib
from rlflow.cluster.presets.architecture import Architecture, architecture
from rlflow.ir.flow import Layout
from rlflow.reshard.atoms import atom_classes
from rlflow.reshard.buckets import plan_buckets
from rlflow.reshard.catalogue import catalogue
from rlflow.reshard.endpoint import Endpoint, Fabric
from rlflow.reshard.inplace import order_in_place
from rlflow.reshard.mapping import map_ranks
from rlflow.reshard.plan import plan_reshard
from rlflow.reshard.shards import Sharding

facts = dict(architecture("qwen3_30b_a3b").facts) | {"num_layers": 4}
tensors, before, after = catalogue(Architecture("short", facts)), Layout(tp=2, pp=2, dp=2, ep=2), Layout(tp=4, dp=2, ep=8)
mapping = map_ranks(atom_classes(Sharding(tensors, before), Sharding(tensors, after)), tuple(range(8)), tuple(range(8)))
plan = plan_reshard(tensors, Endpoint(before, tuple(range(8))), Endpoint(after, mapping.devices), Fabric.uniform(8, 4, 1e9, 1e9))
text = repr((mapping, plan, list(plan.transfers({0, 5})), plan_buckets(plan, 1 << 30), order_in_place(plan, 4 << 30)))
print(hashlib.sha256(text.encode()).hexdigest())
"""


def run(code, seed):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
    )
    return done.stdout.strip()


def test_the_plan_does_not_depend_on_the_hash_seed():
    assert run(PLAN, "1") == run(PLAN, "2") != ""


def test_numpy_and_scipy_are_imported_only_where_they_are_needed():
    """A pass that imports the planner must not make every check slower; a plan without a choice needs neither."""
    code = """
import pkgutil, sys
import rlflow.reshard
from importlib import import_module
for module in pkgutil.iter_modules(rlflow.reshard.__path__):
    import_module(f"rlflow.reshard.{module.name}")
from rlflow.cluster.presets.architecture import architecture
from rlflow.ir.flow import Layout
from rlflow.reshard.catalogue import catalogue
from rlflow.reshard.endpoint import Endpoint, Fabric
from rlflow.reshard.plan import plan_reshard
tensors = catalogue(architecture("qwen3_8b"))
plan_reshard(tensors, Endpoint(Layout(tp=2), (0, 1)), Endpoint(Layout(), (2,)), Fabric.uniform(3, 3, 1e9, 1e9))
print(sorted({"numpy", "scipy", "torch", "networkx", "ray"} & sys.modules.keys()))
"""
    assert run(code, "0") == "[]"
