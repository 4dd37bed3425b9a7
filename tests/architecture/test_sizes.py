"""Files stay small enough to be read in one sitting."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 500
FOLDERS = ("rlflow", "grammar", "passes", "backends", "tests", "examples", "benchmarks")

LARGE: dict[str, str] = {}
"""Files above LIMIT lines, each with the reason why it is not split."""


def test_large_files_have_a_reason() -> None:
    files = {file.resolve() for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")}
    lengths = {str(f.relative_to(ROOT)): len(f.read_text("utf-8").splitlines()) for f in files}
    large = {name for name, length in lengths.items() if length > LIMIT}
    assert large == set(LARGE)
