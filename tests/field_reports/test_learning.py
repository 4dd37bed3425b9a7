"""Groups F (staleness), H (group advantage), I (KL and loss) and J (masks) of the field reports: what compiling can tell.

The formulas themselves are checked by number where they are computed; see NOT_HERE in test_coverage.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from rlflow.ir import ops
from rlflow.ir.flow import EdgeKind

REF = "ref = first.logprobs(samples)"
KL = {"before": REF, "more": ", reference = ref"}
CLIP_KL = "ppo_clip(0.2) + {} * kl({})"


def train_of(result: Any) -> ops.Train:
    (op,) = (node.op for node in result.flow.nodes.values() if isinstance(node.op, ops.Train))
    return op


# --- F: staleness ----------------------------------------------------------------------------------------------------


def test_F2_one_pool_is_on_policy(compile_: Any) -> None:
    """The next generation waits for the weights that training publishes: one edge, with the first weights on it."""
    flow = compile_().flow
    (edge,) = (e for e in flow.edges if e.kind is EdgeKind.WEIGHTS and e.dst == "samples")
    assert flow.nodes[edge.src].op.kind == "train"
    assert compile_(schedule="staleness actor = 0 steps").codes == []


def test_F5_a_bound_above_what_the_flow_permits(compile_: Any) -> None:
    result = compile_(
        items="allow actor staleness <= 2 steps with truncated_is(2.0)", schedule="staleness actor = 3 steps"
    )
    assert result.codes == ["RLF3001"]
    assert "samples be 3 steps old, and the flow permits 2 for `actor`" in result.words
    assert result.places == ["staleness actor = 3 steps"]


def test_F6_several_updates_of_one_batch_keep_the_old_logprobs(compile_: Any) -> None:
    """With more than one update the ratio is taken to the policy before the first, not to the current one."""

    def old_inputs(more: str) -> list[str]:
        flow = compile_(more=more).flow
        return [e.src for e in flow.edges if e.port == "old"]

    (several,) = old_inputs(", minibatch = 8 samples")
    assert compile_(more=", minibatch = 8 samples").flow.nodes[several].op.kind in ("logprobs", "generate")
    (again,) = old_inputs(", epochs = 2")
    assert again == several


# --- H: group advantage ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage",
    [
        "group_normalize(score)",
        "group_normalize(score, std = false)",
        "rloo(score)",
        "reinforce_pp(score, baseline = true)",
    ],
)
def test_H2_one_sample_is_no_group(stage: str, compile_: Any) -> None:
    result = compile_(n=1, advantages=stage)
    assert result.codes == ["RLF2002"]
    assert (
        f"`{stage.partition('(')[0]}` compares the samples of one prompt, and here there is 1 per prompt"
        in result.words
    )
    assert compile_(n=2, advantages=stage).codes == []


@pytest.mark.parametrize("stage", ["best_worst(samples, score)", "mixed_groups(samples, score)"])
def test_H2_one_sample_cannot_be_selected_from(stage: str, compile_: Any) -> None:
    sizes = {"before": f"kept = {stage}", "rows": "kept", "advantages": "reinforce_pp(kept.score)"}
    assert compile_(n=1, **sizes).codes == ["RLF2002"]
    assert compile_(n=2, **sizes).codes == []


def test_H2_advantages_of_the_whole_batch_need_no_group(compile_: Any) -> None:
    assert compile_(n=1, advantages="reinforce_pp(score)").codes == []


def test_H4_groups_of_equal_rewards_can_be_left_out_with_their_kl(compile_: Any) -> None:
    """What is trained on, its KL included, are the groups that `mixed_groups` keeps."""
    result = compile_(
        before="kept = mixed_groups(samples, score)\n    ref = first.logprobs(kept)",
        rows="kept",
        advantages="group_normalize(kept.score)",
        loss=CLIP_KL.format(0.1, "k3"),
        more=", reference = ref",
    )
    assert result.codes == []
    assert result.flow.nodes["ref"].type.origin == "kept"


@pytest.mark.parametrize("second", ["group_normalize", "rloo", "reinforce_pp"])
def test_H5_normalised_twice(second: str, compile_: Any) -> None:
    result = compile_(before="once = group_normalize(score)", advantages=f"{second}(once)")
    assert result.codes == ["RLF1018"]
    assert f"`{second}` gets what is normalised already" in result.words
    places = [label.span.text for label in result.found[0].labels]
    assert places == ["once", "group_normalize(score)"]
    assert compile_(before="once = group_normalize(score)", advantages="once").codes == []


@pytest.mark.parametrize(
    "through", ["0.5 * group_normalize(score) + 0.5 * group_normalize(score)", "-group_normalize(score)"]
)
def test_H5_normalised_twice_through_a_sum(through: str, compile_: Any) -> None:
    assert compile_(before=f"once = {through}", advantages="group_normalize(once)").codes == ["RLF1018"]
    assert compile_(before=f"once = {through}", advantages="once").codes == []


def test_H6_columns_belong_to_the_samples_they_are_used_with(compile_: Any) -> None:
    """A reference of 4 times the rows cannot reach the loss: it was computed on other samples."""
    other = "more = actor.generate(batch, n = 16, max_new = 16 tokens)\n    ref = first.logprobs(more)"
    result = compile_(before=other, more=", reference = ref", loss=CLIP_KL.format(0.1, "k3"))
    assert result.codes == ["RLF1009"]
    assert "`reference` was computed on other rows than `samples`" in result.words
    assert [label.text for label in result.found[0].labels] == ["from `more`", "rows of `samples`"]
    assert compile_(**KL, loss=CLIP_KL.format(0.1, "k3")).codes == []


# --- I: KL and loss --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("written", "weight"), [("+ 0.1 *", 0.1), ("- -0.1 *", 0.1), ("+ 0.1 / 2 *", 0.05)])
def test_I2_the_sign_of_every_term_is_in_the_plan(written: str, weight: float, compile_: Any) -> None:
    clip, kl = train_of(compile_(**KL, loss=f"ppo_clip(0.2) {written} kl(k3)")).loss
    assert (clip.kind, clip.weight) == ("ppo_clip", 1.0)
    assert (kl.kind, kl.weight) == ("kl", weight)


def test_I3_k1_as_a_loss_is_a_warning(compile_: Any) -> None:
    result = compile_(**KL, loss=CLIP_KL.format(0.1, "k1"))
    assert result.flow is not None
    assert result.codes == ["RLF1017"]
    assert result.places == ["kl(k1)"]
    assert "expected gradient is zero" in result.words
    assert "use `kl(k3)` or `kl(k2)`" in result.words


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_I3_the_others_compile(estimator: str, compile_: Any) -> None:
    assert compile_(**KL, loss=CLIP_KL.format(0.1, estimator)).codes == []


def shaped(also: str, loss: str) -> dict[str, str]:
    """KL in the reward, and this loss."""
    return {
        "declare": "model critic = value(actor)",
        "before": f"{REF}\n    v = critic.values(samples)\n    shaped_ = kl_reward(score, samples, reference = ref, weight = 0.1{also})",
        "advantages": "gae(shaped_, v)",
        "loss": loss,
    }


def test_I4_kl_in_reward_and_loss(compile_: Any) -> None:
    result = compile_(**shaped("", CLIP_KL.format(0.1, "k3")), more=", reference = ref")
    assert result.codes == ["RLF1019"]
    assert "it counts twice" in result.words
    places = [label.span.text for label in result.found[0].labels]
    assert places[0] == "ppo_clip(0.2) + 0.1 * kl(k3)"
    assert places[1].startswith("kl_reward(")


def test_I4_one_of_them_or_both_on_purpose_compiles(compile_: Any) -> None:
    assert compile_(**shaped("", "ppo_clip(0.2)")).codes == []
    assert compile_(**shaped(", also_in_loss = true", CLIP_KL.format(0.1, "k3")), more=", reference = ref").codes == []
    assert compile_(**shaped("", CLIP_KL.format(0, "k3")), more=", reference = ref").flow is not None


def test_I7_without_a_weight_the_reference_is_not_loaded(compile_: Any) -> None:
    flow = compile_(**KL, loss=CLIP_KL.format(0, "k3")).flow
    assert "ref" not in flow.nodes
    assert [term.kind for term in flow.nodes["actor.train"].op.loss] == ["ppo_clip"]
    assert not any(getattr(node.op, "model", None) == "first" for node in flow.nodes.values())
    assert "ref" in compile_(**KL, loss=CLIP_KL.format(0.1, "k3")).flow.nodes


def test_I7_it_stays_for_another_reader(compile_: Any) -> None:
    both = f"{REF}\n    adv = group_normalize(score)\n    shaped_ = kl_reward(score, samples, reference = ref, weight = 0.1)"
    result = compile_(
        declare="model critic = value(actor)",
        before=f"{both}\n    v = critic.values(samples)",
        advantages="gae(shaped_, v)",
        loss=CLIP_KL.format(0, "k3"),
        more=", reference = ref",
    )
    assert "ref" in result.flow.nodes


def test_I8_the_policy_is_no_reference(compile_: Any) -> None:
    result = compile_(before="ref = actor.logprobs(samples)", more=", reference = ref", loss=CLIP_KL.format(0.1, "k3"))
    assert result.codes == ["RLF1016"]
    assert "declare `model reference = frozen(actor)`" in result.words
    assert compile_(**KL, loss=CLIP_KL.format(0.1, "k3")).codes == []


def test_I8_nor_is_it_one_in_the_reward(compile_: Any) -> None:
    sizes = shaped("", "ppo_clip(0.2)")
    result = compile_(**{**sizes, "before": sizes["before"].replace("first.logprobs", "actor.logprobs")})
    assert result.codes == ["RLF1016"]


def test_I10_the_constant_of_a_sum_is_never_missing(compile_: Any) -> None:
    """`token_sum` divides by the longest response there can be, not by the width of a batch."""
    assert train_of(compile_(more=", aggregate = token_sum", max_new=16)).horizon == 16
    assert train_of(compile_(more=", aggregate = token_sum", max_new=32)).horizon == 32
    assert train_of(compile_(more="")).aggregate == "token_mean"
    assert "unknown `aggregate`: `width_mean`" in compile_(more=", aggregate = width_mean").words


def test_I11_there_is_no_bf16_only_training(compile_: Any) -> None:
    """`compute = bf16` is the precision of products; the trained weights are fp32, so no small update is swallowed."""
    result = compile_(edit=("context = 256 tokens", "context = 256 tokens, compute = bf16"))
    assert result.codes == []
    assert result.flow.models["actor"].source.compute == "bf16"
    assert compile_(edit=("context = 256 tokens", "dtype = bf16")).codes == ["RLF1003"]


@pytest.mark.parametrize("loss", ["distill()", "distill() + ppo_clip(0.2)"])
def test_I8_nor_its_own_teacher(loss: str, compile_: Any) -> None:
    result = compile_(before="t = actor.logprobs(samples)", more=", teacher = t", loss=loss)
    assert "RLF1016" in result.codes
    assert "RLF1016" not in compile_(before="t = first.logprobs(samples)", more=", teacher = t", loss=loss).codes


def test_I9_a_column_is_what_it_is_taken_for(compile_: Any) -> None:
    """Both are one number per token; a critic's estimates are no log-probabilities to compare the policy with."""
    critic = {"declare": "model critic = value(actor)", "before": f"{REF}\n    v = critic.values(samples)"}
    loss = CLIP_KL.format(0.1, "k3")
    result = compile_(**critic, more=", reference = v", loss=loss)
    assert result.codes == ["RLF1007"]
    assert "`reference` takes log-probabilities" in result.words
    assert "this holds `values`" in result.words
    assert compile_(**critic, advantages="gae(score, ref)").codes == ["RLF1007"]
    assert compile_(**critic, advantages="gae(score, v)", more=", reference = ref", loss=loss).codes == []


# --- J: masks and turns ----------------------------------------------------------------------------------------------

TOOL = {"declare": 'environment tool = python("environments:Calculator")'}
GENERATE = "n = 4, max_new = 16 tokens"


def test_J7_turns_carry_a_mask_of_the_models_own_tokens(compile_: Any) -> None:
    result = compile_(**TOOL, edit=(GENERATE, GENERATE + ", environment = tool, turns = 3"))
    assert result.codes == []
    assert result.flow.nodes["samples"].type.field("mask").per == "token"
    assert compile_().flow.nodes["samples"].type.field("mask") is None


def test_J7_turns_need_who_answers(compile_: Any) -> None:
    result = compile_(edit=(GENERATE, GENERATE + ", turns = 3"))
    assert result.codes == ["RLF1004"]
    assert "`turns = 3` needs an `environment`" in result.words


@pytest.mark.parametrize("field", ["response", "prompt_text", "text"])
def test_J7_text_goes_nowhere_but_to_rewards(field: str, compile_: Any) -> None:
    """No stage takes text, so nothing is turned back into token ids between sampling and training."""
    result = compile_(before=f"t = samples.{field}")
    assert result.codes[0] in ("RLF1007", "RLF1008")
    assert result.flow is None
