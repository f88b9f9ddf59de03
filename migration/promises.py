# SPDX-License-Identifier: Apache-2.0
"""What became of each promise of the four earlier systems: a row for each, with what shows it; makes PROMISES.md.

python -m migration.promises
"""

import collections
import dataclasses
import pathlib

PAGE = pathlib.Path(__file__).resolve().parent.parent / "PROMISES.md"
STATES = {
    "runs": "a check shows it",
    "answered": "deliberately otherwise, and why",
    "not yet": "there is no such thing here so far",
}
SYSTEMS = {
    "A": "AURA: scripts for a TPU pod",
    "B": "VishwamAI: an optimisation guide for TPUs",
    "C": "Valkyrie: many hosts of a v4-32",
    "D": "The v4-64 plan of the recursive-model study",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One promise: its number in the list, what was promised, what is here, its state, and node ids of pytest.

    `note` says why it is otherwise, or what of it is missing.
    """

    item: str
    what: str
    ours: str
    state: str
    checks: tuple[str, ...]
    note: str


def runs(item: str, what: str, ours: str, *checks: str, note: str = "") -> Row:
    """Return the row of a promise that checks show."""
    return Row(item, what, ours, "runs", checks, note)


def answered(item: str, what: str, ours: str, note: str, *checks: str) -> Row:
    """Return the row of a promise that is kept in another way, or deliberately not."""
    return Row(item, what, ours, "answered", checks, note)


def not_yet(item: str, what: str, ours: str = "", note: str = "") -> Row:
    """Return the row of a promise that nothing here keeps so far."""
    return Row(item, what, ours, "not yet", (), note)


# Where the checks are.
DISTILLATION = "tests/test_distillation.py::test_"
GCLOUD = "tests/pods/test_gcloud.py::test_"
HOSTS = "tests/pods/test_hosts.py::test_"
LOCAL = "tests/pods/test_local.py::test_"
PUZZLES = "tests/input_pipeline/puzzles/test_build.py::test_"
READINESS = "tests/pods/test_readiness.py::test_"
SETTINGS = "tests/pods/test_settings.py::test_"
SUPERVISE = "tests/pods/test_supervise.py::test_"
WATCH = "tests/pods/test_watch.py::test_"
POD = "tests/test_pod.py::test_"
BATCH = "tests/test_batch.py::test_"
BATCHES = "tests/input_pipeline/test_batches.py::test_"
BUCKET = "tests/test_bucket.py::test_"
ENVIRONMENT = "tests/configs/test_environment.py::test_"
EXAMPLES = "tests/test_examples.py::test_"
FEATURES = "tests/migration/test_features.py::test_"
GROUPS = "tests/test_groups.py::test_"
LAYOUT = "tests/parallelism/test_layout.py::test_"
PROCESSES = "tests/parallelism/test_processes.py::test_"
REHEARSE = "tests/test_rehearse.py::test_"
REPLICAS = "tests/training/test_replicas.py::test_"
SEARCH = "tests/rehearsal/test_search.py::test_"
STARTUP = "tests/parallelism/test_startup.py::test_"
STEP = "tests/training/test_step.py::test_"
TOPOLOGIES = "tests/configs/test_topologies.py::test_"
TRAIN = "tests/test_train.py::test_"
VALKYRIE = "tests/migration/test_valkyrie.py::test_"

AURA = (
    runs(
        "A1", "`scripts/gcloud_tpu_multihost.sh`: create, setup, describe, launch_pretrain_hf, stop, versions, "
        "tail, delete",
        "the script, a line onto `pod.py`",
        f"{GCLOUD}both_script_names_ask_the_same", f"{GCLOUD}trainings_are_launched_by_one_call_for_all_workers",
        f"{GCLOUD}setup_brings_the_commit_and_the_secrets_but_no_secret_on_a_command_line",
        f"{POD}every_line_of_the_migration_modes_can_be_typed",
        note="the tests that read a Hugging Face data set need the extra `huggingface`",
    ),
    runs(
        "A2", "`scripts/gcloud_tpu_multihost_optimized.sh`: launch_optimized, setup_optimizations, validate, "
        "status, metrics, and every command of the other one",
        "the script, a line onto `pod.py`",
        f"{GCLOUD}both_script_names_ask_the_same", f"{POD}every_line_of_the_migration_modes_can_be_typed",
        f"{POD}the_earlier_aliases_launch_the_optimized_run",
    ),
    runs(
        "A3", "`scripts/deploy_optimizations.py` with its flags; writes optimization_deployment_report.json",
        "the script, on every host by `pod.py setup_optimizations`",
        f"{READINESS}flags_of_the_deployment_and_its_file",
        f"{READINESS}deployment_measures_the_step_on_every_host_and_reports_exactly_the_switches",
        f"{READINESS}mistakes_of_the_deployment_are_one_line",
    ),
    runs(
        "A4", "`scripts/validate_optimizations.sh`, before there is a pod",
        "the script: `pod.py validate` on processes of this machine",
        f"{FEATURES}validation_before_there_is_a_pod",
    ),
    answered(
        "A5", "a folder `src/aura/optimization/` to list",
        "`pods/switches.py` has every switch",
        "each mechanism stands in the room that it belongs to, so that it is trained with, and not beside",
        f"{READINESS}a_switch_without_a_mechanism_is_never_on",
    ),
    runs(
        "A6", "three ways to migrate, and back at any time",
        "every line of them can be typed as it stood",
        f"{POD}every_line_of_the_migration_modes_can_be_typed", f"{GCLOUD}both_script_names_ask_the_same",
    ),
    runs(
        "A7", "the gcloud commands of the guide: ssh to all workers, scp of models, tail of a log",
        "`pod.py ssh`, `copy`, `backup`, `tail` ask exactly these",
        f"{GCLOUD}every_subcommand_asks_exactly_this",
        f"{GCLOUD}the_output_of_ssh_is_displayed_and_its_status_decides",
    ),
    runs(
        "A8", "~/aura_tpu, its models and logs/train_optimized_worker_I.out, /tmp/backup_models; an executable "
        "script",
        "the same paths by the scripts",
        f"{GCLOUD}the_scripts_have_the_defaults_of_the_earlier_system",
        f"{GCLOUD}trainings_are_launched_by_one_call_for_all_workers", f"{POD}the_scripts_can_be_executed",
    ),
    runs(
        "A9", "variables PROJECT, ZONE, NAME, VERSION",
        "the same; flags win",
        f"{SETTINGS}every_variable_of_the_earlier_systems_is_read_and_a_flag_wins",
        f"{POD}without_zone_or_project_nothing_is_called", f"{POD}an_empty_version_lists_them_and_stops",
        note="PROJECT has to be set: gcloud's own default is not taken",
    ),
    runs(
        "A10", "variables ENABLE_TPU_OPT, ENABLE_NEUROPLASTICITY, ENABLE_CAUSAL, ENABLE_EVOLUTION (off), "
        "ENABLE_META_LEARNING, ENABLE_OPTIMIZATIONS, OPTIMIZATION_CONFIG",
        "the same, with the same defaults",
        f"{SETTINGS}evolution_is_off_by_default_and_the_others_on", f"{READINESS}switches_take_the_usual_words",
        f"{READINESS}a_switch_without_a_mechanism_is_never_on",
        note="ENABLE_TPU_OPT alone changes a run so far; each of the others is answered by a line (A16 to A18, A26)",
    ),
    runs(
        "A11", "MODEL_SIZE small, medium, large; SEQ_LEN",
        "the recipe of that name, train.sequence_length",
        f"{LOCAL}variables_become_arguments_of_train", f"{GCLOUD}trainings_are_launched_by_one_call_for_all_workers",
    ),
    runs(
        "A12", "ACCEL, PORT, REPO_URL, REPO_DIR, PYTHON_BIN, VENV_ACTIVATE, COORDINATOR_WORKER, DATASET, CONFIG, "
        "SPLIT, TEXT_KEY, SPM_MODEL, STEPS, LR, BATCH_SIZE, DTYPE, PER_DEVICE_BATCH, CKPT_OUT, DATASET2, CONFIG2, "
        "SPLIT2, MIX_P2",
        "the same variables; their defaults by the scripts",
        f"{SETTINGS}every_variable_of_the_earlier_systems_is_read_and_a_flag_wins",
        f"{LOCAL}variables_become_arguments_of_train", f"{GCLOUD}the_group_is_named_only_where_it_was_asked_for",
        f"{GCLOUD}the_scripts_have_the_defaults_of_the_earlier_system",
        f"{HOSTS}an_environment_of_the_hosts_is_taken_in_place_of_our_own",
    ),
    runs(
        "A13", "automatic deployment of the optimisations",
        "`pod.py setup_optimizations`, which `setup` ends with",
        f"{READINESS}deployment_measures_the_step_on_every_host_and_reports_exactly_the_switches",
        f"{FEATURES}setup_ends_with_the_deployment",
    ),
    answered(
        "A14", "2-3 times faster training",
        "seconds a step and tokens/s in each host's report; `make bench ARGS=naive`, a 1B model beside the naive way",
        "no factor is promised: what a step takes is measured where it runs",
        f"{READINESS}deployment_measures_the_step_on_every_host_and_reports_exactly_the_switches",
    ),
    answered(
        "A15", "half the memory",
        "the compiler's own count, in the report and by `rehearse.py`; `make bench ARGS=naive`, beside the naive way",
        "no factor is promised: what a step needs is counted, and what would spare memory is compiled",
        f"{READINESS}deployment_measures_the_step_on_every_host_and_reports_exactly_the_switches",
        f"{REHEARSE}what_does_not_fit_is_a_verdict_with_what_would",
    ),
    not_yet("A16", "neuroplasticity", note="ENABLE_NEUROPLASTICITY=true is answered by a line"),
    not_yet("A17", "causal reasoning", note="ENABLE_CAUSAL=true is answered by a line"),
    not_yet("A18", "meta-learning", note="ENABLE_META_LEARNING=true is answered by a line"),
    runs(
        "A19", "watching a run: status, metrics",
        "`pod.py status [--watch]`, `pod.py metrics`, from what the run wrote",
        f"{WATCH}status_shows_every_worker_and_what_is_on", f"{WATCH}a_dead_and_an_unreachable_worker_hide_no_other",
        f"{WATCH}metrics_of_the_run_as_text_and_json", f"{WATCH}figures_of_a_run_that_was_taken_up_again",
    ),
    runs(
        "A20", "dynamic batch sizes",
        "batch.ramp, by steps or by the gradient noise scale; batch.fit=auto, for microbatches that fit",
        f"{BATCH}a_batch_grows_and_each_size_is_compiled_once",
        f"{BATCH}a_batch_follows_the_noise_scale_up_to_the_whole",
        "tests/training/test_noise_scale.py::test_on_a_quadratic_with_known_noise_the_estimate_is_within_a_tenth",
    ),
    runs(
        "A21", "bfloat16",
        "model.dtype; parameters, moments and sums in float32, no loss scale",
        f"{FEATURES}products_are_in_bfloat16_and_all_that_is_kept_is_float32",
        "tests/layers/test_products.py::test_bfloat16_accumulates_in_float32",
        "tests/layers/test_normalization.py::test_mean_square_of_bfloat16_is_taken_in_float32",
    ),
    runs(
        "A22", "experts split over devices",
        "model.num_experts and mesh.expert; NUM_EXPERTS of `pod.py launch_optimized`",
        "tests/layers/test_experts.py::test_experts_on_several_devices_are_the_loop",
        "tests/layers/test_experts.py::test_nothing_is_dropped_where_every_token_goes_to_one_device",
        "tests/layers/test_experts.py::test_balancing_brings_a_skewed_router_near_even_load_in_300_steps",
        "tests/models/test_mixtures.py::test_the_program_exchanges_tokens_and_gathers_no_experts",
        "tests/pods/test_settings.py::test_experts_are_of_the_recipe_that_has_them",
    ),
    runs(
        "A23", "gradient checkpointing",
        "model.remat: none, dots, mlp, up, attention, query, attended, full",
        "tests/layers/test_block.py::test_loop_and_remat_change_no_number",
        "tests/layers/test_block.py::test_each_remat_policy_needs_less_memory_than_the_next",
    ),
    runs(
        "A24", "configuration by variables",
        "variables, then flags, then --config.KEY=VALUE; `pod.py help` shows each value's origin",
        f"{READINESS}a_switch_without_a_mechanism_is_never_on",
        f"{LOCAL}what_is_typed_wins_over_variables_and_switches",
        f"{POD}help_lists_every_subcommand_and_every_variable_with_its_origin",
    ),
    runs(
        "A25", "validation before training",
        "`pod.py validate`: 12 items with their evidence, on every host",
        f"{READINESS}validation_trains_and_restores_on_all_hosts_and_finds_what_differs",
        f"{READINESS}each_item_can_fail_and_says_where",
    ),
    not_yet("A26", "evolution for architecture search", note="ENABLE_EVOLUTION=true is answered by a line"),
    not_yet(
        "A27", "presets for production, development and research",
        "MODEL_SIZE and ENABLE_* can be set so",
        note="they differ in switches whose mechanisms are missing (A16 to A18, A26)",
    ),
    runs(
        "A28", "remedies: a script that cannot be executed, `setup` again, switches off, back to the original",
        "the same remedies",
        f"{POD}the_scripts_can_be_executed",
        f"{HOSTS}setup_brings_a_commit_from_nothing_from_a_broken_start_and_again",
        f"{LOCAL}variables_become_arguments_of_train", f"{POD}every_line_of_the_migration_modes_can_be_typed",
    ),
    runs(
        "A29", "a checklist: tested here, versions, pod reachable, code up to date, backup, a small model first",
        "`validate_optimizations.sh`, `pod.py validate` and `backup`, MODEL_SIZE=small",
        f"{FEATURES}validation_before_there_is_a_pod", f"{READINESS}each_item_can_fail_and_says_where",
        f"{GCLOUD}every_subcommand_asks_exactly_this",
    ),
    runs(
        "A30", "a live pod: backup, setup_optimizations, validate, stop, launch_optimized, metrics",
        "the same lines",
        f"{POD}every_line_of_the_migration_modes_can_be_typed", f"{SUPERVISE}the_life_of_a_run_of_four_processes",
    ),
)  # fmt: skip

VISHWAMAI = (
    not_yet("B1", "`optimize_train_tpu.py --config` with a YAML file", "train.py and recipes in Python"),
    not_yet("B2", "the same with --profile"),
    runs(
        "B3", "gradient accumulation",
        "train.gradient_accumulation; the batch is train.global_batch",
        f"{STEP}microbatches_make_the_gradients_of_the_whole_batch_in_a_language_model",
        f"{STEP}gradients_cross_the_batch_axes_once_a_step_for_1_4_and_8_microbatches",
        note="the keys of the YAML file are not read",
    ),
    runs(
        "B4", "model.dtype bfloat16",
        "the same key",
        f"{FEATURES}products_are_in_bfloat16_and_all_that_is_kept_is_float32",
    ),
    runs(
        "B5", "dynamic_batch_size, batch_size_increase_step, batch_size_increase_factor, max_batch_size",
        "batch.ramp=steps, batch.increase_step, batch.increase_factor, train.global_batch",
        f"{BATCH}a_growing_batch_takes_the_examples_in_the_order_of_any_other",
        f"{BATCH}a_ramp_that_is_stopped_goes_on_bit_for_bit",
        "tests/configs/test_ramp.py::test_sizes_grow_by_the_factor_rounded_to_what_mesh_and_microbatches_divide",
    ),
    runs(
        "B6", "grouped queries",
        "model.num_kv_heads",
        "tests/layers/test_attention.py::test_layer_equals_the_formula",
    ),
    runs(
        "B7", "gradient checkpointing",
        "model.remat",
        "tests/layers/test_block.py::test_each_remat_policy_needs_less_memory_than_the_next",
    ),
    runs(
        "B8", "a sequence in chunks",
        "the loss takes chunks of the length; attention goes over all of it",
        "tests/layers/test_cross_entropy.py::test_value_and_gradients_equal_the_plain_form",
        "tests/layers/test_cross_entropy.py::test_temporary_memory_is_that_of_a_chunk",
    ),
    runs(
        "B9", "the batch size that suits the device, raised with time",
        "batch.fit=auto, by the compiler's count of memory; batch.ramp",
        "tests/training/test_fit.py::test_the_fewest_that_fit_are_found_in_few_tries",
        "tests/training/test_fit.py::"
        "test_a_real_step_fits_the_memory_that_was_typed_and_with_larger_microbatches_would_not",
        f"{BATCH}a_batch_grows_and_each_size_is_compiled_once",
    ),
    not_yet("B10", "Tree of Thoughts"),
    not_yet("B11", "error correction"),
    answered(
        "B12", "rules of thumb for the size of a model",
        "`rehearse.py --search=model` finds the largest that fits",
        "the compiler is asked instead",
        f"{SEARCH}the_largest_model_fits_and_the_next_does_not",
    ),
    answered(
        "B13", "rules of thumb for accumulation",
        "`rehearse.py --search` tries mesh, microbatch and remat",
        "the compiler is asked instead",
        f"{SEARCH}the_search_ends_within_3_percent_of_all_layouts",
    ),
    runs("B14", "num_workers of data loading", "data.readers", f"{BATCHES}threads_and_prefetch_change_no_batch"),
    not_yet(
        "B15", "log lines of host and device memory",
        "both are in metrics.jsonl",
        note="not in that form of a line",
    ),
    not_yet("B16", "resource profiles of three sizes", "`rehearse.py --compare` of any recipe"),
    answered(
        "B17", "steps against lack of memory and slowness",
        "`rehearse.py` says what would fit, and what would be faster",
        "each remedy is compiled before it is given, in place of a fixed order",
        f"{SEARCH}a_remedy_is_the_smallest_change_of_its_kind_that_fits",
        f"{SEARCH}advice_is_what_was_compiled_and_faster_the_best_first",
    ),
    answered(
        "B18", "TPUMeshContext: a mesh that is reshaped live, and the sharding that suits a tensor",
        "`--topology`, `layout.changes`, `rehearse.py --advise_sharding`",
        "a run changes its mesh after the steps that it was told, its arrays moved; advice names only what is legal",
        "tests/test_batch.py::test_a_mesh_that_changes_has_the_losses_of_one_that_stays",
        "tests/parallelism/test_reshaping.py::test_arrays_are_whole_on_the_other_mesh_and_gone_from_the_old",
        "tests/rehearsal/test_sharding.py::test_options_are_all_that_jax_can_place_and_hold_what_it_would",
    ),
    answered(
        "B19", "DistillationTrainer: chunked losses by logits, embeddings and targets, gradient accumulation",
        "`train.objective=distillation`, `distillation.teacher=` the folder of a run",
        "an objective of the one loop, with its accumulation, ramp and checkpoints, not a trainer of its own",
        f"{DISTILLATION}a_student_reaches_a_lower_loss_than_alone_and_its_checkpoint_is_a_model_like_any",
        f"{DISTILLATION}microbatches_on_a_mesh_have_the_gradients_of_the_whole_batch",
        "tests/layers/test_distillation.py::test_value_and_gradients_equal_the_plain_form",
        "tests/layers/test_distillation.py::test_temporary_memory_is_that_of_a_part_of_a_chunk",
    ),
    not_yet("B20", "TPUProfiler"),
    not_yet("B21", "VishwamAITrainer"),
    not_yet("B22", "VishwamAIPipeline"),
    not_yet("B23", "the other keys of the YAML file"),
)  # fmt: skip

VALKYRIE_ROWS = (
    answered(
        "C1", "a v4-32 of 4 hosts with 8 chips each: 32 chips, mesh 4x4x2",
        "topologies v4-32 (16 chips) and v4-64 (32)",
        "a v4-32 has 32 TensorCores on 16 chips, and JAX shows a chip as one device: it takes 4x2x2; 4x4x2 is for a "
        "v4-64, which the error says",
        f"{TOPOLOGIES}v4_and_v5p_count_tensorcores_and_the_others_chips",
        f"{ENVIRONMENT}a_mesh_of_tensorcores_is_told_which_slice_it_is_for_and_what_fits",
    ),
    answered(
        "C2", "parameters split over model and fsdp, activations over data and model, the batch over data alone",
        "the same, but for the batch, which is split over data and fsdp",
        "over data alone both chips of an fsdp pair would do the same work",
        f"{LAYOUT}parameters_and_moments_lie_where_the_rules_say",
        f"{LAYOUT}batch_and_activations_are_split_over_batch_and_length",
    ),
    runs(
        "C3", "variables TPU_MESH_CONFIG, TPU_AXIS_NAMES, JAX_PLATFORMS",
        "the same",
        f"{ENVIRONMENT}the_environment_sets_the_mesh_and_its_order_and_is_named_as_their_origin",
        f"{STARTUP}asking_for_an_accelerator_that_is_not_there_is_an_error",
        f"{EXAMPLES}the_example_of_a_v4_32_learns_its_batch",
        note="TPU_DEVICE_COUNT, TPU_FORCE_TOPOLOGY, TPU_USE_GLOBAL_MESH and PROCESS_ID, which the guide does not "
        "name, are not read",
    ),
    runs(
        "C4", "variables JAX_COORDINATOR_ADDRESS, JAX_PROCESS_INDEX, JAX_PROCESS_COUNT, or found without them",
        "the same; TPU VMs, SLURM, Open MPI and Kubernetes as jax finds them",
        f"{PROCESSES}three_families_of_variables_place_a_process",
        f"{PROCESSES}on_a_tpu_and_under_slurm_jax_finds_the_others",
        f"{GROUPS}losses_are_bit_identical_between_one_two_and_four_processes",
    ),
    runs(
        "C5", "HF_TOKEN",
        "the same; to the hosts in a file, never on a command line",
        f"{GCLOUD}setup_brings_the_commit_and_the_secrets_but_no_secret_on_a_command_line",
        f"{HOSTS}words_variables_and_secrets_arrive_as_they_are",
        note="the test that training keeps it nowhere needs the extra `huggingface`",
    ),
    runs(
        "C6", "the example on all workers",
        "`pod.py launch -- python -m examples.tpu_v4_32_training`",
        f"{EXAMPLES}the_example_of_a_v4_32_learns_its_batch",
        f"{EXAMPLES}the_example_runs_on_all_hosts_of_a_pod",
    ),
    answered(
        "C7", "`python3.11 -m src.train.main --config configs/tpu_v4_32.yaml`",
        "`python train.py --config=configs/llama2_7b.py --topology=v4-32`",
        "a recipe is a Python file, and the slice is said apart from it",
        "tests/configs/test_simulation.py::test_every_recipe_runs_on_every_simulated_slice_and_only_sizes_shrink",
    ),
    runs(
        "C8", "scp of a file to `node-1://remote/path/` on all workers",
        "`pod.py copy FILE node-1://remote/path/`",
        f"{GCLOUD}the_pod_of_a_copy_is_the_one_in_the_path", f"{LOCAL}copying_to_all_workers_and_back",
    ),
    runs("C9", "describe of a node", "`pod.py describe`", f"{GCLOUD}every_subcommand_asks_exactly_this"),
    runs(
        "C10", "the log of all hosts, /tmp/training.log",
        "`pod.py tail --worker=all --output-directory=DIR`",
        f"{GCLOUD}every_subcommand_asks_exactly_this", f"{HOSTS}tail_shows_the_newest_log",
        f"{GROUPS}process_0_reports_and_every_one_keeps_a_log_and_a_sign_of_life",
        note="the logs are logs/train_worker_I.out",
    ),
    runs(
        "C11", "setup_multi_host_environment()",
        "`migration.valkyrie.setup_multi_host_environment`",
        f"{VALKYRIE}processes_find_each_other_and_add_up_over_one_mesh",
        f"{VALKYRIE}one_that_fails_ends_the_others_who_quote_it", f"{GROUPS}a_late_process_is_named_by_the_others",
    ),
    runs(
        "C12", "setup_tpu_mesh(device_count, use_global, validate)",
        "`migration.valkyrie.setup_tpu_mesh`",
        f"{VALKYRIE}the_mesh_is_that_of_the_environment_in_its_order",
        f"{VALKYRIE}without_the_environment_the_mesh_is_the_nearest_to_that_of_the_guide",
        f"{VALKYRIE}alone_it_simulates_the_mesh_of_the_environment",
        "tests/parallelism/test_mesh.py::test_chips_of_a_slice_are_a_closed_ring_of_single_hops",
    ),
    runs(
        "C13", "create_train_step(model, optimizer, config, mesh, mixed_precision, ...)",
        "`migration.valkyrie.create_train_step`, model and optimizer by name",
        f"{VALKYRIE}a_step_learns_eight_sequences_by_heart_and_deletes_what_it_was_given",
        f"{VALKYRIE}the_loss_of_three_tokens_is_the_one_by_hand", f"{VALKYRIE}a_step_is_made_of_names",
        note="objects in their place are refused in a line",
    ),
    runs(
        "C14", "ValkyrieConfig(vocab_size, hidden_size, num_layers, num_heads, intermediate_size, max_seq_len, "
        "use_flash_attention)",
        "`migration.valkyrie.ValkyrieConfig`, a configuration of Torus",
        f"{VALKYRIE}the_configuration_of_the_guide_is_the_7b_model_and_nothing_of_it_is_allocated",
        f"{VALKYRIE}what_cannot_be_configured_is_told_in_one_line",
        "tests/layers/test_kernels.py::test_a_run_on_tpus_uses_the_kernel_where_it_serves",
    ),
    runs(
        "C15", "a global batch, its part for each host, accumulation",
        "train.global_batch, train.gradient_accumulation",
        f"{GROUPS}rows_of_the_processes_are_disjoint_and_cover_the_batch",
        f"{STEP}microbatches_make_the_gradients_of_the_whole_batch_in_a_language_model",
    ),
    runs(
        "C16", "memory: bfloat16, checkpointing, fsdp, flash attention",
        "model.dtype, model.remat, mesh.fsdp; the kernel where it serves",
        f"{FEATURES}products_are_in_bfloat16_and_all_that_is_kept_is_float32",
        "tests/layers/test_block.py::test_each_remat_policy_needs_less_memory_than_the_next",
        f"{LAYOUT}every_weight_but_the_norms_is_split_over_every_axis_that_holds_weights",
        "tests/layers/test_kernels.py::test_kernel_equals_the_reference_on_packed_documents",
    ),
    answered(
        "C17", "gradients cross `data` alone, parameters model and fsdp, little traffic with the host",
        "gradients cross data and fsdp, once a step; a batch and a few numbers go between host and devices",
        "the batch is split over both axes (C2), so its gradients are summed over both",
        f"{STEP}gradients_cross_the_batch_axes_once_a_step_for_1_4_and_8_microbatches",
        f"{FEATURES}a_step_moves_nothing_between_host_and_devices",
    ),
    runs(
        "C18", "troubles: no coordinator, wrong process index, number of devices, lack of memory",
        "each is one line that names what is missing and what would fit",
        f"{PROCESSES}what_is_missing_or_contradicts_is_told_with_all_that_is_there",
        f"{GROUPS}a_late_process_is_named_by_the_others",
        f"{ENVIRONMENT}a_mesh_of_tensorcores_is_told_which_slice_it_is_for_and_what_fits",
        f"{REHEARSE}what_does_not_fit_is_a_verdict_with_what_would",
        note="a v4-32 has 16 devices, not 32",
    ),
    runs(
        "C19", "prints local devices, global devices, process index, process count",
        "the same lines, by every process",
        f"{GROUPS}process_0_reports_and_every_one_keeps_a_log_and_a_sign_of_life",
        f"{EXAMPLES}the_example_runs_on_all_hosts_of_a_pod",
    ),
    runs(
        "C20", "`examples/tpu_v4_32_training.py` with synthetic data",
        "the example, through the one loop of train.py",
        f"{EXAMPLES}the_example_of_a_v4_32_learns_its_batch",
        note="loss, step_time_ms and tokens_per_second; an evaluation only on a corpus, without accuracy",
    ),
    answered(
        "C21", "2,000 to 4,000 tokens/s, 100 to 200 ms a step, and how they scale",
        "`rehearse.py [--scaling]`",
        "those figures exclude each other; ours are replayed from the compiler's schedule, and said to be estimates",
        f"{REHEARSE}the_report_keeps_its_contract", f"{REHEARSE}all_time_is_accounted_for",
        f"{SEARCH}scaling_keeps_the_batch_of_a_chip",
    ),
    runs(
        "C22", "practices: validate the mesh, watch memory, synthetic data first, save often",
        "`pod.py validate`, `status`, --synthetic of the example, train.save_every",
        f"{READINESS}each_item_can_fail_and_says_where",
        f"{WATCH}status_shows_every_worker_and_what_is_on", f"{EXAMPLES}the_example_of_a_v4_32_learns_its_batch",
        f"{SUPERVISE}the_life_of_a_run_of_four_processes",
    ),
    answered(
        "C23", "the model behind the guide: BigBird, S5, a planner, YaRN, span denoising",
        "a LLaMA-style decoder, with YaRN and sliding windows",
        "the guide itself names none of it but attention; what is asked for is an error",
        f"{VALKYRIE}what_cannot_be_configured_is_told_in_one_line",
        "tests/layers/test_rotary.py::test_frequencies_are_scaled_as_published",
    ),
)  # fmt: skip

PLAN = (
    runs(
        "D1", "a v4-64: 32 chips of 32 GiB, 8 hosts",
        "--topology=v4-64",
        f"{TOPOLOGIES}preset_is_whole[v4-64]",
        f"{TOPOLOGIES}v4_and_v5p_count_tensorcores_and_the_others_chips[v4-64-32-8]",
        note="4 devices a host, in a torus of three dimensions",
    ),
    runs(
        "D2", "the node `stable-1` in us-central2-b, persistent",
        "NAME=stable-1 ZONE=us-central2-b, without --spot",
        f"{GCLOUD}every_subcommand_asks_exactly_this",
    ),
    runs(
        "D3", "8 processes, one a host",
        "`pod.py launch` starts one on each",
        f"{GCLOUD}launch_runs_on_every_host_until_it_is_stopped[8]",
        f"{GROUPS}losses_are_bit_identical_between_one_two_and_four_processes",
        note="8 that train, on this machine, are in benchmarks/local_pod.py",
    ),
    runs(
        "D4", "variables RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, XLA_USE_BF16, and others of PyTorch/XLA",
        "the first four start a group, XLA_USE_BF16 must agree with model.dtype, the others are answered by a line",
        f"{PROCESSES}three_families_of_variables_place_a_process",
        f"{STARTUP}variables_of_earlier_systems_are_answered",
        f"{GROUPS}losses_are_bit_identical_between_one_two_and_four_processes",
    ),
    runs(
        "D5", "variables TPU_COORDINATOR_ADDRESS, TPU_WORKER_COUNT, TPU_WORKER_ID",
        "the same; without them jax looks",
        f"{PROCESSES}three_families_of_variables_place_a_process", f"{PROCESSES}without_variables_a_process_is_alone",
        note="variables win over what is found",
    ),
    runs(
        "D6", "a global batch that does not depend on the number of hosts",
        "train.global_batch",
        f"{GROUPS}losses_are_bit_identical_between_one_two_and_four_processes",
    ),
    answered(
        "D7", "a model split within a host",
        "mesh.model",
        "its chips are neighbours in the torus, on one host or not: links between chips go from host to host",
        f"{LAYOUT}loss_and_every_gradient_are_those_of_one_device[model4]",
        "tests/parallelism/test_mesh.py::test_chips_of_a_slice_are_a_closed_ring_of_single_hops",
    ),
    runs(
        "D8", "one sum of gradients a step",
        "the same, however many microbatches",
        f"{STEP}gradients_cross_the_batch_axes_once_a_step_for_1_4_and_8_microbatches",
    ),
    runs(
        "D9", "one process reads weights and sends them; all start with the same",
        "checkpoint.restore=broadcast; the copies are compared by their bits",
        f"{GROUPS}a_checkpoint_of_four_processes_goes_on_in_fewer[2-broadcast]",
        f"{REPLICAS}one_flipped_bit_is_named_with_both_holders", f"{REPLICAS}equal_copies_pass",
        f"{GROUPS}copies_of_a_parameter_that_differ_between_processes_are_named_everywhere",
    ),
    runs(
        "D10", "metrics over all processes, written by process 0",
        "metrics.jsonl",
        f"{GROUPS}process_0_reports_and_every_one_keeps_a_log_and_a_sign_of_life",
        f"{GROUPS}losses_are_bit_identical_between_one_two_and_four_processes",
    ),
    runs(
        "D11", "barriers before an evaluation and around saving",
        "all stop, save and evaluate at the same step",
        f"{GROUPS}a_signal_to_one_stops_all_at_the_same_step_saved",
        f"{GROUPS}losses_are_bit_identical_between_one_two_and_four_processes",
        "tests/parallelism/test_hub.py::test_all_stop_at_the_same_boundary_however_far_apart_they_are",
    ),
    runs("D12", "one compilation, fixed shapes", "the same", f"{FEATURES}a_run_compiles_its_step_once"),
    runs(
        "D13", "few transfers between host and devices",
        "a batch ahead, and a step's numbers after the next has begun",
        f"{FEATURES}a_step_moves_nothing_between_host_and_devices",
        "tests/parallelism/test_placement.py::test_the_next_batch_comes_onto_the_devices_while_a_step_takes_its_time",
    ),
    runs(
        "D14", "5,000 steps of the recursive model without a leak",
        "benchmarks/soak.py",
        "tests/test_soak.py::test_nothing_grows_and_nothing_is_compiled_again",
    ),
    runs(
        "D15", "checkpoints every 1,000 steps, copied to a bucket meanwhile",
        "train.save_every and --workdir=gs://...",
        f"{BUCKET}a_run_in_a_bucket_goes_on_on_another_host_and_is_sampled_from",
        f"{SETTINGS}the_run_has_one_folder_for_all_hosts",
        note="saved to local disk and copied beside the steps; the bucket of the test is an emulator's",
    ),
    not_yet(
        "D16", "`xla_dist ... run_experiment.py --config exp01_model_scaling.yaml`",
        "`pod.py launch -- COMMAND`",
        note="any command is started on all hosts; there is no sweep.py for it to start",
    ),
    runs(
        "D17", "torchrun on each worker",
        "the variables that it sets start the group: RANK, WORLD_SIZE, MASTER_*",
        f"{PROCESSES}three_families_of_variables_place_a_process",
        f"{GROUPS}losses_are_bit_identical_between_one_two_and_four_processes",
    ),
    runs(
        "D18", "SPMD",
        "one table from names of axes to the mesh",
        f"{LAYOUT}loss_and_every_gradient_are_those_of_one_device",
        f"{LAYOUT}parameters_and_moments_lie_where_the_rules_say",
    ),
    runs(
        "D19", "a part of the data for each worker, without overlap, all of it together",
        "rows by process",
        f"{GROUPS}rows_of_the_processes_are_disjoint_and_cover_the_batch",
        f"{BATCHES}processes_read_together_what_one_reads",
    ),
    runs(
        "D20", "4 data workers, 4 batches ahead",
        "data.readers, data.prefetch",
        f"{BATCHES}threads_and_prefetch_change_no_batch",
    ),
    runs(
        "D21", "augmentations generated once, on the local disk",
        "data sets of puzzles are built into data.cache_dir, by what they are made of",
        f"{PUZZLES}what_was_built_is_found_again", f"{PUZZLES}several_that_ask_at_once_build_once",
        f"{PUZZLES}an_interrupted_build_leaves_nothing",
    ),
    runs(
        "D22", "health every second, memory by device",
        "a heartbeat of every process; `pod.py status --watch`",
        f"{WATCH}watching_goes_on_until_it_is_ended", f"{WATCH}status_shows_every_worker_and_what_is_on",
        f"{GROUPS}process_0_reports_and_every_one_keeps_a_log_and_a_sign_of_life",
    ),
    runs(
        "D23", "a worker that fails restarts all",
        "`pod.py supervise`",
        f"{SUPERVISE}the_life_of_a_run_of_four_processes",
        f"{SUPERVISE}restarts_are_bounded_and_progress_forgets_them",
        f"{SUPERVISE}a_pod_that_was_taken_away_is_made_again",
    ),
    answered(
        "D24", "a log of each worker; process 0 sends all to W&B",
        "logs/train_worker_I.out; metrics.jsonl and TensorBoard events by process 0",
        "what is measured stays in files of the run, which need no account",
        f"{GROUPS}process_0_reports_and_every_one_keeps_a_log_and_a_sign_of_life",
        f"{TRAIN}metrics_hold_the_contract_and_the_loss_falls",
    ),
    runs(
        "D25", "six troubles: slow compilation, memory, hosts that differ, an exploding loss, slow data, stale "
        "checkpoints",
        "a cache of programs; a verdict before; and for each of the others one line, or nothing to wait for",
        f"{REHEARSE}the_second_time_comes_from_the_cache", f"{REHEARSE}what_does_not_fit_is_a_verdict_with_what_would",
        f"{GROUPS}hosts_that_are_not_the_same_are_told_before_anything_begins",
        f"{TRAIN}a_loss_that_is_not_finite_ends_the_run_and_saves_nothing_of_it",
        f"{TRAIN}metrics_hold_the_contract_and_the_loss_falls", f"{TRAIN}another_run_is_refused_the_workdir",
    ),
    runs(
        "D26", "a checklist of ten points",
        "`pod.py validate`",
        f"{READINESS}validation_trains_and_restores_on_all_hosts_and_finds_what_differs",
        f"{READINESS}each_item_can_fail_and_says_where",
    ),
    answered(
        "D27", "17 ms a step, 360,000 examples/s, 3 of 128 GB, hours",
        "`rehearse.py`, and all of them by benchmarks/trm_plan.py",
        "at the peak of all chips the FLOPs of a step take 33 ms",
        "tests/models/test_trm.py::test_flops_are_those_of_its_products",
    ),
    runs(
        "D28", "what it costs",
        "`pod.py metrics` and `validate`; --price sets dollars per chip-hour",
        f"{WATCH}figures_of_a_run_that_was_taken_up_again", f"{READINESS}what_it_costs_by_the_measured_step",
        note="chips alone; not disks, nor what a grant pays",
    ),
    runs(
        "D29", "ten practices: a small slice first, saving, live metrics, code here and data in the pod's region, "
        "sessions that survive, alerts, versioned configurations, hyper-parameters in them, names, archives",
        "ACCEL=v4-8, `metrics`, `validate`, `launch`, `supervise --alert`, recipes, NAME, `backup`",
        f"{WATCH}metrics_of_the_run_as_text_and_json", f"{READINESS}the_bucket_has_to_be_there_near_and_writable",
        f"{LOCAL}a_command_runs_on_all_hosts_as_one_group_and_survives_its_terminal",
        f"{SUPERVISE}alerts_go_to_the_command_and_its_failure_ends_nothing",
        "tests/configs/test_golden.py::test_a_recipe_resolves_to_its_golden_text",
        f"{GCLOUD}every_subcommand_asks_exactly_this",
    ),
    runs(
        "D30", "no PyTorch within reach",
        "nothing but tests and benchmarks imports it",
        "tests/test_architecture.py::test_nobody_outside_tests_and_benchmarks_imports[torch]",
        note="there is no old code to archive",
    ),
    not_yet("D31", "67 configurations in 14 groups, each with its folder in the bucket"),
    not_yet("D32", "a guide for each experiment"),
    runs(
        "D33", "an assessment of readiness in eleven items",
        "`pod.py validate` writes READINESS.md, 12 items with their evidence",
        f"{READINESS}validation_trains_and_restores_on_all_hosts_and_finds_what_differs",
        f"{READINESS}each_item_can_fail_and_says_where",
        note="its six quick lines name experiment scripts that are missing",
    ),
    not_yet(
        "D34", "wished: plots of results, W&B templates, grouped configurations, a queue, TPU hours, a database of "
        "results, CI against PyTorch",
        "TPU hours by `pod.py metrics`; PyTorch by tests/test_architecture.py",
    ),
)  # fmt: skip

ROWS = (*AURA, *VISHWAMAI, *VALKYRIE_ROWS, *PLAN)


def counts(rows: tuple[Row, ...]) -> dict[str, int]:
    """Return how many rows there are of each state, and of all."""
    found = collections.Counter(row.state for row in rows)
    return {state: found[state] for state in STATES} | {"all": len(rows)}


def page() -> str:
    """Return PROMISES.md."""
    lines = [
        "# What became of each promise", "",
        "Torus takes the place of four earlier systems. Every item that one of them promised has a row: what is here",
        "in its place, and the checks of the test suite that show it. A test holds this page to the table in",
        "[migration/promises.py](migration/promises.py), which makes it (`python -m migration.promises`), and runs",
        "every check of a row that `runs`.", "",
        f"| | {' | '.join(STATES)} | all |", "|---" * (len(STATES) + 2) + "|",
    ]  # fmt: skip
    tables = {letter: tuple(row for row in ROWS if row.item[0] == letter) for letter in SYSTEMS}
    for name, rows in [*((SYSTEMS[letter], rows) for letter, rows in tables.items()), ("all", ROWS)]:
        lines.append(f"| {name} | {' | '.join(map(str, counts(rows).values()))} |")
    lines += ["", *(f"- **{state}**: {meaning}" for state, meaning in STATES.items())]
    for letter, rows in tables.items():
        lines += ["", f"## {SYSTEMS[letter]}", "", "| | promised | here | state | shown by |", "|---|---|---|---|---|"]
        lines += [_line(row) for row in rows]
    return "\n".join([*lines, ""])


def _line(row: Row) -> str:
    ours = "; ".join(filter(None, (row.ours, row.note)))
    checks = "<br>".join(f"`{check.removeprefix('tests/').replace('|', '/')}`" for check in row.checks)
    return f"| {row.item} | {row.what} | {ours} | {row.state} | {checks} |"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE.name}: {', '.join(f'{number} {state}' for state, number in counts(ROWS).items())}")
