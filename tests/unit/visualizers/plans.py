"""A realistic GRPO plan made by hand, so that these tests need no compiler."""

from __future__ import annotations

from rlflow.ir.ops import (
    AdamW,
    FileData,
    FrozenModel,
    Generate,
    GroupNormalize,
    HfModel,
    Kl,
    Logprobs,
    Op,
    PpoClip,
    PythonReward,
    Score,
    Take,
    Train,
)
from rlflow.plan import (
    Because,
    Channel,
    DataDecl,
    Evaluation,
    Instruction,
    Layout,
    ModelDecl,
    Plan,
    Pool,
    Program,
    PublishWeights,
    RankPlace,
    Reason,
    RewardDecl,
    RunStage,
    SaveCheckpoint,
    Source,
    Stage,
    Stop,
    TakeRows,
    WaitStage,
)
from rlflow.plan_parts import SpanRef

FILE = "examples/grpo.rlflow"


def span(line: int) -> SpanRef:
    return SpanRef(file=FILE, line=line, column=3, end_line=line, end_column=40)


def because(line: int, reason: Reason = "written", inserted_by: str = "") -> Because:
    return Because(reason=reason, span=span(line), inserted_by=inserted_by)


def _stage(
    id: str, op: Op, line: int, *, pool: str = "main", phase: str = "step", layout: Layout | None = None, **inputs: str
) -> Stage:
    output = {
        "take": f"rows<prompt 64 of {id}; uid:i64, prompt_ids:i64/token>",
        "generate": f"rows<sample 512/8 of {id}; uid:i64, text:str, response_ids:i64/token, logprobs:f32/token>",
        "train": "weights<actor>",
    }.get(op.kind, f"rows<sample 512/8 of samples; {op.kind}:f32>")
    return Stage(
        id=id, op=op, phase=phase, pool=pool, layout=layout, inputs=inputs, output=output, because=because(line)
    )


def grpo_plan() -> Plan:
    """GRPO with a Python reward, a frozen reference and one evaluation, on one device and two reward workers."""
    one = Layout()
    stages = (
        _stage("batch", Take(data="questions", count=64), 8),
        _stage("samples", Generate(model="actor", n=8, max_new=512), 9, layout=one, prompts="batch"),
        _stage("ref", Logprobs(model="reference", temperature=1.0), 10, layout=one, samples="samples"),
        _stage("score", Score(reward="exact"), 11, pool="cpu", samples="samples"),
        _stage("adv", GroupNormalize(), 12, rewards="score"),
        _stage("train", _train(), 13, layout=one, samples="samples", advantages="adv", reference="ref"),
        _stage("held", Take(data="heldout", count=None), 20, phase="heldout"),
        _stage(
            "answers",
            Generate(model="actor", n=1, max_new=512, temperature=0.0),
            21,
            phase="heldout",
            layout=one,
            prompts="held",
        ),
        _stage("grade", Score(reward="exact"), 22, pool="cpu", phase="heldout", samples="answers"),
    )
    return Plan(
        rlflow_version="0.1.0",
        flow="grpo",
        cluster="local",
        sources=(Source(path=FILE, sha256="0" * 64),),
        overrides=("samples.n=8",),
        pipeline="place,insert-weight-edges,insert-waits,schedule",
        seed=7,
        stop=Stop(steps=200, epochs=None),
        data=(
            DataDecl(name="heldout", source=FileData(path="held.jsonl", format="jsonl", shuffle=False), span=span(3)),
            DataDecl(name="questions", source=FileData(path="train.jsonl", format="jsonl", answer="a"), span=span(2)),
        ),
        models=(
            ModelDecl(name="actor", source=HfModel(path="models/qwen", compute="bf16"), trainable=True, span=span(4)),
            ModelDecl(name="reference", source=FrozenModel(of="actor"), trainable=False, span=span(5)),
        ),
        rewards=(
            RewardDecl(name="exact", source=PythonReward(function="rewards:exact_match", retries=2), span=span(6)),
        ),
        pools=(
            Pool(name="cpu", device="functions", ranks=_ranks(2)),
            Pool(name="main", device="cpu", ranks=_ranks(1)),
        ),
        stages=stages,
        programs=(
            Program(
                pool="main",
                step=_step(),
                evaluations=(Evaluation(name="heldout", every=20, instructions=_evaluation()),),
            ),
        ),
        channels=(
            Channel(model="actor", source="train", readers=("answers", "samples"), max_staleness=0, transport="cast"),
        ),
    )


def _ranks(count: int) -> tuple[RankPlace, ...]:
    return tuple(RankPlace(rank=i, host="local", index=i) for i in range(count))


def _train() -> Train:
    return Train(
        model="actor",
        loss=(PpoClip(weight=1.0, clip_low=0.2, clip_high=0.28), Kl(weight=0.001, estimator="k3")),
        optimizer=AdamW(lr=1e-6, warmup=10),
        minibatch=128,
    )


def _step() -> tuple[Instruction, ...]:
    return (
        TakeRows(id="take.batch", stage="batch", because=because(8)),
        RunStage(id="run.samples", stage="samples", because=because(9)),
        RunStage(id="run.score", stage="score", because=because(11)),
        RunStage(id="run.ref", stage="ref", because=because(10)),
        WaitStage(id="wait.score", stage="score", because=because(11, "asynchronous-call", "insert-waits")),
        RunStage(id="run.adv", stage="adv", because=because(12)),
        RunStage(id="run.train", stage="train", because=because(13)),
        PublishWeights(
            id="publish.actor", model="actor", because=because(13, "weights-changed", "insert-weight-edges")
        ),
        SaveCheckpoint(id="checkpoint", every=50, because=because(1, "keep-progress", "schedule")),
    )


def _evaluation() -> tuple[Instruction, ...]:
    return (
        TakeRows(id="heldout.take.held", stage="held", because=because(20)),
        RunStage(id="heldout.run.answers", stage="answers", because=because(21)),
        RunStage(id="heldout.run.grade", stage="grade", because=because(22)),
        WaitStage(id="heldout.wait.grade", stage="grade", because=because(22, "asynchronous-call", "insert-waits")),
    )
