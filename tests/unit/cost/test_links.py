"""Links and machines from the facts of a cluster."""

from __future__ import annotations

import pytest

from rlflow.cluster.spec import Cluster, Host
from rlflow.cost.errors import LayoutError, UnknownFactError
from rlflow.cost.knobs import calibration
from rlflow.cost.links import Tier, link, place, tier
from rlflow.cost.machine import Device, machine

ASCEND = Cluster(
    "c",
    (
        Host("a", "ascend_910c", 16, supernode="s"),
        Host("b", "ascend_910c", 16, supernode="s"),
        Host("d", "ascend_910c", 16, supernode="t"),
        Host("e", "ascend_910b", 8),
    ),
)


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        (3, 3, Tier.DEVICE),
        (2, 3, Tier.PACKAGE),
        (3, 4, Tier.HOST),
        (3, 16, Tier.SUPERNODE),
        (3, 32, Tier.ACROSS),
        (3, 48, Tier.ACROSS),
        (48, 49, Tier.HOST),
    ],
)
def test_tiers(src, dst, expected):
    assert tier(place(ASCEND, src), place(ASCEND, dst)) == expected
    assert tier(place(ASCEND, dst), place(ASCEND, src)) == expected


def test_rates_are_the_facts():
    """Facts of hardware.toml times the share that software reaches."""
    constants = calibration("ascend").constants
    rates = {name: link(ASCEND, *ends) for name, ends in
             {"device": (0, 0), "package": (0, 1), "host": (0, 2), "supernode": (0, 16), "across": (0, 32), "pair": (48, 50)}.items()}  # fmt: skip
    assert rates["device"].bytes_per_s == pytest.approx(1.6e12 * constants.memory_copy / 2)
    assert rates["package"].bytes_per_s == pytest.approx(270e9 * constants.link_inside)
    assert rates["host"] == rates["supernode"]
    assert rates["host"].bytes_per_s == pytest.approx(196e9 * constants.link_inside)
    assert rates["across"].bytes_per_s == pytest.approx(25e9 * constants.link_across)
    assert rates["pair"].bytes_per_s == pytest.approx(28e9 * constants.link_inside)
    assert rates["device"].latency_s < rates["host"].latency_s < rates["across"].latency_s


def test_the_slower_end_decides():
    mixed = Cluster("c", (Host("a", "a100", 8), Host("b", "h100", 8)))
    assert link(mixed, 0, 8) == link(mixed, 8, 0)
    assert link(mixed, 0, 8).bytes_per_s == pytest.approx(25e9 * calibration("nvidia").constants.link_across)


def test_missing_facts_are_named():
    cluster = Cluster("c", (Host("a", "h20", 8), Host("b", "h20", 8)))
    assert link(cluster, 0, 7).bytes_per_s > 0
    with pytest.raises(UnknownFactError, match="`h20` has no fact `scaleout_bytes_per_s`"):
        link(cluster, 0, 8)
    with pytest.raises(UnknownFactError, match="`cpu` has no fact `hbm_bytes_per_s`"):
        link(Cluster("c", (Host("a", "cpu", 2),)), 0, 0)
    with pytest.raises(UnknownFactError, match="`cpu` has no fact `peak_bf16_flop_per_s`"):
        machine(Cluster("c", (Host("a", "cpu", 2),)))


def test_places_outside():
    with pytest.raises(LayoutError, match="no number 56"):
        place(ASCEND, 56)
    with pytest.raises(LayoutError, match="no number -1"):
        place(ASCEND, -1)


def test_a_measured_cpu():
    """Where no facts are published a measurement gives them."""
    measured = Device("cpu", {"peak_bf16_flop_per_s": 1e11, "hbm_bytes": 10**10, "hbm_bytes_per_s": 2e10})
    here = machine(Cluster("c", (Host("a", "cpu", 2),)), device=measured)
    assert (here.flop_per_s, here.memory_bytes, here.calibration.family) == (1e11, 10**10, "cpu")
    with pytest.raises(UnknownFactError, match="scaleup_bytes_per_s"):
        here.link_inside()


def test_machines_of_pools():
    assert machine(ASCEND, ["a", "b"]).supernode_devices == 32
    assert machine(ASCEND, ["a", "d"]).supernode_devices == 16
    assert machine(ASCEND, ["e"]).supernode_devices == machine(ASCEND, ["e"]).host_devices == 8
    with pytest.raises(LayoutError, match="ascend_910b, ascend_910c"):
        machine(ASCEND)
    with pytest.raises(LayoutError, match="none of the hosts z"):
        machine(ASCEND, ["z"])


def test_equal_machines_are_equal():
    one, two = machine(ASCEND, ["a"]), machine(ASCEND, ["a"])
    assert one == two
    assert hash(one) == hash(two)
    assert one != machine(ASCEND, ["a"], tuned=calibration("ascend").override(train_moe=0.2))


def test_host_link_is_shared_when_all_copy():
    device = machine(ASCEND, ["a"]).device
    assert device.host_link(to_host=True, all_busy=False) == 110e9
    assert device.host_link(to_host=False, all_busy=False) == 151e9
    assert device.host_link(to_host=False, all_busy=True) == 40e9
    h100 = machine(Cluster("c", (Host("a", "h100", 8),))).device
    assert h100.host_link(to_host=True, all_busy=True) == 64e9
