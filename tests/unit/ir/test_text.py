"""Text of the intermediate form: what is printed parses back to the same flow, and broken text is refused by line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.diagnostics import CompileError
from rlflow.driver import context_of, read_source
from rlflow.frontend.lower import lower
from rlflow.grammar.parse import parse
from rlflow.ir import ops
from rlflow.ir.flow import (
    Data,
    Edge,
    EdgeKind,
    Evaluation,
    Flow,
    Layout,
    Model,
    Node,
    Placement,
    PoolSpec,
    Reward,
    Stage,
)
from rlflow.ir.parser import FlowSyntaxError, parse_flow
from rlflow.ir.printer import describe_type, print_flow
from rlflow.ir.typesystem import Field, RowsType, WeightsType
from rlflow.passes.pipeline import DEFAULT_PIPELINE, run_pipeline

ROOT = Path(__file__).parents[3]
FILES = sorted([*(ROOT / "examples").glob("**/*.rlflow"), *(ROOT / "tests" / "data").glob("*.rlflow")])


def without_spans(flow: Flow) -> Flow:
    """The flow as it is after printing and parsing: no spans, data edges first."""

    def bare(table: Any) -> dict[str, Any]:
        return {name: dataclasses.replace(value, span=None) for name, value in table.items()}

    edges = [dataclasses.replace(edge, span=None) for edge in flow.edges]
    order = {node_id: i for i, node_id in enumerate(flow.nodes)}
    data = sorted((e for e in edges if e.kind is EdgeKind.DATA), key=lambda e: order[e.dst])
    return dataclasses.replace(
        flow,
        data=bare(flow.data),
        models=bare(flow.models),
        rewards=bare(flow.rewards),
        environments=bare(flow.environments),
        nodes=bare(flow.nodes),
        pools=bare(flow.pools),
        edges=(*data, *(e for e in edges if e.kind is not EdgeKind.DATA)),
        evaluations=tuple(dataclasses.replace(e, span=None) for e in flow.evaluations),
        span=None,
        save_span=None,
        allowed_staleness=dict(flow.allowed_staleness),
        corrections=dict(flow.corrections),
        decisions=tuple(dataclasses.replace(d, span=None) for d in flow.decisions),
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_round_trip_at_every_stage(file: Path) -> None:
    start = lower(parse(read_source(file)), None)  # without looking for the files that it names
    seen: list[Flow] = [start.flow]
    context = context_of(start)
    try:
        run_pipeline(start.flow, context, DEFAULT_PIPELINE, lambda name, before, after: seen.append(after))
    except CompileError as error:
        if any(d.code != "RLF4003" for d in error.diagnostics):
            raise
    for flow in seen:
        text = print_flow(flow)
        assert parse_flow(text) == without_spans(flow)
        assert print_flow(parse_flow(text)) == text


# --- flows that no frontend would make -------------------------------------------------------------------------------

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
texts = st.text(max_size=12)
numbers = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**63 - 1)
values = st.one_of(counts, numbers, texts, st.booleans(), st.none())
losses = st.one_of(
    st.builds(ops.PpoClip, weight=numbers, clip_low=numbers, clip_high=numbers),
    st.builds(ops.Kl, weight=numbers, estimator=st.sampled_from(["k1", "k2", "k3"])),
    st.builds(ops.Entropy, weight=numbers),
)
data_sources = st.one_of(
    st.builds(
        ops.FileData, path=texts, format=st.just("jsonl"), prompt=texts, answer=st.none() | texts, shuffle=st.booleans()
    ),
    st.builds(
        ops.GymData,
        task=texts,
        size=counts,
        options=st.lists(st.tuples(names, st.one_of(values, st.lists(values, max_size=2).map(tuple))), max_size=2).map(
            tuple
        ),
    ),
)
model_sources = st.one_of(
    st.builds(ops.HfModel, path=texts),
    st.builds(ops.TinyModel, architecture=st.just("llama"), alphabet=texts, hidden=counts),
    st.builds(ops.FrozenModel, of=names),
)
reward_sources = st.one_of(
    st.builds(ops.PythonReward, function=texts, retries=counts), st.builds(ops.DatasetScorer, data=names)
)
operations = st.one_of(
    st.builds(ops.Take, data=names, count=st.none() | counts),
    st.builds(ops.Generate, model=names, n=counts, max_new=counts, temperature=numbers, top_k=counts),
    st.builds(ops.Logprobs, model=names, temperature=numbers),
    st.builds(ops.Score, reward=names),
    st.builds(ops.GroupNormalize, std=st.booleans(), epsilon=numbers),
    st.builds(
        ops.Train,
        model=names,
        loss=st.lists(losses, max_size=3).map(tuple),
        optimizer=st.builds(ops.AdamW, lr=numbers, warmup=counts),
        minibatch=counts,
    ),
)
columns = st.builds(Field, names, st.sampled_from(["f32", "i64", "str"]), st.sampled_from(["row", "token"]))
types = st.one_of(
    st.builds(WeightsType, names),
    st.builds(
        RowsType,
        st.sampled_from(["prompt", "sample"]),
        names,
        st.none() | counts,
        st.integers(1, 9),
        st.lists(columns, min_size=1, max_size=3).map(tuple),
    ),
)
layouts = st.builds(Layout, *[st.integers(1, 99)] * 3)
placements = st.none() | st.builds(Placement, names, st.none() | layouts)


@st.composite
def flows(draw: st.DrawFn) -> Flow:
    def table(make: Any, *parts: Any) -> dict[str, Any]:
        return {
            name: make(name, *(draw(part) for part in parts)) for name in draw(st.lists(names, max_size=2, unique=True))
        }

    ids = draw(st.lists(st.from_regex(r"[a-z][a-z0-9_.]{0,6}", fullmatch=True), min_size=1, max_size=5, unique=True))
    nodes = {
        node_id: Node(
            node_id,
            draw(operations),
            draw(types),
            None,
            draw(st.sampled_from(["step", "held"])),
            draw(st.sampled_from(["", "insert-old-logprobs"])),
            draw(placements),
            draw(st.none() | st.integers(0, 9)),
        )
        for node_id in ids
    }
    ends = st.sampled_from(ids)
    data = [
        Edge(draw(ends), node_id, EdgeKind.DATA, port)
        for node_id in ids
        for port in draw(st.lists(names, max_size=2, unique=True))
    ]
    others = [
        Edge(
            draw(ends),
            draw(ends),
            draw(st.sampled_from([EdgeKind.WEIGHTS, EdgeKind.ORDER])),
            tokens=draw(st.integers(0, 3)),
        )
        for _ in range(draw(st.integers(0, 2)))
    ]
    return Flow(
        name=draw(names),
        stage=draw(st.sampled_from(Stage)),
        data=table(Data, data_sources),
        models=table(Model, model_sources, st.booleans()),
        rewards=table(Reward, reward_sources),
        nodes=nodes,
        edges=(*data, *others),
        evaluations=tuple(table(Evaluation, st.integers(0, 99)).values()),
        allowed_staleness=table(lambda name, bound: bound, st.integers(0, 9)),
        stop_steps=draw(st.none() | counts),
        stop_epochs=draw(st.none() | counts),
        save_every=draw(counts),
        seed=draw(counts),
        pools=table(PoolSpec, st.sampled_from(["cpu", "functions"]), st.lists(names, max_size=3).map(tuple)),
    )


@given(flows())
@settings(max_examples=80, deadline=None)
def test_round_trip_of_any_flow(flow: Flow) -> None:
    assert parse_flow(print_flow(flow)) == flow


@given(flows(), st.data())
@settings(max_examples=80, deadline=None)
def test_broken_text_is_refused_or_read(flow: Flow, data: st.DataObject) -> None:
    text = print_flow(flow)
    at = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(at, min(len(text), at + 8)))
    try:
        parse_flow(text[:at] + data.draw(st.sampled_from(["", "{", '"', "x", "9", ","])) + text[end:])
    except FlowSyntaxError as error:
        assert str(error).startswith("line ")  # noqa: PT017


TINY = """\
flow @f stage=logical {} {
  data @d = reasoning_gym {size=3, task="t"}
  %b = take() {count=2, data="d"} : rows<prompt 2 of b; uid:i64>
}
"""


def test_defaults_are_left_out_and_come_back() -> None:
    flow = parse_flow(TINY)
    assert flow.data["d"].source == ops.GymData(task="t", size=3)
    assert "seed=0" in print_flow(flow)
    assert "shuffle" not in print_flow(flow)


def test_comments_and_blank_lines_are_skipped() -> None:
    assert parse_flow("// RUN: x\n\n" + TINY.replace("  %b", "  // here\n\n  %b")) == parse_flow(TINY)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (TINY, "", "line 1: no flow here"),
        ("flow @f", "flaw @f", "line 1: expected 'flow @'"),
        ("logical", "lojical", "line 1: unknown stage lojical"),
        ("logical {}", "logical {sed=3}", "line 1: unknown setting sed"),
        ("logical {}", "logical {seed=}", "line 1: "),
        ("}\n", "", "line 3: the flow is not closed"),
        ("data @d", "date @d", "line 2: unknown word date"),
        ("reasoning_gym", "gym", "line 2: unknown kind gym"),
        ("size=3", "sise=3", "line 2: "),
        ("size=3", "size=" + "[" * 100_000, "line 2: "),
        ("take()", "tak()", "line 3: unknown kind tak"),
        ("take()", "take(x=y)", "line 3: expected '=%'"),
        ("rows<prompt", "rows<promt", "line 3: unknown row kind promt"),
        ("uid:i64>", "uid:i64> on p[dq=2]", "line 3: "),
        ("uid:i64>", "uid:i64> !", "line 3: unexpected '!'"),
    ],
)  # fmt: skip
def test_broken_text(old: str, new: str, says: str) -> None:
    assert TINY.count(old) >= 1
    head, _, tail = TINY.rpartition(old)
    with pytest.raises(FlowSyntaxError) as caught:
        parse_flow(head + new + tail)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("type_", "words"),
    [
        (RowsType("sample", "s", 512, 8, ()), "512 samples (64 x 8)"),
        (RowsType("prompt", "b", 64, 1, ()), "64 prompts"),
        (RowsType("prompt", "b", None, 1, ()), "prompts"),
        (WeightsType("actor"), "weights<actor>"),
    ],
)
def test_types_in_words(type_: Any, words: str) -> None:
    assert describe_type(type_) == words
