"""Every row of published_runs.csv: predicted beside published, or why there is no prediction."""

from __future__ import annotations

from benchmarks.validation.hardware import model_named
from benchmarks.validation.measures import whole
from benchmarks.validation.observe import Compared, Observation
from benchmarks.validation.predict import STAGE_NAMES
from benchmarks.validation.results import shipped
from benchmarks.validation.runs import Run
from benchmarks.validation.tables import percent, seconds, table

TITLES = {
    "C": "C: verl with vLLM-Ascend and MindSpeed (cann-recipes-train)",
    "N": "N: NeMo-RL",
    "S": "S: SkyRL",
    "V": "V: verl on H20",
    "A": "A: AReaL and verl on H800",
    "M": "M: MindSpeed-RL",
    "G": "G: Megatron-LM",
}


def row_tables() -> str:
    """One table a source."""
    texts = []
    for source in dict.fromkeys(each.run.source for each in shipped()):
        mine = [each for each in shipped() if each.run.source == source]
        rows = [row for each in mine for row in _rows(each)]
        head = ("row", "grade", "run", "of", "published s", "predicted s", "error")
        texts.append(f"### {TITLES.get(source, source)}\n\n{table(head, rows)}")
        reasons = [(each.run.id, reason) for each in mine if (reason := _reason(each))]
        if reasons:
            texts.append(table(("row", "remark"), reasons))
    return "\n\n".join(texts)


def _rows(each: Compared) -> list[tuple[str, ...]]:
    """A line for every stage that is published or predicted, and for the step."""
    run = each.run
    lines: list[tuple[str, str, str, str]] = []
    seen = {o.stage: o for o in each.stages}
    names = [*dict.fromkeys([*run.published, *each.predicted])]
    for name in names:
        found = seen.get(name)
        if found:
            lines.append(_line(STAGE_NAMES.get(name, name), found))
        elif name in each.predicted or name in run.published:
            lines.append(
                (
                    STAGE_NAMES.get(name, name),
                    seconds(run.published.get(name)),
                    seconds(each.predicted.get(name)),
                    "anchor" if name in run.published and name in each.predicted else "",
                )
            )
    if run.text["placement"] not in ("rollout_only", "train_only"):
        step = each.step
        if step:
            lines.append(_line("**step**", step))
        else:
            same = run.number("step_s")
            anchor = "anchor" if same and each.whole is not None else ""
            lines.append(("**step**", seconds(same), seconds(each.whole), anchor))
    name = _name(run)
    found_rows: list[tuple[str, ...]] = []
    for i, (stage, published, predicted, error) in enumerate(lines):
        lead = (run.id, run.text["grade"], name) if i == 0 else ("", "", "")
        found_rows.append((*lead, stage, published, predicted, error))
    return found_rows


def _line(name: str, o: Observation) -> tuple[str, str, str, str]:
    return (name, seconds(o.published), seconds(o.predicted), percent(o.error))


def _name(run: Run) -> str:
    mode = "" if run.is_synchronous else f", {run.text['mode'].replace('_', ' ')}"
    cards = "cards of " if "dies" in run.text["device_unit"] else ""
    return f"{run.text['model']}, {run.text['n_devices']} {cards}{run.text['device']}{mode}"


def _reason(each: Compared) -> str:
    """Why a row has no prediction of its whole, or on what its prediction stands."""
    run, notes = each.run, []
    if run.grade == "X":
        notes.append("contradicts itself or its neighbours (the file's grade): in no median")
    if each.problem:
        notes.append(f"no prediction: {each.problem}")
    elif model_named(run.text["model"]) is None:
        notes.append("no prediction: the architecture is in no preset, and mean lengths are not usable")
    elif not run.text["prompts_per_step"]:
        notes.append("no prediction: the batch is not published")
    elif each.implied is not None:
        column = each.implied.column.removesuffix("_s").replace("_tokens_per_s_per_device", "").replace("_", " ")
        notes.append(
            f"mean length not published; {each.implied.tokens:,.0f} tokens meet the {column} of {each.implied.anchor}"
        )
    elif run.number("mean_response_tokens") is None:
        notes.append("no prediction: mean length not published, and none meets the published step or throughput")
    elif whole(each) is None:
        notes.append("no prediction of the whole")
    return "; ".join(notes)
