"""Programs of several files: what is found where, what is said about what is not, and what the plan records."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlflow.diagnostics import CompileError, Diagnostic, SourceFile
from rlflow.diagnostics.render import FORMATS, render
from rlflow.driver import Options, changed_sources, check, compile, find_base_dir
from rlflow.frontend.imports import MAX_CHAIN
from rlflow.frontend.lower import lower
from rlflow.grammar.parse import parse

FLOW = """\
flow f(n = 4) {
  data   sums  = jsonl("sums.jsonl", prompt = "question", answer = "answer")
  model  actor = tiny(qwen3, alphabet = "0123456789+-=. ")
  reward exact = python("rewards:exact")
  step {
    batch = sums.take(8 prompts)
    samples = actor.generate(batch, n = n, max_new = 8 tokens)
    score = exact(samples)
    adv = group_normalize(score)
    actor.train(samples, advantages = adv, loss = ppo_clip(0.2), optimizer = adamw(lr = 1e-3))
  }
}
"""
SCHEDULE = "schedule f on pod { pool main = 4 devices }\n"
CLUSTER = "cluster pod { host = 4 * h100 }\n"

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """`write(path=text)`, with `__` for `/` and without `.rlflow`; the tests run in the folder."""
    monkeypatch.chdir(tmp_path)

    def run(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / (name.replace("__", "/") + ".rlflow")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
            (path.parent / "sums.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
            (path.parent / "rewards.py").write_text("def exact(response, answer):\n    return 1.0\n")

    return run


def problems(path: str, options: Options | None = None) -> list[Diagnostic]:
    with pytest.raises(CompileError) as caught:
        check(path, options)
    found = list(caught.value.diagnostics)
    for format in FORMATS:
        assert render(found, format)
    return found


def paths(plan_or_path: str) -> list[str]:
    return [source.path for source in compile(plan_or_path).sources]


def test_flow_schedule_and_cluster_in_three_files(write: Write) -> None:
    write(flows__f=FLOW, pods=CLUSTER, main='import "flows/f.rlflow"\nimport "pods.rlflow"\n' + SCHEDULE)
    checked = check("main.rlflow")
    assert checked.warnings == ()
    assert checked.flow.pools["main"].host_of_rank == ("host",) * 4
    assert paths("main.rlflow") == ["flows/f.rlflow", "main.rlflow", "pods.rlflow", "flows/rewards.py"]


def test_a_schedule_file_for_the_flow_of_the_file_that_is_asked_for(write: Write) -> None:
    write(f='import "on_pod.rlflow"\n' + FLOW, on_pod=CLUSTER + SCHEDULE)
    assert check("f.rlflow").lowered.cluster.name == "pod"
    assert paths("f.rlflow") == ["f.rlflow", "on_pod.rlflow", "rewards.py"]


def test_paths_are_relative_to_the_file_that_says_them(write: Write, tmp_path: Path) -> None:
    write(
        a__main='import "../b/f.rlflow"\nimport "pods/pod.rlflow"\n' + SCHEDULE,
        b__f=FLOW,
        a__pods__pod='import "../../c/pod.rlflow"\n',
        c__pod=CLUSTER,
    )
    (tmp_path / "a" / "sums.jsonl").unlink()
    (tmp_path / "a" / "rewards.py").unlink()
    plan = compile("a/main.rlflow")
    assert [s.path for s in plan.sources] == [
        "b/f.rlflow", "a/main.rlflow", "c/pod.rlflow", "a/pods/pod.rlflow", "b/rewards.py",
    ]  # fmt: skip
    assert find_base_dir(plan) == tmp_path / "b", "a run reads the data beside the flow"
    assert changed_sources(plan, Path("b")) == []
    (tmp_path / "c" / "pod.rlflow").write_text(CLUSTER + "# another comment\n")
    assert changed_sources(plan, Path("b")) == ["c/pod.rlflow"]


def test_a_file_that_two_need_is_read_once(write: Write) -> None:
    write(
        main='import "x.rlflow"\nimport "y.rlflow"\nimport "./x.rlflow"\n' + FLOW,
        x='import "pod.rlflow"\n' + SCHEDULE,
        y='import "sub/../pod.rlflow"\n',
        pod=CLUSTER,
    )
    assert check("main.rlflow").lowered.cluster.name == "pod"
    assert paths("main.rlflow") == ["main.rlflow", "pod.rlflow", "x.rlflow", "y.rlflow", "rewards.py"]


def test_the_file_that_is_asked_for_comes_first_when_flows_are_chosen(write: Write) -> None:
    write(main='import "g.rlflow"\n' + FLOW, g=FLOW.replace("flow f", "flow g"))
    assert check("main.rlflow").flow.name == "f"
    assert check("main.rlflow", Options(flow="g")).flow.name == "g"
    write(two='import "g.rlflow"\nimport "h.rlflow"\n', h=FLOW.replace("flow f", "flow h"))
    (error,) = problems("two.rlflow")
    assert "2 flows" in error.message
    assert [label.span.file.name for label in error.labels] == ["g.rlflow", "h.rlflow"]
    assert check("two.rlflow", Options(flow="h")).flow.name == "h"


def test_overrides_reach_an_imported_flow(write: Write) -> None:
    write(main='import "f.rlflow"\n', f=FLOW)
    assert check("main.rlflow", Options(overrides=("n=2",))).flow.nodes["samples"].op.n == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("files", "message", "chain", "where"),
    [
        ({"main": 'import "main.rlflow"\n'}, "`main.rlflow` imports itself", "`main.rlflow` -> `main.rlflow`", "main"),
        (
            {"main": 'import "a.rlflow"\n', "a": 'import "sub/b.rlflow"\n', "sub__b": 'import "../main.rlflow"\n'},
            "these files import each other",
            "`main.rlflow` -> `a.rlflow` -> `sub/b.rlflow` -> `main.rlflow`",
            "sub/b",
        ),
        (
            {"main": 'import "a.rlflow"\n', "a": 'import "b.rlflow"\n', "b": 'import "a.rlflow"\n'},
            "these files import each other",
            "`a.rlflow` -> `b.rlflow` -> `a.rlflow`",
            "b",
        ),
    ],
)
def test_cycle(files: dict[str, str], message: str, chain: str, where: str, write: Write) -> None:
    write(**files)
    (error,) = problems("main.rlflow")
    assert (error.code, error.message) == ("RLF0008", message)
    assert error.notes == (chain,)
    assert error.span is not None
    assert error.span.file.name == f"{where}.rlflow"


def test_missing_file(write: Write) -> None:
    write(main='import "sub/a.rlflow"\n' + FLOW, sub__a='import "bods.rlflow"\n', sub__pods=CLUSTER)
    (error,) = problems("main.rlflow")
    assert (error.code, error.message) == ("RLF1012", "there is no file `bods.rlflow` beside this one")
    assert str(error.span) == "sub/a.rlflow:1:8"
    assert error.notes == ("imported by main.rlflow:1:1",)
    assert error.help == ("did you mean `pods.rlflow`?",)


@pytest.mark.parametrize("path", ["", ".", "sub", "a\0b", "x" * 5000])
def test_no_file_at_all(path: str, write: Write) -> None:
    write(main=f'import "{path}"\n' + FLOW, sub__x="")
    (error,) = problems("main.rlflow")
    assert error.code == "RLF1012"


def test_every_missing_file_is_reported(write: Write) -> None:
    write(main='import "a.rlflow"\nimport "b.rlflow"\n' + FLOW)
    assert [d.code for d in problems("main.rlflow")] == ["RLF1012", "RLF1012"]


def test_syntax_error_in_an_imported_file(write: Write) -> None:
    write(main='import "a.rlflow"\n' + FLOW, a='import "b.rlflow"\n', b="cluster pod {\n  host = 4 ** h100\n}\n")
    (error,) = problems("main.rlflow")
    assert error.code == "RLF0001"
    assert str(error.span) == "b.rlflow:2:13"
    assert error.notes == ("imported by a.rlflow:1:1, from main.rlflow:1:1",)


def test_imported_bytes_that_are_no_text(write: Write, tmp_path: Path) -> None:
    write(main='import "a.rlflow"\n' + FLOW)
    (tmp_path / "a.rlflow").write_bytes(b"flow \xff")
    (error,) = problems("main.rlflow")
    assert error.code == "RLF0003"
    assert "a.rlflow:1: byte 0xff" in error.message


def test_error_of_meaning_in_an_imported_file(write: Write) -> None:
    write(main='import "f.rlflow"\n' + SCHEDULE + CLUSTER, f=FLOW.replace("exact(samples)", "exakt(samples)"))
    (error,) = problems("main.rlflow")
    assert str(error.span) == "f.rlflow:8:13"
    write(f=FLOW, main='import "f.rlflow"\nimport "p.rlflow"\n', p=SCHEDULE + CLUSTER.replace("h100", "h101"))
    (error,) = problems("main.rlflow")
    assert str(error.span) == "p.rlflow:2:26"


@pytest.mark.parametrize("what", ["flow", "cluster"])
def test_the_same_name_in_two_files(what: str, write: Write) -> None:
    text = FLOW if what == "flow" else CLUSTER
    rest = SCHEDULE + CLUSTER if what == "flow" else FLOW + SCHEDULE
    write(main='import "a.rlflow"\n' + text + rest, a=text)
    (error,) = problems("main.rlflow")
    assert error.code == "RLF1002"
    assert "defined twice" in error.message
    assert [label.span.file.name for label in error.labels] == ["main.rlflow", "a.rlflow"]


def test_two_schedules_for_one_flow(write: Write) -> None:
    write(main='import "a.rlflow"\n' + FLOW + SCHEDULE + CLUSTER, a="schedule f on dgx_h100 { auto }\n")
    (error,) = problems("main.rlflow")
    assert "2 schedules" in error.message
    assert check("main.rlflow", Options(cluster="dgx_h100")).lowered.cluster.num_devices == 8


def test_schedule_for_no_flow(write: Write) -> None:
    write(main='import "a.rlflow"\n' + FLOW, a="schedule g { auto }\n")
    (error,) = problems("main.rlflow")
    assert error.message == "unknown flow `g`"


def test_warnings_of_imported_files_can_be_silenced_there(write: Write) -> None:
    unused = FLOW.replace("  step {", "  model spare = frozen(actor){}\n  step {")
    write(main='import "f.rlflow"\n', f=unused.replace("{}", ""))
    assert [str(w.span) for w in check("main.rlflow").warnings] == ["f.rlflow:5:9"]
    write(f=unused.replace("{}", "  # rlflow: ignore[RLF1013] for later"))
    assert check("main.rlflow").warnings == ()
    write(f=FLOW.replace("  step {", "  step {  # rlflow: ignore[RLF1013]"))
    assert [(w.code, str(w.span)) for w in check("main.rlflow").warnings] == [("RLF0006", "f.rlflow:5:28")]


def test_a_file_of_rlflow(write: Write) -> None:
    write(main='import "rlflow:clusters"\n' + FLOW + "schedule f on dgx_h100 { auto }\n")
    assert check("main.rlflow").lowered.cluster.num_devices == 8
    assert paths("main.rlflow") == ["main.rlflow", "rewards.py"], "the version of rlflow covers it"
    write(main='import "rlflow:clutsers"\n' + FLOW)
    (error,) = problems("main.rlflow")
    assert error.help == ("did you mean `clusters`?",)
    write(main='import "rlflow:clusters"\ncluster dgx_h100 { host = 8 * h100 }\n' + FLOW)
    (error,) = problems("main.rlflow")
    assert error.code == "RLF1002"


def test_a_long_chain_is_an_error_and_no_crash(write: Write) -> None:
    chain = {f"f{i}": f'import "f{i + 1}.rlflow"\n' for i in range(MAX_CHAIN + 5)}
    write(main='import "f0.rlflow"\n' + FLOW, **chain, **{f"f{MAX_CHAIN + 5}": ""})
    (error,) = problems("main.rlflow")
    assert error.code == "RLF1010"
    write(**{f"f{MAX_CHAIN - 2}": CLUSTER})
    assert check("main.rlflow").warnings == ()


def test_a_text_that_is_no_file_imports_none() -> None:
    with pytest.raises(CompileError) as caught:
        lower(parse(SourceFile("x", 'import "a.rlflow"\n' + FLOW)), None)
    assert [d.code for d in caught.value.diagnostics] == ["RLF1012"]
    lower(parse(SourceFile("x", 'import "rlflow:clusters"\n' + FLOW)), None)


def test_the_same_plan_under_every_hash_seed(write: Write) -> None:
    write(main='import "x.rlflow"\nimport "y.rlflow"\n' + FLOW, x='import "y.rlflow"\n' + SCHEDULE, y=CLUSTER)
    code = "from rlflow.driver import compile; print(compile('main.rlflow').to_json())"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(outputs) == 1
