"""docs/language.md says what the compiler does: its tables are those of the sources, its examples compile.

`--update-golden` writes the tables anew.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlflow.cluster import presets
from rlflow.diagnostics import CompileError, SourceFile
from rlflow.driver import context_of
from rlflow.frontend import signatures
from rlflow.frontend.clusters import MAX_DEVICES, preset
from rlflow.frontend.constants import LARGEST
from rlflow.frontend.imports import MAX_CHAIN
from rlflow.frontend.layout_settings import LAYOUT_SETTINGS
from rlflow.frontend.lower import lower
from rlflow.frontend.parameters import (
    MOST,
    REQUIRED,
    Count,
    Duration,
    Flag,
    OnError,
    Parameter,
    Real,
    Reference,
    Rows,
    Signature,
    Text,
    Whole,
    Word,
)
from rlflow.frontend.schedules import ADMISSIONS, CARRIES, MAX_WORKERS
from rlflow.frontend.units import UNITS
from rlflow.grammar.format import format_text
from rlflow.grammar.parse import MAX_DEPTH, parse
from rlflow.grammar.words import ITEM_WORDS
from rlflow.passes.pipeline import run_pipeline

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "language.md"
TEXT = PAGE.read_text("utf-8")

_FENCE = re.compile(r"^```rlflow(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_TABLE = re.compile(r"<!-- (?P<name>[\w ]+) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)

# --- tables ----------------------------------------------------------------------------------------------------------


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _table(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    return _row(*heads) + "|---" * len(heads) + "|\n" + "".join(_row(*row) for row in rows)


def _code(words: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def units() -> str:
    by_dimension: dict[str, list[str]] = {}
    for word, unit in UNITS.items():
        by_dimension.setdefault(unit.dimension, []).append(word)
    return _table(("measures", "units"), ((name, _code(words)) for name, words in by_dimension.items()))


def devices() -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        for name in presets.device_names():
            if name == "cpu":
                yield "`cpu`", "cpu", "", ""
                continue
            facts = presets.device(name)
            memory, speed = facts["hbm_bytes"] / 1e9, facts["peak_bf16_flop_per_s"] / 1e12
            yield f"`{name}`", presets.torch_device(name), f"{memory:g} GB", f"{speed:g} TFLOPS"

    return _table(("device", "torch device", "memory", "dense bf16"), rows())


def clusters() -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        for name in (*presets.hosts(), *presets.supernodes()):
            hosts = preset(name).hosts
            yield f"`{name}`", str(len(hosts)), f"{hosts[0].devices} x `{hosts[0].device}`"

    return _table(("cluster", "hosts", "devices of a host"), rows())


def reserved() -> str:
    return textwrap.fill(_code(sorted(ITEM_WORDS)), 118, break_on_hyphens=False) + "\n"


def _bounds(least: float | None, most: float | None, opened: bool = False) -> str:
    parts = [] if least is None else [f"{'above' if opened else 'at least'} {least:g}"]
    parts += [] if most is None or most >= MOST else [f"at most {most:g}"]
    return " ".join(parts)


def accepts(parameter: Parameter) -> str:
    match parameter.accepts:
        case Text():
            words = "text"
        case Flag():
            words = "`true` or `false`"
        case Whole(least, most):
            words = f"whole number, {_bounds(least, most)}"
        case Real(least, most, opened):
            words = ", ".join(part for part in ("number", _bounds(least, most, opened)) if part)
        case Count(unit, least, _):
            words = f"{unit}, at least {least}"
        case Duration():
            words = "time"
        case Word(choices):
            words = _code(choices)
        case Rows(row):
            words = f"rows of {row}s"
        case Reference(kind):
            words = f"name of a {kind}"
        case other:
            words = (other.__doc__ or "").removeprefix("A value of the step: ").rstrip(".")
            words = words[0].lower() + words[1:]
    return words + (", or `none`" if parameter.optional else "")


def default(parameter: Parameter) -> str:
    value, kind = parameter.default, parameter.accepts
    if value is REQUIRED:
        return "required"
    if isinstance(kind, OnError):
        return "`fail`"
    if isinstance(value, bool) or value is None:
        return f"`{str(value).lower()}`"
    if isinstance(kind, Duration) and isinstance(value, int):
        return f"`{value / 1e6:g} s`"
    if isinstance(kind, Count):
        return f"`{value} {kind.unit}`"
    return f'`"{value}"`' if isinstance(kind, Text) else f"`{value}`"


def described(signature: Signature, title: str) -> str:
    text = f"#### {title}\n\n{signature.doc[0].upper()}{signature.doc[1:]}.\n\n"
    if not signature.parameters:
        return text
    rows = ((f"`{p.name}`", accepts(p), default(p), p.doc) for p in signature.parameters)
    return text + _table(("argument", "takes", "default", "meaning"), rows) + "\n"


def sections() -> dict[str, dict[str, Signature]]:
    """Everything that can be called: heading to signatures by the words that a user writes."""
    found: dict[str, dict[str, Signature]] = {}
    for kind, table in signatures.DECLARATIONS.items():
        found[f"Declarations: {kind}"] = {f"`{kind} NAME = {word}(...)`": s for word, s in table.items()}
    for kind, table in signatures.METHODS.items():
        found[f"Stages of {kind}"] = {f"`{kind.upper()}.{word}(...)`": s for word, s in table.items()}
    found["Stages of a reward"] = {"`REWARD(...)`": signatures.REWARD_CALL}
    for heading, table in (
        ("Functions", signatures.FUNCTIONS),
        ("Loss terms", signatures.LOSSES),
        ("Optimizers", signatures.OPTIMIZERS),
        ("Corrections for staleness", signatures.CORRECTIONS),
        ("What to do when a sample cannot be scored", signatures.ON_ERRORS),
        ("Adapters", signatures.ADAPTERS),
    ):
        found[heading] = {f"`{word}(...)`": s for word, s in table.items()}
    return found


def callables() -> str:
    out = ""
    for heading, table in sections().items():
        out += f"### {heading}\n\n" + "".join(described(s, title) for title, s in table.items())
    return out


TABLES = {"units": units, "devices": devices, "clusters": clusters, "words": reserved, "callables": callables}


def test_tables_are_those_of_the_sources(request: pytest.FixtureRequest) -> None:
    def fill(found: re.Match[str]) -> str:
        return f"<!-- {found['name']} -->\n{TABLES[found['name']]()}<!-- end -->"

    wanted = _TABLE.sub(fill, TEXT)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(wanted, "utf-8")
        return
    assert {found["name"] for found in _TABLE.finditer(TEXT)} == set(TABLES)
    assert wanted == TEXT, "docs/language.md is out of date: run this file with --update-golden and read the diff"


def test_every_unit_device_and_callable_is_there() -> None:
    """What the tables come from is complete: a new table of the sources needs a section."""
    tables = {name for name in vars(signatures) if name.isupper() and not name.startswith("_")}
    assert tables - {"P", "REQUIRED", "MOST", "PRESETS"} == {
        "DECLARATIONS", "METHODS", "FUNCTIONS", "REWARD_CALL", "LOSSES", "OPTIMIZERS", "CORRECTIONS", "ON_ERRORS",
        "ADAPTERS",
    }  # fmt: skip


def test_schedule_words_are_those_of_the_sources() -> None:
    part = TEXT.partition("## Schedule\n")[2].partition("\n## ")[0]
    for word in (*LAYOUT_SETTINGS, "split", *ADMISSIONS, *CARRIES):
        assert f"`{word}`" in part


def test_limits_are_those_of_the_sources() -> None:
    part = TEXT.partition("## Limits\n")[2]
    for limit in (MAX_DEPTH, MAX_CHAIN, MAX_DEVICES, MAX_WORKERS, MOST):
        assert f"| {limit:,} |" in part
    assert f"| {LARGEST:g} |" in part


def test_links_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        if target.startswith("#"):
            assert target[1:] in headings
        else:
            assert (PAGE.parent / target).is_file()


def test_lines_are_short() -> None:
    assert all(len(line) <= 120 or line.startswith("|") or line.startswith("`") for line in TEXT.splitlines())


# --- examples --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """A fence: `rlflow` is a file, `rlflow step` a part of one, `rlflow file NAME` stands beside the others."""

    kind: str
    text: str


EXAMPLES = [Example(found["info"].strip(), found["body"]) for found in _FENCE.finditer(TEXT)]
WHOLE = [example for example in EXAMPLES if example.kind == ""]
AROUND = {
    "items": "flow f {{\n{}}}\n",
    "step": "flow f {{\n step {{\n{}}}\n}}\n",
    "schedule": "schedule f {{\n{}}}\n",
    "cluster": "cluster f {{\n{}}}\n",
}
FIRST = WHOLE[0].text
FLOW = FIRST[: FIRST.index("schedule add")]


@pytest.mark.parametrize("example", [e for e in EXAMPLES if not e.kind.startswith("file")], ids=lambda e: e.kind)
def test_example_parses(example: Example) -> None:
    text = AROUND[example.kind].format(example.text) if example.kind else example.text
    parse(SourceFile("x", text))


def test_examples_are_in_the_one_style() -> None:
    for example in EXAMPLES:
        if example.kind == "" or example.kind.startswith("file"):
            assert format_text(SourceFile("x", example.text)) == example.text


@pytest.mark.parametrize("example", WHOLE, ids=lambda e: e.text.split("{")[0].replace("\n", " ")[:40])
def test_example_compiles(example: Example, tmp_path: Path) -> None:
    """A file without a flow gets the first example's, and a schedule for its last cluster."""
    (tmp_path / "sums.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n', "utf-8")
    (tmp_path / "rewards.py").write_text("def exact(response, answer):\n    return 1.0\n", "utf-8")
    for other in EXAMPLES:
        if other.kind.startswith("file "):
            (tmp_path / other.kind.split()[1]).write_text(other.text, "utf-8")
    text = example.text
    program = parse(SourceFile("x", text))
    if not program.flows:
        text += FLOW
    if program.clusters and not program.schedules:
        text += f"schedule add on {program.clusters[-1].name.text} {{ pool main = 8 devices }}\n"
    names = {s.cluster.text for s in parse(SourceFile("x", text)).schedules if s.cluster} or {None}
    for name in names:
        lowered = lower(parse(SourceFile("x.rlflow", text)), tmp_path, cluster_name=name)
        context = context_of(lowered)
        run_pipeline(lowered.flow, context)
        assert [d.message for d in (*lowered.warnings, *context.diagnostics)] == []


def test_the_example_with_a_condition_does_what_the_text_says(tmp_path: Path) -> None:
    (example,) = [e for e in WHOLE if "if kl > 0" in e.text]
    program = parse(SourceFile("x", example.text))
    assert list(lower(program, None).flow.models) == ["actor", "first"]
    assert list(lower(program, None, overrides=["kl=0"]).flow.models) == ["actor"]
    with pytest.raises(CompileError):
        lower(parse(SourceFile("x", example.text.replace("if kl > 0", "if kl", 1))), None)
    assert lower(program, None, overrides=["mode=long"]).flow.nodes["samples"].op.max_new == 16  # type: ignore[union-attr]
