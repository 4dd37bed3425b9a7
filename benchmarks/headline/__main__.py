"""`python -m benchmarks.headline`: compile, simulate what has changed, write docs/headline.md.

`--again` simulates everything, as after a change of the compiler, the cost model or the simulator.
"""

from __future__ import annotations

import os
import sys

from benchmarks.headline.page import DOC, page
from benchmarks.headline.study import cases, run


def main() -> int:
    found = run(cases(), processes=min(4, os.cpu_count() or 1), again="--again" in sys.argv[1:])
    DOC.write_text(page(found), "utf-8")
    print(f"wrote {DOC.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
