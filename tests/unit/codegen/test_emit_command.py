"""`rlflow emit` on the command line: a .rlflow file or a plan, what it writes, and what it says when it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlflow.cli import main


@pytest.fixture
def rlflow(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(list(argv))
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        assert isinstance(caught.value.code, int)
        return caught.value.code, captured.out, captured.err

    return run


def contents(folder: str) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def test_a_plan_gives_what_its_source_gives(project: Any, rlflow: Any) -> None:
    path = str(project())
    assert rlflow("compile", path, "-o", "plan.json", "--set", "group=8")[0] == 0
    code, out, _ = rlflow("emit", "plan.json", "--target", "slurm", "-o", "a")
    assert code == 0
    assert "wrote 8 files for slurm to a; a/README.md says how to start it" in out
    assert rlflow("emit", path, "--set", "group=8", "--target", "slurm", "-o", "b")[0] == 0
    assert contents("a") == contents("b")
    assert rlflow("emit", path, "--target", "slurm", "-o", "c")[0] == 0
    assert contents("a")["job/plan.json"] != contents("c")["job/plan.json"]


def test_a_plan_whose_source_changed(project: Any, rlflow: Any) -> None:
    path = project()
    rlflow("compile", str(path), "-o", "plan.json")
    Path("flow/rewards.py").write_text("def digits(response, answer):\n    return 0.0\n", "utf-8")
    code, _, err = rlflow("emit", "plan.json", "--target", "slurm", "-o", "out")
    assert code == 1
    assert "error[RLF4002]" in err
    assert not Path("out").exists()


def test_json_for_programs(project: Any, rlflow: Any) -> None:
    code, out, _ = rlflow("emit", str(project()), "--target", "ray-job", "-o", "out", "--format", "json")
    assert code == 0
    found = json.loads(out)
    assert found["target"] == "ray-job"
    assert {"README.md", "submit.sh", "runtime_env.yaml", "job/plan.json"} <= set(found["files"])
    assert set(found["files"]) == set(contents("out")) - {".rlflow-emit.json"}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--target", "k8s", "-o", "out"], 1, "error[RLF4008]: there are no launch files for the target `k8s`"),
        (["--target", "kuberay", "-o", "out"], 1, "error[RLF4010]: the target `kuberay` needs an image"),
        (["--target", "slurm", "-o", "out", "--image", "x"], 1, "error[RLF4010]: --image has no effect"),
        (["--target", "slurm", "-o", "flow"], 1, "error[RLF4009]: the folder `flow` holds other files"),
        (["--target", "slurm"], 2, "Missing option '-o'"),
        (["-o", "out"], 2, "Missing option '--target'"),
        (["--target", "slurm", "-o", "out", "--cluster", "nowhere"], 1, "error[RLF"),
    ],
)
def test_what_is_refused(arguments: list[str], code: int, words: str, project: Any, rlflow: Any) -> None:
    found, _, err = rlflow("emit", str(project()), *arguments)
    assert (found, words in err) == (code, True), err
    assert not Path("out").exists()


def test_a_plan_takes_no_options_of_compiling(project: Any, rlflow: Any) -> None:
    rlflow("compile", str(project()), "-o", "plan.json")
    code, _, err = rlflow("emit", "plan.json", "--set", "group=4", "--target", "slurm", "-o", "out")
    assert code == 2
    assert "this is a plan already" in err


def test_edited_files_are_kept(project: Any, rlflow: Any) -> None:
    path = str(project())
    rlflow("emit", path, "--target", "slurm", "-o", "out")
    Path("out/job.sbatch").write_text("mine\n", "utf-8")
    code, _, err = rlflow("emit", path, "--target", "slurm", "-o", "out")
    assert code == 1
    assert "changed since they were written: `job.sbatch`" in err
    assert Path("out/job.sbatch").read_text("utf-8") == "mine\n"
    Path("out/job.sbatch").unlink()
    assert rlflow("emit", path, "--target", "ray-job", "-o", "out")[0] == 0
    assert "submit.sh" in contents("out"), "another target replaces the files of the first"
