"""Choice of sources: hand-worked optima, the program against the greedy choice, chains."""

from __future__ import annotations

import itertools

import pytest

from rlflow.reshard.atoms import AtomClass, Part
from rlflow.reshard.endpoint import Fabric
from rlflow.reshard.routes import Delivery, Loads, deliveries, hops
from rlflow.reshard.shares import WHOLE, Share, share_cells, share_elements
from rlflow.reshard.sources import choose_sources


def atoms(holders, needers, elements):
    return AtomClass(holders, needers, (Part(("w",), (((0, elements),),)),))


def chosen(classes, fabric, multicast=True):
    return choose_sources(classes, deliveries(classes, fabric), fabric, multicast=multicast, min_elements=1)


def test_a_holder_that_alone_has_something_is_spared_the_rest():
    fabric = Fabric.uniform(4, 4, 1.0, 1.0)
    routes, loads, _ = chosen((atoms((0,), (2,), 1000), atoms((0, 1), (3,), 1000)), fabric)
    assert {device: n for device, n in loads.device_out.items() if n} == {0: 1000, 1: 1000}
    assert [share.source for share in routes[1].shares] == [1]


def test_the_linear_program_splits_where_greed_cannot_see_ahead():
    """X is at 0 and 1, Y at 1 and 2, each with its own size: 0 sends all of X, 2 all of Y and 1 helps the larger."""
    fabric = Fabric.uniform(6, 6, 1.0, 1.0)
    classes = (atoms((0, 1), (3,), 1024), atoms((1, 2), (4,), 2048))
    _, loads, method = chosen(classes, fabric)
    assert method == "lp"
    assert max(loads.device_out.values()) == pytest.approx(1024, abs=2)  # 3072 over three holders


def test_bandwidths_weigh_the_shares():
    fabric = Fabric((0, 0, 0), (3.0, 1.0, 10.0), {0: 1.0})
    _, loads, _ = chosen((atoms((0, 1), (2,), 4000),), fabric)
    assert loads.device_out[0] == pytest.approx(3000, abs=70)


def test_uplinks_of_nodes_are_balanced_too():
    """Four holders on node 0, one on node 1, each uplink 1: half must come from the single one."""
    fabric = Fabric((0, 0, 0, 0, 1, 2), (100.0,) * 6, {0: 1.0, 1: 1.0, 2: 10.0})
    _, loads, _ = chosen((atoms((0, 1, 2, 3, 4), (5,), 8000),), fabric)
    assert loads.node_out[1] == pytest.approx(4000, abs=130)


def test_holders_in_the_node_are_preferred():
    fabric = Fabric.uniform(6, 2, 1.0, 1.0)
    found = deliveries((atoms((0, 2), (1, 3, 4, 5), 10),), fabric)
    assert [(d.sources, d.nodes, d.remote) for d in found] == [
        ((0,), ((1,),), False),
        ((2,), ((3,),), False),
        ((0, 2), ((4, 5),), True),
    ]


def test_a_chain_enters_every_node_once_and_nobody_sends_what_it_lacks():
    delivery = Delivery(0, (0,), ((2, 3), (4, 5), (6,)), True, 0)
    for node_turn in range(3):
        for device_turn in range(2):
            share = Share(0, 0, WHOLE, node_turn, device_turn)
            way = list(hops(delivery, share, multicast=True))
            has = {0: -1}
            for hop in way:
                assert hop.step == has[hop.source] + 1
                has[hop.target] = hop.step
            assert sorted(has) == [0, 2, 3, 4, 5, 6]
            assert len(way) == 5
            node = {0: 0, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3}
            assert sorted(node[h.target] for h in way if node[h.source] != node[h.target]) == [1, 2, 3]
            assert max(sum(h.source == d for h in way) for d in has) <= 2
            loads = Loads(Fabric((0, 0, 1, 1, 2, 2, 3), (1.0,) * 7, dict.fromkeys(range(4), 1.0)))
            loads.add_receivers(delivery, 7, multicast=True)
            loads.add_share(delivery, share, 7, multicast=True)
            assert {d: n for d, n in loads.device_out.items() if n} == {
                d: 7 * sum(h.source == d for h in way) for d in has if any(h.source == d for h in way)
            }


def test_unicast_sends_to_everyone_from_the_source():
    delivery = Delivery(0, (0,), ((2, 3), (4,)), True, 0)
    assert [(h.source, h.target, h.step) for h in hops(delivery, Share(0, 0, WHOLE), multicast=False)] == [
        (0, 2, 0),
        (0, 3, 0),
        (0, 4, 0),
    ]


@pytest.mark.parametrize("min_elements", [1, 13, 10**6])
def test_shares_tile_a_class(min_elements):
    boxes = (((0, 5), (0, 4)), ((5, 6), (1, 4)))
    found = AtomClass((0,), (1,), (Part(("a", "b", "c"), boxes), Part(("d",), (((0, 9),),))))
    cuts = [0, 1, 9_000, 30_000, 30_001, 65_000, WHOLE]
    cells = []
    for low, high in itertools.pairwise(cuts):
        mine = list(share_cells(found, low, high, min_elements))
        assert share_elements(found, low, high, min_elements) == sum(
            len(range(*box[0])) * (len(range(*box[1])) if len(box) > 1 else 1) for _, box in mine
        )
        cells += [
            (name, i, j)
            for name, box in mine
            for i in range(*box[0])
            for j in (range(*box[1]) if len(box) > 1 else (0,))
        ]
    assert len(cells) == len(set(cells)) == found.elements == 3 * 23 + 9
