# SPDX-License-Identifier: Apache-2.0
"""Does a published model score here as lm-evaluation-harness scores it with transformers?

For each family of published models, a tiny random one is imported. The same questions and texts, made here, are scored
by the harness's own backend for Hugging Face models and by `torus`. Log-likelihoods of choices must agree to 1e-4 nats,
and those of texts to 1e-4 of their size. The chosen answers must be the same, except where the two best of an item
differ by less than 2e-4 nats, which are counted.

It needs two extras: make setup EXTRAS="interop lm-eval".
"""

import importlib.util
import json
import pathlib
import sys
import tempfile

import numpy as np
import support

TOLERANCE, MARGIN = 1e-4, 2e-4
ITEMS = 20 if support.QUICK else 200
WORDS = ["bad", "cab", "dead", "face", "fed", "gag", "head", "hide", "idea", "had", "bag", "fig", "chef", "dig"]
MISSING = [name for name in ("lm_eval", "torch", "transformers") if importlib.util.find_spec(name) is None]
if MISSING:
    support.usage_error(f'{MISSING[0]} is not installed; run make setup EXTRAS="interop lm-eval"')

import tokenizers
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from core.scored_model import scored_model
from migration.logits import float32_run
from parallelism.mesh import mesh_context
from scoring.harness import Torus
from tests.migration import hugging_face_cases as cases
from tests.migration.record_hugging_face import CASES, V, make
from trained_run import TrainedRun


def text(rng: np.random.Generator, count: int) -> str:
    """Return some random words."""
    return " ".join(rng.choice(WORDS, count))


def write_tokenizer(folder: pathlib.Path, *, begins: bool) -> None:
    """Write a byte-pair encoding of the words; with `begins` it puts <s> before each text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = tokenizers.decoders.Metaspace(prepend_scheme="never")
    rng = np.random.default_rng(0)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=V, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False, max_token_length=6
    )  # fmt: skip
    tokenizer.train_from_iterator([text(rng, 40) for _ in range(50)], trainer)
    if begins:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    marks = {"unk_token": "<unk>", "eos_token": "</s>"} | ({"bos_token": "<s>"} if begins else {})
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(marks | settings))


def both(case: str, folder: pathlib.Path) -> tuple:
    """Return (the harness's backend, its variant for whole texts, ours, the mesh) of a random model of a family.

    The variant adds no <s>: for whole texts the backend would add it twice, and score the second.
    """
    make(case, folder / "theirs", seed=1)
    write_tokenizer(folder / "theirs", begins=not case.startswith("qwen"))
    published = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "theirs", dtype="float32", attn_implementation="eager"
    ).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder / "theirs")
    how = {"pretrained": published, "tokenizer": tokenizer, "batch_size": 8}
    config = float32_run(cases.import_run(folder / "theirs", folder / "run")).config
    trained = TrainedRun(folder / "run", config)
    model = scored_model(trained.run, trained.params, trained.tokenizer, lambda *batch: None, is_trained=False)
    return HFLM(**how), HFLM(**how, add_bos_token=False), Torus(model), model.mesh


def request(kind: str, *arguments) -> Instance:
    """Return a request of the harness."""
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def compare(case: str, folder: pathlib.Path) -> dict[str, float]:
    """Return how far both backends differ on one family."""
    rng = np.random.default_rng(3)
    theirs, theirs_whole, ours, mesh = both(case, folder)
    lengths = rng.integers(0, 60, ITEMS)  # words: some questions are longer than the model's inputs
    questions = [text(rng, count) for count in lengths]
    choices = [[f" {text(rng, rng.integers(1, 5))}" for _ in range(4)] for _ in questions]
    pairs = [request("loglikelihood", q, c) for q, of in zip(questions, choices, strict=True) for c in of]
    texts = [request("loglikelihood_rolling", text(rng, count)) for count in (1, 30, 90, 150)]
    with mesh_context(mesh):
        found = ours.loglikelihood(pairs), ours.loglikelihood_rolling(texts)
    expected = theirs.loglikelihood(pairs, disable_tqdm=True), theirs_whole.loglikelihood_rolling(texts, True)
    values = [np.array([value for value, _ in side[0]]).reshape(ITEMS, 4) for side in (found, expected)]
    margins = np.diff(np.sort(values[1], axis=1)[:, -2:])[:, 0]
    clear = margins >= MARGIN
    rolling = [np.array(side[1]) for side in (found, expected)]
    return {
        "difference": float(np.abs(values[0] - values[1]).max()),
        "rolling_difference": float(np.abs(rolling[0] / rolling[1] - 1).max()),
        "other_answers": int((values[0].argmax(1) != values[1].argmax(1))[clear].sum()),
        "other_greedy": sum(ours[1] != theirs[1] for ours, theirs in zip(found[0], expected[0], strict=True)),
        "close_items": int((~clear).sum()),
    }  # fmt: skip


def main() -> None:
    """Compare all families."""
    figures = {"items_of_a_family": ITEMS}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = compare(case, pathlib.Path(folder))
        print(f"{case}: {found}", flush=True)
        figures |= {f"{case}_{name}": value for name, value in found.items()}
    wrong = [name for name, value in figures.items() if "difference" in name and value > TOLERANCE]
    wrong += [name for name, value in figures.items() if "other_answers" in name and value]
    support.finish("scores", figures)
    if wrong:
        sys.exit(f"{', '.join(wrong)}: not what lm-evaluation-harness gives with transformers")


if __name__ == "__main__":
    main()
