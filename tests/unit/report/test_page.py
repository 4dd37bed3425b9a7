"""The page: it is whole, loads nothing, says the same for the same, and no text of a user can leave its place."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from rlflow import driver
from rlflow.backends.visualizers.report import page as drawing
from rlflow.reports import Simulation, gather, report

SECTIONS = {"summary", "program", "graph", "placement", "timeline", "traffic", "decisions"}
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=hacked()>"


def test_every_part_is_there(make, flow_file):
    found, text = make(flow_file)
    assert found.ids >= SECTIONS | {"gantt", "strips", "legend", "data", "theme"}
    assert "measured" not in found.ids
    assert "<svg" in text
    (subject,) = found.data["subjects"]
    assert [track["title"] for track in subject["tracks"]] == ["simulated"]
    assert [memory["pool"] for memory in subject["memory"]] == ["rollout", "learner"]
    assert {queue["id"] for queue in subject["queues"]} == {"samples->learner", "exact->learner"}
    assert [ages["stage"] for ages in subject["ages"]] == ["samples"]
    assert "nothing is chosen" in found.text.lower()


def test_it_loads_nothing(make, flow_file):
    found, text = make(flow_file)
    for tag, attributes in found.elements:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form"), tag
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("href", "src", "xlink:href", "action"):
                assert (value or "").startswith("#"), (tag, name, value)
    assert "url(" not in re.sub(r"url\(#", "", text)
    assert "@import" not in text


def test_only_its_own_script_may_run(make, flow_file):
    found, _ = make(flow_file)
    policies = [a["content"] for tag, a in found.elements if a.get("http-equiv") == "Content-Security-Policy"]
    digest = base64.b64encode(hashlib.sha256(found.scripts[1].encode()).digest()).decode()
    assert len(found.scripts) == 2
    assert len(policies) == 1
    assert policies[0].startswith("default-src 'none';")
    assert f"script-src 'sha256-{digest}';" in policies[0]


def test_the_same_subject_gives_the_same_page(make, flow_file):
    assert make(flow_file)[1] == make(flow_file)[1]


def test_text_of_users_stays_text(make, tmp_path, flow_file):
    folder = tmp_path / "<b onmouseover=hacked()><"
    folder.mkdir()
    path = folder / "script><script>window.hacked=1<!--.rlflow"
    rows = folder / HOSTILE
    rows.parent.mkdir(parents=True)
    rows.write_text('{"question": "1+1=", "answer": "2"}\n' * 64, "utf-8")
    shutil.copy("examples/rewards.py", folder)
    text = flow_file.read_text("utf-8") + f"# {HOSTILE}\n"
    text = text.replace(
        'reasoning_gym("chain_sum", size = 512)', f'jsonl("{HOSTILE}", prompt = "question", answer = "answer")'
    )
    path.write_text(text.replace("scorer(tests)", 'python("rewards:correct_digits")'), "utf-8")
    found, raw = make(path)
    clean, _ = make(flow_file)
    assert len(found.scripts) == len(clean.scripts)
    assert raw.count("<script") == 2
    tags = {tag for tag, _ in found.elements}
    assert tags <= {tag for tag, _ in clean.elements}  # no img, no b with a handler
    assert all(not name.startswith("on") for _, attributes in found.elements for name in attributes)
    assert HOSTILE in found.text
    assert found.data["subjects"][0]["name"] == path.as_posix()


def test_text_of_a_run_stays_text(make, tmp_path, flow_file):
    run = tmp_path / "run"
    (run / "trace").mkdir(parents=True)
    (run / "plan.json").write_text(driver.compile(flow_file).to_json(), "utf-8")
    (run / "run.json").write_text(json.dumps({"status": HOSTILE}), "utf-8")
    event = {"pool": HOSTILE, "rank": 0, "instruction": HOSTILE, "stage": HOSTILE, "kind": HOSTILE, "step": 1}
    (run / "trace" / "x.jsonl").write_text(json.dumps(event | {"start_us": 5, "duration_us": 7}) + "\n", "utf-8")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": {f"val/{HOSTILE}": 1.0}}) + "\n", "utf-8")
    found, raw = make(run)
    assert raw.count("<script") == 2
    assert HOSTILE in found.text
    tracks = found.data["subjects"][0]["tracks"]
    assert tracks[-1]["rows"][0]["pool"] == HOSTILE


def test_it_is_small_however_large_the_plan(make, tmp_path):
    source = Path("examples/pangu_ultra_moe.rlflow").read_text("utf-8")
    larger = source.replace("2 * cloudmatrix384", "4 * cloudmatrix384").replace("512 prompts", "1024 prompts")
    larger = larger.replace("1024 devices", "2048 devices").replace("= 512 devices", "= 1024 devices")
    path = tmp_path / "four.rlflow"
    path.write_text(larger, "utf-8")
    found, raw = make(path)
    assert len(found.data["subjects"][0]["hosts"]) == 192
    assert len(raw.encode()) < 1_000_000


def test_what_a_plan_does_not_tell_is_said(make, tmp_path):
    found, _ = make(Path("examples/grpo_arithmetic.rlflow"))
    assert "not simulated: RLF4004" in found.text
    assert found.data["subjects"][0]["tracks"] == []
    assert "gantt" not in found.ids


def test_a_changed_source_is_not_shown(make, tmp_path, flow_file):
    plan = tmp_path / "plan.json"
    plan.write_text(driver.compile(flow_file).to_json(), "utf-8")
    assert "# two pools, one step of staleness" in make(plan)[0].text
    flow_file.write_text("flow other { }\n", "utf-8")
    found, _ = make(plan)
    assert "is not what the plan was made from" in found.text
    assert "flow other" not in found.text
    flow_file.unlink()
    assert "is not found from here" in make(plan)[0].text


def test_two_plans_side_by_side(make, tmp_path, flow_file):
    other = tmp_path / "wide.rlflow"
    text = flow_file.read_text("utf-8").replace("with tp = 2\n  place actor.train", "with tp = 4\n  place actor.train")
    other.write_text(text, "utf-8")
    found, _ = make(flow_file, other)
    assert "differences" in found.ids
    assert "[samples].layout.tp" in found.text
    assert [subject["short"] for subject in found.data["subjects"]] == ["two.rlflow", "wide.rlflow"]
    same, _ = make(flow_file, flow_file)
    assert "differences" not in same.ids
    folder = tmp_path / "other"
    folder.mkdir()
    shutil.copy(flow_file, folder)
    names = [subject["short"] for subject in make(flow_file, folder / "two.rlflow")[0].data["subjects"]]
    assert names == [flow_file.as_posix(), (folder / "two.rlflow").as_posix()]


@pytest.mark.parametrize("count", [0, 3])
def test_one_or_two(flow_file, count):
    with pytest.raises(ValueError, match=f"{count} paths"):
        report([flow_file] * count)


def test_without_graphviz_the_graph_is_drawn_all_the_same(make, flow_file, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    found, text = make(flow_file, flow_file)
    assert text.count("Laid out by rlflow, without Graphviz.") == 2
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)
    assert next(a["viewbox"] for tag, a in found.elements if tag == "svg")


def test_drawn_lengths_reach_the_page(make, flow_file):
    found, _ = make(flow_file, seed=1)
    assert "lengths drawn" in found.text


def test_it_may_load_itself_again(flow_file):
    (subject,) = gather([flow_file], simulation=Simulation(2))
    assert 'http-equiv="refresh" content="5"' in drawing.render_report([subject], refresh_s=5)
    assert 'http-equiv="refresh"' not in drawing.render_report([subject])


def test_json_ends_no_script():
    text = drawing._json({"a": "</script>&<!--\u2028"})
    assert not re.search(r"[<>&\u2028]", text)
    assert json.loads(text) == {"a": "</script>&<!--\u2028"}
