"""The software NPU: what the runtime computes through torch_npu's operators is what it computes on a CPU.

Everything runs in processes of its own: once active, the double stays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.npu.frozen_model import frozen_flow

ROOT = Path(__file__).parents[2]
SITE = ROOT / "tests" / "npu" / "site"
EXAMPLE = ROOT / "examples" / "grpo_arithmetic.rlflow"
STEPS = 3

pytestmark = pytest.mark.timeout(600)


def run(folder: Path, *command: str) -> str:
    """Standard output of a Python command on the software NPU; operators are noted in `folder`/operators."""
    (folder / "operators").mkdir(exist_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(SITE)]),
        "RLFLOW_SOFTWARE_NPU_RECORD": str(folder / "operators"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def operators(folder: Path) -> set[str]:
    files = (folder / "operators").iterdir()
    return {name for file in files for name in file.read_text("utf-8").split()}


def test_five_families_compute_what_they_compute_on_a_cpu(tmp_path: Path) -> None:
    """Logits, gradients, an AdamW update and a cached decode step, against transformers' eager attention and experts."""
    lines = run(tmp_path, "tests/npu/served_models.py").splitlines()
    found = {line["family"]: line for line in map(json.loads, filter(lambda line: line.startswith("{"), lines))}
    assert set(found) == {"llama", "qwen2", "qwen3", "qwen3 moe", "deepseek v3"}
    for family, line in found.items():
        assert line["logits"] < 1e-5
        assert line["decoded"] < 1e-5
        assert line["gradients"] < 1e-5
        assert line["weights"] < 1e-5
        if family != "qwen3 moe":  # there bf16 may choose another expert
            assert line["decoded in bf16"] < 0.05
    reached = operators(tmp_path)
    assert {"npu_fusion_attention_grad", "npu_fused_infer_attention_score", "npu_grouped_matmul"} <= reached
    assert {"npu_moe_init_routing_v2", "npu_moe_token_permute", "npu_apply_adam_w"} <= reached


def test_a_frozen_model_says_the_same_with_its_weights_cast(tmp_path: Path) -> None:
    """Through torch_npu's own function; the trained model's weights are not given to it."""
    file = frozen_flow(tmp_path)
    found = json.loads(run(tmp_path, "tests/npu/frozen_model.py", str(file)).splitlines()[-1])
    assert found["cast"][0] == 2 * 7  # the linear layers of both decoder layers
    assert found["plain"][0] == 0
    assert found["cast"][1] == found["plain"][1]
    assert max(found["cast"][1]) < 0
    assert "npu_format_cast" in operators(tmp_path)


def losses(folder: Path, device: str, file: Path) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and mean response length of every step of a run of `file`."""
    where = folder / f"{device}-{file.stem}"
    command = ["-m", "rlflow", "run", str(file), "--device", device, "--steps", str(STEPS), "--run-dir", str(where)]
    run(folder, *command, "--plain")
    assert f'"device": "{device}"' in (where / "plan.json").read_text("utf-8")
    steps = [json.loads(line) for line in (where / "metrics.jsonl").read_text("utf-8").splitlines()]
    data = [step["data"] for step in steps if "actor/loss" in step["data"]]
    assert len(data) == STEPS
    return [(step["actor/loss"], step["actor/grad_norm"], step["response_length/mean"]) for step in data]


def test_a_run_on_npus_loses_what_a_run_on_the_cpu_loses(tmp_path: Path) -> None:
    """`rlflow run --device npu`: Ray's NPU resource, a device per rank; on two ranks gradients are summed over hccl."""
    text = EXAMPLE.read_text("utf-8")
    one, two = tmp_path / "one.rlflow", tmp_path / "two.rlflow"
    one.write_text(text, "utf-8")
    two.write_text(text + "\nschedule grpo_arithmetic on local {\n  pool main = 2 devices\n}\n", "utf-8")
    (tmp_path / "rewards.py").write_text((EXAMPLE.parent / "rewards.py").read_text("utf-8"), "utf-8")
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a in range(10) for b in range(10)]
    (tmp_path / "data" / "arithmetic.jsonl").write_text("".join(rows), "utf-8")
    on_the_cpu = losses(tmp_path, "cpu", one)
    assert operators(tmp_path) == set()
    on_one = losses(tmp_path, "npu", one)
    own = {
        "npu_fusion_attention",
        "npu_fusion_attention_grad",
        "npu_rms_norm_backward",
        "npu_swiglu",
        "npu_add_rms_norm",
        "npu_apply_adam_w",
    }
    assert own <= operators(tmp_path)
    assert "c10d::allreduce_" not in operators(tmp_path)
    on_two = losses(tmp_path, "npu", two)
    assert "c10d::allreduce_" in operators(tmp_path)
    for cpu, single, pair in zip(on_the_cpu, on_one, on_two, strict=True):
        assert single == pytest.approx(cpu, abs=1e-4)
        assert pair == pytest.approx(cpu, abs=1e-4)
