# SPDX-License-Identifier: Apache-2.0
"""Readers of migration/ to fuzz: weights, configurations and tokens that others have written."""

import io
import json
import pathlib
import shutil
import types

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from migration import hugging_face, hugging_face_reader, logits, safetensors_files, trm_reference
from settings import validation
from tests.fuzz.harness import reader
from tests.support import ROOT

PUBLISHED = ROOT / "tests" / "fixtures" / "hugging_face"
SMALL = PUBLISHED / "llama2", PUBLISHED / "gemma3", PUBLISHED / "mixtral"  # one in two files, one of few kinds of keys
HEADER_BYTES = 8


def _tensors() -> dict[str, np.ndarray]:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    kinds = {"a": np.float32, "b": np.float16, "layers.0.c": jnp.bfloat16}
    return {name: (values + number).astype(kind) for number, (name, kind) in enumerate(kinds.items())}


def _weights() -> list[bytes]:
    return [
        safetensors.numpy.save(_tensors(), {"format": "pt"}),
        safetensors.numpy.save({"x": np.zeros(3, np.float32)}),
    ]


def _split(content: bytes) -> tuple[bytes, bytes]:
    end = HEADER_BYTES + int.from_bytes(content[:HEADER_BYTES], "little")
    return content[HEADER_BYTES:end].strip(), content[end:]


@reader("safetensors file", _weights)
def read_weights(content: bytes, folder: pathlib.Path) -> None:
    """What is accepted has the names, shapes and bytes that the format's own reader finds."""
    file = folder / safetensors_files.ONE_FILE
    file.write_bytes(content)
    found = safetensors_files.find(folder)
    with safetensors.safe_open(file, "numpy") as theirs:
        assert set(theirs.keys()) == found.keys()
        for name, ours in found.items():
            tensor = theirs.get_tensor(name)
            assert (tensor.shape, tensor.dtype) == (ours.shape, safetensors_files.DTYPES[ours.dtype])
            if ours.shape:
                assert ours.rows(0, ours.shape[0]).tobytes() == tensor.tobytes()


@reader("safetensors header", lambda: [_split(content)[0] for content in _weights()])
def read_header(content: bytes, folder: pathlib.Path) -> None:
    """A header in front of the tensors that it should describe."""
    body = max((_split(whole)[1] for whole in _weights()), key=len) if b"layers" in content else bytes(12)
    read_weights(len(content).to_bytes(HEADER_BYTES, "little") + content + body, folder)


@reader("Hugging Face config.json", lambda: [(folder / "config.json").read_bytes() for folder in PUBLISHED.iterdir()])
def read_config(content: bytes, folder: pathlib.Path) -> None:
    """What is accepted is a model of ours that can be built."""
    (folder / "config.json").write_bytes(content)
    config, _, model = hugging_face.configuration(folder)
    assert all(config.model[key] == value for key, value in model.items())
    validation.validate(config, 1)


@reader("Hugging Face folder", lambda: [(SMALL[1] / "config.json").read_bytes()], divisor=20)
def read_folder(content: bytes, folder: pathlib.Path) -> None:
    """A configuration in the folder of weights; if it is accepted, each tensor of the model is there."""
    for file in SMALL[1].iterdir():
        shutil.copyfile(file, folder / file.name)
    (folder / "config.json").write_bytes(content)
    published = hugging_face.Published(folder, folder / "run")
    assert all(published.stored[tensor.name].shape == tensor.shape for tensor in published.tensors)


@reader("safetensors index", lambda: [(SMALL[0] / safetensors_files.INDEX).read_bytes()])
def read_index(content: bytes, folder: pathlib.Path) -> None:
    """An accepted index names each tensor once, in a file of its folder."""
    for file in SMALL[0].glob("*.safetensors"):
        (folder / file.name).symlink_to(file)
    (folder / safetensors_files.INDEX).write_bytes(content)
    found = safetensors_files.find(folder)
    assert all(stored.file.parent == folder for stored in found.values())


@reader("types of imported tensors", lambda: [json.dumps({"a": "BF16", "b": "F32"}).encode()])
def read_types(content: bytes, folder: pathlib.Path) -> None:
    """What is accepted are types that we write."""
    (folder / hugging_face.TYPES).write_bytes(content)
    assert set(hugging_face.kept_types(folder).values()) <= safetensors_files.DTYPES.keys()


def _arrays() -> list[bytes]:
    found = []
    for save in (np.save, np.savez):
        save(file := io.BytesIO(), np.arange(6, dtype=np.int32).reshape(2, 3))
        found.append(file.getvalue())
    return found[:1]


@reader("tokens", _arrays)
def read_tokens(content: bytes, folder: pathlib.Path) -> None:
    """What is accepted are ids of the model's, a row of them at least."""
    (folder / "tokens.npy").write_bytes(content)
    found = logits.read_tokens(folder / "tokens.npy", types.SimpleNamespace(vocab_size=7, max_length=100))
    assert found.dtype == np.int32 and found.ndim == 2 and found.min() >= 0 and found.max() < 7


def _recursive() -> tuple[dict, dict]:
    tree = {"embedding": {"embedding": np.ones((5, 4), np.float32)}, "head": {"kernel": np.ones((4, 5), np.float32)}}
    return tree, trm_reference.to_reference(tree)


@reader("TRM weights", lambda: [safetensors.numpy.save(_recursive()[1])])
def read_trm(content: bytes, folder: pathlib.Path) -> None:
    """What is accepted has the shapes of the model's weights."""
    (folder / "weights.safetensors").write_bytes(content)
    tree = trm_reference.load(folder / "weights.safetensors", like := _recursive()[0])
    assert [leaf.shape for leaf in tree["head"].values()] == [leaf.shape for leaf in like["head"].values()]


@reader("second reader of an export", lambda: [(SMALL[1] / "config.json").read_bytes()], divisor=4)
def read_export(content: bytes, folder: pathlib.Path) -> None:
    """What it computes may be of another model; it ends, and in one line where it cannot."""
    (folder / safetensors_files.ONE_FILE).symlink_to(SMALL[1] / safetensors_files.ONE_FILE)
    (folder / "config.json").write_bytes(content)
    hugging_face_reader.logits(folder, np.zeros((1, 3), np.int32))
