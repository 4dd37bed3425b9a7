"""What a plan may decide and the runtime does not do yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow import driver
from rlflow.backends.ray_runtime.accepted import refuse_unknown
from rlflow.diagnostics import RunFailure
from rlflow.plan import Plan

TEXT = """
flow f {{
  data d = reasoning_gym("chain_sum", size = 9)
  model m = preset("qwen3_8b"{lora})
  reward e = scorer(d)
  step {{
    b = d.take(64 prompts)
    s = m.generate(b, n = 8, max_new = 512 tokens)
    m.train(s, advantages = group_normalize(e(s)), loss = ppo_clip(), optimizer = adamw(1e-6))
  }}
}}
schedule f on pod {{
  pool main = 8 devices
  place m.generate on main with tp = 2{reshard}
  place m.train on main with tp = 4
}}
cluster pod {{ host = 8 * ascend_910b {{ memory = 1.5 TiB }} }}
"""


def compiled(folder: Path, lora: str = "", reshard: str = "") -> Plan:
    file = folder / "f.rlflow"
    file.write_text(TEXT.format(lora=lora, reshard=reshard), "utf-8")
    return driver.compile(file)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"reshard": ", reshard = in_place"}, "does not reshard in place, as the plan does with `m`"),
        ({"lora": ", lora = lora(rank = 8)"}, "the plan sends those of `m`"),
    ],
)
def test_it_is_refused_with_a_word(tmp_path: Path, asked: dict[str, str], words: str) -> None:
    with pytest.raises(RunFailure, match=words) as failure:
        refuse_unknown(compiled(tmp_path, **asked))
    assert failure.value.code == "RLF4003"


def test_other_plans_are_not(tmp_path: Path) -> None:
    refuse_unknown(compiled(tmp_path))
