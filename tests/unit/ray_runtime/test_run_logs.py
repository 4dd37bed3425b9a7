"""What a process of a run writes says who it comes from."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from rlflow.backends.ray_runtime.run_logs import Tagged, Whereabouts, rank_log, told
from rlflow.diagnostics import RunFailure

CODE = """\
import logging, os, sys, warnings
from pathlib import Path
from rlflow.backends.ray_runtime.run_logs import doing, log_to
log_to(Path(sys.argv[1]), "rollout/0")
doing("step 3 run:samples")
print("two\\nlines"); print("an error", file=sys.stderr); print("no end", end="")
logging.getLogger("some.library").warning("odd %d", 7)
logging.getLogger("some.library").info("not told")
warnings.warn("deprecated")
os.write(2, b"raw\\n"); sys.stdout.buffer.write(b"bytes\\n")
"""


def test_every_line_names_pool_rank_step_and_instruction(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rollout-0.log"
    subprocess.run([sys.executable, "-c", CODE, str(log)], check=True, timeout=60)
    lines = log.read_text("utf-8").splitlines()
    stamped = [line[24:] for line in lines if line[:2] == "20"]
    assert stamped[:4] == [
        "print rollout/0 step 3 run:samples: two",
        "print rollout/0 step 3 run:samples: lines",
        "stderr rollout/0 step 3 run:samples: an error",
        "WARNING rollout/0 step 3 run:samples some.library: odd 7",
    ]
    assert "WARNING rollout/0 step 3 run:samples py.warnings: <string>:9: UserWarning: deprecated" in stamped
    assert stamped[-1] == "print rollout/0 step 3 run:samples: no end"
    assert {"raw", "bytes"} <= set(lines)


def test_lines_of_threads_stay_whole() -> None:
    found: list[str] = []
    stream = Tagged(found.append, "print", Whereabouts("rollout/0"))

    def write(mark: str) -> None:
        for _ in range(200):
            for part in (mark, mark, "\n"):
                stream.write(part)

    threads = [threading.Thread(target=write, args=(mark,)) for mark in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {line.split(": ")[1] for line in found} == {"aa\n", "bb\n", "cc\n"}
    assert len(found) == 600


def test_a_failure_says_where_the_log_is() -> None:
    log = rank_log(Path("/run"), "rollout", 1)
    failure = told(RunFailure("RLF5006", "the stage failed", stage="samples", notes=("KeyError: 'x'",)), log)
    assert failure.help == ("what the process wrote is in /run/logs/rollout-1.log",)
    assert (failure.stage, failure.notes) == ("samples", ("KeyError: 'x'",))
