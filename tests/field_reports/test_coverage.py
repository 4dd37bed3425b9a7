"""Every report of the groups that concern the language is tested here by its id, or says where it is, or why it is not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GROUPS = {"A": 21, "B": 13, "F": 10, "H": 8, "I": 11, "J": 7, "K": 7, "N": 2, "Q": 12}
"""Reports of each group."""

AXES = "needs tp, pp, sp or ep, which this version does not place"
POOLS = "needs several pools, which this version does not place"
ASYNC = "needs rollout and training on separate pools, which this version does not place"
RAY = "tests/unit/ray_runtime"
MATHS = "tests/unit/algorithms"

NOT_HERE = {
    "A6": f"micro-batches count tokens, so none is empty: {RAY}/test_trainer.py::test_micro_batches_hold_every_row_once_under_the_budget",
    "A8": AXES,
    "A11": AXES,
    "A12": AXES,
    "A13": AXES,
    "A14": AXES,
    "A15": AXES,
    "A16": "there is one packed edge, inside one rank; needs disaggregated training",
    "A17": "needs weight transfers between pools",
    "A20": AXES,
    "B1": f"the sum over a host needs placement; what is not there stops the launch: {RAY}/test_launcher.py::test_resources_that_are_not_there",
    "B3": f"numbers of the live cluster: {RAY}/test_launcher.py::test_resources_that_are_not_there",
    "B4": "every rank asks for one device, so no bundle is larger than a host",
    "B5": f"pools are numbers of devices, not their ids; {POOLS}",
    "B6": POOLS,
    "B7": POOLS,
    "B9": "device ids of a real machine; needs device pools in the runtime",
    "B10": f"at launch: {RAY}/test_launcher.py::test_resources_that_are_not_there",
    "B11": "at launch; a log, not the language",
    "B12": "at launch over several hosts",
    "B13": "needs the search for placements",
    "F1": ASYNC,
    "F3": ASYNC,
    "F4": ASYNC,
    "F7": f"a formula: {MATHS}/test_losses.py::test_truncated_importance_sampling_uses_the_old_policy",
    "F8": f"at run time: {RAY}/test_execute.py::test_samples_carry_the_version_that_made_them",
    "F9": ASYNC,
    "F10": ASYNC,
    "H1": f"a formula: {RAY}/test_algorithms.py::test_groups_of_unequal_size_keep_their_own_mean",
    "H3": f"a formula: {RAY}/test_algorithms.py::test_normalised_inside_groups_not_over_the_batch",
    "H7": f"at run time: {RAY}/test_execute.py::test_the_cursor_moves_over_epochs",
    "H8": f"a formula: {MATHS}/test_group.py::test_order_and_split_change_no_bit",
    "I1": f"a formula: {RAY}/test_algorithms.py::test_token_mean_is_defined_over_the_mini_batch",
    "I5": f"a formula: {MATHS}/test_shaping.py::test_kl_of_masked_tokens_does_not_reach_earlier_returns",
    "I6": f"a formula: {RAY}/test_algorithms.py::test_nothing_counted_gives_zero_loss_and_gradient",
    "J1": f"at run time: {RAY}/test_rollout.py::test_response_lengths",
    "J2": f"at run time: {RAY}/test_rollout.py::test_models_with_several_end_tokens",
    "J3": f"a formula: {MATHS}/test_shaping.py::test_the_score_lies_on_the_last_token",
    "J4": f"at run time: {RAY}/test_rollout.py::test_a_truncated_response_gets_no_end_token",
    "J5": f"a formula: {MATHS}/test_gae.py::test_a_masked_value_is_never_read",
    "J6": f"a formula: {MATHS}/test_invariance.py::test_masked_tokens_have_no_loss_and_no_gradient",
    "K1": f"at run time: {RAY}/test_rewards_drop.py::test_one_of_many_is_dropped_and_all_of_them_stop_the_run",
    "K2": f"at run time: {RAY}/test_rewards.py::test_a_hanging_sample_is_named_in_time",
    "K4": f"at run time: {RAY}/test_rewards.py::test_a_result_that_is_no_score_stops_the_run",
    "K5": f"at run time: {RAY}/test_rewards_drop.py::test_none_is_not_applicable_and_counted",
    "K6": f"at run time: {RAY}/test_rewards.py::test_a_result_that_is_no_score_stops_the_run",
    "N2": f"at run time: {RAY}/test_data_prompts.py::test_exactly_one_bos",
    "Q5": "a value may be read by several stages without being declared so; queues between pools come later",
    "Q10": "the page of the language is made from the schema: tests/unit/docs/test_language_reference.py::test_tables_are_those_of_the_sources",
    "Q11": f"the decoder is our own and makes n rows a prompt: {RAY}/test_rollout.py::test_columns",
}  # fmt: skip
"""Id to one line: where it is tested, or why it cannot be."""


def functions(file: Path) -> set[str]:
    return {n.name for n in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(n, ast.FunctionDef)}


def test_every_report_is_tested_or_accounted_for() -> None:
    names = {name for file in HERE.glob("test_*.py") for name in functions(file)}
    tested = {found[1] for name in names if (found := re.match(r"test_([A-Z]\d+)_", name))}
    wanted = {f"{group}{number}" for group, last in GROUPS.items() for number in range(1, last + 1)}
    assert tested | set(NOT_HERE) == wanted
    assert not tested & set(NOT_HERE)


def test_what_is_pointed_at_is_there() -> None:
    for report, reason in NOT_HERE.items():
        for path, name in re.findall(r"(tests/\S+\.py)::(\w+)", reason):
            assert (ROOT / path).is_file(), f"{report}: {path}"
            assert name in functions(ROOT / path), f"{report}: {name}"
