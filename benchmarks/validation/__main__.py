"""`python -m benchmarks.validation`: fit, predict every row, write docs/validation.md.

`--keep` takes the fits as they are.
"""

from __future__ import annotations

import sys

from benchmarks.validation import folds
from benchmarks.validation.report import DOC, report


def main() -> int:
    if "--keep" not in sys.argv[1:]:
        print("fitting every family, and each without one source")
        folds.write(folds.make())
        folds.read.cache_clear()
    DOC.write_text(report(), "utf-8")
    print(f"wrote {DOC.name}")
    for line in folds.stale():
        print(f"not the fit of all rows: {line}", file=sys.stderr)
    return 1 if folds.stale() else 0


if __name__ == "__main__":
    raise SystemExit(main())
