"""Launch files are written once and again, and what a person did in the folder is never lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlflow.backends.codegen.write import MANIFEST, write_files
from rlflow.diagnostics import RunFailure

FILES: dict[str, bytes | Path] = {"README.md": b"read me\n", "job/run.sh": b"#!/bin/sh\n", "job/plan.json": b"{}\n"}


def refused(folder: Path, files: dict[str, bytes | Path] = FILES) -> RunFailure:
    with pytest.raises(RunFailure) as caught:
        write_files(folder, files)
    assert caught.value.code == "RLF4009"
    return caught.value


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_written_and_again(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    write_files(folder, FILES)
    assert {name: text for name, text in contents(folder).items() if name != MANIFEST} == FILES
    assert os.access(folder / "job/run.sh", os.X_OK)
    assert not os.access(folder / "job/plan.json", os.X_OK)
    write_files(folder, {"README.md": b"other\n", "job/plan.json": b"{1}\n"})
    assert set(contents(folder)) == {"README.md", "job/plan.json", MANIFEST}, "what is no longer made is gone"
    assert (folder / "README.md").read_bytes() == b"other\n"


def test_an_edited_file_is_kept(tmp_path: Path) -> None:
    write_files(tmp_path, FILES)
    (tmp_path / "job/run.sh").write_text("module load ray\n", "utf-8")
    before = contents(tmp_path)
    failure = refused(tmp_path)
    assert failure.code == "RLF4009"
    assert failure.notes == ("changed since they were written: `job/run.sh`",)
    assert contents(tmp_path) == before
    without = {name: content for name, content in FILES.items() if name != "job/run.sh"}
    assert refused(tmp_path, without).notes == failure.notes, "nor is it removed when it is no longer made"


def test_a_file_of_somebody_else_is_kept(tmp_path: Path) -> None:
    write_files(tmp_path, FILES)
    (tmp_path / "submit.sh").write_text("mine\n", "utf-8")
    write_files(tmp_path, FILES)  # a name that is not needed is no matter
    failure = refused(tmp_path, FILES | {"submit.sh": b"theirs\n"})
    assert failure.notes == ("not written by `rlflow emit`: `submit.sh`",)
    assert (tmp_path / "submit.sh").read_text("utf-8") == "mine\n"


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"{number}.txt").write_text("", "utf-8")
    before = contents(tmp_path)
    failure = refused(tmp_path)
    assert failure.code == "RLF4009"
    assert failure.notes == ("`0.txt`, `1.txt`, `2.txt`, `3.txt`, `4.txt` and 2 more",)
    assert contents(tmp_path) == before


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    out, target = tmp_path / "out", tmp_path / "precious"
    write_files(out, FILES)
    target.write_bytes(b"read me\n")
    (out / "README.md").unlink()
    (out / "README.md").symlink_to(target)
    refused(out)
    assert target.read_bytes() == b"read me\n"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "rlflow.emit", "files": {"../x": "0"}}'])
def test_a_broken_manifest_protects_everything(tmp_path: Path, text: str) -> None:
    write_files(tmp_path, FILES)
    (tmp_path / MANIFEST).write_text(text, "utf-8")
    refused(tmp_path)


def test_the_output_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    assert "is a file" in refused(tmp_path / "file").message
