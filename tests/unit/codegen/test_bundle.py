"""The working directory of a run: everything that the flow names, and a plan that finds it there."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from rlflow import driver
from rlflow.backends.codegen import bundle
from rlflow.backends.codegen.write import write_files
from rlflow.diagnostics import RunFailure


def shipped(files: dict[str, Any]) -> set[str]:
    return {name.removeprefix("job/") for name in files if name.startswith("job/")}


def test_everything_that_is_named_is_shipped(project: Any, emitted: Any) -> None:
    """Modules that a reward imports too; what nothing names is not."""
    files = emitted(project(), "slurm")
    assert shipped(files) == {"plan.json", "run.sh", "grpo.rlflow", "data/sums.jsonl", "rewards.py", "scoring.py"}


def test_the_shipped_plan_finds_its_sources(
    project: Any, emitted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "out", emitted(project(), "slurm"))
    monkeypatch.chdir(tmp_path / "out" / "job")
    plan = driver.load_plan("plan.json")
    base_dir = driver.find_base_dir(plan, Path("plan.json"))
    assert base_dir == Path.cwd()
    assert driver.changed_sources(plan, base_dir) == []
    spans = {span["file"] for span in _spans(json.loads(Path("plan.json").read_text("utf-8")))}
    assert spans == {"grpo.rlflow"}
    assert driver.compile("grpo.rlflow") == plan  # the same as compiled there


def _spans(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        own = [value] if "end_column" in value else []
        return own + [span for item in value.values() for span in _spans(item)]
    return [span for item in value for span in _spans(item)] if isinstance(value, list) else []


def test_names_do_not_depend_on_where_it_was_compiled(
    project: Any, emitted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project()
    here = emitted(path, "ray-job")
    monkeypatch.chdir(tmp_path / "flow")
    there = emitted(Path("grpo.rlflow"), "ray-job")
    absolute = emitted(path if path.is_absolute() else tmp_path / path, "ray-job")
    assert here["job/plan.json"] == there["job/plan.json"] == absolute["job/plan.json"]
    assert here["job/run.sh"] == there["job/run.sh"] == absolute["job/run.sh"]


def test_data_above_the_flow(project: Any, emitted: Any) -> None:
    path = project()
    Path("flow/data/sums.jsonl").rename("sums.jsonl")
    text = path.read_text("utf-8").replace("data/sums.jsonl", "../sums.jsonl")
    path.write_text(text, "utf-8")
    files = emitted(path, "slurm")
    assert {"sums.jsonl", "flow/grpo.rlflow", "flow/rewards.py"} <= shipped(files)
    plan = json.loads(files["job/plan.json"])
    assert plan["sources"][0]["path"] == "flow/grpo.rlflow"


def test_absolute_paths_and_hub_names_are_listed(project: Any, emitted: Any, tmp_path: Path) -> None:
    path = project()
    text = path.read_text("utf-8").replace("data/sums.jsonl", str(tmp_path / "flow/data/sums.jsonl"))
    text = text.replace('tiny(qwen3, alphabet = "0123456789+=", context = 32 tokens)', 'hf("Qwen/Qwen3-8B")').replace(
        "tp = 2, pp = 2", "tp = 2"
    )
    path.write_text(text, "utf-8")
    files = emitted(path, "ray-job")
    assert "data/sums.jsonl" not in shipped(files)
    readme = files["README.md"].decode()
    assert f"- `{tmp_path}/flow/data/sums.jsonl`" in readme
    assert "- `Qwen/Qwen3-8B`" in readme


def test_a_model_folder_beside_the_flow(project: Any, emitted: Any) -> None:
    """Shipped when it is there; a path that is none of a hub's names must be there."""
    path = project()
    model = 'tiny(qwen3, alphabet = "0123456789+=", context = 32 tokens)'
    text = path.read_text("utf-8").replace("tp = 2, pp = 2", "tp = 2")
    path.write_text(text.replace(model, 'hf("../models/policy")'), "utf-8")
    with pytest.raises(RunFailure, match=r"`actor` names `\.\./models/policy`, which is not there") as caught:
        emitted(path, "ray-job")
    assert caught.value.code == "RLF1012"
    Path("models/policy").mkdir(parents=True)
    Path("models/policy/config.json").write_text("{}", "utf-8")
    assert "models/policy/config.json" in shipped(emitted(path, "ray-job"))


def test_data_that_went_away_since_is_named(project: Any) -> None:
    path = project()
    checked = driver.check(path)
    plan = driver.plan_of(checked, driver.Options())
    Path("flow/data/sums.jsonl").unlink()
    with pytest.raises(RunFailure) as caught:
        bundle.collect(plan, path.parent)
    assert caught.value.code == "RLF1012"
    assert "data `questions` names `data/sums.jsonl`" in caught.value.message


def test_included_files(project: Any, emitted: Any) -> None:
    path = project()
    Path("flow/prompts/.git").mkdir(parents=True)
    Path("flow/prompts/.git/huge").write_text("", "utf-8")
    Path("flow/prompts/system.txt").write_text("be brief", "utf-8")
    assert "prompts/system.txt" in shipped(emitted(path, "slurm", include=(Path("prompts"),)))
    assert "prompts/.git/huge" not in shipped(emitted(path, "slurm", include=(Path("prompts"),)))
    with pytest.raises(RunFailure, match="--include names `nothing`"):
        emitted(path, "slurm", include=(Path("nothing"),))


def test_too_large_names_the_largest(project: Any, emitted: Any, tmp_path: Path) -> None:
    path = project()
    with (tmp_path / "flow/data/weights.bin").open("wb") as file:
        file.truncate(bundle.LIMIT_BYTES + 1)  # sparse
    with pytest.raises(RunFailure) as caught:
        emitted(path, "ray-job", include=(Path("data/weights.bin"),))
    assert caught.value.code == "RLF4011"
    assert caught.value.notes[0].startswith("`data/weights.bin`: 500")
    assert len(caught.value.notes) == 5
    assert "500" in caught.value.message


def test_the_zip_holds_the_working_directory(project: Any, emitted: Any) -> None:
    files = emitted(project(), "kuberay")
    with zipfile.ZipFile(io.BytesIO(files["job.zip"])) as archive:
        names = archive.namelist()
        assert archive.read("job/plan.json") == files["job/plan.json"]
    assert {name.removeprefix("job/") for name in names} == shipped(files)
    assert all(name.startswith("job/") for name in names), "Ray takes off one folder at the top"
