"""`rlflow explain`."""

from __future__ import annotations

import pytest
from click.testing import CliRunner, Result

from rlflow.commands import explain as module
from rlflow.commands.explain import explain
from rlflow.diagnostics import CODES
from rlflow.diagnostics.codes import page_text


def run(*argv: str) -> Result:
    return CliRunner().invoke(explain, argv)


@pytest.mark.parametrize(
    "spelling",
    ["RLF1003", "rlf1003", "1003", "error[RLF1003]", "unknown-keyword", "Unknown_Keyword", " RLF1003 "],
)
def test_a_code_in_any_spelling(spelling: str) -> None:
    done = run(spelling)
    assert (done.exit_code, done.stdout) == (0, page_text("RLF1003"))


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("RLF90011", "did you mean `RLF9001`?"),
        ("unknown-keywords", "did you mean `unknown-keyword`?"),
        ("zzz", "`rlflow explain` lists all codes"),
        ("", "`rlflow explain` lists all codes"),
        ("²", "`rlflow explain` lists all codes"),
    ],
)
def test_an_unknown_code_exits_with_2_and_the_nearest(word: str, hint: str) -> None:
    done = run(word)
    assert done.exit_code == 2
    assert f"unknown code `{word}`; {hint}" in done.stderr


def test_without_a_code_all_are_listed() -> None:
    done = run()
    assert done.exit_code == 0
    for code, name in CODES.items():
        assert f"{code}  {name}" in done.stdout
    assert "RLF1013  unused-value  (warning)" in done.stdout


def test_on_a_terminal_the_page_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        @staticmethod
        def isatty() -> bool:
            return True

    class System:
        stdout = Terminal()

    monkeypatch.setattr(module, "sys", System)
    done = run("RLF2001")
    assert done.exit_code == 0
    assert "does-not-divide" in done.stdout
    assert "```" not in done.stdout
    assert "nearest" in done.stdout
