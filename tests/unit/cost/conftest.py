"""Machines and models that the tests of the cost model share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.validation.hardware import gpt
from rlflow.cluster.presets.architecture import Architecture, architecture
from rlflow.cluster.spec import Cluster, Host
from rlflow.cost.dimensions import Dimensions, dimensions
from rlflow.cost.machine import Machine, machine


@pytest.fixture(scope="session")
def make_cluster() -> Callable[..., Cluster]:
    """`make_cluster(device, hosts, devices a host, supernode)`."""

    def make(device: str, hosts: int, each: int, supernode: str | None = None) -> Cluster:
        return Cluster("c", tuple(Host(f"h{i}", device, each, supernode=supernode) for i in range(hosts)))

    return make


@pytest.fixture(scope="session")
def make_machine(make_cluster: Callable[..., Cluster]) -> Callable[..., Machine]:
    return lambda *args: machine(make_cluster(*args))


@pytest.fixture(scope="session")
def model() -> Callable[[str], Dimensions]:
    """The dimensions of a preset."""
    return lambda name: dimensions(architecture(name))


@pytest.fixture(scope="session")
def plain_gpt() -> Callable[[int, int, int], Dimensions]:
    """A transformer as in the Megatron papers: f = 4h without a gate, every head its own keys, dropout."""

    def make(hidden: int, layers: int, heads: int) -> Dimensions:
        return dimensions(Architecture("gpt", gpt(hidden, layers, heads)))

    return make
