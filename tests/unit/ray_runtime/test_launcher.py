"""The driver's side without a run: refusals, signals, which failure is told. Whole runs are in tests/e2e."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlflow.backends.ray_runtime import launcher, session
from rlflow.backends.ray_runtime.failures import guarded, root_cause, worker_died
from rlflow.backends.ray_runtime.launcher import RunObserver, RunSettings, run_plan
from rlflow.backends.ray_runtime.saving.manifest import write_manifest
from rlflow.backends.ray_runtime.session import Interrupts, reserved
from rlflow.diagnostics import RunFailure
from rlflow.plan import Plan, Pool, RankPlace
from rlflow.runs import read_metrics


def pool(ranks: int, device: str = "cpu") -> Pool:
    places = tuple(RankPlace(rank=i, host="local", index=i) for i in range(ranks))
    return Pool(name="main", device=device, ranks=places)  # type: ignore[arg-type]


def test_the_driver_is_light() -> None:
    """Torch and transformers take seconds to import, and only the ranks need them."""
    code = (
        "import sys, rlflow.backends.ray_runtime.launcher\n"
        "print(*{'torch', 'transformers', 'pyarrow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# --- refusals --------------------------------------------------------------------------------------------------------


def test_devices_that_this_version_does_not_run(small_plan: Plan, tmp_path: Path) -> None:
    functions = [p for p in small_plan.pools if p.device == "functions"]
    plan = small_plan.model_copy(update={"pools": (pool(1, "cuda"), *functions)})
    with pytest.raises(RunFailure, match="runs on CPUs and NPUs, and pool `main` is made of cuda devices") as failure:
        run_plan(plan, RunSettings(tmp_path, tmp_path / "run"), RunObserver())
    assert failure.value.code == "RLF4003"


def test_a_checkpoint_is_checked_before_ray_starts(
    small_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here one that a killed run was about to replace: it is put back, and then a file of it is missing."""
    monkeypatch.setattr(launcher, "ray_session", None)  # calling it would be another error
    folder = tmp_path / "run" / "checkpoints"
    aside = folder / ".global_step_2.replaced"
    aside.mkdir(parents=True)
    (aside / "state.json").write_text("{}", "utf-8")
    write_manifest(aside, {"actor/model.safetensors": {"bytes": 3, "sha256": "00"}})
    (folder / "latest_checkpointed_iteration.txt").write_text("2", "utf-8")
    with pytest.raises(RunFailure, match=r"`actor/model.safetensors` of the checkpoint of step 2") as failure:
        run_plan(small_plan, RunSettings(tmp_path, tmp_path / "run", resume=True), RunObserver())
    assert failure.value.code == "RLF5045"
    assert (folder / "global_step_2" / "state.json").is_file()


@pytest.mark.ray
def test_resources_that_are_not_there(ray_cluster: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "PLACE_DEADLINE_S", 0.5)
    with pytest.raises(RunFailure) as failure, reserved([pool(64)]):
        pass
    assert failure.value.code == "RLF5008"
    assert failure.value.notes[0] == "wanted: 1 bundle of 64 CPUs, each on one machine"
    assert "the cluster has 4 CPUs" in failure.value.notes[1]
    with pytest.raises(RunFailure) as failure, reserved([pool(2, "npu")]):
        pass
    assert failure.value.notes[0] == "wanted: 1 bundle of 2 CPUs and 2 NPUs, each on one machine"
    assert failure.value.notes[2] == "the cluster has 0 NPUs, 0 of them free"


# --- signals ---------------------------------------------------------------------------------------------------------


def test_during_start_up_the_first_ctrl_c_ends() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts():
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_during_the_run_the_second_one_ends(first: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:  # noqa: PT012
        interrupts.finish_steps()
        os.kill(os.getpid(), first)
        assert interrupts.count == 1
        os.kill(os.getpid(), signal.SIGINT)


def test_during_a_restart_the_first_ctrl_c_ends() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:  # noqa: PT012
        interrupts.finish_steps()
        interrupts.start_up()
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:  # noqa: PT012
        interrupts.finish_steps()
        os.kill(os.getpid(), signal.SIGINT)  # it asks for a clean stop, which the death of a process makes impossible
        interrupts.start_up()


def test_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interrupts() as interrupts:
        interrupts.finish_steps()
        signal.signal(signal.SIGTERM, lambda *_: None)  # as ray.init does
        interrupts.install()
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.count == 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.fixture(autouse=True)
def restore_signals() -> object:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# --- failures --------------------------------------------------------------------------------------------------------


def test_the_cause_is_told_and_not_its_echo() -> None:
    echo = RunFailure("RLF5006", "the stage failed", notes=("RuntimeError: [gloo] Connection closed by peer",))
    cause = RunFailure("RLF5006", "the stage failed", notes=("KeyError: 'x'",))
    death = RunFailure("RLF5011", "rank 1 of pool `main` died")
    assert root_cause([echo, cause]) is cause
    assert root_cause([echo]) is echo
    assert root_cause([echo, cause, death]) is death


def test_a_dead_worker_is_described(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "main-1.log").write_text("a\nb\n\nFatal Python error: Segmentation fault\n", "utf-8")
    error = RuntimeError(
        "The actor died.\n The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
        "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes "
        "include: ..."
    )
    failure = worker_died("main", 1, error, tmp_path)
    assert failure.message == "rank 1 of pool `main` died"
    assert "Fatal Python error: Segmentation fault" in failure.notes[1]
    assert failure.notes[-1] == "RuntimeError: Worker unexpectedly exits with a connection error code 2. End of file."


def test_what_goes_wrong_while_loading() -> None:
    def missing() -> None:
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401

    failure = guarded("loading models", missing)
    assert failure is not None
    assert (failure.code, failure.message) == (
        "RLF5012",
        "loading models needs the package `no_such_package`, which cannot be imported",
    )
    failure = guarded("loading models", lambda: [][0])
    assert failure is not None
    assert failure.notes == ("IndexError: list index out of range",)


# --- what a crash leaves ---------------------------------------------------------------------------------------------


def test_metrics_with_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "data": {}}) + '\n{"step": 2, "da', "utf-8")
    assert read_metrics(path) == [{"step": 1, "data": {}}]
