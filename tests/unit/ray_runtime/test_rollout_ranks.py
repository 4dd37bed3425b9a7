"""Sampling by several ranks that hold one model together."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.backends.ray_runtime.local_weights import canonical_tensors, catalogue_of
from rlflow.backends.ray_runtime.rollout import RolloutEngine
from rlflow.ir.flow import Layout
from rlflow.reshard.execute import cut, gather
from rlflow.reshard.shards import Sharding
from rlflow.reshard.storage import Storage
from tests.unit.ray_runtime import rollout_jobs as jobs
from tests.unit.ray_runtime.parallel.workers import Workers, started


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    # Both processes are forked from one that has imported everything, which takes most of this file's time.
    multiprocessing.get_context("forkserver").set_forkserver_preload([jobs.__name__])
    forkserver.ensure_running()
    with started(2) as running:
        yield running
    torch.set_num_threads(before)


CASES = [
    ("qwen3", Layout(tp=2), {}, {}),
    ("llama", Layout(tp=2), {}, {"kv_heads": 1}),  # the key-value head is on both ranks
    ("qwen2", Layout(tp=2), {"top_p": 0.9}, {}),  # biases, a head of its own
    ("qwen3", Layout(tp=2), {"temperature": 0.0}, {"layers": 1}),
    ("qwen2", Layout(tp=2), {}, {"letters": 3}),  # a vocabulary of 17, padded to 18
    ("qwen3", Layout(tp=2), {}, {"letters": 1}),  # and tied to the embedding
    ("qwen3_moe", Layout(tp=2, ep=2), {}, {}),
    ("qwen3_moe", Layout(tp=2), {}, {}),  # every expert on both ranks
    ("qwen3_moe", Layout(tp=2, etp=2), {}, {}),
]


@pytest.mark.parametrize(("kind", "layout", "options", "sizes"), CASES)
def test_two_ranks_sample_what_one_does(
    workers: Workers, kind: Any, layout: Layout, options: dict[str, Any], sizes: dict[str, int]
) -> None:
    loaded = jobs.model(kind, **sizes)
    alone = RolloutEngine(loaded, "fp32").generate(jobs.prompts(loaded), jobs.op(**options), seed=3, step=5)
    found = workers.run(jobs.generated, layout, kind, "fp32", options, sizes, ranks=2)
    assert found[0]["decoder"] == ("GenericDecoder" if kind == "qwen3_moe" else "DenseDecoder")
    assert found[0]["tokens"] == found[1]["tokens"] == jobs.rows(alone)
    assert len({len(row) for row in found[0]["tokens"]}) > 1  # rows end at different tokens
    assert found[0]["logprobs"] == found[1]["logprobs"]  # bit for bit between ranks
    flat = np.concatenate([np.array(row) for row in found[0]["logprobs"]])
    np.testing.assert_allclose(flat, alone.packed("logprobs").values.numpy(), atol=2e-5)
    # The parts are those of a planned reshard, padding included, and nothing is lost.
    known = catalogue_of(loaded.model.config)
    sharding = Sharding(known, layout, Storage(vocabulary_multiple=2, mtp=False))
    whole = {name: tensor.numpy() for name, tensor in canonical_tensors(loaded.model, known).items()}
    shards = {rank: found[rank]["tensors"] for rank in (0, 1)}
    for rank, mine in shards.items():
        expected = cut(sharding, whole, rank)
        assert list(mine) == list(expected)
        for name, tensor in expected.items():
            np.testing.assert_array_equal(mine[name], tensor)
    for spec in known:
        np.testing.assert_array_equal(gather(sharding, shards, spec.name), whole[spec.name])


def test_two_ranks_in_bf16_agree_with_each_other(workers: Workers) -> None:
    found = workers.run(jobs.generated, Layout(tp=2), "qwen3", "bf16", {}, {}, ranks=2)
    assert found[0]["tokens"] == found[1]["tokens"]
    assert found[0]["logprobs"] == found[1]["logprobs"]
    loaded = jobs.model("qwen3")
    alone = RolloutEngine(loaded, "bf16").generate(jobs.prompts(loaded), jobs.op(), seed=3, step=5)
    same = [a[:3] == b[:3] for a, b in zip(found[0]["tokens"], jobs.rows(alone), strict=True)]
    assert sum(same) > 15  # of 20: rounding moves a draw now and then


def test_data_parallel_replicas_sample_for_themselves(workers: Workers) -> None:
    found = workers.run(jobs.generated, Layout(dp=2), "qwen3", "fp32", {}, {}, ranks=2)
    loaded = jobs.model("qwen3")
    alone = RolloutEngine(loaded, "fp32").generate(jobs.prompts(loaded), jobs.op(), seed=3, step=5)
    assert found[0]["tokens"] == found[1]["tokens"] == jobs.rows(alone)


@pytest.mark.parametrize(
    ("layout", "kind", "sizes", "words"),
    [
        (Layout(pp=2), "qwen3", {}, "generate cannot run with pp = 2, cp = 1"),
        (Layout(cp=2), "qwen3", {}, "generate cannot run with pp = 1, cp = 2"),
        (Layout(dp=2, ep=2), "qwen3_moe", {}, "generate cannot run with ep 2 x etp 1 = 2 on tp = 1"),
        (Layout(dp=2, zero=3), "qwen3", {}, "generate cannot run on weights that are sharded"),
        (
            Layout(tp=2),
            "qwen3",
            {"heads": 3, "kv_heads": 1, "hidden": 24},
            "tp 2 does not divide the 3 units of self_attn",
        ),
        (Layout(tp=2), "llama", {"intermediate": 49}, "tp 2 does not divide the 49 units of mlp.gate_proj"),
    ],
)
def test_layouts_that_cannot_sample_are_refused(
    workers: Workers, layout: Layout, kind: str, sizes: dict[str, int], words: str
) -> None:
    for message in workers.run(jobs.refused, layout, kind, sizes, ranks=2):
        assert message.startswith("RLF4003")
        assert words in message
        assert "generate with tp" in message


def test_a_pause_with_new_weights_stops_all_ranks_at_one_token(workers: Workers) -> None:
    found = workers.run(jobs.updated_while_paused, Layout(tp=2), "qwen3", ranks=2)
    assert found[0] == found[1]
    versions = {version for row in found[0]["versions"] for version, _ in row}
    assert versions == {0, 1}
    for tokens, parts in zip(found[0]["tokens"], found[0]["versions"], strict=True):
        assert sum(count for _, count in parts) == len(tokens)


def test_the_environment_is_asked_once(workers: Workers) -> None:
    found = workers.run(jobs.talked, Layout(tp=2), "qwen3", ranks=2)
    assert found[0]["tokens"] == found[1]["tokens"]
    assert any(0 in mask for mask in found[0]["mask"])
    # Sums in other orders, over conversations of many turns: 0.8e-5 to 2e-5 from run to run. A wrong position or a
    # turn that the cache lacks is a thousand times that.
    assert all(one["off"] < 1e-4 for one in found)


@pytest.mark.parametrize("lora", [False, True])
def test_parts_of_weights_that_are_trained_in_the_same_process(workers: Workers, lora: bool) -> None:
    found = workers.run(jobs.trained_here, Layout(tp=2), lora, ranks=2)
    assert found[0] == found[1]
    before, after = found[0]
    assert before[0] != after[0]
    assert max(before[1], after[1]) < (2e-4 if lora else 2e-5)  # the trainer multiplies by two small matrices
    assert (before[3], after[3]) == ([0], [1])
    assert (before[2] != after[2]) == lora
