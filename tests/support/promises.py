# ruff: noqa: E501 - a test is named on one line
"""Every promise, and a default test that holds it: `file::function`, or one of its ids, `file::function[id]`.

`test_markers.py` compares the table with the public names and the commands: a promise whose test is left out by
default fails there.
"""

NAMES = {
    "CheckpointError": "test_checkpoint_faults.py::test_a_path_without_a_checkpoint_is_named",
    "Checkpoints": "test_checkpoint.py::test_a_state_is_restored_onto_any_plan[zero3-axes3]",
    "Deadline": "test_processes_of_guard.py::test_a_loop_that_hangs_ends_with_75",
    "Feed": "test_feed.py::test_rows_are_sharded_as_the_plan_says",
    "Loss": "test_step.py::test_the_objective_is_sum_over_weight_exactly[zero3-manual-axes2-4]",
    "Placement": "test_notebook.py::test_placements_are_listed_with_reasons",
    "Plan": "test_plan.py::test_the_bytes_foreseen_are_the_bytes_held",
    "Precision": "test_precision.py::test_manual_gathers_and_reduces_in_their_dtypes[zero3-2-bf16-bfloat16-float32]",
    "Step": "test_step.py::test_steps_lower_for_their_states_mesh",
    "TrainState": "test_init.py::test_the_abstract_state_describes_the_real_one",
    "ValueAndGrad": "test_value_and_grad.py::test_both_of_two_models_are_differentiated[manual]",
    "abstract_state": "test_init.py::test_the_abstract_state_describes_the_real_one",
    "ema_params": "test_ema.py::test_the_average_follows_the_recursion",
    "foresee": "test_foresee.py::test_from_python_around_ones_own_model",
    "gather_rows": "test_gather_rows.py::test_negatives_are_of_the_whole_batch[manual-8-zero3]",
    "init": "test_value_and_grad.py::test_trees_are_made_sharded_bit_for_bit",
    "init_state": "test_init.py::test_initial_values_are_the_same_on_any_mesh[zero3-axes0]",
    "initialize": "test_initialize.py::test_two_processes_sum_over_four_devices",
    "keep_memory": "test_processes_of_base.py::test_freed_memory_is_reused_without_page_faults",
    "keep_programs": "test_persistent_cache.py::test_programs_are_kept_by_processor",
    "make_eval_step": "test_step.py::test_evaluation_is_the_loss_without_randomness_or_donation",
    "make_mesh": "test_mesh.py::test_minus_one_takes_the_remaining_devices",
    "make_train_step": "test_step.py::test_results_stay_where_the_plan_wants_them",
    "muon": "test_zero_and_muon.py::test_equals_one_device[zero3-8-1]",
    "place": "test_value_and_grad.py::test_placing_changes_no_bit",
    "process_rows": "test_feed.py::test_a_process_reads_its_devices_rows",
    "restore": "test_checkpoint.py::test_a_path_may_lead_to_many_checkpoints",
    "restore_params": "test_checkpoint.py::test_only_parameters_are_read",
    "save": "test_checkpoint.py::test_only_overwrite_replaces_a_checkpoint",
    "scaled_lr": "test_schedules.py::test_the_rate_is_scaled_with_the_batch",
    "scan_layers": "test_overlap.py::test_results_are_those_of_one_device[zero3]",
    "shard_batches": "test_feed.py::test_rows_are_sharded_as_the_plan_says",
    "value_and_grad": "test_value_and_grad.py::test_both_of_two_models_are_differentiated[manual]",
    "verify": "test_verify.py::test_a_step_that_keeps_the_contract",
    "warmup": "test_schedules.py::test_the_warmup_climbs_in_equal_increments_and_stays",
    "with_ema": "test_ema.py::test_the_average_follows_the_recursion",
    "checkpoint": "test_tree_checkpoints.py::test_a_tree_is_restored_onto_another_plan",
    "data": "test_order_properties.py::test_processes_read_the_same_global_batches",
    "export": "test_hugging_face.py::test_an_exported_model_is_what_was_imported[llama]",
    "guard": "test_nonfinite.py::test_nan_in_batches_is_named_with_rows[zero3]",
    "models": "test_hugging_face.py::test_the_logits_are_those_of_transformers[llama]",
    "prove": "test_prove.py::test_every_strategy_and_a_resume_are_proven",
}
"""The public names of `jdp`."""

COMMANDS = {
    "new": "test_new.py::test_a_new_file_is_a_renamed_shipped_experiment",
    "train": "test_train.py::test_writes_what_it_promises",
    "plan": "test_foresee.py::test_people_get_tables_and_sentences",
    "verify": "test_foresee.py::test_verify_keeps_or_breaks",
    "prove": "test_prove.py::test_an_experiment_is_proven_as_it_is",
    "launch": "test_launch.py::test_processes_learn_who_they_are",
    "generate": "test_generate.py::test_greedy_text_is_the_argmax_of_forward_passes",
    "report": "test_report.py::test_a_run_becomes_a_page",
    "why": "test_diagnosis.py::test_the_first_failure_is_named",
    "doctor": "test_doctor.py::test_alone_with_eight_devices",
}
"""The commands of `jdp`."""

_EQUAL = "test_equivalence.py::test_equals_one_device"
_BYTES = "test_traffic.py::test_the_chosen_partitioning_keeps_the_contract"
_RESTORED = "test_checkpoint.py::test_a_state_is_restored_onto_any_plan"
CONTRACTS = {
    **{
        f"{strategy}, {partitioning}: the losses and weights of one device": f"{_EQUAL}[mlp-{strategy}-{partitioning}-{k}]"
        for strategy, ks in {"ddp": (1, 4), "zero1": (4, 1), "zero2": (1, 4), "zero3": (4, 1)}.items()
        for partitioning, k in zip(("auto", "manual"), ks, strict=True)
    },
    "layers of a stack": f"{_EQUAL}[gpt-scanned-zero3-manual-4]",
    "bf16 over float32 weights": "test_equivalence.py::test_bf16_stays_close",
    **{
        f"{case}: bytes sent are the contract's": f"{_BYTES}[{case}]"
        for case in ("mlp-ddp-4", "mlp-zero1-4", "mlp-zero2-4", "gpt-zero3-4")
    },
    "replicas: shards of gradients alone cross the slow links": "test_model_axis.py::test_only_shards_of_gradients_cross_the_hosts",
    **{
        f"{case}: a checkpoint is restored onto any plan": f"{_RESTORED}[{case}]"
        for case in ("ddp-axes0", "zero1-axes4", "zero2-axes1", "zero3-axes3")
    },
    "a damaged checkpoint is found, and the one before is restored": "test_flips.py::test_the_damaged_newest_is_set_aside",
    "stop and resume are bitwise the undisturbed run": "test_train.py::test_stop_and_resume_is_bitwise_the_undisturbed_run",
    "the same order of examples on any number of processes": "test_order_properties.py::test_processes_read_the_same_global_batches",
    "masks are those of any mesh": "test_row_keys.py::test_every_draw_is_by_global_row[5-manual-2-2]",
    "initial weights are those of any mesh": "test_init.py::test_initial_values_are_the_same_on_any_mesh",
    "a loss that mixes examples is refused where it cannot be right": "test_loss_check.py::test_mixing_losses_see_all_rows_or_are_refused[contrastive]",
    "any pytree trains": "test_other_frameworks.py::test_any_pytree_trains_as_on_one_device[linen]",
    "any step is compared with its baseline, by source line": "test_programs.py::test_a_baseline_notices_a_line_that_sends_more",
    "a user's mistake is one error and exit 2": "test_cli.py::test_a_mistake_is_one_error_and_exit_2",
    "processes that are missing are named": "test_roll_call.py::test_missing_processes_are_named_everywhere",
    "a bad call is one error with the fix": "test_bad_calls.py::test_bad_calls_are_one_error_with_the_fix",
    "a wrong file is one line with key, rule, value and fix": "test_experiment.py::test_a_wrong_file_is_refused_in_one_line",
}
"""Lines of the design's contracts."""
