"""`rlflow fmt`: which files, what is written, exit codes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlflow.commands.fmt import fmt
from rlflow.grammar import format as format_module

UGLY = "flow   f{ step{a=1} }"
PRETTY = "flow f {\n  step {\n    a = 1\n  }\n}\n"


def run(*arguments: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(fmt, [str(a) for a in arguments], input=stdin)


def test_formats_in_place_and_keeps_the_mode(tmp_path: Path) -> None:
    file = tmp_path / "a.rlflow"
    file.write_text(UGLY)
    file.chmod(0o640)
    result = run(file)
    assert result.exit_code == 0, result.output
    assert file.read_text() == PRETTY
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert "1 file reformatted" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["a.rlflow"]
    assert "1 file left unchanged" in run(file).stderr


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "real", tmp_path / "a.rlflow"
    file.write_text(UGLY)
    link.symlink_to(file)
    assert run(tmp_path).exit_code == 0
    assert link.is_symlink()
    assert file.read_text() == PRETTY


def test_folders_are_searched_without_hidden_ones(tmp_path: Path) -> None:
    for name in ("a.rlflow", "deep/er/b.rlflow", ".hidden/c.rlflow", "d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(UGLY)
    result = run("--check", tmp_path, tmp_path / "a.rlflow")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        f"would reformat {tmp_path}/a.rlflow",
        f"would reformat {tmp_path}/deep/er/b.rlflow",
    ]
    assert (tmp_path / "a.rlflow").read_text() == UGLY
    assert run("--check", tmp_path / "d.txt").exit_code == 1, "a file named outright is formatted whatever it is called"


def test_default_is_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no .rlflow files" in run().stderr
    (tmp_path / "a.rlflow").write_text(UGLY)
    assert run().exit_code == 0
    assert (tmp_path / "a.rlflow").read_text() == PRETTY


def test_diff_writes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.rlflow"
    file.write_text(UGLY)
    result = run("--diff", file)
    assert result.exit_code == 0
    assert f"--- {file}\n+++ {file} (formatted)\n@@ -1 +1,5 @@\n-{UGLY}\n\\ No newline" in result.stdout
    assert "+flow f {\n" in result.stdout
    assert run("--diff", "--check", file).exit_code == 1
    assert file.read_text() == UGLY


def test_files_with_errors_do_not_stop_the_others(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.rlflow" for name in ("a", "b", "c", "d")}
    files["a"].write_text("flow {")
    files["b"].write_bytes(b"# \xff")
    files["c"].write_text(UGLY)
    result = run(*files.values())
    assert result.exit_code == 2, "the file that is not there weighs more than the two that do not parse"
    assert "RLF0001" in result.stderr
    assert "byte 0xff is not UTF-8" in result.stderr
    assert "No such file" in result.stderr
    assert files["c"].read_text() == PRETTY
    assert files["a"].read_text() == "flow {"
    assert run(files["a"], files["c"]).exit_code == 1


def test_line_ends_and_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "a.rlflow"
    file.write_bytes(b"\xef\xbb\xbf" + PRETTY.replace("\n", "\r\n").encode())
    assert run("--check", file).exit_code == 1
    assert run(file).exit_code == 0
    assert file.read_bytes() == PRETTY.encode()


def test_standard_input() -> None:
    result = run("-", stdin="# ü\nflow f{}".encode())
    assert (result.exit_code, result.stdout_bytes.decode()) == (0, "# ü\nflow f {}\n")
    result = run("-", "--check", stdin=UGLY.encode())
    assert (result.exit_code, result.stdout) == (1, "")
    assert run("-", "--check", stdin=PRETTY.encode()).exit_code == 0
    result = run("-", "--stdin-filename", "editor.rlflow", stdin=b"flow {")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "editor.rlflow:1:6" in result.stderr
    assert "+++ e.rlflow (formatted)" in run("-", "--diff", "--stdin-filename", "e.rlflow", stdin=UGLY.encode()).stdout
    assert run("-", "a.rlflow", stdin=b"").exit_code == 2


def test_a_wrong_result_is_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.rlflow"
    file.write_text(UGLY)
    monkeypatch.setattr(format_module, "print_source", lambda program: "flow f {}\n")
    result = run(file)
    assert result.exit_code == 70
    assert "would change the program, so it was left as it is" in result.stderr
    assert file.read_text() == UGLY


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.rlflow"
    file.write_text(UGLY)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rlflow.commands.fmt.os.replace", full)
    result = run(file)
    assert result.exit_code == 2
    assert "No space left on device" in result.stderr
    assert file.read_text() == UGLY
    assert [p.name for p in tmp_path.iterdir()] == ["a.rlflow"]
