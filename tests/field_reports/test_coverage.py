"""Every report of the groups that concern the language and the compiler is tested here by its id, or says where it is, or why it is not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GROUPS = {
    "A": 21,
    "B": 13,
    "C": 11,
    "D": 20,
    "E": 12,
    "F": 10,
    "H": 8,
    "I": 11,
    "J": 7,
    "K": 7,
    "L": 9,
    "M": 5,
    "N": 2,
    "O": 10,
    "P": 10,
    "Q": 12,
}
"""Reports of each group."""

LATER = "at run time, not there yet"
"""Not in the runtime, or needs hardware; the line says what."""
RAY = "tests/unit/ray_runtime"
PARALLEL = f"{RAY}/parallel"
POOLS = "tests/e2e/test_pools.py"
FAULTS = "tests/e2e/test_faults.py"
MATHS = "tests/unit/algorithms"
MEMORY = "tests/unit/passes/memory"
RESHARD = "tests/unit/reshard"
PROTOCOL = "tests/unit/protocol"
DOCTOR = "tests/unit/doctor/test_machine.py"

NOT_HERE = {
    "A6": f"micro-batches count tokens, so none is empty: {RAY}/test_trainer.py::test_micro_batches_hold_every_row_once_under_the_budget",
    "A8": f"tensor ranks that share a sequence: {PARALLEL}/test_tensor_parallel.py::test_equals_one_process (sp); context parallelism is refused at run time: {PARALLEL}/test_tensor_parallel.py::test_what_cannot_run_is_refused_with_the_nearest; its gradients are {LATER}: no rank trains on a part of a sequence",
    "A16": "rows cross pools unpadded, and each stage packs them by tokens itself: there is no multiple to agree on",
    "B3": f"numbers of the live cluster: {RAY}/test_launcher.py::test_resources_that_are_not_there",
    "B10": f"at launch: {RAY}/test_launcher.py::test_resources_that_are_not_there",
    "B11": f"each phase of the start with its own seconds: tests/unit/visualizers/test_progress.py::test_lines_into_a_pipe, and of a real run: {POOLS}::test_a_resumed_run_of_models_in_parts_goes_on_under_any_layout",
    "B12": f"{LATER}: needs two hosts; the doctor asks every host, and does not connect the pairs",
    "C4": f"a formula: {MEMORY}/test_states.py::test_a_sync_of_the_adapter_alone_brings_the_base_back_only_from_a_kept_copy",
    "C5": f"at run time: {RAY}/test_engine.py::test_sleep_frees_what_is_measured_and_wake_brings_it_back, deep: {RAY}/test_engine.py::test_deep_sleep_needs_an_update, other weights than were sent: {RAY}/test_engine.py::test_an_update_is_what_was_sent",
    "C6": f"at run time: {RAY}/test_engine.py::test_cycles_of_sleep_leave_nothing_behind",
    "C7": f"at launch: {DOCTOR}::test_expandable_segments_against_swaps and tests/unit/codegen/test_variables.py::test_expandable_segments_only_where_nothing_swaps",
    "C8": f"at run time, a number: {RAY}/test_residency.py::test_bf16_learns_the_same_and_tells_what_the_plan_does_not_count; more than the device may hold stops: {RAY}/test_residency.py::test_more_than_a_device_may_hold_fails_with_both_numbers; a checkpoint before that stop is {LATER}",
    "C11": f"at run time: {RAY}/test_residency.py::test_measured_bytes_never_exceed_the_plans and {RAY}/test_residency.py::test_bf16_learns_the_same_and_tells_what_the_plan_does_not_count",
    "D1": f"numbers: {RESHARD}/test_layouts.py::test_grouped_qkv_is_interleaved_per_kv_head and {RESHARD}/test_layouts.py::test_to_grouped_and_back_is_the_identity",
    "D2": f"numbers: {RESHARD}/test_experts.py::test_experts_keep_their_identity",
    "D3": f"numbers: {RESHARD}/test_layouts.py::test_layers_keep_their_global_names and {RESHARD}/test_layouts.py::test_stages_that_count_their_layers_from_0_are_found_out",
    "D4": f"at run time: {RAY}/test_adapter_runs.py::test_a_publish_that_changes_nothing_is_refused",
    "D6": f"numbers: {RESHARD}/test_layouts.py::test_slices_of_experts_are_not_sent_as_if_whole",
    "D7": f"the embedded engine writes in place, inside one update: {RAY}/test_engine.py::test_a_half_update_is_refused; layouts of a kernel need an engine that is not the embedded one",
    "D8": f"one group joins all that send with all that receive: {POOLS}::test_other_layouts_learn_the_same_up_to_rounding (pipeline to tensor parallel) and {RAY}/test_weight_channel.py::test_every_rank_that_trains_hears_of_a_reader_that_died",
    "D11": f"at run time: {RAY}/test_rollout.py::test_ids_that_are_no_token_are_never_sampled, {RAY}/test_rollout.py::test_ids_without_a_token_take_no_draw_however_likely; padding for tp: {RAY}/test_rollout_ranks.py::test_two_ranks_sample_what_one_does",
    "D14": f"at run time: {PARALLEL}/test_pipeline.py::test_both_ends_of_a_tied_pair_stay_equal",
    "D16": f"at run time: {RAY}/test_adapters.py::test_an_adapter_is_applied_once",
    "D18": "no weights are quantised in this version",
    "D19": "no weights are quantised in this version",
    "D20": f"numbers: {RESHARD}/test_layouts.py::test_a_tied_embedding_is_on_both_ends",
    "E1": f"at run time: {RAY}/test_weight_channel.py::test_a_lost_peer_is_told_with_pools_and_version, {RAY}/test_weight_channel.py::test_every_rank_that_trains_hears_of_a_reader_that_died; the cause: {RAY}/test_launcher.py::test_the_cause_is_told_and_not_its_echo; again after a failed update: {RAY}/test_engine.py::test_an_update_is_what_was_sent",
    "E2": f"at run time: {RAY}/test_trainer.py::test_data_parallel_ranks_learn_what_one_rank_learns",
    "E3": f"at run time: {RAY}/test_trainer.py::test_no_response_tokens_is_a_skipped_update",
    "E4": f"at run time: {FAULTS}::test_who_waits_says_who_is_late (where all ranks are, and all queues), {FAULTS}::test_a_rank_that_stands_still_is_named; by every rank that waits: {RAY}/test_pool_edges.py::test_a_reader_that_nobody_feeds_ends, {RAY}/test_pool_edges.py::test_a_writer_that_nobody_reads_from_ends",
    "E5": f"of the queue: {PROTOCOL}/test_queue.py::test_ten_prompts_and_a_batch_of_sixteen_are_one_update",
    "E6": f"of the queue: {PROTOCOL}/test_queue.py::test_an_empty_queue_is_not_the_end",
    "E7": f"at run time, a producer that hangs: {FAULTS}::test_who_waits_says_who_is_late, one that died: {FAULTS}::test_a_run_outlives_its_processes; of the queue: {PROTOCOL}/test_queue.py::test_an_empty_queue_is_not_the_end and {PROTOCOL}/test_queue.py::test_a_dead_producer_is_an_error_with_its_words",
    "E10": f"at run time: {RAY}/test_selection.py::test_too_few_groups_is_an_error_with_the_share and {RAY}/test_selection.py::test_too_few_groups_may_be_trained_on",
    "E12": f"of the gate: {PROTOCOL}/test_gate.py::test_an_older_version_is_refused_unless_a_rollback_is_declared",
    "F1": f"of the gate: {PROTOCOL}/test_gate.py::test_a_resumed_gate_has_the_capacity_of_a_new_one",
    "F4": f"of the rules: {PROTOCOL}/test_game.py::test_slow_prompts_are_trained_once_an_epoch",
    "F7": f"a formula: {MATHS}/test_losses.py::test_truncated_importance_sampling_uses_the_old_policy",
    "F8": f"at run time: {RAY}/test_execute.py::test_samples_carry_the_version_that_made_them, resumed: {RAY}/test_partial_rollouts.py::test_unfinished_samples_go_on_beside_new_ones, by token: {RAY}/test_engine.py::test_every_token_has_the_version_that_made_it, the age of samples in the metrics of a run: tests/e2e/test_streams.py::test_bursts_in_order_are_the_same_every_time",
    "F9": f"at run time: {POOLS}::test_equal_layouts_learn_the_same_to_the_last_bit",
    "F10": f"of the rules: {PROTOCOL}/test_game.py::test_items_over_the_bound_are_filtered_and_counted_when_the_producer_stops",
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
    "L1": f"at run time: tests/e2e/test_run.py::test_resuming_gives_the_uninterrupted_run, on two pools: {POOLS}::test_a_resumed_run_of_two_pools_is_the_uninterrupted_one",
    "L2": f"on pools that take turns: benchmarks/fault_trials.py and {FAULTS}::test_a_run_outlives_its_processes; samples under way: tests/e2e/test_resume.py::test_a_stale_run_goes_on_as_if_it_had_not_stopped and tests/e2e/test_streams.py::test_a_resumed_run_trains_every_prompt_once",
    "L3": "learning rates are constant in this version; there is no resume of weights only, a new run starts from the model folder of a checkpoint",
    "L4": f"the cursor counts rows, not epochs: {RAY}/test_data.py::test_the_stream_wraps_over_epochs_and_goes_on_from_any_cursor",
    "L5": f"at run time: {RAY}/test_checkpoint.py::test_other_data",
    "L6": f"at run time, the samples of one rank and of two: tests/e2e/test_split_groups.py::test_metrics_and_samples_are_those_of_one_rank, resumed under another layout: {POOLS}::test_a_resumed_run_of_models_in_parts_goes_on_under_any_layout",
    "L7": f"at run time: {RAY}/test_sample_edge.py::test_a_resumed_run_trains_on_what_was_left_first, of real runs: tests/e2e/test_streams.py::test_samples_are_admitted_by_the_rule_and_trained_on_once",
    "L8": "at run time: tests/e2e/test_run.py::test_the_same_seed_gives_the_same_run",
    "L9": f"at run time, random streams by seed, step, prompt and sample: {RAY}/test_rollout.py::test_a_sample_does_not_depend_on_its_batch",
    "M1": f"at run time, with no restart left: tests/e2e/test_wrong_input.py::test_a_rank_that_is_killed; restarted: {FAULTS}::test_a_run_outlives_its_processes",
    "M2": f"all ranks start anew, with the weights of the checkpoint, before any of them samples: {FAULTS}::test_a_run_outlives_its_processes; an engine that sleeps refuses: {RAY}/test_engine.py::test_deep_sleep_needs_an_update",
    "M3": f"at run time: {RAY}/test_launcher.py::test_a_dead_worker_is_described, host and process: {FAULTS}::test_a_run_outlives_its_processes; the signal is not known to Ray",
    "M4": f"of a queue: {RAY}/dist_queue/test_dist_queue.py::test_memory_of_the_object_store_comes_back, of 2,000 steps: benchmarks/flat_memory.py",
    "M5": f"at run time: {RAY}/test_waiting.py::test_an_actor_that_does_not_answer, {RAY}/test_waiting.py::test_weights_that_do_not_leave, joining a cluster: {RAY}/test_connect.py::test_a_cluster_that_does_not_answer",
    "N2": f"at run time: {RAY}/test_data_prompts.py::test_exactly_one_bos",
    "O1": "phases of the start with seconds: tests/unit/visualizers/test_progress.py::test_lines_into_a_pipe; rewards start beside the ranks, and all pools at once",
    "O2": "the folder that a Ray job ships: tests/unit/codegen/test_bundle.py::test_too_large_names_the_largest",
    "O3": f"at run time: tests/e2e/test_wrong_input.py::test_reward, of several ranks the cause: {RAY}/test_launcher.py::test_the_cause_is_told_and_not_its_echo",
    "O4": "there is no metric over several tries of a prompt in this version",
    "O5": f"rows are known by their number in the data, never by their text: {RAY}/test_data.py::test_all_gives_every_row_once_in_file_order",
    "O6": f"one temperature on both sides: {RAY}/test_rollout.py::test_behaviour_logprobs_are_the_trainers",
    "O7": "at run time: tests/e2e/test_data_parallel.py::test_an_evaluation_that_does_not_divide_counts_every_row_once",
    "O8": "golden texts of plans: tests/unit/visualizers/test_show_examples.py::test_one_screen",
    "O9": f"at run time: {RAY}/test_measure.py::test_ranks_reduce_to_the_mean_over_all_rows, {RAY}/test_measure.py::test_a_rank_without_rows",
    "O10": f"names apart, in docs/running.md: critic/score as the function gave it, critic/rewards with the KL term; that the page has all names is {LATER}",
    "Q5": "a value may be read by several stages without being declared so",
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
