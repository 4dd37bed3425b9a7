"""Groups A (batch and parallel-size arithmetic) and B (pools, placement, devices) of the field reports."""

from __future__ import annotations

from typing import Any

import pytest

PLAIN = "reinforce_pp(score)"
"""Advantages that need no group."""

# --- A ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "n", "legal"), [(2, 4, "3 prompts; or n = 3 or 6"), (8, 4, "6 or 9 prompts; or n = 3 or 6")]
)
def test_A1_samples_over_data_parallel_ranks(prompts: int, n: int, legal: str, compile_: Any) -> None:
    """8 and 32 samples do not divide over 6 ranks; the smallest legal counts are said."""
    result = compile_(prompts=prompts, n=n, devices=6)
    assert result.codes[0] == "RLF2001"
    assert f"{prompts * n} samples do not divide over the 6 data-parallel ranks of `samples`" in result.words
    assert f"{prompts} prompts x {n} samples; pool `main`" in result.words
    assert f"nearest that divide: {legal}" in result.words
    assert f"actor.generate(batch, n = {n}, max_new = 16 tokens)" in result.places


@pytest.mark.parametrize(("prompts", "n"), [(3, 4), (6, 4), (1, 6), (2, 3), (2, 6)])
def test_A1_twins_compile(prompts: int, n: int, compile_: Any) -> None:
    flow = compile_(prompts=prompts, n=n, devices=6).flow
    assert flow.nodes["samples"].type.rows == prompts * n
    assert flow.nodes["samples"].placement.layout.dp == 6


def test_A2_512_samples_over_6_ranks(compile_: Any) -> None:
    result = compile_(prompts=512, n=1, devices=6, advantages=PLAIN)
    assert result.codes[0] == "RLF2001"
    assert "512 samples do not divide over the 6 data-parallel ranks of `samples`" in result.words
    assert "nearest that divide: 510 or 516 prompts" in result.words
    for prompts in (510, 516):
        assert compile_(prompts=prompts, n=1, devices=6, advantages=PLAIN).codes == []


def test_A3_the_node_that_breaks_the_rule_is_named(compile_: Any) -> None:
    """32 samples fit the 32 replicas of the rollout with tp 2, and not the 64 of the training."""
    both = "place actor.generate on main with tp = 2 place actor.train on main with tp = 1"
    sizes = {"n": 1, "devices": 64, "advantages": PLAIN, "schedule": both}
    result = compile_(prompts=32, **sizes)
    assert set(result.codes) == {"RLF2001"}
    assert "32 samples do not divide over the 64 data-parallel ranks of `actor.train`" in result.words
    assert "of `samples`" not in result.words
    assert all(place.startswith("actor.train(") for place in result.places)
    assert compile_(prompts=64, **sizes).codes == []


def test_A3_an_evaluation_is_not_what_breaks_it(compile_: Any) -> None:
    items = "evaluate held { a = actor.generate(sums.all(), max_new = 4 tokens) g = exact(a) }"
    sizes = {"n": 1, "devices": 64, "advantages": PLAIN, "items": items}
    result = compile_(prompts=32, **sizes)
    assert "32 samples do not divide over the 64 data-parallel ranks of `samples`" in result.words
    assert "sums.all" not in "".join(result.places)
    assert compile_(prompts=64, **sizes).codes == []


def test_A4_one_device_trains_a_group_of_8(compile_: Any) -> None:
    """Micro-batches are a number of tokens, so one device takes any batch; it may not be refused."""
    assert compile_(prompts=1, n=8, devices=1, more=", microbatch = 1 token").codes == []


def test_A4_a_group_of_8_does_not_divide_into_7(compile_: Any) -> None:
    result = compile_(prompts=1, n=8, devices=1, more=", minibatch = 7 samples")
    assert result.codes == ["RLF2001"]
    assert "a batch of 8 samples does not divide into mini-batches of 7" in result.words
    assert "8 = 1 x 7 + 1" in result.words
    assert "4 or 8 samples" in result.words
    assert "8 samples do not divide over the 7 data-parallel ranks" in compile_(prompts=1, n=8, devices=7).words


def test_A5_a_group_needs_two(compile_: Any) -> None:
    result = compile_(n=1)
    assert result.codes == ["RLF2002"]
    assert "a group needs at least 2 samples" in result.words
    assert "divi" not in result.words


def test_A5_with_a_critic_one_sample_compiles(compile_: Any) -> None:
    critic = {
        "declare": "model critic = value(actor)",
        "before": "v = critic.values(samples)\n    critic.train(samples, returns = returns(score, v), values = v, "
        "loss = value_clip(0.2), optimizer = adamw(lr = 1e-4))",
        "advantages": "gae(score, v)",
    }
    assert compile_(n=1, **critic).codes == []


@pytest.mark.parametrize("trained", ["actor", "critic"])
def test_A7_batch_100_minibatch_32(trained: str, compile_: Any) -> None:
    """For the actor and, on its own, for the critic."""
    minis = {"actor": "", "critic": ""} | {trained: ", minibatch = 32 samples"}

    def run(prompts: int) -> Any:
        return compile_(
            prompts=prompts,
            n=1,
            advantages="gae(score, v)",
            declare="model critic = value(actor)",
            before="v = critic.values(samples)\n    critic.train(samples, returns = returns(score, v), values = v, "
            f"loss = value_clip(0.2), optimizer = adamw(lr = 1e-4){minis['critic']})",
            more=minis["actor"],
        )

    result = run(100)
    assert result.codes == ["RLF2001"]
    assert "a batch of 100 samples does not divide into mini-batches of 32" in result.words
    assert "100 = 3 x 32 + 4" in result.words
    assert "25 or 50 samples; or take 96 or 128 prompts" in result.words
    assert result.places == ["32 samples"]
    assert result.text[: result.found[0].span.start].rpartition(".train(")[0].endswith(trained)
    for prompts in (96, 128):
        assert run(prompts).codes == []


def test_A9_an_evaluation_need_not_divide(compile_: Any) -> None:
    items = (
        'data test = reasoning_gym("chain_sum", size = 10)\n'
        "  evaluate held { a = actor.generate(test.all(), max_new = 4 tokens) g = exact(a) }"
    )
    result = compile_(devices=4, items=items)
    assert result.codes == []
    assert result.flow.nodes["held.a"].type.rows is None, "every row once, however many there are"


def test_A10_rollout_20_over_8_ranks(compile_: Any) -> None:
    """20 samples, whether they are 20 prompts or 10 twice, are an error; 20 prompts of 4 are 80 samples and are not."""
    for prompts, n in ((20, 1), (10, 2)):
        advantages = PLAIN if n == 1 else "group_normalize(score)"
        result = compile_(prompts=prompts, n=n, devices=8, advantages=advantages)
        assert "20 samples do not divide over the 8 data-parallel ranks of `samples`" in result.words
        assert f"nearest that divide: {'16 or 24' if n == 1 else '8 or 12'} prompts" in result.words
    for prompts, n in ((16, 4), (20, 4), (24, 4)):
        assert compile_(prompts=prompts, n=n, devices=8).codes == []


def test_A10_a_mini_batch_divides_over_the_ranks_too(compile_: Any) -> None:
    result = compile_(prompts=8, n=4, devices=8, more=", minibatch = 4 samples")
    assert result.codes == ["RLF2001"]
    assert "a mini-batch of 4 samples does not divide over 8 data-parallel ranks" in result.words
    assert "nearest that divide: 8 samples" in result.words
    assert compile_(prompts=8, n=4, devices=8, more=", minibatch = 8 samples").codes == []


def test_A18_one_device_needs_no_tp(compile_: Any) -> None:
    flow = compile_(devices=1).flow
    layout = flow.nodes["samples"].placement.layout
    assert (layout.dp, getattr(layout, "tp", 1)) == (1, 1)
    assert compile_(devices=1, schedule="place actor on main with tp = 1").codes == []


@pytest.mark.parametrize("kept", ["best_of(samples, score, at_least = 0.5)", "mixed_groups(samples, score)"])
def test_A19_a_batch_known_in_the_run_only_compiles(kept: str, compile_: Any) -> None:
    """Micro-batches are made from tokens in the run, and ranks agree on their number; a legal set-up, not an error."""
    before = f"kept = {kept}\n    adv = reinforce_pp(kept.score)"
    result = compile_(
        n=4,
        devices=2,
        before=before,
        rows="kept",
        advantages="adv",
        more=", minibatch = 2 samples, microbatch = 64 tokens",
    )
    assert result.codes == []
    assert result.flow.nodes["kept"].type.rows is None


def test_A21_response_and_context(compile_: Any) -> None:
    result = compile_(context=4096, max_new=4096)
    assert result.codes == ["RLF1010"]
    assert "4096 + 1 > 4096" in result.words
    assert "at most `max_new = 4095 tokens`" in result.words
    assert compile_(context=4096, max_new=4095).codes == []


# --- B ---------------------------------------------------------------------------------------------------------------


def test_B2_16_devices_wanted_8_there(compile_: Any) -> None:
    result = compile_(prompts=16, devices=16, hosts=1)
    assert result.codes == ["RLF2003"]
    assert "pool `main` wants 16 devices, and cluster `pod` has 8" in result.words
    assert "devices by host: host-0: 8" in result.words
    assert "at most `8 devices`" in result.words
    assert compile_(prompts=16, devices=8, hosts=1).codes == []
    assert compile_(prompts=16, devices=16, hosts=2).codes == []


@pytest.mark.parametrize("size", ["0 devices", "", "8", "8 samples"])
def test_B8_a_pool_says_how_many_devices(size: str, compile_: Any) -> None:
    (error,) = compile_(edit=("pool main = 8 devices", f"pool main = {size}"), devices=8).found
    assert error.code in ("RLF0001", "RLF1010", "RLF1005")
    if size == "8":
        assert "`8 devices`" in error.help[0]
    if size == "0 devices":
        assert "at least 1, and is 0" in error.message
