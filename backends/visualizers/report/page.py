"""Draws a report: jinja2 for what is text, JSON for what scripts draw, everything inside one file.

The page loads nothing: its policy forbids every request, and lets run only the script that it was made with.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rlflow import __version__
from rlflow.amounts import seconds
from rlflow.backends.visualizers.graph import render_svg
from rlflow.backends.visualizers.palette import GREY
from rlflow.backends.visualizers.report.choices import choice_rows, limit_lines, search_lines
from rlflow.backends.visualizers.report.colours import FILLS, OBJECTS, fills
from rlflow.backends.visualizers.report.facts import difference, facts_of
from rlflow.backends.visualizers.report.flows import measured_ages, measured_queues, simulated_ages, simulated_queues
from rlflow.backends.visualizers.report.measured import compared, curves_of, profile_words
from rlflow.backends.visualizers.report.memory import memory_of
from rlflow.backends.visualizers.report.placement import households, placement_of
from rlflow.backends.visualizers.report.program import diagnostic_words, effects_of, listings
from rlflow.backends.visualizers.report.subject import Subject
from rlflow.backends.visualizers.report.timeline import Labels, last_steps, measured_track, simulated_track
from rlflow.backends.visualizers.report.traffic import matrices

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that two plans decide differently, in words."""

    section: str
    path: str
    before: str
    after: str


def render_report(subjects: Sequence[Subject], differences: Sequence[Difference] = (), refresh_s: int = 0) -> str:
    """The page about one plan or run, or about two side by side, as HTML; equal subjects give equal text.

    `refresh_s` > 0: the page loads itself again after so many seconds.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["time"] = _time
    script = _script()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_digest(script)}'; base-uri 'none'"
    return environment.get_template("page.html.j2").render(
        title=" and ".join(f"{s.plan.flow} on {s.plan.cluster}" for s in subjects),
        policy=policy,
        refresh_s=refresh_s,
        style=Markup(_joined("*.css")),
        script=Markup(script),
        data=Markup(_json(_data(subjects))),
        subjects=[_view(number, subject, Markup) for number, subject in enumerate(subjects)],
        facts=_facts(subjects),
        differences=list(differences),
        version=__version__,
    )


def _view(number: int, subject: Subject, markup: type[str]) -> dict[str, Any]:
    """What the template writes about one subject."""
    effects = effects_of(subject)
    svg, _ = render_svg(subject.plan)
    without_place = [d for d in subject.diagnostics or () if d.span is None]
    return {
        "number": number,
        "name": subject.name,
        "plan": subject.plan,
        "ran": subject.ran,
        "listings": listings(subject, effects),
        "effects": effects,
        "warnings": [diagnostic_words(found) for found in without_place],
        "knows_warnings": subject.diagnostics is not None,
        "graph": markup(_own_ids(svg, number)),
        "households": households(subject.plan),
        "matrices": matrices(subject.plan),
        "choices": choice_rows(subject.plan),
        "search": search_lines(subject.plan),
        "limits": limit_lines(subject.plan),
        "compared": compared(subject),
        "profile_words": profile_words(subject),
        "memory": subject.plan.memory,
        "simulated": subject.simulated,
        "why_not_simulated": subject.why_not_simulated,
        "has_timeline": subject.simulated is not None or bool(subject.ran and subject.ran.events),
    }


def _facts(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """One entry a label, with the fact of every subject, and how the last differs from the first."""
    found = [{fact.label: fact for fact in facts_of(subject)} for subject in subjects]
    rows = []
    for label in dict.fromkeys(label for facts in found for label in facts):
        own = [facts.get(label) for facts in found]
        first, last = own[0], own[-1]
        apart = difference(first, last) if len(own) > 1 and first is not None and last is not None else ("", "")
        rows.append({"label": label, "facts": own, "difference": apart[0], "way": apart[1]})
    return rows


def _data(subjects: Sequence[Subject]) -> dict[str, Any]:
    """What the scripts draw."""
    short = [PurePosixPath(subject.name).name for subject in subjects]
    if len(set(short)) < len(short):
        short = [subject.name for subject in subjects]
    return {
        "fills": FILLS,
        "other": GREY,
        "objects": [[name.strip(), colour] for name, colour in OBJECTS],
        "stages": {name: [fill.colour, fill.texture] for name, fill in fills(s.plan for s in subjects).items()},
        "subjects": [_subject_data(subject, name) for subject, name in zip(subjects, short, strict=True)],
    }


def _subject_data(subject: Subject, short: str) -> dict[str, Any]:
    plan, simulated, ran = subject.plan, subject.simulated, subject.ran
    labels = Labels(plan)
    tracks, queues, ages = [], [], []
    if simulated is not None:
        tracks.append(simulated_track(plan, simulated, labels))
        queues += simulated_queues(plan, simulated)
        ages += simulated_ages(simulated)
    if ran is not None and ran.events:
        shown, note = last_steps(ran.events)
        first = min(event["start_us"] for event in shown)
        tracks.append(measured_track(plan, shown, labels) | {"note": note})
        queues += measured_queues(plan, shown, first)
        ages += measured_ages(plan, shown, labels)
    return {
        "name": subject.name,
        "short": short,
        "tracks": tracks,
        "labels": labels.rows,
        "pools": [{"name": pool.name, "device": pool.device, "size": len(pool.ranks)} for pool in plan.pools],
        "memory": memory_of(plan),
        "hosts": placement_of(plan),
        "queues": queues,
        "ages": ages,
        "curves": curves_of(subject),
    }


def _time(us: float | None) -> str:
    return "" if us is None else seconds(round(us))


def _json(value: Any) -> str:
    """JSON that ends no script element, whatever a user's text holds."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _own_ids(svg: str, number: int) -> str:
    """The same SVG with ids of its own, and what refers to them, so that two on one page do not share any."""
    names = re.compile(r'(\sid="|href="#|url\(#)')
    svg = re.sub(r"<[^<>]+>", lambda tag: names.sub(rf"\g<1>s{number}-", tag[0]), svg)
    return svg.replace("<svg ", '<svg role="img" aria-label="graph of the plan" ', 1)


def _script() -> str:
    return '"use strict";\n(() => {\n' + _joined("*.js") + "})();\n"


def _joined(pattern: str) -> str:
    return "".join(path.read_text("utf-8") for path in sorted((_HERE / "assets").glob(pattern)))


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
