# SPDX-License-Identifier: Apache-2.0
"""Adding is what WORKSPACE.md says it is: each kind of thing is added to a copy of the tree, once, and used there.

The files that an addition touches are held to the map's table and to a number, and they are enough: in the copy all of
them are put into one run, and what holds the house together passes.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.support import ROOT

LICENSE = "# SPDX-License-Identifier: Apache-2.0\n"
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "runs", "fixtures", "recorded", "RESULTS.md", "*.lock")

RECIPE = '''"""Does it learn?"""

from configs import tiny


def get_config():
    """Return the recipe."""
    config = tiny.get_config()
    config.model.name = config.train.objective = config.optimizer.name = config.optimizer.schedule = "added"
    return config
'''
LAYER = '''"""A factor for each channel (arXiv:2103.17239, equation 2). D embed."""

from flax import nnx

from layers.axes import scale


class LayerScale(nnx.Module):
    """Multiply the last dimension."""

    def __init__(self, embed_dim: int):
        self.scale = scale(embed_dim, ("norm",))

    def __call__(self, x_BTD):
        return x_BTD * self.scale[...].astype(x_BTD.dtype)
'''
MODEL = '''"""A language model that sees the last token alone: MLPs, and nothing that mixes positions."""

from flax import nnx

from layers.added import LayerScale
from layers.block import Stack
from layers.embeddings import Embedding
from layers.mlp import SwiGLU
from layers.normalization import RMSNorm
from layers.products import einsum_f32, transposed
from layers.fsdp import all_gather_reduce_first
from layers.units import of_mlps


def make(config, *, dtype, scan: bool, kernel: str = "", rngs: nnx.Rngs) -> "LastToken":
    """Build the model."""
    return LastToken(config, dtype=dtype, scan=scan, rngs=rngs)


def flops_per_token(config, length: int) -> float:
    """Return floating-point operations to train on one token."""
    return 6.0 * config.embed_dim * (3 * config.num_layers * config.mlp_dim + config.vocab_size)


def hidden_units(config) -> tuple:
    """Return the hidden units of the MLPs."""
    return (of_mlps(("stack", "blocks", "mlp"), biased=False),)


class Block(nnx.Module):
    """x + scale * mlp(norm(x))."""

    SUBLAYERS = ("mlp",)

    def __init__(self, embed_dim: int, mlp_dim: int, epsilon: float, rngs: nnx.Rngs):
        self.norm, self.factor = RMSNorm(embed_dim, epsilon=epsilon), LayerScale(embed_dim)
        self.mlp = SwiGLU(
            embed_dim=embed_dim, mlp_dim=mlp_dim, biased=False, quantization="none", out_scale=0.5, rngs=rngs
        )

    def __call__(self, x_BTD, cache, key):
        return x_BTD + self.factor(self.mlp(self.norm(x_BTD))), cache, {}


class LastToken(nnx.Module):
    """Embedding, blocks, a norm, and the embedding transposed."""

    logit_cap = 0.0

    def __init__(self, config, *, dtype, scan: bool, rngs: nnx.Rngs):
        sizes = config.embed_dim, config.mlp_dim, config.norm_epsilon
        self.dtype = dtype
        self.embed = Embedding(vocab_size=config.vocab_size, embed_dim=config.embed_dim, rngs=rngs)
        self.stack = Stack(
            lambda rngs: Block(*sizes, rngs), num_layers=config.num_layers, scan=scan, remat=config.remat, rngs=rngs
        )
        self.norm = RMSNorm(config.embed_dim, epsilon=config.norm_epsilon)

    def __call__(self, tokens_BT, positions_BT, segments_BT, cache=None, *, key=None):
        return self.forward_with_aux(tokens_BT, positions_BT, segments_BT, cache, key=key)[:2]

    def forward_with_aux(self, tokens_BT, positions_BT, segments_BT, cache=None, *, key=None):
        """Return (stream, cache, {})."""
        x_BTD, _, figures = self.stack(self.embed(tokens_BT, self.dtype), [()])
        return self.norm(x_BTD), cache, figures

    def head_weight(self):
        """Return [D, V]."""
        return transposed(self.embed.embedding[...])

    def head_inputs(self, x_BTD):
        """Return the stream and the head, whole."""
        return all_gather_reduce_first(x_BTD, self.head_weight(), ("embed", "vocab"), self.dtype)

    def logits(self, x_BTD):
        """Return float32 [B, T, V]."""
        return einsum_f32("BTD,DV->BTV", *self.head_inputs(x_BTD))

    def empty_cache(self, rows: int, length: int, dtype=None):
        """Return nothing: the last token is all that there is."""
        return {}

    def shorten_cache(self, cache, num_tokens_B):
        """Return nothing."""
        return cache
'''
OPTIMIZER = '''

def added(config, weights: Weights) -> optax.GradientTransformation:
    """The gradient over the root of its mean square."""
    return optax.scale_by_rms(decay=config.beta2, eps=config.epsilon)
'''
SCHEDULE = '''

def added(config, num_steps: int) -> optax.Schedule:
    """The peak over the root of the steps after the warm-up."""
    return _after_warmup(config, lambda step: (1 + step) ** -0.5)
'''
OBJECTIVE = '''"""Next-token prediction that leaves out the first token of a document."""

import jax.numpy as jnp

from objectives import language_modeling


def make(config) -> "NotTheFirst":
    """Return the objective of a configuration."""
    return NotTheFirst(**vars(language_modeling.make(config)))


class NotTheFirst(language_modeling.LanguageModeling):
    """Language modeling, but for the loss of what is trained on."""

    def loss(self, model, carry, batch, key):
        """Of targets in positions from 1 on."""
        later = batch | {"targets": jnp.where(batch["positions"] > 0, batch["targets"], -1)}
        return super().loss(model, carry, later, key)
'''
SOURCE = '''

@source
def added(data, path: str, **_) -> Iterable[Document]:
    """The first two files of a path."""
    return _documents(data, find_files(path)[:2], format_of)
'''
FORMAT = '''class Lines(RecordFile):
    """A document a line."""

    def values(self) -> Iterator[tuple[int, bytes]]:
        with open_decompressed(self.path) as lines:
            yield from enumerate(lines, start=1)

    def text(self, number: int, value: bytes) -> bytes:
        return value

    def name(self, number: int) -> str:
        return f"{self.path}:{number}"


BY_SUFFIX: dict[str, type[RecordFile]] = {
    ".lines": Lines,'''
KEY = """train.added = Key(4, "an added number of steps", above=1, most=8, scope=UNCOMPILED)

"""
BENCHMARK = '''"""How many steps has the smallest recipe?"""

import support

from configs import tiny

if __name__ == "__main__":
    support.finish("added", {"steps": tiny.get_config().train.steps})
'''
TESTS = '''"""What was added is used."""

import jax
import pytest

from core import assembly
from configs import base, topologies
from configs.errors import ConfigError
from configs.key import RESUME, UNCOMPILED
from settings import loading, validation
from input_pipeline.sources import read_source
from parallelism.mesh import mesh_context
from inference.batching import Request
from inference.decoding import generate

SMALL = {
    "model.num_layers": "2", "model.embed_dim": "16", "model.mlp_dim": "24", "model.vocab_size": "32",
    "train.sequence_length": "16", "train.global_batch": "8", "optimizer.warmup_steps": "1",
}


def assembled(topology, **mesh):
    loaded = loading.load("configs/added.py", topology, SMALL | {f"mesh.{axis}": size for axis, size in mesh.items()})
    validation.validate(loaded.config, loaded.topology.chips, loaded)
    return assembly.assemble(loaded.config, devices=jax.devices()[: loaded.topology.chips])


def test_a_run_of_it_learns_on_eight_devices_and_writes_on_one():
    run, losses = assembled("cpu-8", data="2", fsdp="2", model="2"), []
    batch = jax.device_get(run.objective.random_batch(jax.random.key(0)))
    with mesh_context(run.mesh):
        state = run.init()
        for _ in range(6):
            state, scalars = run.train_step(state, batch)
            losses.append(float(scalars["loss"]))
        params = jax.device_get(state.params)
    assert losses[-1] < losses[0] - 0.5  # of 3.5 nats
    one = assembled("cpu")
    with mesh_context(one.mesh):
        written = generate(one.graph, params, [Request([1, 2], 2), Request([3], 2)], vocab_size=32)
    assert [len(tokens) for tokens in written] == [2, 2]


def test_documents_of_it_are_read(tmp_path):
    for name in ("a.lines", "b.lines", "c.lines"):
        (tmp_path / name).write_text("one\\ntwo\\n")
    data = base.get_config().data
    data.update(source="added", path=str(tmp_path))
    documents = read_source(data, vocab_size=256, seed=0)
    assert [document.open().read() for document in documents] == [b"one\\n", b"two\\n"] * 2


def test_the_key_is_read_and_its_range_is_checked():
    loaded = loading.load("configs/added.py", "cpu", {"train.added": "5"})
    assert (loaded.config.train.added, base.get_config().train.added) == (5, 4)
    assert "train.added" in base.keys_of(UNCOMPILED) and "train.added" not in base.keys_of(RESUME)
    for value, rule in ((9, "at most 8"), (1, "greater than 1")):
        loaded.config.train.added = value
        with pytest.raises(ConfigError, match=f"^train.added={value} must be {rule} .an added number of steps.$"):
            validation.validate(loaded.config, 1, loaded)


def test_the_topology_is_there():
    assert topologies.of_size(topologies.get("v6e-8"), 16) == "v6e-16"
'''

ADDITIONS = {  # of each kind: {file: its text, or (what stands there, what does then) in one that there is}
    "recipe": {"configs/added.py": RECIPE},
    "experiment": {"benchmarks/added.py": BENCHMARK},
    "layer": {"layers/added.py": LAYER},
    "model": {"models/added.py": MODEL},
    "objective": {"objectives/added.py": OBJECTIVE},
    "data source": {"input_pipeline/sources.py": ("\n\ndef format_of", SOURCE + "\n\ndef format_of")},
    "file format of many documents": {
        "input_pipeline/reading/formats.py": ("BY_SUFFIX: dict[str, type[RecordFile]] = {", FORMAT)
    },
    "optimizer": {"training/optimizers.py": ("\n\ndef _adam(", OPTIMIZER + "\n\ndef _adam(")},
    "schedule": {"training/schedules.py": ("\n\ndef scaled(", SCHEDULE + "\n\ndef scaled(")},
    "key": {"configs/base.py": ("batch = Section(", KEY + "batch = Section(")},
    "topology": {"configs/topologies.py": ('    "h100-8":', '    "v6e-16": ("v6e", 16, 4, "v6e:4x4"),\n    "h100-8":')},
}
FILES = {  # that an addition touches, with its recipe and its test where it has these
    "recipe": 1, "experiment": 1, "layer": 2, "model": 3, "objective": 3, "data source": 2,
    "file format of many documents": 2, "optimizer": 2, "schedule": 2, "topology": 1, "key": 1,
}  # fmt: skip
HOUSE = (  # what knows lists of files, names and shapes
    "tests/test_added.py", "tests/test_architecture.py", "tests/configs/test_golden.py",
    "tests/configs/test_topologies.py", "tests/settings/test_simulation.py", "tests/settings/test_loading.py",
)  # fmt: skip
TOYS = ROOT / "tests" / "toys"
TOY_FILES = {
    "reset_units": "training/transforms", "inner_update": "objectives", "second_head": "objectives",
    "self_training": "objectives",
}  # fmt: skip
TOY_KEY = (
    "configs/base.py",
    ("batch = Section(", 'train.reset_units_every = Key(0, "steps between resets; 0: none")\n\nbatch = Section('),
)
# Of these; all else is in this suite anyway.
OF_IT = "added or written_down or v6e-16 or test_architecture and not (point_down or few_libraries or at_once)"


def table() -> dict[str, list[str]]:
    """Return the map's rows of what can be added: {kind: [file, what else]}."""
    section = (ROOT / "WORKSPACE.md").read_text().partition("## How to add")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if "|" in line]
    assert all(len(" | ".join(row)) <= 3 * 120 for row in rows)  # three lines each
    return {kind: others for kind, *others in rows[2:]}


@pytest.mark.parametrize("kind", ADDITIONS)
def test_an_addition_touches_the_files_that_the_map_names(kind):
    file, also = table()[kind]
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", file)
    assert named == [path.replace("added", "NAME") for path in ADDITIONS[kind]]
    assert len(named) + also.count("its test") + also.count("a recipe with") == FILES[kind]


@pytest.mark.slow
def test_additions_work_in_a_copy_of_the_tree_and_the_house_stands(tmp_path):
    copy = copy_with([item for files in ADDITIONS.values() for item in files.items()], tmp_path)
    (copy / "tests/test_added.py").write_text(LICENSE + TESTS)
    run_pytest(copy, "-k", OF_IT, *HOUSE)
    benchmark = subprocess.run(
        [sys.executable, "benchmarks/run_all.py", "added"], cwd=copy, capture_output=True, text=True
    )
    assert benchmark.returncode == 0 and "| steps | 200 |" in (copy / "benchmarks/RESULTS.md").read_text()


@pytest.mark.slow
def test_each_toy_attaches_by_an_interface_without_an_edit_of_the_core(tmp_path):
    """A step transform, objectives of three kinds, callbacks, an evaluator, and runs that follow each other."""
    files = [(f"{folder}/{name}.py", (TOYS / f"{name}.py").read_text()) for name, folder in TOY_FILES.items()]
    copy = copy_with([*files, TOY_KEY, ("tests/test_toys.py", (TOYS / "use_toys.py").read_text())], tmp_path)
    run_pytest(copy, "tests/test_toys.py")


def copy_with(changes: list[tuple], folder: pathlib.Path) -> pathlib.Path:
    """Return a copy of the tree with new files, and with changes of files that there are."""
    copy = folder / "tree"
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    for path, change in changes:
        file = copy / path
        assert file.exists() == isinstance(change, tuple), path
        if isinstance(change, tuple):
            assert file.read_text().count(change[0]) == 1, path
            file.write_text(file.read_text().replace(*change))
        else:
            file.write_text(change if change.startswith(LICENSE) else LICENSE + change)
    return copy


def run_pytest(copy: pathlib.Path, *arguments: str) -> None:
    """Run tests in a copy of the tree; they pass."""
    house = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(house, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
