"""Clusters, hosts, devices and models that ship with rlflow."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from rlflow.cluster import presets
from rlflow.cluster.presets.architecture import architecture
from rlflow.cluster.spec import Cluster, Host
from rlflow.diagnostics import CompileError, Diagnostic, SourceFile
from rlflow.frontend.clusters import preset, preset_clusters
from rlflow.frontend.imports import shipped
from rlflow.frontend.lower import lower
from rlflow.grammar.format import format_text
from rlflow.grammar.parse import parse

ROOT = Path(__file__).parents[3]

FLOW = """\
flow f {
  data   sums  = reasoning_gym("chain_sum", size = 64)
  model  actor = tiny(qwen3, alphabet = "0123456789+-=. ")
  reward exact = scorer(sums)
  step {
    batch = sums.take(8 prompts)
    samples = actor.generate(batch, n = 4, max_new = 8 tokens)
    adv = group_normalize(exact(samples))
    actor.train(samples, advantages = adv, loss = ppo_clip(0.2), optimizer = adamw(lr = 1e-3))
  }
}
"""


def cluster(text: str) -> Cluster:
    return lower(parse(SourceFile("x", FLOW + text)), None).cluster


def problem(text: str) -> Diagnostic:
    with pytest.raises(CompileError) as caught:
        cluster(text)
    (found,) = caught.value.diagnostics
    return found


# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets.device_names())
def test_every_device_may_stand_in_a_cluster(name: str) -> None:
    (host,) = cluster(f"schedule f on c {{ auto }} cluster c {{ host = 2 * {name} }}").hosts
    assert host.device == name
    assert host.torch_device == presets.torch_device(name)
    assert host.torch_device in ("cpu", "npu", "cuda")
    if name != "cpu":
        assert host.facts["hbm_bytes"] >= 64e9


def test_short_names_mean_the_device_they_stand_for() -> None:
    assert Host("h", "ascend_910b", 8).facts == Host("h", "ascend_910b_bin313", 8).facts
    assert Host("h", "ascend_910c", 8).facts["dies_per_package"] == 2
    assert Host("h", "cpu", 1).facts == {}
    with pytest.raises(KeyError):
        Host("h", "h20", 1).facts["scaleout_bytes_per_s"]


# --- clusters --------------------------------------------------------------------------------------------------------


def test_the_clusters_are_those_of_the_table() -> None:
    assert set(preset_clusters()) == {*presets.hosts(), *presets.supernodes()}


@pytest.mark.parametrize("name", presets.hosts())
def test_host_agrees_with_its_sources(name: str) -> None:
    facts = presets.hosts()[name]
    (host,) = preset(name).hosts
    assert host.devices == facts["devices"]
    assert host.facts == presets.device(facts["device"])
    stated = facts.get("host_memory_bytes", facts.get("host_memory_bytes_min"))
    assert host.memory_bytes == stated
    assert host.cpus == facts.get("cpu_cores")
    assert host.supernode is None


@pytest.mark.parametrize("name", presets.supernodes())
def test_supernode_agrees_with_its_sources(name: str) -> None:
    facts = presets.supernodes()[name]
    machines = preset(name)
    (host,) = preset(facts["node"]).hosts
    assert len(machines.hosts) == facts["nodes"]
    assert machines.num_devices == facts["devices"]
    assert {(h.device, h.devices, h.memory_bytes) for h in machines.hosts} == {
        (host.device, host.devices, host.memory_bytes)
    }
    assert {h.supernode for h in machines.hosts} == {name}


def test_the_shipped_file_is_in_the_one_style() -> None:
    source = shipped("clusters")
    assert format_text(source) == source.text
    with pytest.raises(KeyError):
        shipped("../clusters")


def test_the_wheel_has_the_files() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert {"*.toml", "*.rlflow"} <= set(settings["tool"]["setuptools"]["package-data"]["*"])


def test_a_schedule_names_a_shipped_cluster() -> None:
    machines = cluster("schedule f on cloudmatrix384 { auto }")
    assert (machines.name, machines.num_devices) == ("cloudmatrix384", 768)
    assert machines == preset("cloudmatrix384")


def test_a_cluster_of_the_file_comes_before_a_shipped_one() -> None:
    machines = cluster("schedule f on dgx_h100 { auto } cluster dgx_h100 { host = 2 * h100 }")
    assert machines.num_devices == 2


def test_a_number_of_shipped_clusters() -> None:
    machines = cluster("schedule f on pod { auto } cluster pod { hosts = 4 * cloudmatrix384 }")
    assert machines.num_devices == 4 * 768
    assert len({host.name for host in machines.hosts}) == 4 * 48
    assert [h.supernode for h in machines.hosts[::48]] == [f"cloudmatrix384-{i}" for i in range(4)]


def test_shipped_and_own_hosts_together() -> None:
    text = (
        "schedule f on pod { auto } cluster pod { dgx_h100 = 2 * dgx_h100 own = 4 * h100 { cpus = 8 } owns = 3 * own }"
    )
    hosts = cluster(text).hosts
    assert [h.devices for h in hosts] == [8, 8, 4, 4, 4]
    assert len({h.name for h in hosts}) == 5
    assert {h.supernode for h in hosts} == {None}


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("schedule f on cloudmatrix348 { auto }", "RLF1001", "unknown cluster `cloudmatrix348`"),
        ("cluster pod { hosts = 4 * cloudmatrix383 }", "RLF1001", "unknown device or host `cloudmatrix383`"),
        ("cluster pod { hosts = 4 * dgx_h100 { cpus = 3 } }", "RLF1003", "`hosts` only counts hosts"),
        ("cluster pod { hosts = 200 * cloudmatrix384 }", "RLF1010", "153600 devices"),
        ("cluster pod { hosts = 100000 * cloudmatrix384 }", "RLF1010", "76800000 devices"),
        ("cluster pod { hosts = 0 * dgx_h100 }", "RLF1010", "at least 1"),
        ("cluster pod { hosts = hosts }", "RLF1001", "unknown device or host `hosts`"),
    ],
)
def test_mistake(text: str, code: str, says: str) -> None:
    found = problem(text if text.startswith("schedule") else "schedule f on pod { auto } " + text)
    assert found.code == code
    assert says in found.message
    if "cloudmatrix38" in text or "348" in text:
        assert code == "RLF1010" or "`cloudmatrix384`" in found.help[0]


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets.model_names())
def test_parameters_follow_from_the_architecture(name: str) -> None:
    model = architecture(name)
    facts = model.facts
    assert model.params() == facts["params_total"]
    assert model.params(active=True) == facts["params_active"]
    assert model.params_active_no_embedding == facts["params_active_no_embedding"]
    assert model.params_routed_experts == facts.get("params_routed_experts", 0)
    assert model.params_mtp == facts.get("params_mtp", 0)
    assert model.kv_bytes_per_token() == facts["kv_bytes_per_token_bf16"]


@pytest.mark.parametrize("name", presets.model_names())
def test_parameters_are_those_that_are_published(name: str) -> None:
    model = architecture(name)
    assert abs(model.params() / model.facts["published_params_total"] - 1) < 0.01
    assert model.params_active_no_embedding <= model.params(active=True) <= model.params()
    assert model.is_moe == (model.params(active=True) < model.params())


def test_unknown_model() -> None:
    with pytest.raises(KeyError):
        architecture("qwen4")
