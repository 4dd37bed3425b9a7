"""The command line: exit codes, where output goes, and an answer instead of a traceback to whatever is given."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlflow.cli import main
from rlflow.passes.pipeline import InternalError
from rlflow.plan import Plan

FLOW = """\
flow f {
  data d = reasoning_gym("chain_sum", size = 9)
  model m = hf("m")
  reward e = scorer(d)
  step {
    s = m.generate(d.take(4 prompts), n = 2, max_new = 4 tokens)
    m.train(s, advantages = group_normalize(e(s)), loss = ppo_clip(), optimizer = adamw(1e-3))
  }
}
"""
BROKEN = FLOW.replace("4 prompts", "4")
WARNS = FLOW.replace("  step {", '  model spare = hf("x")\n  step {')


@dataclass
class Done:
    code: Any
    out: str
    err: str


Cli = Callable[..., Done]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with a sound, a broken and a warning flow."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, text in (("f.rlflow", FLOW), ("broken.rlflow", BROKEN), ("warns.rlflow", WARNS)):
        Path(name).write_text(text, "utf-8")
    return tmp_path


@pytest.fixture
def rlflow(here: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*argv: str) -> Done:
        with pytest.raises(SystemExit) as caught:
            main(list(argv))
        captured = capsys.readouterr()
        for text in (captured.out, captured.err):
            assert "Traceback" not in text
            assert "bug of rlflow" not in text
        return Done(caught.value.code, captured.out, captured.err)

    return run


# --- exit codes and streams ------------------------------------------------------------------------------------------


def test_check_of_a_sound_flow(rlflow: Cli) -> None:
    assert rlflow("check", "f.rlflow") == Done(0, "f.rlflow: flow `f` is sound (5 stages on cluster `local`)\n", "")


def test_check_of_a_broken_flow(rlflow: Cli) -> None:
    done = rlflow("check", "broken.rlflow")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(
        "error[RLF1005]: `count` counts prompts, and this number has no unit\n --> broken.rlflow:6:27\n"
    )


def test_warnings_do_not_fail(rlflow: Cli) -> None:
    done = rlflow("check", "warns.rlflow")
    assert done.code == 0
    assert done.err.startswith("warning[RLF1013]: model `spare` is never used\n")
    assert "is sound" in done.out


@pytest.mark.parametrize("verb", ["check", "compile", "show", "graph", "opt"])
def test_every_verb_fails_on_a_broken_flow(verb: str, rlflow: Cli) -> None:
    done = rlflow(verb, "broken.rlflow")
    assert (done.code, done.out) == (1, "")
    assert "error[RLF1005]" in done.err


@pytest.mark.parametrize("verb", ["check", "compile", "show", "graph", "opt", "run"])
def test_missing_file(verb: str, rlflow: Cli) -> None:
    assert rlflow(verb, "nowhere.rlflow") == Done(2, "", "rlflow: No such file or directory `nowhere.rlflow`\n")


@pytest.mark.parametrize("verb", ["check", "compile", "show", "graph", "opt"])
def test_folder_instead_of_a_file(verb: str, rlflow: Cli) -> None:
    Path("folder").mkdir()
    assert rlflow(verb, "folder") == Done(2, "", "rlflow: Is a directory `folder`\n")


@pytest.mark.parametrize("verb", ["check", "compile", "show", "graph", "opt"])
@pytest.mark.parametrize("name", ["x.rlflow", "x.json", "x.rlir", "x", "x.png"])
@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"\x00\x01\xff\xfe", "é".encode("latin-1"), FLOW.encode("utf-16"), b"{}", b"[" * 50_000, b"flow f {", b"}", b"9" * 9999],
    ids=["empty", "newline", "binary", "latin-1", "utf-16", "json", "deep", "cut", "brace", "digits"],
)  # fmt: skip
def test_bad_content_is_answered(content: bytes, name: str, verb: str, rlflow: Cli) -> None:
    Path(name).write_bytes(content)
    done = rlflow(verb, name)
    assert done.code in (1, 2)
    assert done.out == ""
    assert done.err.startswith(("error[RLF", "rlflow: ", "Error: ", "Usage: "))


def test_text_that_is_not_utf8_is_named_by_line(rlflow: Cli) -> None:
    Path("x.rlflow").write_bytes(b"flow f {\n  # caf\xe9\n}\n")
    done = rlflow("check", "x.rlflow")
    assert (done.code, done.err) == (1, "error[RLF0003]: x.rlflow:2: byte 0xe9 is not UTF-8 text\n")


@pytest.mark.parametrize(
    "change", [lambda t: "\ufeff" + t, lambda t: t.replace("\n", "\r\n"), lambda t: t.replace("  ", "\t")]
)
def test_byte_order_mark_windows_newlines_and_tabs(change: Callable[[str], str], rlflow: Cli) -> None:
    Path("x.rlflow").write_bytes(change(FLOW).encode())
    assert rlflow("check", "x.rlflow").code == 0
    Path("x.rlflow").write_bytes(change(BROKEN).encode())
    done = rlflow("check", "x.rlflow", "--format", "concise")
    assert done.err.startswith("x.rlflow:6:")
    assert "\r" not in done.err


@pytest.mark.parametrize(
    "argv",
    [
        ["chek", "f.rlflow"],
        ["check"],
        ["check", "f.rlflow", "g.rlflow"],
        ["check", "f.rlflow", "--formt", "json"],
        ["check", "f.rlflow", "--format", "yaml"],
        ["graph", "f.rlflow", "-o", "x.gif"],
        ["graph", "f.rlflow", "--stage", "final"],
        ["opt", "f.rlflow", "-p", "plaice"],
        ["opt", "f.rlflow", "-p", "schedule"],
        ["compile", "f.rlflow", "-o", "."],
        ["compile", "f.rlflow", "-o", ""],
        ["compile", "f.rlflow", "-o", "no/such/folder/plan.json"],
        ["compile", "f.rlflow", "-o", "f.rlflow/plan.json"],
        ["run"],
        ["run", "f.rlflow", "--steps", "-1"],
        ["run", "--resume", "nowhere"],
        ["check", ""],
        ["check", "-"],
        ["check", "x" * 5000],
    ],
    ids=lambda argv: " ".join(argv)[:40],
)  # fmt: skip
def test_wrong_usage(argv: list[str], rlflow: Cli, here: Path) -> None:
    before = sorted(path.name for path in here.iterdir())
    done = rlflow(*argv)
    assert (done.code, done.out) == (2, "")
    assert done.err
    assert sorted(path.name for path in here.iterdir()) == before, "nothing is left behind"


def test_options_that_a_plan_cannot_take(rlflow: Cli) -> None:
    rlflow("compile", "f.rlflow", "-o", "plan.json")
    done = rlflow("show", "plan.json", "--set", "d.take.count=8")
    assert done.code == 2
    assert "this is a plan already" in done.err


# --- formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count", "code"), [("f.rlflow", 0, 0), ("broken.rlflow", 1, 1), ("warns.rlflow", 1, 0)]
)
def test_json_is_all_that_is_printed(name: str, count: int, code: int, rlflow: Cli) -> None:
    done = rlflow("check", name, "--format", "json")
    assert (done.code, done.err) == (code, "")
    found = json.loads(done.out)
    assert len(found) == count
    for item in found:
        assert set(item) == {"code", "name", "severity", "message", "labels", "notes", "help"}
        assert item["labels"][0]["file"] == name


def test_concise_is_one_line_each(rlflow: Cli) -> None:
    Path("x.rlflow").write_text(BROKEN.replace("4 tokens", "4 prompts"), "utf-8")
    done = rlflow("check", "x.rlflow", "--format", "concise")
    first, second = done.err.splitlines()
    assert first == "x.rlflow:6:27: error[RLF1005] `count` counts prompts, and this number has no unit"
    assert second.startswith("x.rlflow:6:48: error[RLF1005] `max_new` counts tokens")


def test_several_problems_are_counted(rlflow: Cli) -> None:
    Path("x.rlflow").write_text(BROKEN.replace("4 tokens", "4 prompts"), "utf-8")
    assert rlflow("check", "x.rlflow").err.splitlines()[-1] == "2 errors"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_color", [None, "", "1"])
def test_color_on_a_terminal_only_and_not_against_the_users_wish(
    no_color: str | None, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    for stream, colored in ((Terminal(), no_color is None), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        with pytest.raises(SystemExit):
            main(["check", "broken.rlflow"])
        assert ("\x1b[" in stream.getvalue()) == colored


def test_overrides_reach_the_plan(rlflow: Cli) -> None:
    done = rlflow("compile", "f.rlflow", "--set", "s.n=4", "-D", "seed=3")
    plan = Plan.from_json(done.out)
    assert (plan.overrides, plan.seed) == (("s.n=4", "seed=3"), 3)
    assert done.err == ""


# --- files -----------------------------------------------------------------------------------------------------------


def test_compile_to_a_file_and_to_standard_output_agree(rlflow: Cli) -> None:
    assert rlflow("compile", "f.rlflow", "-o", "plan.json") == Done(0, "", "wrote plan.json\n")
    assert rlflow("compile", "f.rlflow").out == Path("plan.json").read_text("utf-8")


def test_failed_compile_leaves_the_old_plan(rlflow: Cli, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("plan.json").write_text("old", "utf-8")
    rlflow("compile", "broken.rlflow", "-o", "plan.json")
    assert Path("plan.json").read_text("utf-8") == "old"

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "replace", fail)
    assert rlflow("compile", "f.rlflow", "-o", "plan.json").code == 2
    assert Path("plan.json").read_text("utf-8") == "old"
    assert not list(here.glob("*.partial"))


def test_a_pipe_stays_a_pipe(rlflow: Cli, here: Path) -> None:
    """As /dev/null must: what is no file is written to, and nothing takes its place."""
    os.mkfifo(here / "pipe")
    reader = os.open(here / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert rlflow("graph", "f.rlflow", "-o", "pipe", "--format", "mmd").code == 0
        assert os.read(reader, 1 << 20).decode() == rlflow("graph", "f.rlflow").out
    finally:
        os.close(reader)
    assert (here / "pipe").is_fifo()
    assert not list(here.glob("*.partial"))


@pytest.mark.parametrize("verb", ["show", "graph", "compile"])
def test_plan_and_source_give_the_same(verb: str, rlflow: Cli) -> None:
    rlflow("compile", "f.rlflow", "-o", "plan.json")
    from_source, from_plan = rlflow(verb, "f.rlflow"), rlflow(verb, "plan.json")
    assert from_source == from_plan
    assert from_source.code == 0
    assert "m.train" in from_source.out


def test_show_json_is_the_plan(rlflow: Cli) -> None:
    assert rlflow("show", "warns.rlflow", "--format", "json").out == rlflow("compile", "warns.rlflow").out


@pytest.mark.parametrize(
    ("argv", "start"),
    [
        ([], "flowchart"),
        (["--format", "mmd"], "flowchart"),
        (["--format", "dot"], "digraph"),
        (["-o", "x.mmd"], "flowchart"),
        (["-o", "x.dot"], "digraph"),
        (["-o", "x.svg"], "<"),
        (["-o", "x.txt", "--format", "dot"], "digraph"),
    ],
)
def test_graph(argv: list[str], start: str, rlflow: Cli) -> None:
    done = rlflow("graph", "f.rlflow", *argv)
    assert done.code == 0
    text = Path(argv[1]).read_text("utf-8") if "-o" in argv else done.out
    assert start in text.splitlines()[0] + text[:200]
    assert "train" in text


def test_opt_reads_what_it_prints(rlflow: Cli) -> None:
    passes = "insert-old-logprobs,place,parallelize,insert-weight-edges,schedule".split(",")
    whole = rlflow("opt", "f.rlflow", "-p", ",".join(passes)).out
    text = rlflow("opt", "f.rlflow").out
    for name in passes:
        Path("x.rlir").write_text(text, "utf-8")
        text = rlflow("opt", "x.rlir", "-p", name).out
    assert text == whole


def test_opt_refuses_an_unsound_flow(rlflow: Cli) -> None:
    text = rlflow("opt", "f.rlflow").out
    Path("x.rlir").write_text(text.replace('model="m"', 'model="x"', 1), "utf-8")
    done = rlflow("opt", "x.rlir")
    assert done.code == 2
    assert "not a sound flow: s reads the unknown model x" in done.err


# --- our own mistakes ------------------------------------------------------------------------------------------------


def test_internal_error_is_70_and_keeps_the_flow(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlflow.passes.schedule._order", lambda *args: 1 / 0)
    with pytest.raises(SystemExit) as caught:
        main(["check", "f.rlflow"])
    assert caught.value.code == 70
    assert "error[RLF9001]: pass schedule: ZeroDivisionError" in capsys.readouterr().err
    assert Path("rlflow-internal-error.rlir").read_text("utf-8").startswith("flow @f stage=physical")
    with pytest.raises(InternalError):
        main(["check", "f.rlflow", "--debug"])


def test_interrupt_is_130(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlflow.driver.check", interrupt)
    with pytest.raises(SystemExit) as caught:
        main(["check", "f.rlflow"])
    assert caught.value.code == 130


# --- as a process ----------------------------------------------------------------------------------------------------


def process(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlflow", *argv]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, check=False)


def test_process_exit_codes(here: Path) -> None:
    assert process("check", "f.rlflow").returncode == 0
    done = process("check", "broken.rlflow")
    assert (done.returncode, done.stdout) == (1, "")
    assert "\x1b[" not in done.stderr


def test_check_loads_nothing_heavy(here: Path) -> None:
    code = (
        "import sys\nfrom rlflow.cli import main\n"
        "try:\n    main(['check', 'f.rlflow'])\nexcept SystemExit as exit:\n    assert exit.code == 0\n"
        "heavy = ('ray', 'torch', 'transformers', 'networkx', 'pydantic', 'numpy', 'graphviz', 'jinja2')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_goes_away_is_no_error(here: Path) -> None:
    command = f"{sys.executable} -m rlflow compile f.rlflow | head -c 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{", "")
