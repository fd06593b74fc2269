# ruff: noqa: E501 - a test is named on one line
"""The marker `rest`: tests that `pytest` leaves out by default, and `.ci/run` runs after the README's command.

The default tests hold every promise once, by its cheapest test. The rest are products of settings, other variants,
real clusters and long faults. `REST` has an entry for each function of tests of which some are left out (`*`: all of
the file): the ids that stay, parted by " | ", with `*` for any text. They cover the promise; where none stays, other
default tests do.

`pytest -m rest` runs them alone, `pytest -m 'not slow and not gpu'` together with the default ones.
"""

import dataclasses
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

REST = {
    # Products of settings: the ids that stay take every value of every setting once, as far as it is a promise.
    "core/test_equivalence.py::test_equals_one_device": "mlp-ddp-auto-1 | mlp-ddp-manual-4 | mlp-zero1-auto-4 | mlp-zero1-manual-1 | mlp-zero2-auto-1 | mlp-zero2-manual-4 | mlp-zero3-auto-4 | mlp-zero3-manual-1 | gpt-scanned-zero3-manual-4",
    "core/test_init.py::test_initial_values_are_bitwise_the_same_on_any_mesh": "zero3-axes0 | zero1-axes2 | ddp-axes3",
    "core/test_layers.py::test_remat_decides_what_is_computed_again": "True-None-3-1 | True-full-4-2 | False-dots-3-2",
    "core/test_lora.py::test_a_model_with_updates_starts_as_the_one_without_bit_for_bit": "",
    "core/test_outputs.py::test_the_state_of_equinox_makes_the_round_trip": "zero3-batch",
    "core/test_overlap.py::test_results_are_those_of_one_device": "zero3-False",
    "core/test_overlap.py::test_with_several_microbatches_layers_are_reduced_one_by_one_and_what_is_sent_stays": "",
    "core/test_traced_collectives.py::test_layers_are_gathered_forward_and_backward": "manual",
    "core/test_training_properties.py::test_draws_equal_one_device": "",
    "core/test_zero_and_muon.py::test_on_other_meshes": "",
    "core/test_gather_rows.py::test_in_batch_negatives_are_those_of_the_whole_batch": "manual-8-zero3 | None-4-ddp",
    "core/test_loops.py::test_four_devices_learn_what_one_learns": "grain_loader-zero3 | private-ddp",
    "core/test_loss_check.py::test_a_batch_of_another_form_is_tried_anew": "",
    "core/test_loss_check.py::test_batch_norm_is_no_mixing": "",
    "core/test_loss_check.py::test_a_loss_that_is_no_sum_sees_all_rows_or_is_refused": "contrastive | at_least_one",
    "core/test_loss_check.py::test_a_loss_that_mixes_rows_in_training_alone_sees_whole_microbatches": "",
    "core/test_loss_check.py::test_values_that_hide_what_rows_do_hide_nothing": "values",
    "core/test_optimizers.py::test_every_optimizer_is_laid_as_planned_and_trains_as_on_one_device": "quick-*",
    "core/test_optimizers.py::test_without_products_no_optimizer_sends_more_than_its_row": "two",
    "core/test_outputs.py::test_outputs_come_back_in_the_order_of_the_batchs_rows": "ddp-auto-1",
    "core/test_overlap.py::test_a_list_of_layers_trains_as_on_one_device": "manual-4",
    "core/test_step.py::test_results_stay_where_the_plan_wants_them": "adamw",
    "core/test_training_properties.py::test_kept_cases_equal_one_device": "Case(rows=16, model='nnx', state='norm')* | Case(inputs='tokens', layers=2, stacked=True, noise='numbered', optimizer='adamw')* | Case(noise='dropout')*",
    "core/test_value_and_grad.py::test_a_step_of_several_gradients_sends_what_each_promises": "zero3",
    "core/test_wire.py::test_rounding_is_right_on_average_and_small": "int8-ddp-8-settings0",
    "core/test_zero_and_muon.py::test_equals_one_device": "zero3-8-1",
    "core/test_overlap.py::test_matrices_are_multiplied_while_a_layer_is_gathered_and_reduced": "True-2",
    "core/test_overlap.py::test_a_list_of_layers_holds_less_than_zero2": "",
    "core/test_overlap.py::test_under_vmap_a_gradient_is_summed_over_rows_before_it_is_sent": "",
    "core/test_row_keys.py::test_every_draw_is_by_global_row": "5-manual-2-2",
    "core/test_row_keys.py::test_samplers_are_by_global_row_too": "",
    "core/test_row_keys.py::test_a_draw_whose_rows_cannot_be_told_sees_the_whole_batch": "gamma",
    "core/test_value_and_grad.py::test_both_of_two_models_are_differentiated": "manual",
    "core/test_value_and_grad.py::test_a_call_takes_what_changed_in_models_that_were_checked": "moved",
    "foresight/test_contract.py::test_a_leaf_that_no_dimension_divides_is_promised_as_ddp_sends_it": "zero3",
    "core/test_zero_and_muon.py::test_on_one_device_it_is_optaxs": "function",
    "core/test_loops.py::test_islands_take_the_published_outer_step": "",
    "core/test_model_axis.py::test_parts_of_a_dimension_that_both_axes_cut_are_put_together_in_order": "",
    "core/test_wire.py::test_gradients_take_a_share_of_the_bytes_and_the_contract_knows_them": "int8-0.27-zero3",
    "core/test_small_leaves.py::test_leaves_below_min_shard_size_are_all_reduced_by_plan": "",
    "core/test_wire.py::test_int8_on_the_wire_of_real_gpus": "",
    "foresight/test_peak_memory.py::test_the_classes_add_up_and_arguments_are_those_of_the_plan": "mlp-zero1-1",
    "foresight/test_targets.py::test_every_gpu_kind_compiles_matrix_products_and_collectives": "h100-*",
    "foresight/test_traffic.py::test_the_chosen_partitioning_keeps_the_contract": "gpt-zero3-4 | mlp-ddp-4 | mlp-zero1-4 | mlp-zero2-4",
    "foresight/test_traffic.py::test_only_what_is_trained_has_gradients_to_reduce": "",
    "foresight/test_traffic.py::test_what_runs_in_the_loop_over_the_microbatches": "scanned-zero3 | mlp-ddp | mlp-zero1 | mlp-zero2",
    "checkpoint/test_checkpoint.py::test_a_state_is_restored_bit_by_bit_onto_any_plan": "ddp-axes0 | zero2-axes1 | zero3-axes3 | zero1-axes4",
    "checkpoint/test_hugging_face.py::test_the_logits_are_those_of_transformers": "llama | llama 3.1 | gpt2 | mistral | qwen2 | qwen3",
    "checkpoint/test_hugging_face.py::test_an_exported_model_is_what_was_imported": "llama | llama 3.1 | gpt2 | mistral | qwen2 | qwen3",
    "checkpoint/test_hugging_face.py::test_each_case_has_other_logits_than_the_plain_model": "llama 3.1 | gpt2 gelu",
    # Other variants of what a default test holds on a smaller or simpler case.
    "models/test_losses.py::test_chunks_have_the_loss_and_the_gradients_of_the_whole": "fp32-tied | bf16-untied",
    "models/test_models.py::test_every_form_of_the_layer_loop_has_the_same_loss_and_gradients": "config3-True-dots",
    "models/test_models.py::test_greedy_sampling_takes_the_likeliest_token_of_a_plain_forward_pass": "1-llama",
    "models/test_models.py::test_sixteen_bit_parameters_compute_in_sixteen_bits_and_give_float32_logits": "llama",
    "models/test_models.py::test_scanned_and_unrolled_start_from_the_same_bits": "llama",
    "models/test_models.py::test_a_token_changes_nothing_before_it_and_something_after": "llama | qwen",
    "models/test_segments.py::test_a_packed_document_has_the_logits_that_it_has_alone": "llama | window",
    "models/test_vision_models.py::test_a_resnet_is_its_formula_and_rows_of_weight_zero_leave_no_trace_in_it": "basic",
    "guard/test_nonfinite.py::test_nan_in_the_batch_is_named_with_its_rows": "zero3",
    "guard/test_nonfinite.py::test_gradients_break_where_the_backward_pass_does": "zero3",
    "guard/test_nonfinite.py::test_parameters_that_are_not_finite_come_before_the_loss": "ddp",
    "prove/test_prove.py::test_a_tree_of_arrays_is_a_model_too_and_a_step_that_is_skipped_is_skipped_by_all": "",
    "prove/test_prove.py::test_quick_is_one_run_and_says_what_it_leaves_out": "",
    "prove/test_prove.py::test_rows_that_do_not_divide_are_listed_not_changed": "",
    "prove/test_prove.py::test_a_mean_and_batch_statistics_have_one_microbatch": "",
    "prove/test_prove.py::test_masks_that_are_the_same_on_every_shard_are_seen": "",
    "experiment/test_muon.py::test_updates_are_those_of_optax_written_by_hand": "",
    "experiment/test_prepare.py::test_a_chat_is_learnt_from_its_answers": "",
    "experiment/test_experiments.py::test_fits_its_devices": "quickstart_muon",
    "models/test_decode.py::test_top_p_draws_among_the_likeliest_that_have_the_probability": "",
    "experiment/test_toy_recipes.py::test_a_model_of_hugging_face_starts_with_its_loss_and_leaves_as_one": "",
    "experiment/test_toy_recipes.py::test_an_image_folder_is_learnt_from_resized_crops": "",
    "experiment/test_toy_recipes.py::test_pre_training_reads_text_with_its_tokenizer": "",
    "experiment/test_toy_recipes.py::test_pre_training_goes_on_with_a_models_own_tokenizer_and_leaves_an_export": "",
    "experiment/test_toy_recipes.py::test_lora_starts_from_a_run_and_watches_what_is_forgotten": "",
    "experiment/test_toy_recipes.py::test_digits_are_learnt": "",
    "experiment/test_toy_recipes.py::test_a_plug_in_is_found_by_its_package": "",
    "run/test_damaged_checkpoints.py::test_where_none_is_whole_the_run_stops_with_what_is_wrong_and_nothing_is_moved": "",
    "run/test_health.py::test_an_inspection_changes_nothing": "",
    "run/test_history.py::test_a_run_that_was_taken_over_begins_anew_and_is_resumed": "",
    "run/test_profile.py::test_a_signal_ends_the_trace_and_what_is_behind_is_not_profiled_later": "",
    "run/test_train.py::test_skips_before_a_stop_are_not_counted_again": "",
    "run/test_train_kinds.py::test_lora_fine_tunes_a_run_and_leaves_its_weights_alone": "",
    "lessons/test_large_batches.py::test_a_batch_beyond_the_critical_one_saves_no_steps_without_another_rate": "",
    "lessons/test_staleness.py::test_old_gradients_need_a_lower_rate": "",
    "lessons/test_staleness.py::test_rounds_of_four_steps_learn": "",
    "test_losses_table.py::test_the_trial_accepts_a_sum": "criteo | ctc | diffusion",
    "test_losses_table.py::test_the_trial_refuses_a_loss_that_mixes_rows": "clip | load_balancing | mixup_by_a_permutation | siblings_are_alike | cox_survival",
    "experiment/test_prepare.py::test_text_is_learnt_from_its_ids": "",
    "run/test_damaged_checkpoints.py::test_a_run_goes_on_from_the_newest_that_is_whole": "",
    "run/test_train_kinds.py::test_what_is_compiled_for_is_what_is_read": "text",
    "cli/test_ci_workflow.py::test_a_pull_request_that_sends_more_fails_with_a_table": "",
    "launch/test_nodes.py::test_a_failure_before_all_have_joined_is_not_counted": "",
    "models/test_blockwise.py::test_a_model_traced_for_gpus_has_the_losses_and_gradients_of_one_traced_for_cpus": "",
    "lessons/test_mixed_precision.py::test_float16_loses_small_and_large_gradients_and_bfloat16_none": "",
    "lessons/test_batch_norm_lesson.py::test_statistics_are_small_and_many": "",
    "lessons/test_zero_muon.py::test_other_strategies_send_what_the_formula_says": "",
    "lessons/test_fewer_bytes.py::test_int8_trains_as_well": "",
    "lessons/test_fewer_bytes.py::test_what_top_k_drops_is_missed_and_what_it_keeps_is_not": "",
    "lessons/test_simple_ddp.py::test_uneven_shards_need_the_mean_over_rows": "",
    "lessons/test_gradient_accumulation.py::test_unequal_microbatches_need_sums": "",
    "models/test_models.py::test_sampling_draws_among_the_likeliest_and_follows_its_key": "",
    "models/test_decode.py::test_logits_through_the_cache_are_those_of_the_whole_forward_pass": "llama",
    "models/test_decode.py::test_the_draws_are_those_of_generate": "top_k",
    "models/test_decode.py::test_prompts_of_unequal_lengths_share_the_programs_and_are_each_continued_as_alone": "",
    "models/test_vision_models.py::test_a_vit_is_its_formula": "mean",
    "run/test_train_kinds.py::test_what_the_file_asks_for_is_proven_as_it_is_trained": "",
    "checkpoint/test_merge_lora.py::test_merged_it_is_a_plain_model_with_the_same_logits": "scanned",
    "experiment/test_wire_keys.py::test_stopped_and_resumed_is_bitwise_the_undisturbed_run": "",
    "run/test_train_course.py::test_an_evaluation_that_is_made_up_has_one_row": "between",
    "run/test_samples.py::test_a_signal_during_an_evaluation_leaves_the_sample_to_the_next_visit": "",
    "report/test_run_page.py::test_many_long_runs_make_a_page_of_bounded_size": "",
    "checkpoint/test_mirror.py::test_a_fresh_machine_goes_on_from_the_newest_copy": "bucket",
    "checkpoint/test_checkpoint_processes.py::*": "",
    "test_readme.py::test_training_prints_what_is_shown": "",
    "test_guides.py::test_its_python_runs": "jdp/README.md | jdp/core/README.md | jdp/core/m* | jdp/checkpoint/m* | jdp/checkpoint/in_memory.md | jdp/data/* | jdp/foresight/* | jdp/guard/* | jdp/run/* | jdp/cli/* | jdp/launch/* | jdp/experiment/* | jdp/report/* | jdp/outside.md",
    "core/test_loss_check.py::test_a_loss_that_closes_over_a_tracer_cannot_be_tried": "",
    "core/test_zero_and_muon.py::test_in_a_loop_of_ones_own": "",
    "core/test_offload.py::test_an_optimizer_that_mixes_leaves_and_parameters": "",
    "core/test_traced_collectives.py::test_a_zero3_that_is_a_zero2_is_reported": "",
    "core/test_loops.py::test_the_private_loss_has_the_gradient_of_the_algorithm": "",
    "core/test_initialize.py::test_who_raised_is_named_and_not_who_waits": "",
    "models/test_losses.py::test_over_devices_strategies_and_microbatches_chunks_change_nothing": "",
    "run/test_train_course.py::test_a_short_run_that_ends_in_skipped_steps_diverged": "",
    "run/test_train_course.py::test_a_run_goes_on_after_its_folder_its_data_and_its_first_weights_were_moved": "",
    "run/test_train_course.py::test_a_run_that_failed_before_its_first_step_leaves_no_folder_in_the_way": "",
    "run/test_train_course.py::test_what_a_damaged_record_lacks_is_said": "",
    "run/test_health.py::test_of_two_copies_that_differ_none_is_believed": "",
    "run/test_passing_trouble.py::test_storage_that_is_away_costs_no_step_and_a_fresh_machine_resumes_from_it": "",
    "run/test_evaluated.py::test_images_are_counted_with_statistics_and_microbatches": "",
    "run/test_train_kinds.py::test_a_resnet_trains_on_digits_with_its_statistics": "",
    "run/test_train_kinds.py::test_losses_of_its_own_are_sums": "features",
    "experiment/test_experiment_optimizer.py::test_every_optimizer_descends": "adamw",
    "experiment/test_experiment_optimizer.py::test_a_norm_is_each_layers_own_where_layers_are_stacked": "lamb",
    "checkpoint/test_mirror.py::test_copies_that_are_newer_and_were_never_here_stay": "",
    "checkpoint/test_mirror.py::test_a_run_that_is_killed_after_it_went_back_does_not_fetch_what_it_left": "",
    "foresight/test_foresee.py::test_what_does_not_fit_has_no_times": "",
    "prove/test_prove.py::test_a_mean_of_means_is_seen_in_the_loss_or_in_a_leaf": "",
    "prove/test_prove.py::test_a_weight_that_is_no_sum_over_examples_is_named_before_the_loss": "",
    "lessons/test_gradient_accumulation.py::test_jdp_reduces_where_the_strategy_says": "",
    "lessons/test_gradient_sync_visualizer.py::test_the_page_loads_nothing": "",
    "core/test_nnx.py::test_a_filter_trains_variables_of_other_types": "one",
    "core/test_value_and_grad.py::test_a_shared_module_gets_its_whole_gradient": "",
    "core/test_value_and_grad.py::test_a_filter_leaves_the_rest_without_gradients_and_optimizer_state": "",
    "prove/test_prove.py::test_stale_data_and_state_that_is_not_restored_are_named": "",
    "models/test_scores.py::test_scores_are_the_same_in_chunks_and_add_up_to_the_loss": "",
    "core/test_loss_check.py::test_a_refusal_says_how_batch_norms_take_several_microbatches": "",
    "run/test_train_course.py::test_weights_start_from_another_run_and_the_optimizer_anew": "",
    "run/test_train.py::test_resumes_under_another_strategy": "",
    "test_types.py::test_nothing_is_wrong_with_a_right_program": "",
    # Real clusters, hosts and processes, and faults that they wait for.
    "core/test_barrier.py::test_a_process_that_left_barriers_by_an_exception_ends_normally": "",
    "core/test_initialize.py::test_exit_codes_are_the_programs_own": "",
    "core/test_initialize.py::test_who_ends_early_says_so": "",
    "core/test_initialize.py::test_a_failure_does_not_wait_in_the_exit_barrier": "",
    "launch/test_launch_faults.py::test_two_kills_in_one_run_cost_nothing_but_time": "",
    "launch/test_launch_faults.py::test_processes_that_were_not_started_alike_say_so_and_leave": "",
    "launch/test_nodes.py::test_a_node_that_starts_again_first_waits_for_the_old_coordinator_to_go": "",
    "launch/test_nodes.py::test_a_node_whose_processes_ended_well_says_so_to_one_that_starts_again": "",
    "launch/test_open_mpi.py::*": "",
    "launch/test_slurm.py::*": "",
    "launch/test_two_hosts.py::*": "",
    "checkpoint/test_kills.py::*": "",
    "checkpoint/test_mirror.py::test_two_processes_fetch_one_copy": "",
    "run/test_health_faults.py::*": "",
    "run/test_train.py::test_two_processes_train_the_quickstart_as_one": "",
    "run/test_run_faults.py::test_a_signal_to_one_process_stops_all_at_the_same_place": "",
    "run/test_run_faults.py::test_the_stopped_run_is_bit_for_bit_the_calm_one": "",
    "run/test_run_faults.py::test_a_signal_after_the_last_step_changes_nothing": "",
    "run/test_lost_output.py::test_a_run_goes_on_to_its_end_without_its_output": "Broken pipe",
    "run/test_run_faults.py::test_who_hangs_is_named_and_all_leave_to_be_started_again": "",
    "run/test_run_faults.py::test_the_recorder_has_the_deadline_and_where_the_loop_was": "",
    "run/test_run_faults.py::test_why_names_the_process_that_was_stopped": "",
    "run/test_run_faults.py::test_leaving_at_once_does_not_need_the_main_thread": "second",
    "run/test_run_faults.py::test_leaving_at_once_waits_for_the_end_of_a_destructor": "weakref",
    "run/test_samples.py::test_two_processes_write_what_one_writes": "",
    "run/test_samples.py::test_a_run_that_is_stopped_writes_the_same_samples": "",
    "run/test_samples.py::test_without_every_there_is_a_sample_at_the_end": "",
    "run/test_evaluated.py::test_text_is_measured_by_domain": "zero3-8-manual",
    "run/test_soak.py::*": "",
    "run/test_trackers.py::test_a_run_that_a_signal_stops_is_stopped_over_there_and_goes_on_when_resumed": "",
    "cli/test_doctor.py::test_two_processes_of_other_versions": "",
    "cli/test_new.py::test_the_commands_that_come_next_work": "",
    "test_wheel.py::test_the_quickstart_trains_in_another_folder": "",
    "cli/test_doctor.py::test_a_process_that_stops_in_the_all_reduce": "",
    "cli/test_doctor.py::test_an_all_reduce_that_hangs_is_tried_without_nccls_ways": "",
    "cli/test_doctor.py::test_process_1_does_not_come": "",
    "cli/test_doctor.py::test_two_hosts_with_and_without_a_link": "",
    "lessons/test_bucketing.py::test_two_processes_measure": "",
    # Programs compiled for described GPUs: one of each kind stays.
    "models/test_attention.py::test_compiled_for_h100s_auto_is_cudnn_and_no_strategy_sends_more": "zero3",
    "models/test_attention.py::test_heads_and_a_vocabulary_sharded_over_model_stay_where_they_are": "",
    "models/test_blockwise.py::test_dots_keeps_what_attention_returns_so_that_it_runs_forward_once": "dots-4",
    "models/test_blockwise.py::test_compiled_for_h100s_nothing_holds_the_length_twice_and_no_strategy_sends_more": "",
    "models/test_losses.py::test_compiled_for_h100s_the_head_is_gathered_and_reduced_once": "manual",
    "cli/test_programs.py::test_a_plan_of_several_targets_is_a_row_for_each": "",
    "cli/test_programs.py::test_steps_of_other_libraries": "nnx | jdp",
    "cli/test_ci_workflow.py::test_for_described_gpus_moved_lines_are_equal": "",
    "cli/test_ci_workflow.py::test_the_first_pull_request_has_nothing_to_compare_with": "",
    "foresight/test_traffic.py::test_resnet_and_vit_keep_the_contract": "",
    "foresight/test_traffic.py::test_batch_statistics_are_counted_apart": "",
    "experiment/test_experiments.py::test_compiles_for_its_gpus_and_fits": "",
    "lessons/test_scaling.py::test_fewer_sequences_a_gpu_scale_worse_and_hold_less": "",
    "lessons/test_scaling.py::test_what_is_recorded_is_what_is_planned": "",
    "lessons/test_first_steps.py::test_it_shows_what_its_text_says": "",
    # The site and the outputs that the README shows: minutes of compiling.
    "test_readme.py::test_commands_print_what_is_shown": "",
    "test_readme.py::test_its_picture_is_made_again": "",
    "test_site.py::test_every_page_is_in_the_contents_and_its_code_in_blocks": "",
    "test_site.py::test_every_link_of_the_site_leads_somewhere": "",
    "test_site.py::test_the_reference_has_every_public_name": "",
    "test_site.py::test_pages_open_without_errors_and_load_nothing_from_elsewhere": "",
}

WITHOUT_DEFAULT = {
    "checkpoint/test_checkpoint_processes.py": "two processes; `checkpoint/test_checkpoint.py` restores onto any plan in one",
    "checkpoint/test_kills.py": "kills at many moments of a run; `test_checkpoint.py` has half-written checkpoints",
    "experiment/test_wire_keys.py": "three runs; `core/test_wire.py` has the encodings of a step",
    "launch/test_open_mpi.py": "a real mpirun; `core/test_schedulers.py` reads its environment",
    "launch/test_slurm.py": "a real Slurm; `core/test_schedulers.py` reads its environment",
    "launch/test_storm.py": "twenty signals to a run; `launch/test_restarts.py` has a kill and what follows",
    "launch/test_two_hosts.py": "two network namespaces; `launch/test_nodes.py` has two nodes of one network",
    "run/test_damaged_checkpoints.py": "runs of a process each; `checkpoint/test_checkpoint_faults.py` has damage in one",
    "run/test_health_faults.py": "two processes a fault; `run/test_health.py` has the faults in one",
    "run/test_soak.py": "two thousand steps; nothing else counts what they leak",
}
"""Files without a default test: why, and which default tests hold the promise."""


@dataclasses.dataclass(frozen=True)
class Collected:
    function: str  # as in REST
    name: str  # the id, "" without parameters
    default: bool


COLLECTED = pytest.StashKey[list[Collected]]()
"""What this run collected, before it selected some."""


@functools.cache
def staying() -> dict[str, tuple[re.Pattern[str], ...]]:
    """Return, for each function of `REST`, patterns of the ids that stay."""
    return {function: tuple(map(_pattern, filter(None, ids.split(" | ")))) for function, ids in REST.items()}


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, text.split("*"))), re.DOTALL)


def is_left_out(function: str, name: str = "") -> bool:
    """Return whether `rest` marks the test."""
    patterns = staying().get(function, staying().get(f"{function.partition('::')[0]}::*"))
    return patterns is not None and not any(pattern.fullmatch(name) for pattern in patterns)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    collected = config.stash[COLLECTED] = []
    for item in items:
        function = f"{item.path.relative_to(TESTS).as_posix()}::{getattr(item, 'originalname', item.name)}"
        name = item.callspec.id if hasattr(item, "callspec") else ""
        default = not any(item.get_closest_marker(marker) for marker in ("slow", "gpu"))
        if default and is_left_out(function, name):
            item.add_marker(pytest.mark.rest)
            default = False
        collected.append(Collected(function, name, default))
