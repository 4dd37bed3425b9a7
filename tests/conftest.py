"""What all tests share: FileCheck files as tests, golden texts, one Ray for the session."""

from __future__ import annotations

import io
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

TESTS = Path(__file__).parent
RUN = re.compile(r"RUN: (?P<must_fail>not )?rlflow (?P<command>[^|]*)(?:\| *filecheck (?P<options>.*))?")
"""`RUN: rlflow check %s | filecheck %s`. `%s` = the file, `%t` = an empty folder; `not` = the exit code must be 1."""

Golden = Callable[[str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files instead of comparing")
    parser.addoption("--browser", action="store_true", help="run the tests that drive Chromium")


# --- FileCheck -------------------------------------------------------------------------------------------------------


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.File | None:
    if file_path.suffix not in {".rlflow", ".rlir"} or not file_path.is_relative_to(TESTS / "filecheck"):
        return None
    if not RUN.search(file_path.read_text("utf-8")):
        return None
    file: pytest.File = CheckFile.from_parent(parent, path=file_path)
    return file


class CheckFile(pytest.File):
    """A text that says how to run it and what to expect: one test per RUN line."""

    def collect(self) -> Iterator[pytest.Item]:
        for number, line in enumerate(self.path.read_text("utf-8").splitlines(), start=1):
            found = RUN.search(line)
            if found:
                yield CheckItem.from_parent(self, name=f"line {number}", found=found)


class CheckItem(pytest.Item):
    def __init__(self, *, found: re.Match[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.command = found["command"]
        self.options = shlex.split((found["options"] or "%s").replace("%s", shlex.quote(str(self.path))))
        self.expected = 1 if found["must_fail"] else 0

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"{self.path.name}: {self.name}"

    def runtest(self) -> None:
        from filecheck.error import ParseError
        from filecheck.finput import FInput
        from filecheck.matcher import Matcher
        from filecheck.options import parse_argv_options
        from filecheck.parser import Parser

        code, output = self._run()
        if code != self.expected:
            hint = " (write `RUN: not rlflow` for a text that must be refused)" if code == 1 else ""
            pytest.fail(f"exit code {code}, expected {self.expected}{hint}\n{output}", pytrace=False)
        options = parse_argv_options(["filecheck", *self.options])
        report = io.StringIO()
        with redirect_stderr(report), redirect_stdout(report):
            try:
                failed = Matcher(options, FInput("output", output), Parser.from_opts(options)).run() != 0
            except ParseError as error:
                pytest.fail(f"{self.path.name}: {error}", pytrace=False)
        if failed:
            pytest.fail(f"{report.getvalue()}\n--- output\n{output}", pytrace=False)

    def _run(self) -> tuple[int, str]:
        """Exit code and output (stdout and stderr together) of the command, run in this process."""
        from rlflow.cli import main

        output = io.StringIO()
        with (
            tempfile.TemporaryDirectory() as folder,
            patch.dict(os.environ, {"NO_COLOR": "1", "COLUMNS": "120"}),
            redirect_stdout(output),
            redirect_stderr(output),
        ):
            places = {"%s": str(self.path), "%t": folder}
            argv = [re.sub("%[st]", lambda m: places[m[0]], word) for word in shlex.split(self.command)]
            try:
                main(argv)
            except SystemExit as exit:
                if isinstance(exit.code, str):
                    print(exit.code)
                return (exit.code if isinstance(exit.code, int) else int(exit.code is not None)), output.getvalue()
        return 0, output.getvalue()


# --- golden texts ----------------------------------------------------------------------------------------------------


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden(text)` compares with the file named after the test; `--update-golden` writes it. One call per test."""
    module = request.path.relative_to(TESTS).with_suffix("")
    name = re.sub(r"[^A-Za-z0-9_.=-]+", "_", request.node.name).strip("_")
    file = TESTS / "golden" / module / f"{name}.txt"

    def compare(text: str) -> None:
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            return
        if not file.is_file():
            pytest.fail(f"there is no {file.relative_to(TESTS.parent)}: make it with --update-golden and read it")
        assert text == file.read_text("utf-8"), f"differs from {file.relative_to(TESTS.parent)} (--update-golden)"

    return compare


# --- Ray -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """The module `ray`, with one local Ray of four CPUs for the whole session. Skips where Ray is missing."""
    ray = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # tests send nothing anywhere
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, resources={})
    yield ray
    ray.shutdown()
