"""The report in a real browser: every chart is drawn, and mouse and keyboard do what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlflow import driver
from rlflow.backends.simulator.run import Options, simulate
from rlflow.reports import Simulation, gather, page

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"

SPREAD = """(() => {
  const pen = %s.getContext("2d"), {width, height} = %s;
  return new Set(new Uint32Array(pen.getImageData(0, 0, width, height).data.buffer)).size;
})()"""
"""Colours on a canvas."""


def large(folder: Path, events: int, ranks: int) -> Path:
    """A run folder with so many events of a plan of four supernodes."""
    source = Path("examples/pangu_ultra_moe.rlflow").read_text("utf-8")
    larger = source.replace("2 * cloudmatrix384", "4 * cloudmatrix384").replace("512 prompts", "1024 prompts")
    larger = larger.replace("1024 devices", "2048 devices").replace("= 512 devices", "= 1024 devices")
    path = folder / "four.rlflow"
    path.write_text(larger, "utf-8")
    plan = driver.compile(path)
    run = folder / "run"
    (run / "trace").mkdir(parents=True)
    (run / "plan.json").write_text(plan.to_json(), "utf-8")
    simulated = simulate(plan, Options(steps=events // (15 * ranks) + 1)).events
    lines = []
    for rank in range(ranks):
        for event in simulated:
            took = event["duration_us"] * (0.97 + 0.03 * (rank % 5) / 5)
            lines.append(json.dumps({**event, "rank": rank, "duration_us": took, "result_us": took}))
    (run / "trace" / "all.jsonl").write_text("\n".join(lines[:events]), "utf-8")
    rows = [
        {"step": step, "data": {"timing_s/step": 1000.0 + step, "critic/score/mean": step / 90}}
        for step in range(1, 90)
    ]
    rows[3]["data"][f"val/{HOSTILE}"] = 0.5
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return run


def small(folder: Path) -> Path:
    """The run of a plan whose times are not known, with an evaluation before its two steps."""
    run = folder / "small"
    (run / "trace").mkdir(parents=True)
    (run / "plan.json").write_text(driver.compile("examples/grpo_arithmetic.rlflow").to_json(), "utf-8")
    lines = []
    for number, (kind, stage, step) in enumerate(
        [
            ("run", "all.answers", 0),
            *((k, s, n) for n in (1, 2) for k, s in (("run", "samples"), ("run", "actor.train"))),
        ]
    ):
        event = {
            "pool": "main",
            "rank": 0,
            "instruction": f"{kind}:{stage}",
            "stage": stage,
            "kind": kind,
            "step": step,
        }
        lines.append(json.dumps({**event, "start_us": 10**15 + number * 50_000, "duration_us": 40_000, "version": 0}))
    (run / "trace" / "main-0.jsonl").write_text("\n".join(lines), "utf-8")
    return run


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    run = large(folder, 50_000, 24)
    subjects = {
        "async": ["examples/async_grpo.rlflow"],
        "four": [run / "plan.json"],
        "run": [run],
        "two": ["examples/async_grpo.rlflow", "examples/pangu_ultra_moe.rlflow"],
        "bare": ["examples/grpo_arithmetic.rlflow"],
        "measured": [small(folder)],
    }
    found = {}
    for name, paths in subjects.items():
        found[name] = folder / f"{name}.html"
        found[name].write_text(page(gather(paths, simulation=Simulation(12))), "utf-8")
    return found


@pytest.fixture
def opened(chromium: Any, written: dict[str, Path]) -> Any:
    """Opens a page and, when the test has ended, looks for errors and requests."""

    def open_(name: str) -> Any:
        chromium.scheme("light")
        chromium.open(written[name])
        return chromium

    yield open_
    assert chromium.problems() == []
    assert chromium.requests() == []
    assert chromium.value("rlflowReport.errors") == []
    assert chromium.value("typeof window.hacked") == "undefined"


def box(browser: Any, selector: str) -> dict[str, float]:
    """Where an element is on the screen, once it is in view."""
    browser.value(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
    browser.frame()
    found: dict[str, float] = browser.value(
        f"(({{x, y, width, height}}) => ({{x, y, width, height}}))(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
    )
    return found


def bar(browser: Any, stage: str) -> tuple[float, float]:
    """The middle of the first bar of a stage that is in view."""
    canvas = box(browser, "#gantt")
    place = browser.value(f"""(() => {{
      const {{gantt, axis, tracks}} = rlflowReport, track = tracks[0];
      for (let at = 0; at < track.start.length; at += 1) {{
        const label = track.subject.labels[track.label[at]];
        const middle = axis.x(track.start[at] + track.length[at] / 2);
        if (label.stage !== {json.dumps(stage)} || label.kind !== "run" || middle < axis.left || middle > axis.width) continue;
        const line = gantt.lines.find((own) => own.track === track && own.row === track.row[at]);
        return [middle, gantt.top - gantt.scroll + line.y + line.height / 2];
      }}
    }})()""")
    return canvas["x"] + place[0], canvas["y"] + place[1]


@pytest.mark.parametrize("name", ["async", "four", "run", "two"])
def test_every_chart_is_drawn(opened, name):
    browser = opened(name)
    browser.frame()
    assert browser.value(SPREAD % ("rlflowReport.gantt.canvas", "rlflowReport.gantt.canvas")) > 20
    strips = browser.value("document.querySelectorAll('#strips canvas').length")
    assert strips >= 5
    for at in range(strips):
        canvas = f"document.querySelectorAll('#strips canvas')[{at}]"
        assert browser.value(SPREAD % (canvas, canvas)) > 5, at
    assert browser.value("document.querySelectorAll('.graph svg g.node').length") > 10
    assert browser.value("document.querySelectorAll('.map .host').length") >= 4
    assert browser.value("document.querySelectorAll('.matrix td').length") >= 4
    assert browser.value("document.querySelectorAll('#legend span').length") >= 5
    assert browser.value("document.querySelectorAll('.curve svg path').length") == (5 if name == "run" else 0)


def test_a_page_without_times_works(opened):
    browser = opened("bare")
    assert browser.value("document.getElementById('gantt')") is None
    browser.click(*[box(browser, ".s")[side] + 4 for side in ("x", "y")])
    assert browser.value("document.querySelectorAll('.effects.chosen').length") == 1


def test_a_run_without_a_prediction_is_drawn_alone(opened):
    browser = opened("measured")
    assert browser.value("rlflowReport.tracks.map((track) => track.title)") == ["measured"]
    assert browser.value("document.getElementById('align')") is None
    assert browser.value("document.querySelectorAll('#strips canvas').length") == 1
    assert browser.value(SPREAD % ("rlflowReport.gantt.canvas", "rlflowReport.gantt.canvas")) > 20
    browser.mouse("mouseMoved", *bar(browser, "samples"))
    browser.frame()
    assert "age of what it makes: 0 steps" in browser.value("document.getElementById('tip').textContent")


def test_the_mouse_zooms_moves_and_reads(opened):
    browser = opened("async")
    x, y = bar(browser, "samples")
    before = browser.value("[rlflowReport.axis.from, rlflowReport.axis.to]")
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-240, modifiers=2)
    browser.frame()
    near = browser.value("[rlflowReport.axis.from, rlflowReport.axis.to]")
    assert before[0] < near[0] < near[1] < before[1]
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", x - 120, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x - 120, y, button="left", clickCount=1)
    browser.frame()
    moved = browser.value("[rlflowReport.axis.from, rlflowReport.axis.to]")
    assert moved[0] > near[0]
    assert moved[1] - moved[0] == pytest.approx(near[1] - near[0])
    assert browser.value("rlflowReport.gantt.chosen") is None, "a drag chose something"
    browser.value("rlflowReport.axis.fit()")
    browser.frame()
    browser.mouse("mouseMoved", *bar(browser, "samples"))
    browser.frame()
    tip = browser.value("document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent")
    assert tip.startswith("run samples, step ")
    for words in (
        "pool rollout, rank 0",
        "weights of version 0",
        "ages of its samples in steps: 0: 100 %",
        "examples/async_grpo.rlflow:15",
    ):
        assert words in tip
    browser.mouse("mouseMoved", 3, 3)
    browser.frame()
    assert browser.value("document.getElementById('tip').hidden")


def test_a_click_chooses_a_bar_and_its_place(opened):
    browser = opened("async")
    browser.click(*bar(browser, "samples"))
    assert "run samples, step" in browser.value("document.getElementById('event').textContent")
    browser.value("rlflowReport.gantt.canvas.focus()")
    browser.key("Enter")
    assert browser.value("document.querySelector('.s.chosen').textContent").startswith("actor.generate")
    chosen = browser.value("document.querySelector('.effects.chosen').textContent")
    assert "reshard actor" in chosen
    assert browser.value("[...document.querySelectorAll('g.node.hit title')].map((own) => own.textContent)") == [
        "instruction.step.rollout.reshard:actor", "stage.samples"
    ]  # fmt: skip


def test_the_keyboard_reaches_everything(opened):
    browser = opened("async")
    browser.value("rlflowReport.gantt.canvas.focus()")
    browser.key("ArrowRight")
    first = browser.value("document.getElementById('event').textContent")
    assert "step" in first
    browser.key("ArrowRight")
    assert browser.value("document.getElementById('event').textContent") != first
    browser.key("ArrowDown")
    assert "pool learner" in browser.value("document.getElementById('event').textContent")
    span = browser.value("rlflowReport.axis.to - rlflowReport.axis.from")
    browser.key("+")
    assert browser.value("rlflowReport.axis.to - rlflowReport.axis.from") == pytest.approx(0.6 * span)
    start = browser.value("rlflowReport.axis.from")
    browser.key("ArrowRight", shift=True)
    assert browser.value("rlflowReport.axis.from") > start
    browser.key("0")
    assert browser.value("rlflowReport.axis.to - rlflowReport.axis.from") > span
    browser.key("Escape")
    assert browser.value("document.getElementById('event').textContent") == "No bar is chosen."
    browser.value("document.querySelector('.s[tabindex]').focus()")
    browser.key("Enter")
    assert browser.value("document.querySelectorAll('.effects.chosen').length") == 1
    browser.key("Escape")
    assert browser.value("document.querySelectorAll('.effects.chosen').length") == 0
    browser.value("document.querySelector('.host').focus()")
    browser.key("ArrowRight")
    assert "host-1" in browser.value("document.activeElement.textContent")
    assert "ranks 8-15" in browser.value("document.getElementById('tip').textContent")


def test_tab_goes_through_the_page_and_out_of_the_chart(opened):
    browser = opened("async")
    browser.value("rlflowReport.gantt.canvas.focus()")
    browser.key("Tab")
    assert browser.value("document.activeElement.id") != "gantt"
    browser.value("document.body.focus(); document.activeElement.blur()")
    seen = set()
    for _ in range(60):
        browser.key("Tab")
        seen.add(
            browser.value(
                "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
            )
        )
    assert {"skip", "theme", "s", "paper", "host", "zoom-in", "gantt"} <= seen


def test_the_strips_say_what_is_resident(opened):
    browser = opened("four")
    canvas = box(browser, "#strips canvas")
    browser.mouse("mouseMoved", canvas["x"] + canvas["width"] * 0.5, canvas["y"] + 40)
    browser.frame()
    tip = browser.value("document.getElementById('tip').textContent")
    assert "actor weights: 15.2 GiB" in tip
    assert "of 56.6 GiB" in tip


def test_a_decision_leads_to_its_place(opened):
    browser = opened("four")
    browser.value("document.querySelector('#decisions a[data-key]').click()")
    browser.frame()
    assert browser.value("document.querySelector('.s.chosen').textContent").startswith("actor.train(")
    assert "recompute full" in browser.value("document.querySelector('.effects.chosen').textContent")


def test_curves_are_read_with_the_keyboard(opened):
    browser = opened("run")
    browser.value("document.querySelector('.curve svg').focus()")
    browser.key("Home")
    assert browser.value("document.querySelector('.curve output').textContent").startswith(
        "step 1: measured 1001, predicted "
    )
    browser.key("ArrowRight")
    assert browser.value("document.querySelector('.curve output').textContent").startswith("step 2: measured 1002")


def test_light_dark_and_the_switch(opened):
    browser = opened("async")
    paper = "getComputedStyle(document.body).backgroundColor"
    assert browser.value(paper) == "rgb(255, 255, 255)"
    browser.scheme("dark")
    dark = browser.value(paper)
    assert dark != "rgb(255, 255, 255)"
    corner = "[...rlflowReport.gantt.canvas.getContext('2d').getImageData(3, 60, 1, 1).data].slice(0, 3).join(', ')"
    assert f"rgb({browser.value(corner)})" == dark
    browser.value("document.getElementById('theme').click()")
    browser.frame()
    assert browser.value(paper) == "rgb(255, 255, 255)"
    assert browser.value(corner) == "255, 255, 255"


def test_words_can_be_read_on_their_ground(opened):
    """Contrast of at least 4.5 (WCAG 2.2, 1.4.3) for text, links and quiet text, in both schemes."""
    browser = opened("async")
    contrast = """(() => {
      const part = (value) => ((value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
      const light = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number); return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b); };
      const ground = (own) => { for (let at = own; at; at = at.parentElement) { const c = getComputedStyle(at).backgroundColor; if (!c.endsWith(", 0)") && c !== "transparent") return c; } return "rgb(255, 255, 255)"; };
      const found = [];
      for (const selector of ["p", "a", ".quiet", "dd", "th", "td", "summary", "button", ".tag", ".inserted", ".no", "pre", "h2"])
        for (const own of document.querySelectorAll(selector)) {
          if (own.closest("svg, .matrix, .skip")) continue;
          const [a, b] = [light(getComputedStyle(own).color), light(ground(own))];
          const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
          if (ratio < 4.5) found.push([selector, ratio, own.textContent.slice(0, 30)]);
        }
      return found;
    })()"""
    for scheme in ("light", "dark"):
        browser.scheme(scheme)
        assert browser.value(contrast) == [], scheme


@pytest.mark.parametrize("width", [1400, 520])
def test_nothing_is_wider_than_the_window(opened, chromium, width):
    chromium.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    try:
        browser = opened("two")
        browser.frame()
        assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    finally:
        chromium.call("Emulation.clearDeviceMetricsOverride")


def test_it_prints(opened):
    browser = opened("async")
    browser.call(
        "Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    browser.frame()
    assert browser.value("getComputedStyle(document.querySelector('.card')).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.value("getComputedStyle(document.querySelector('.effects')).display") == "block"
    assert browser.value("getComputedStyle(document.querySelector('nav')).display") == "none"
    corner = "[...rlflowReport.gantt.canvas.getContext('2d').getImageData(3, 60, 1, 1).data].slice(0, 3).join(', ')"
    assert browser.value(corner) == "255, 255, 255"
    browser.call("Emulation.setEmulatedMedia", media="")
    printed = browser.pdf()
    assert printed.startswith(b"%PDF")
    assert printed.count(b"/Type /Page\n") + printed.count(b"/Type /Page ") >= 3


def test_four_supernodes_stay_small(written):
    assert written["four"].stat().st_size < 1_000_000
    assert written["run"].stat().st_size < 5_000_000


@pytest.mark.parametrize("ranks", [False, True], ids=["pools", "ranks"])
def test_fifty_thousand_events_move_smoothly(opened, ranks):
    """Milliseconds in which the page draws one frame while it is dragged: 16 would be 60 frames a second. The bound is
    that of a busy machine without a graphics card; typical are 2 to 5."""
    browser = opened("run")
    assert browser.value("rlflowReport.tracks[1].start.length") == 50_000
    if ranks:
        browser.value("document.getElementById('ranks').click()")
    browser.value("document.getElementById('timeline').scrollIntoView()")
    for view in ("fit()", "zoom(0.2)"):
        browser.value(f"rlflowReport.axis.{view}")
        browser.frame()
        took = browser.value("""new Promise((done) => {
          const {axis} = rlflowReport; let left = 60; axis.frames.length = 0;
          const step = () => { if (!left--) return done(axis.frames); axis.pan(left % 20 < 10 ? 0.02 : -0.02); requestAnimationFrame(step); };
          step();
        })""")
        assert len(took) > 30
        assert sorted(took)[len(took) // 2] < 33, (view, sorted(took))
