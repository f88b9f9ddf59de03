# SPDX-License-Identifier: Apache-2.0
"""Which errors in the code would the tests miss? Plants faults one at a time, such as a careless engineer makes.

For each fault, a text in a copy of this working tree is replaced by a wrong one. Then the tests that mirror the file
run there, or, for slow files, the tests that should notice the fault. The fault is caught if a test fails that passes
without it, and missed otherwise. All faults were chosen from the code before reading its tests. For faults that were
missed, tests were written or sharpened. The copy has its own cache, because a wrong pipeline would store wrong results;
only compiled programs, whose names are digests of their content, are shared.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import NamedTuple

import support

from input_pipeline.cache import cache_path
from input_pipeline.tensorflow_import import tensorflow
from tests import warm

QUICK_FAULTS = 3
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py::.*?)(?: - .*)?$", re.MULTILINE)
PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
NOTHING_FAILED, SOMETHING_FAILED = 0, 1  # exit status of pytest


class Fault(NamedTuple):
    """A wrong change.

    Attributes:
        what: the effect of the change.
        file: contains `text` exactly once.
        planted: replacement of the text.
        tests: tests that should notice it, as arguments of pytest.
    """

    what: str
    file: str
    text: str
    planted: str
    tests: tuple[str, ...]


FAULTS = (
    Fault(
        "every pass has the order of the first", "input_pipeline/order.py",
        "mix(mix(seed & MASK) + epochs)", "mix(mix(seed & MASK) + 0 * epochs)", ("tests/input_pipeline/test_order.py",),
    ),
    Fault(
        "a place past the last token counts as one", "input_pipeline/packing.py",
        "real = begins[:, None] + steps < num_tokens", "real = begins[:, None] + steps <= num_tokens",
        ("tests/input_pipeline/test_packing.py",),
    ),
    Fault(
        "an evaluation takes the first windows, not an even spread", "input_pipeline/batches.py",
        "places < taken, places * num_windows // taken", "places < taken, places",
        ("tests/input_pipeline/test_batches.py",),
    ),
    Fault(
        "parts of a mixture begin again where weights change", "input_pipeline/mixture.py",
        "indices[inside] += done[parts[inside]]", "indices[inside] += 0 * done[parts[inside]]",
        ("tests/input_pipeline/test_mixture.py",),
    ),
    Fault(
        "the first example of a skipped range is taken", "input_pipeline/mixture.py",
        "count * (first <= taken)", "count * (first < taken)", ("tests/input_pipeline/test_mixture.py",),
    ),
    Fault(
        "the ledger is a step late", "input_pipeline/ledger.py",
        '(step - section["step"] - 1)', '(step - section["step"])', ("tests/input_pipeline/test_ledger.py",),
    ),
    Fault(
        "what one part holds out another trains on", "input_pipeline/corpus.py",
        "if span.digest not in elsewhere]", "if span not in elsewhere]", ("tests/input_pipeline/test_corpus.py",),
    ),
    Fault(
        "a token that ends where an answer begins is learned", "input_pipeline/chat/encoding.py",
        "(starts < end) & (ends > begin)", "(starts < end) & (ends >= begin)",
        ("tests/input_pipeline/chat/test_encoding.py",),
    ),
    Fault(
        "of a pair that is too long each side gets the other's room", "input_pipeline/chat/windows.py",
        "in zip((rejected, chosen), most", "in zip((chosen, rejected), most",
        ("tests/input_pipeline/chat/test_windows.py",),
    ),
    Fault(
        "a sliding window is a token too wide", "layers/attention/attention.py",
        "(distance_BTS < sliding_window)", "(distance_BTS <= sliding_window)", ("tests/layers/test_attention.py",),
    ),
    Fault(
        "on a TPU positions turn the wrong way", "layers/attention/rotary.py",
        "[[0 * one, one], [-one, 0 * one]]", "[[0 * one, -one], [one, 0 * one]]", ("tests/layers/test_rotary.py",),
    ),
    Fault(
        "the kernel's sliding window is a token too wide", "layers/attention/kernels.py",
        "(sliding_window - 1, 0), 0)", "(sliding_window, 0), 0)", ("tests/layers/test_kernels.py",),
    ),
    Fault(
        "stablemax has the wrong branch below 0", "layers/stablemax.py",
        "jnp.where(u < 0, -u, 0)", "jnp.where(u < 0, u, 0)", ("tests/layers/test_stablemax.py",),
    ),
    Fault(
        "the gradient of z-loss lacks its factor 2", "layers/cross_entropy.py",
        "(1 + 2 * z_loss * log_z_BT)", "(1 + z_loss * log_z_BT)", ("tests/layers/test_cross_entropy.py",),
    ),
    Fault(
        "a router's bias grows with its expert's load", "layers/experts/experts.py",
        "load_E - load_E.mean()", "load_E.mean() - load_E",
        ("tests/layers/test_experts.py::test_the_bias_gets_how_much_more_than_the_mean_an_expert_has_to_do",),
    ),
    Fault(
        "a router's bias counts in the gates too", "layers/experts/experts.py",
        "jnp.take_along_axis(log_scores_BTE, experts_BTK, axis=-1)",
        "jnp.take_along_axis(log_scores_BTE + self.bias[...], experts_BTK, axis=-1)", ("tests/layers/test_experts.py",),
    ),
    Fault(
        "LoRA's scale is upside down", "layers/adapters.py",
        "scale=lora.alpha / lora.rank", "scale=lora.rank / lora.alpha",
        ("tests/checkpointing/test_adapters.py::test_merged_with_what_they_are_beside_they_compute_the_same",),
    ),
    Fault(
        "a gradient's sum leaves out the neighbours on one side", "layers/fsdp.py",
        "from_side(1, 0, shard // 2) + from_side(-1, shard // 2, shard)", "from_side(1, 0, shard // 2)",
        ("tests/layers/test_fsdp.py",),
    ),
    Fault(
        "of a row that devices share each sums its own part alone", "layers/sequence_parallel.py",
        "return jax.lax.psum(x, axes) if axes else x", "return x",
        ("tests/test_dpo.py::test_microbatches_on_a_mesh_have_the_gradients_of_the_whole_batch",),
    ),
    Fault(
        "the cache's next place is a token early", "models/decoder_lm.py",
        'cache["start"] + ends_BT.max(axis=1)', 'cache["start"] + ends_BT.max(axis=1) - 1',
        ("tests/models/test_decoder_lm.py", "tests/inference/test_engine.py"),
    ),
    Fault(
        "a replacement gets the number of the next layer", "layers/taps.py",
        "jnp.arange(num_layers)", "jnp.arange(1, num_layers + 1)", ("tests/layers/test_taps.py",),
    ),
    Fault(
        "a patched site is replaced in every layer", "causality/sites.py",
        "(sites_B.name == number) & _is_at(sites_B.layer, layer)", "sites_B.name == number",
        ("tests/causality/test_patching.py",),
    ),
    Fault(
        "an edge is removed although its variables depend on each other", "causality/discovery.py",
        "math.sqrt(n - len(given) - 3)", "math.sqrt(len(given) + 3)", ("tests/causality/test_estimation.py",),
    ),
    Fault(
        "a counterfactual forgets the noise of its units", "causality/structural.py",
        "noise = mechanism.invert(", "noise = 0 * mechanism.invert(",
        ("tests/causality/test_estimation.py::test_a_counterfactual_is_that_of_the_closed_form",),
    ),
    Fault(
        "the padding of a shorter row counts as tokens", "inference/engine.py",
        "segments_BT.sum(axis=1)", "tokens_BT.shape[1]", ("tests/inference/test_engine.py",),
    ),
    Fault(
        "FLOPs of attention are half of what they are", "models/decoder_lm.py",
        "12.0 * heads_dim * keys", "6.0 * heads_dim * keys",
        ("tests/models/test_decoder_lm.py::test_flops_per_token_equals_a_hand_count",),
    ),
    Fault(
        "the halt head reads the last position", "models/trm.py",
        "self.halt(high_BTD[:, 0])", "self.halt(high_BTD[:, -1])",
        ("tests/models/test_trm.py::test_the_loss_and_what_is_reported_are_those_recorded",),
    ),
    Fault(
        "padding counts in the loss", "objectives/language_modeling.py",
        '((batch["segments"] > 0)', '((batch["segments"] >= 0)', ("tests/objectives/test_language_modeling.py",),
    ),
    Fault(
        "DPO multiplies by beta twice", "objectives/dpo.py",
        "jax.nn.softplus(-margin_B)", "jax.nn.softplus(-self.beta * margin_B)", ("tests/objectives/test_dpo.py",),
    ),
    Fault(
        "a slot halts without exploration", "objectives/recursive.py",
        '(halt_logits > 0) & (carry["steps"] >= chosen)', "halt_logits > 0", ("tests/objectives/test_recursive.py",),
    ),
    Fault(
        "replaced units keep their moments", "training/optimizers.py",
        "jnp.where(mask, jnp.zeros_like(leaf), leaf)", "leaf",
        ("tests/training/test_plasticity.py::test_continual_backprop_keeps_the_function_and_zeroes_weights_and_moments",),
    ),
    Fault(
        "the most useful unit is replaced", "training/plasticity/replacement.py",
        "jax.lax.top_k(-scores_U, most)", "jax.lax.top_k(scores_U, most)",
        ("tests/training/test_plasticity.py::test_the_least_useful_mature_unit_is_replaced_at_the_rate",),
    ),
    Fault(
        "all microbatches draw the same dropout", "training/step.py",
        "jax.random.fold_in(key, index)", "key",
        ("tests/training/test_step.py::test_every_step_and_microbatch_draws_its_own_randomness_again_the_same_from_the_same_seed",),
    ),
    Fault(
        "the carry of a bad update is kept", "training/step.py",
        "carry=accepted(carry, state.carry)", "carry=carry",
        ("tests/training/test_step.py::test_an_update_that_is_no_number_leaves_all_but_the_counts_as_it_was",),
    ),
    Fault(
        "the average is of the parameters before the update", "training/transforms/average.py",
        "jax.tree.map(_mix, change.params, memory, decays)", "jax.tree.map(_mix, context.state.params, memory, decays)",
        ("tests/training/test_step.py::test_an_average_of_the_parameters_follows_them_and_is_what_is_evaluated",),
    ),
    Fault(
        "norms decay", "training/optimizers.py",
        'NOT_DECAYED = ("scale", "bias", "embedding")', 'NOT_DECAYED = ("bias", "embedding")',
        ("tests/training/test_optimizers.py",),
    ),
    Fault(
        "gradients are clipped entry by entry", "training/optimizers.py",
        "optax.clip_by_global_norm(config.clip_norm)", "optax.clip(config.clip_norm)",
        ("tests/training/test_optimizers.py",),
    ),
    Fault(
        "the fall begins a step after the warm-up", "training/schedules.py",
        "optax.join_schedules([rise, factor], [warmup])", "optax.join_schedules([rise, factor], [warmup + 1])",
        ("tests/training/test_schedules.py",),
    ),
    Fault(
        "an update is a spike only where loss and gradient both are", "training/transforms/guard.py",
        "jnp.all(values <= limits)", "jnp.any(values <= limits)", ("tests/training/test_guard.py",),
    ),
    Fault(
        "what a restart does again counts as work twice", "reporting/goodput.py",
        'self.before["training"] -= trained', 'self.before["training"] -= 0 * trained',
        ("tests/reporting/test_goodput.py",),
    ),
    Fault(
        "the worst checkpoint is kept as the best", "checkpointing/retention.py",
        "(losses[step], step)", "(-losses[step], step)", ("tests/checkpointing/test_retention.py",),
    ),
    Fault(
        "digests are not compared", "checkpointing/manifest.py",
        "return None if found == digest else", "return None if found else",
        ("tests/checkpointing/test_damage.py::test_a_damage_is_detected_by_name_or_changes_nothing",),
    ),
    Fault(
        "a stranger's proof is good whatever it is", "cluster/door.py",
        'hmac.compare_digest(proof, _proof(secret, b"process", nonces))', "len(proof) == PROOF_BYTES",
        ("tests/cluster/test_door.py",),
    ),
    Fault(
        "a lease falls by the clock of the host", "checkpointing/lease.py",
        "generation and now < written", "generation and time.time() < written",
        ("tests/checkpointing/test_lease.py::test_the_clock_of_who_wants_a_lease_does_not_count",),
    ),
    Fault(
        "a lease is renewed when it has run out", "checkpointing/lease.py",
        "lease.renew, RENEW_SECONDS", "lease.renew, LEASE_SECONDS", ("tests/checkpointing/test_lease.py",),
    ),
    Fault(
        "a run that diverged ends with status 0", "reporting/step_log.py",
        "exit_status = 3", "exit_status = 0",
        ("tests/test_train.py::test_a_loss_that_is_not_finite_ends_the_run_and_saves_nothing_of_it",),
    ),
    Fault(
        "replicas that differ in order have the same checksum", "training/replicas.py",
        "bits * (2 * places + 1) * (places ^ jnp.uint32(0x9E3779B9) | 1)", "bits", ("tests/training/test_replicas.py",),
    ),
    Fault(
        "going back leaves out a batch before the bad ones", "core/job.py",
        "max(0, step - stage.step - 1)", "max(0, step - stage.step - 2)",
        ("tests/test_survival.py::test_too_many_in_a_row_go_back_to_the_last_good_checkpoint_and_leave_out_their_batches",),
    ),
    Fault(
        "a smaller batch has a larger learning rate", "settings/ramp.py",
        "(size / config.train.global_batch) **", "(config.train.global_batch / size) **",
        ("tests/settings/test_ramp.py",),
    ),
    Fault(
        "neighbours of a mesh are far apart", "parallelism/mesh.py",
        "(heights if n % 2 == 0 else reversed(heights))", "heights", ("tests/parallelism/test_mesh.py",),
    ),
    Fault(
        "donated arrays are counted twice", "reporting/preflight.py",
        "return total - memory.alias_size_in_bytes", "return total", ("tests/reporting/test_preflight.py",),
    ),
    Fault(
        "a product has an operation for each pair", "rehearsal/roofline.py",
        "return 2.0 * math.prod(instruction.shapes[0].dims)", "return 1.0 * math.prod(instruction.shapes[0].dims)",
        ("tests/rehearsal/test_hlo.py",),
    ),
    Fault(
        "an all-reduce goes round once", "rehearsal/schedule.py",
        "sent *= 2 * (size - 1) / size", "sent *= (size - 1) / size", ("tests/rehearsal/test_schedule.py",),
    ),
    Fault(
        "advice praises what is slower", "rehearsal/layouts/advice.py",
        'rate / self.figures["tokens_per_second"] - 1 if', '1 - rate / self.figures["tokens_per_second"] if',
        ("tests/rehearsal/test_search.py::test_advice_is_what_was_compiled_and_faster_the_best_first",),
    ),
    Fault(
        "top_p leaves out the token that reaches it", "inference/choice.py",
        "jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV", "jnp.cumsum(probabilities_BV, axis=-1)",
        ("tests/inference/test_decoding.py",),
    ),
    Fault(
        "requests of one prompt that come together compute it each", "inference/batching.py",
        "if self._soon_shared(prefix) > max(shared):", "if self._soon_shared(prefix) < 0:",
        ("tests/inference/test_batching.py",),
    ),
    Fault(
        "a copied row keeps a token too many", "inference/rows.py",
        "engine.shorten(engine.fork(rows.cache, source_R), keep_R)",
        "engine.shorten(engine.fork(rows.cache, source_R), keep_R + 1)", ("tests/inference/test_batching.py",),
    ),
    Fault(
        "a choice is normalised by its characters", "scoring/tasks.py",
        "value / len(one.encode())", "value / len(one)", ("tests/scoring/test_tasks.py",),
    ),
    Fault(
        "the logits of the position before are scored", "scoring/likelihood.py",
        "np.arange(end - count, end)", "np.arange(end - count, end) - 1", ("tests/scoring/test_likelihood.py",),
    ),
    Fault(
        "a window of a long text has a token less of context", "scoring/texts.py",
        "tokens[end - longest - 1 : start]", "tokens[end - longest : start]", ("tests/scoring/test_texts.py",),
    ),
    Fault(
        "an accuracy is centred but not scaled", "scoring/core_metric.py",
        "(accuracy.value - baseline) / (1 - baseline)", "accuracy.value - baseline",
        ("tests/scoring/test_core_metric.py",),
    ),
    Fault(
        "votes are weighed, not counted", "puzzles/voting.py",
        "(-count, -total / count, predicted)", "(-total, -count, predicted)",
        ("tests/puzzles/test_voting.py",),
    ),
    Fault(
        "a prompt begins with two ends of document", "inference/prompts.py",
        "tokens = [*(", "tokens = [end, *(", ("tests/inference/test_answer.py",),
    ),
    Fault(
        "a stream shows a part of a character", "inference/text_stream.py",
        "MOST_HELD = 1024", "MOST_HELD = 2", ("tests/inference/test_text_stream.py",),
    ),
    Fault(
        "the stop string that begins first ends a text", "inference/text_stream.py",
        "text[: min(found)[1]]", "text[: min(begin for _, begin in found)]", ("tests/inference/test_text_stream.py",),
    ),
    Fault(
        "a client that disconnects keeps its row", "serving/worker.py",
        "self.batch.cancel(part.continuation)", "pass", ("tests/serving/test_worker.py",),
    ),
    Fault(
        "other processes do not learn what was cancelled", "serving/following.py",
        'self._changes.append({"cancel": self._numbers.pop(one)})', "self._numbers.pop(one)",
        ("tests/serving/test_following.py",),
    ),
    Fault(
        "a token is drawn after a part of a prompt", "inference/batching.py",
        "for index, one in enumerate(chosen) if not _remaining(one)]", "for index, one in enumerate(chosen)]",
        ("tests/inference/test_batching.py",),
    ),
    Fault(
        "exported matrices are not transposed", "migration/hugging_face_tensors.py",
        "block.reshape(self.shape[1], -1).T", "block.reshape(-1, self.shape[1])",
        ("tests/migration/test_hugging_face.py::test_what_is_exported_is_what_was_imported_bit_for_bit",),
    ),
    Fault(
        "exported adapters have another alpha", "migration/peft.py",
        '"lora_alpha": stored["lora.alpha"]', '"lora_alpha": stored["lora.rank"]',
        ("tests/test_fine_tuning.py::test_what_is_given_out_is_the_base_and_the_adapters_of_peft",),
    ),
    Fault(
        "a pod with an unreachable host has no problem", "pods/watch.py",
        "if not worker.reachable or worker.died]", "if worker.died]", ("tests/pods/test_watch.py",),
    ),
    Fault(
        "a pause between two processes is paid for", "pods/watch.py",
        "total += 0.0 if starts or before is None else", "total += 0.0 if before is None else",
        ("tests/pods/test_watch.py",),
    ),
    Fault(
        "a host is given up though it answered between", "pods/supervise.py",
        "if any(not worker.reachable for worker in workers) else 0",
        "if any(not worker.reachable for worker in workers) else self.unreachable",
        (
            "tests/pods/test_supervise.py::test_what_a_look_comes_to",
            "tests/pods/test_supervise.py::test_a_worker_that_stays_unreachable_is_trouble",
        ),
    ),
    Fault(
        "a study with failed trials is started again for ever", "pods/supervise.py",
        'studies.FINAL if record.get("study") else hosts.FINAL', "hosts.FINAL",
        ("tests/pods/test_supervise.py::test_how_a_study_ended_decides_whether_it_is_started_again",),
    ),
    Fault(
        "a stop of one host does not reach the others", "cluster/processes.py",
        "_line is not None and _line.stop_at < math.inf", "_line is not None and _line.index == 0",
        ("tests/cluster/test_hub.py::test_who_does_not_pass_boundaries_sees_that_a_stop_is_agreed",),
    ),
    Fault(
        "a pod whose hosts see other processes is ready", "pods/checks/readiness.py",
        "!= (count, total)", "== (0, total)",
        ("tests/pods/test_readiness.py::test_each_item_can_fail_and_says_where",),
    ),
)  # fmt: skip


def planted_in(text: str, fault: Fault) -> str:
    """Return the text of a file with a fault; ValueError if the file does not contain the fault's text once."""
    if text.count(fault.text) != 1:
        raise ValueError(f"{fault.file} has {fault.text!r} {text.count(fault.text)} times, not once; mend the table")
    return text.replace(fault.text, fault.planted)


def copied(tree: pathlib.Path) -> pathlib.Path:
    """Copy the working tree, without ignored files, and make a cache for it; return the cache."""
    subprocess.run(["git", "clone", "--quiet", "--shared", str(support.ROOT), str(tree)], check=True)
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=support.ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        (tree / name).unlink(missing_ok=True)
        if (support.ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(support.ROOT / name, tree / name)
    (tree / ".venv").symlink_to(support.ROOT / ".venv")
    compiled, cache = cache_path("") / "tests" / "compiled", tree.with_name("cache")
    compiled.mkdir(parents=True, exist_ok=True)
    (cache / "torus" / "tests").mkdir(parents=True)
    (cache / "torus" / "tests" / "compiled").symlink_to(compiled)
    return cache


def failing(tests: Iterable[str], template: warm.Template, *more: str) -> list[str]:
    """Return the tests that fail in the copy; its template of tests/warm.py has its own root and cache."""
    arguments = ["-c", PYTEST, "-q", "-n", "0", "-p", "no:cacheprovider", *more, *tests]
    process = template.fork(arguments, dict(os.environ))
    said = "".join(process.communicate())
    found = FAILED.findall(said)
    if process.returncode != (SOMETHING_FAILED if found else NOTHING_FAILED):
        sys.exit(f"{said}pytest {' '.join(tests)} ended with status {process.returncode}")
    return found


def tried(fault: Fault, tree: pathlib.Path, template: warm.Template) -> str | None:
    """Plant a fault; return the test that catches it, or None."""
    path = tree / fault.file
    whole = path.read_text()
    path.write_text(planted_in(whole, fault))
    try:
        return next(iter(failing(fault.tests, template, "-x")), None)
    finally:
        path.write_text(whole)


def template_in(tree: pathlib.Path, cache: pathlib.Path) -> warm.Template:
    """Return a template whose processes have imported the libraries and then import the copy's code."""
    os.environ |= {
        "XDG_CACHE_HOME": str(cache), "PYTHONDONTWRITEBYTECODE": "1",  # which would tell a change by time and size
        "JAX_COMPILATION_CACHE_DIR": str(cache / "torus" / "tests" / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }  # fmt: skip
    tensorflow()  # sets the variables by which it says nothing while it is imported
    return warm.template(tree, workspace=())


def main() -> None:
    """Plant all faults in turn; then run the tests that caught them without any fault."""
    chosen, catching, missed = FAULTS[:QUICK_FAULTS] if support.QUICK else FAULTS, set(), []
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder) / "tree"
        template = template_in(tree, copied(tree))
        for fault in chosen:
            test = tried(fault, tree, template)
            print(f"{fault.file}: {fault.what}: {f'caught by {test}' if test else 'MISSED'}", flush=True)
            catching |= {test} - {None}
            missed += [] if test else [f"{fault.file}: {fault.what}"]
        if wrong := catching and failing(sorted(catching), template):
            sys.exit(f"fails without any fault: {', '.join(wrong)}")
        template.close()
    support.finish("planted_faults", {"planted": len(chosen), "caught": len(chosen) - len(missed), "missed": missed})
    if missed:
        sys.exit(f"planted_faults: {len(missed)} of {len(chosen)} are missed")


if __name__ == "__main__":
    main()
