"""Progress: one line per step into a pipe, a panel on a terminal, and no failure on odd data."""

from __future__ import annotations

import io
import re

from rich.console import Console

from rlflow.backends.visualizers.progress import Progress, sparkline

STEP = {
    "critic/score/mean": 0.25,
    "response_length/mean": 33.3,
    "perf/throughput": 1234.4,
    "timing_s/gen": 0.9,
    "timing_s/update_actor": 0.6,
    "timing_s/step": 1.6,
}


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(console: Console, total: int | None = 4) -> None:
    clock = Clock()
    progress = Progress(total, console, clock)
    progress.start("starting Ray")
    clock.now += 2
    progress.phase("loading models")
    clock.now += 3
    for step in (1, 2):
        clock.now += 1.6
        progress.step(step, STEP)
    progress.step(2, {"val/heldout/mean": 0.5})
    progress.message("checkpoint step-2 [saved]")
    progress.stop()


def test_lines_into_a_pipe() -> None:
    out = io.StringIO()
    run(Console(file=out, width=60))
    assert out.getvalue().splitlines() == [
        "starting Ray ...",
        "starting Ray: 2.0 s",
        "loading models ...",
        "loading models: 4.6 s",
        "step 1/4  reward 0.2500  length 33.3 tokens  1234 tokens/s  1.60 s  (gen 0.90, update_actor 0.60)",
        "step 2/4  reward 0.2500  length 33.3 tokens  1234 tokens/s  1.60 s  (gen 0.90, update_actor 0.60)",
        "step 2  held out heldout 0.5000",
        "checkpoint step-2 [saved]",
    ]


def test_no_known_end_and_missing_values() -> None:
    out = io.StringIO()
    progress = Progress(None, Console(file=out), Clock())
    progress.step(7, {"critic/score/mean": 1.0})
    progress.step(8, {})
    progress.stop()
    assert out.getvalue() == "step 7  reward 1.0000  0.00 s\n"


def panel(**options: object) -> str:
    out = io.StringIO()
    run(Console(file=out, force_terminal=True, width=100, **options))  # type: ignore[arg-type]
    return out.getvalue()


def test_panel_on_a_terminal() -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", panel())
    for words in ("step 2 / 4", "left about 3.2 s", "mean reward 0.2500", "1234 tokens/s", "update_actor"):
        assert words in text
    assert "held out heldout 0.5000   checkpoint step-2 [saved]" in text


def test_no_color() -> None:
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", panel(no_color=True))
    assert re.search(r"\x1b\[[0-9;]*3[0-9]m", panel(color_system="standard"))


def test_stop_twice_and_without_start() -> None:
    progress = Progress(1, Console(file=io.StringIO()))
    progress.stop()
    progress.stop()


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert len(set(sparkline([3.0, 3.0]))) == 1
    assert sparkline([0.0, 1.0], "_#") == "_#"


def test_flow_of_work_where_it_is_recorded() -> None:
    more = {
        "pool/rollout/idle": 0.284,
        "pool/learner/idle": 0.0,
        "queue/a->b/depth": 1.5,
        "queue/c->d/depth": 2.0,
        "age/samples/mean": 0.971,
        "age/samples/max": 1.0,
        "age/other/max": 2.0,
        "pool/odd/idle": float("nan"),
    }
    out = io.StringIO()
    progress = Progress(4, Console(file=out, width=60), Clock())
    progress.capacities = {"a->b": 2}
    progress.step(1, STEP | more)
    progress.stop()
    line = out.getvalue()
    assert "  idle rollout 28%, learner 0%  queue a->b 1.5 of 2, c->d 2  age of samples 0.97, at most 1" in line
    assert "age of other at most 2" in line
    assert "odd" not in line


def test_idle_share_follows_from_the_stages_on_the_panel_only() -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", panel())
    assert "idle 6%" in text, "1.5 of 1.6 s are in stages"
    assert "1.6 s a step" in text
    out = io.StringIO()
    run(Console(file=out, width=60))
    assert "idle" not in out.getvalue()


def test_note_and_title() -> None:
    out = io.StringIO()
    progress = Progress(None, Console(file=out, force_terminal=True, width=100), Clock())
    progress.title = "rlflow watch here"
    progress.start("waiting", since=90)
    progress.step(1, STEP)
    progress.note = "nothing new for 70.0 s"
    progress.stop()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    for words in ("rlflow watch here", "nothing new for 70.0 s", "elapsed 1 min 30 s"):
        assert words in text


def test_a_run_that_diverged_shows_it() -> None:
    out = io.StringIO()
    progress = Progress(3, Console(file=out, force_terminal=True, width=80), Clock())
    progress.start("x")
    progress.step(1, STEP)
    progress.step(2, STEP | {"critic/score/mean": float("nan")})
    progress.stop()
    assert "mean reward nan ▅" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())


def test_hostile_values_do_not_stop_the_panel() -> None:
    """What `rlflow watch` reads may have been written by anything."""
    rows: list[dict[str, object]] = [
        {"timing_s/step": 0.0, "timing_s/gen": 0.0},
        {"timing_s/step": "soon", "critic/score/mean": "high", "timing_s/gen": None},
        {"critic/score/mean": float("inf"), "timing_s/step": float("nan"), "response_length/mean": [1]},
        {"critic/score/mean": True, "timing_s/step": 1.0, "val/a/mean": "x", "queue//depth": 1.0},
        {"critic/score/mean": 1e300, "timing_s/step": 1e12, "timing_s/gen": float("inf")},
    ]
    for terminal in (False, True):
        out = io.StringIO()
        progress = Progress(9, Console(file=out, force_terminal=terminal, width=80), Clock())
        progress.start("x")
        for step, row in enumerate(rows, start=1):
            progress.step(step, row)
        progress.stop()
        assert "step 5" in out.getvalue()
