"""`rlflow run --device`: a plan for this machine on its devices of another kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.cli import main
from rlflow.diagnostics import RunFailure
from rlflow.driver import Options, compile
from rlflow.runs import on_device

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_pools_change_and_nothing_else() -> None:
    plan = compile(EXAMPLES / "grpo_arithmetic.rlflow")
    moved = on_device(plan, "npu")
    assert (plan.pools[0].name, plan.pools[0].device) == ("main", "cpu")
    assert (moved.pools[0].name, moved.pools[0].device) == ("main", "npu")
    assert moved.pools[1:] == plan.pools[1:]
    assert moved.model_copy(update={"pools": plan.pools}) == plan
    assert on_device(moved, "cpu") == plan


def test_a_cluster_says_itself_what_its_devices_are() -> None:
    plan = compile(EXAMPLES / "pangu_ultra_moe.rlflow", Options(cluster="supernodes"))
    assert on_device(plan, "npu") == plan
    with pytest.raises(RunFailure) as caught:
        on_device(plan, "cpu")
    assert caught.value.code == "RLF4003"
    assert (
        "`--device cpu` is for plans of this machine, and this one is for cluster `supernodes`" in caught.value.message
    )


def test_a_resumed_run_keeps_its_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["run", "--resume", str(tmp_path), "--device", "npu"])
    assert exit.value.code == 2
    assert "takes everything from the run folder" in capsys.readouterr().err
