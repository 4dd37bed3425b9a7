"""`rlflow report`: what it takes, where it writes, and what it says about what it cannot use."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlflow import driver, reports
from rlflow.cli import main
from rlflow.commands import report as command
from rlflow.reports import is_running


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch, flow_file):
    monkeypatch.chdir(tmp_path)


def run(capsys, *argv: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["report", *argv])
    return int(ended.value.code or 0), capsys.readouterr().err


def test_writes_the_page_and_prints_warnings(capsys):
    code, err = run(capsys, "two.rlflow", "-o", "page.html", "--steps", "2")
    assert code == 0
    assert "warning[RLF1013]" in err
    assert err.endswith("wrote page.html\n")
    assert Path("page.html").read_text("utf-8").startswith("<!DOCTYPE html>")
    assert [path.name for path in Path().glob("*.partial")] == []


def test_options_of_the_compile_reach_it(capsys):
    code, _ = run(capsys, "two.rlflow", "--steps", "2", "-D", "batch.count=64")
    assert code == 0
    assert "take 64 prompts" in Path("report.html").read_text("utf-8")


def test_stated_times_reach_the_simulation(capsys):
    code, _ = run(capsys, "two.rlflow", "--steps", "2", "--stage", "samples=1000", "--stage", "exact=1")
    assert code == 0
    assert "16.7 min" in Path("report.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["missing.rlflow"], 2, "missing.rlflow"),
        (["missing.json"], 2, "No such file"),
        (["empty"], 1, "is not a run folder: it has no plan.json"),
        (["bad.json"], 1, "error[RLF4001]"),
        (["two.rlflow", "two.rlflow", "two.rlflow"], 2, "3 paths; a report is about one, or two side by side"),
        (["plan.json", "--set", "batch.count=8"], 2, "apply to a .rlflow file"),
        (["two.rlflow", "-o", "."], 2, "is a folder"),
        (["two.rlflow", "-o", "no/such/folder.html"], 2, "No such file"),
        (["two.rlflow", "--follow"], 2, "--follow is of one run folder"),
        (["two.rlflow", "--stage", "samples"], 2, "write NAME=SECONDS"),
        (["two.rlflow", "--stage", "nothing=3"], 1, "nothing"),
        ([], 2, "Missing argument"),
    ],
)
def test_what_it_cannot_use(capsys, argv, code, words):
    Path("bad.json").write_text('{"format": "other"}', "utf-8")
    Path("plan.json").write_text(driver.compile("two.rlflow").to_json(), "utf-8")
    Path("empty").mkdir()
    found, err = run(capsys, *argv)
    assert (found, words in err) == (code, True), err
    assert "Traceback" not in err


def test_a_failure_leaves_the_page_before(capsys, monkeypatch):
    Path("report.html").write_text("the page before", "utf-8")
    monkeypatch.setattr(reports, "page", lambda *_: "\ud800")  # cannot be written as UTF-8
    assert run(capsys, "two.rlflow", "--steps", "2")[0] == 70
    assert Path("report.html").read_text("utf-8") == "the page before"


def test_follows_a_run_until_it_has_ended(monkeypatch):
    folder = Path("run")
    folder.mkdir()
    (folder / "plan.json").write_text(driver.compile("two.rlflow").to_json(), "utf-8")
    (folder / "run.json").write_text('{"status": "running"}', "utf-8")
    monkeypatch.setattr(command, "FOLLOW_S", 0.2)
    page = Path("report.html")

    def ends() -> None:
        until = time.monotonic() + 60
        while not page.is_file() and time.monotonic() < until:
            time.sleep(0.02)
        assert 'http-equiv="refresh"' in page.read_text("utf-8")
        row = json.dumps({"step": 1, "data": {"critic/score/mean": 0.25, "timing_s/step": 2.0}})
        (folder / "metrics.jsonl").write_text(row + "\n", "utf-8")
        (folder / "run.json").write_text('{"status": "finished"}', "utf-8")

    ending = threading.Thread(target=ends)
    ending.start()
    result = CliRunner().invoke(command.report, ["run", "--steps", "1", "--follow"], catch_exceptions=False)
    ending.join()
    assert result.exit_code == 0
    assert not is_running(folder)
    text = page.read_text("utf-8")
    assert 'http-equiv="refresh"' not in text
    assert "mean reward" in text
