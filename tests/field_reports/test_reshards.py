"""Group D of the field reports (wrong weights after resharding or publishing): what can be said before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlflow.ir.flow import Layout
from rlflow.reshard.catalogue import EMBEDDING, Catalogue, Home, Rule, TensorSpec
from rlflow.reshard.shards import Sharding
from rlflow.reshard.storage import Storage

APART = "pool rollout = 8 devices pool learner = 8 devices place actor.generate on rollout with tp = {} place actor.train on learner with {}"


def vocabulary_rows(vocabulary: int, multiple: int, tp: int) -> list[int]:
    spec = TensorSpec(EMBEDDING, (vocabulary, 8), Rule.VOCAB, 0, vocabulary, Home.EMBEDDING)
    sharding = Sharding(Catalogue((spec,), 1), Layout(tp=tp), Storage(vocabulary_multiple=multiple))
    return [sharding.shard(rank, EMBEDDING).shape[0] for rank in range(tp)]


@pytest.mark.parametrize(("multiple", "padded", "each"), [(1, 151_936, 75_968), (256, 152_064, 76_032)])
def test_D9_padding_is_not_multiplied_by_tp(multiple: int, padded: int, each: int) -> None:
    rows = vocabulary_rows(151_936, multiple, 2)
    assert rows == [each, each]
    assert sum(rows) == padded


def test_D10_both_ends_of_an_edge_pad_alike() -> None:
    """Rows of a rank, wherever they are asked for: 32,008 to a multiple of 64 over two ranks."""
    assert vocabulary_rows(32_008, 64, 2) == [16_032, 16_032]
    assert sum(vocabulary_rows(32_008, 64, 1)) == 32_064


def test_D10_a_vocabulary_that_tp_does_not_divide_compiles(place_: Any, hf_model: Any) -> None:
    """Each end pads to a multiple of its own tp, not of both; padding is not sent."""
    (even,) = place_(APART.format(2, "tp = 4"), model=hf_model(vocab_size=32_008)).plan.reshards
    assert even.padded_vocabulary == ()
    (odd,) = place_(APART.format(2, "tp = 4"), model=hf_model(vocab_size=32_009)).plan.reshards
    assert odd.padded_vocabulary == (32_012, 32_010)
    assert odd.needed - even.needed == 4 * 2 * 512 * 2, "a row more of embedding and head for each of 4 engines"


def needed(result: Any) -> int:
    (reshard,) = result.plan.reshards
    return int(reshard.needed)


def test_D12_a_tied_head_is_not_sent(place_: Any, hf_model: Any) -> None:
    """One copy of 32000 x 512 in 16 bits less for each of 8 engines."""
    untied = needed(place_(APART.format(1, "tp = 1"), model=hf_model(tie_word_embeddings=False)))
    tied = needed(place_(APART.format(1, "tp = 1"), model=hf_model(tie_word_embeddings=True)))
    assert untied - tied == 8 * 32_000 * 512 * 2


def test_D13_a_tie_that_only_the_nested_section_states(place_: Any, hf_model: Any, tmp_path: Path) -> None:
    """So do sizes that stand only there: they are checked against the layout as any others."""
    tied = needed(place_(APART.format(1, "tp = 1"), model=hf_model(tie_word_embeddings=True)))
    model = hf_model()
    (config,) = tmp_path.glob(f"{model.split(chr(34))[1]}/config.json")
    text = json.loads(config.read_text("utf-8"))
    nested = {"model_type": "wrapper", "text_config": {**text, "tie_word_embeddings": True}}
    config.write_text(json.dumps(nested), "utf-8")
    assert needed(place_(APART.format(1, "tp = 1"), model=model)) == tied
    assert (
        "`pp = 3` does not divide the 8 layers"
        in place_("pool a = 3 devices place actor on a with pp = 3", model=model).words
    )


@pytest.mark.parametrize("trainer", ["pp = 2", "tp = 4, pp = 2", "tp = 2", "zero = 3"])
def test_D15_every_tensor_is_sent_and_none_twice(trainer: str, place_: Any, hf_model: Any) -> None:
    """Bytes: an engine of tp 2 receives all parameters once between its two ranks; key-value heads divide."""
    result = place_(APART.format(2, trainer), model=hf_model())
    assert result.codes == []
    (reshard,) = result.plan.reshards
    h, f, v, layers = 512, 1024, 32_000, 8
    qk_norms, norms = 2 * 64, 2 * h
    whole = 2 * v * h + layers * (4 * h * 8 * 64 + 3 * h * f)
    small = layers * (qk_norms + norms) + h  # on both ranks of an engine
    assert reshard.needed == 4 * 2 * (whole + 2 * small)
    assert reshard.received == reshard.needed == reshard.lower_bound, "the pools share no device"


def test_D17_the_wire_has_the_precision_of_the_engine(place_: Any, hf_model: Any) -> None:
    """Training keeps 32-bit masters; what engines get is cast to the compute precision before it is sent."""
    half = place_(APART.format(1, "tp = 1"), model=hf_model())
    full = place_(APART.format(1, "tp = 1"), model=hf_model().replace("bf16", "fp32"))
    assert needed(full) == 2 * needed(half)


def test_D5_a_cache_of_old_weights_does_not_outlive_its_stage(place_: Any) -> None:
    """Keys and values belong to one run of a generate stage: nothing of them is needed by the next version.

    At run time: test_weights_changed_in_place_are_seen.
    """
    plan = place_(
        "pool main = 8 devices { memory = 40 GiB } place actor.generate on main with tp = 2 place actor.train on main with tp = 4"
    ).plan
    (program,) = plan.programs
    ids = [instruction.id for instruction in program.step]
    dropped = ids.index("drop:samples keys and values")
    assert ids.index("run:samples") < dropped < ids.index("publish:actor")
    back = program.step[ids.index("rebuild:samples keys and values")]
    assert not back.from_host, "only room is made; nothing of the old content comes back"
