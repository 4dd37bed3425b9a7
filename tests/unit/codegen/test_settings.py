"""What `rlflow emit` refuses, with the nearest legal value."""

from __future__ import annotations

from typing import Any

import pytest

from rlflow.backends.codegen.names import job_name, legal_name
from rlflow.backends.codegen.settings import EmitSettings, check_settings
from rlflow.diagnostics import RunFailure


def refused(**settings: Any) -> RunFailure:
    with pytest.raises(RunFailure) as caught:
        check_settings(EmitSettings(**settings))
    return caught.value


def test_an_unknown_target() -> None:
    failure = refused(target="kubray")
    assert failure.code == "RLF4008"
    assert failure.help == ("did you mean `kuberay`?",)
    assert refused(target="lsf").help == ("write --target with `ray-job`, `kuberay` or `slurm`",)


@pytest.mark.parametrize(
    ("settings", "nearest"),
    [
        ({"name": "My_Run"}, "my-run"),
        ({"name": "9lives"}, "lives"),
        ({"name": "x" * 41}, "x" * 40),
        ({"name": "Ünit"}, "nit"),
        ({"namespace": "Team A"}, "team-a"),
        ({"claim": "runs_1"}, "runs-1"),
        ({"image": "a b"}, None),
        ({"image": "$(touch x)"}, None),
        ({"working_dir": "job.zip"}, None),
        ({"working_dir": "https://host/'job'.zip"}, None),
        ({"device_resource": "npu; rm"}, None),
        ({"run_dir": "runs/x"}, None),
        ({"run_dir": "/runs\n#SBATCH --x"}, None),
        ({"interface": "eth0 eth1"}, None),
    ],
)
def test_values_that_are_not_legal(settings: dict[str, str], nearest: str | None) -> None:
    failure = refused(**{"target": "kuberay", "image": "i"} | settings)
    assert failure.code == "RLF4010"
    assert next(iter(settings)).replace("_", "-") in failure.message
    assert "\n" not in failure.message
    assert failure.help == ((f"the nearest that is: `{nearest}`",) if nearest else ())


@pytest.mark.parametrize("settings", [{"partition": "a b"}, {"account": "x\n#SBATCH"}, {"time": "1 day"}, {"time": ""}])
def test_values_of_slurm(settings: dict[str, str]) -> None:
    if any(settings.values()):
        assert refused(target="slurm", **settings).code == "RLF4010"
    check_settings(EmitSettings("slurm", partition="npu,gpu", account="team_1", time="1-12:00:00"))


@pytest.mark.parametrize(
    ("target", "option", "value"),
    [("slurm", "image", "i"), ("ray-job", "partition", "p"), ("kuberay", "time", "90"), ("ray-job", "claim", "c")],
)
def test_an_option_without_effect(target: str, option: str, value: str) -> None:
    failure = refused(target=target, **{option: value})
    assert failure.code == "RLF4010"
    assert f"--{option} has no effect with the target `{target}`" in failure.message


def test_kuberay_needs_an_image() -> None:
    assert "needs an image" in refused(target="kuberay").message
    check_settings(EmitSettings("kuberay", image="registry.example:5000/team/rlflow:1@sha256"))


@pytest.mark.parametrize("flow", ["Async_GRPO", "_x", "a" * 200, "日本", "x9_", "A-B"])
def test_names_are_legal_and_stay_apart(flow: str) -> None:
    name = job_name(flow, "0123456789abcdef")
    check_settings(EmitSettings("ray-job", name=name))
    assert name.endswith("-01234567")
    assert name != job_name(flow, "f123456789abcdef")
    assert legal_name(name) == name
