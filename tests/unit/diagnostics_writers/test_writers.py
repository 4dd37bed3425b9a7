"""SARIF and GitHub annotations."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.diagnostics import CODES, Diagnostic, Label, Severity, SourceFile, Span
from rlflow.diagnostics.render import FORMATS, MACHINE_FORMATS, render


def _schema() -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("sarif_schema", Path(__file__).with_name("sarif_schema.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    schema: dict[str, Any] = module.SCHEMA
    return schema


SCHEMA = _schema()
FILE = SourceFile("my flows/grpo.rlflow", "flow a {\n  é = x\n}\n")
X = Span(FILE, 15, 16)
BLOCK = Span(FILE, 7, 18)

ERROR = Diagnostic(
    "RLF1001",
    "unknown name `x`",
    (Label(X, "here"), Label(BLOCK, "in this block", primary=False), Label(X, primary=False)),
    ("known here: `y`",),
    ("did you mean `y`?", "100%\r\nsure"),
)
WARNING = Diagnostic("RLF1013", "`é` is never used", (Label(Span(FILE, 11, 12)),), severity=Severity.WARNING)
LONG = Diagnostic("RLF1015", "this step trains nothing", (Label(BLOCK),))
NOWHERE = Diagnostic("RLF4001", "not a plan: at all, really")
OVERRIDE = Diagnostic(
    "RLF1011", "there is no `size`", (Label(Span(SourceFile("--set batch.size=8", "batch.size=8"), 0, 10)),)
)
ALL = [WARNING, ERROR, LONG, NOWHERE, OVERRIDE]


def sarif(found: list[Diagnostic], path: str | None = "in.rlflow") -> dict[str, Any]:
    log: dict[str, Any] = json.loads(render(found, "sarif", path=path))
    jsonschema.validate(log, SCHEMA)
    return log


def test_schema_is_a_schema_and_refuses_a_result_without_a_place() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    log = sarif(ALL)
    del log["runs"][0]["results"][3]["locations"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(log, SCHEMA)


def test_sarif_result_has_region_related_places_and_notes() -> None:
    (result,) = sarif([ERROR])["runs"][0]["results"]
    assert (result["ruleId"], result["level"]) == ("RLF1001", "error")
    assert result["message"]["text"].splitlines()[:3] == [
        "unknown name `x`",
        "note: known here: `y`",
        "help: did you mean `y`?",
    ]
    physical = {
        "artifactLocation": {"uri": "my%20flows/grpo.rlflow"},
        "region": {"startLine": 2, "startColumn": 7, "endLine": 2, "endColumn": 8},
    }
    assert result["locations"] == [{"physicalLocation": physical, "message": {"text": "here"}}]
    block, again = result["relatedLocations"]
    assert (block["id"], again["id"]) == (1, 2)
    assert block["message"] == {"text": "in this block"}
    assert block["physicalLocation"]["region"] == {"startLine": 1, "startColumn": 8, "endLine": 3, "endColumn": 2}
    assert "message" not in again


def test_sarif_rules_have_help_from_their_pages() -> None:
    log = sarif(ALL)["runs"][0]
    rules = log["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == sorted({diagnostic.code for diagnostic in ALL})
    for result in log["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    unused = next(rule for rule in rules if rule["id"] == "RLF1013")
    assert unused["name"] == "UnusedValue"
    assert unused["defaultConfiguration"] == {"level": "warning"}
    assert unused["help"]["markdown"].startswith("# RLF1013: unused-value")
    assert unused["helpUri"].endswith("/RLF1013.md")
    assert unused["fullDescription"]["text"].startswith("Something is computed")


def test_sarif_places_what_has_no_place_on_the_first_line_of_the_input() -> None:
    for found in (NOWHERE, OVERRIDE):
        (result,) = sarif([found], "sub/in.rlflow")["runs"][0]["results"]
        physical = {"artifactLocation": {"uri": "sub/in.rlflow"}, "region": {"startLine": 1}}
        assert result["locations"] == [{"physicalLocation": physical}]
    assert "given as `--set batch.size=8`" in sarif([OVERRIDE])["runs"][0]["results"][0]["message"]["text"]
    # without the input's path: a file that another diagnostic names
    results = sarif([NOWHERE, ERROR], None)["runs"][0]["results"]
    assert results[0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "my%20flows/grpo.rlflow"


def test_sarif_of_nothing_is_a_log_without_results() -> None:
    assert sarif([])["runs"][0]["results"] == []


def test_sarif_absolute_path_is_a_file_address(tmp_path: Path) -> None:
    (result,) = sarif([NOWHERE], str(tmp_path / "a b.rlflow"))["runs"][0]["results"]
    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri == (tmp_path / "a b.rlflow").as_uri()


def test_github_errors_first_escaped_and_columns_only_on_one_line() -> None:
    lines = render(ALL, "github", path="in.rlflow").splitlines()
    assert lines == [
        "::error file=my flows/grpo.rlflow,line=2,endLine=2,col=7,endColumn=8,title=RLF1001 unknown-name"
        "::unknown name `x`%0Anote: known here: `y`%0Ahelp: did you mean `y`?%0Ahelp: 100%25%0D%0Asure",
        "::error file=my flows/grpo.rlflow,line=1,endLine=3,title=RLF1015 no-training::this step trains nothing",
        "::error file=in.rlflow,line=1,title=RLF4001 not-a-plan::not a plan: at all, really",
        "::error file=in.rlflow,line=1,title=RLF1011 unknown-override"
        "::there is no `size`%0Anote: given as `--set batch.size=8`",
        "::warning file=my flows/grpo.rlflow,line=2,endLine=2,col=3,endColumn=4,title=RLF1013 unused-value"
        "::`é` is never used",
    ]


def test_github_escapes_properties() -> None:
    odd = Diagnostic("RLF1001", "m", (Label(Span(SourceFile("a:b,c%.rlflow", "x"), 0, 1)),))
    assert "file=a%3Ab%2Cc%25.rlflow," in render([odd], "github")
    assert render([NOWHERE], "github").startswith("::error title=RLF4001 not-a-plan::")
    assert render([], "github") == ""


texts = st.text(max_size=20)


@st.composite
def diagnostics(draw: st.DrawFn) -> Diagnostic:
    body = draw(texts)
    file = SourceFile(draw(st.text(min_size=1, max_size=10).filter(lambda name: not name.startswith("--"))), body)
    labels = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(body)))
        end = draw(st.integers(start, len(body)))
        labels.append(Label(Span(file, start, end), draw(texts), draw(st.booleans())))
    return Diagnostic(
        draw(st.sampled_from(sorted(CODES))),
        draw(st.text(min_size=1, max_size=20)),
        tuple(labels),
        tuple(draw(st.lists(texts, max_size=2))),
        tuple(draw(st.lists(texts, max_size=2))),
        draw(st.sampled_from(Severity)),
    )


@settings(deadline=None, max_examples=50)  # the machine may be busy
@given(st.lists(diagnostics(), max_size=4))
def test_any_diagnostics_are_written_in_every_format(found: list[Diagnostic]) -> None:
    for format in FORMATS:
        assert isinstance(render(found, format, path="in.rlflow"), str)
    for result, diagnostic in zip(sarif(found)["runs"][0]["results"], found, strict=True):
        assert result["ruleId"] == diagnostic.code
    lines = render(found, "github", path="in.rlflow").split("\n")
    assert len(lines) == max(1, len(found))
    assert all(line.startswith(("::error ", "::warning ")) for line in lines if found)


def test_formats_for_machines_are_formats() -> None:
    assert set(MACHINE_FORMATS) < set(FORMATS)
