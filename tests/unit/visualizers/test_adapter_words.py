"""What `show` and `graph` say about adapters and shared weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.backends.visualizers.summary import summary_lines
from rlflow.backends.visualizers.words import describe_source
from rlflow.driver import compile
from rlflow.ir.ops import HfModel, Lora, PresetModel, TinyModel, ValueModel

ADAPTERS = Lora(rank=8, alpha=4.0, targets="attention")
NAMED = Lora(rank=8, alpha=0.5, targets=("q_proj", "v_proj"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (HfModel(path="m", lora=ADAPTERS), "hf m compute fp32, lora rank 8 alpha 4 on attention"),
        (HfModel(path="m"), "hf m compute fp32"),
        (PresetModel(name="p", lora=NAMED), "preset p without weights, lora rank 8 alpha 0.5 on q_proj v_proj"),
        (
            TinyModel(architecture="llama", alphabet="ab", lora=NAMED),
            "tiny llama 2 layers, hidden 64, compute fp32, lora rank 8 alpha 0.5 on q_proj v_proj",
        ),
        (ValueModel(of="m", shared=True), "value head on m's own body"),
        (ValueModel(of="m"), "value head on m's first weights"),
    ],
)
def test_a_source_in_words(source: HfModel | PresetModel | TinyModel | ValueModel, expected: str) -> None:
    assert describe_source(source) == expected


def test_the_summary_says_what_is_trained_and_what_is_published() -> None:
    plan = compile(Path(__file__).parents[3] / "examples" / "grpo_lora.rlflow")
    text = " ".join(" ".join(line for _, line in summary_lines(plan, 200)).split())
    assert "lora rank 16 alpha 32 on all_linear" in text
    assert "readers hold the frozen weights plus the adapters" in text
