# SPDX-License-Identifier: Apache-2.0
"""Of a safetensors file we accept what the format's own reader accepts, and read the same numbers from it."""

import errno
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from migration import safetensors_files
from migration.safetensors_files import WeightsError


def entry(shape: list, start: int, end: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


TWO = {"a": entry([2], 0, 8), "b": entry([2], 8, 16)}
WRONG = {
    "overlapping tensors": TWO | {"b": entry([2], 4, 12)},
    "a hole": {"a": entry([2], 0, 8), "b": entry([1], 12, 16)},
    "bytes of no tensor": {"a": entry([2], 0, 8)},
    "a negative shape": {"a": entry([-4], 0, 16)},
    "a shape that is not a whole number": {"a": entry([4.0], 0, 16)},
    "a shape that is a truth value": {"a": entry([True], 0, 4), "b": entry([3], 4, 16)},
    "a shape as a text": {"a": entry(["4"], 0, 16)},
    "offsets the wrong way round": {"a": entry([4], 16, 0)},
    "a shape that overflows": {"a": entry([2**62, 2], 0, 16)},
    "a tensor beyond the end": TWO | {"c": entry([1], 16, 20)},
    "an unknown type": {"a": entry([4], 0, 16, "F31")},
    "a type that is not read": {"a": entry([2], 0, 16, "F64")},
    "an entry without offsets": {"a": {"dtype": "F32", "shape": [4]}},
    "metadata that are not texts": {"a": entry([4], 0, 16), "__metadata__": {"step": 3}},
    "a list": [],
    "an entry twice": b'{"a": %s, "a": %s}' % ((json.dumps(entry([4], 0, 16)).encode(),) * 2),
    "a deep header": b"[" * 100_000,
    "a header that ends early": b'{"a": {"dtype"',
}


def written(folder, header, body: bytes = bytes(16), length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + text + body)
    return folder


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_that_names_itself():
    """A small tensor fits the buffers, and would only be missing at the end."""
    with pytest.raises(OSError) as caught:
        safetensors_files.write_file(
            pathlib.Path("/dev/full"), {"a": ("F32", (2,))}, lambda name: iter([np.ones(2, np.float32)])
        )
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("what", WRONG)
def test_a_header_that_does_not_describe_its_file_is_refused_in_one_line(tmp_path, what):
    with pytest.raises(WeightsError) as error:
        safetensors_files.find(written(tmp_path, WRONG[what]))
    assert str(error.value).startswith(f"{tmp_path}/model.safetensors: ")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("content", [b"", b"abc", bytes(8), b"\xff" * 8, (2**40).to_bytes(8, "little") + b"{}"])
def test_a_file_without_a_header_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=r"^\S*/model\.safetensors: "):
        safetensors_files.find(tmp_path)


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(WeightsError, match="not a file; name a folder of safetensors files"):
        safetensors_files.find(tmp_path)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_any_rows_of_a_tensor_are_those_that_the_formats_own_reader_gives(tmp_path, dtype):
    tensors = {name: np.random.default_rng(0).standard_normal((7, 3, 2)).astype(dtype) for name in "ab"}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    found = safetensors_files.find(tmp_path)
    for name, tensor in tensors.items():
        for first, last in ((0, 7), (2, 5), (6, 7), (3, 3)):
            rows = found[name].rows(first, last)
            assert rows.dtype == tensor.dtype and rows.tobytes() == tensor[first:last].tobytes()


def test_a_file_that_becomes_shorter_while_it_is_read_is_told(tmp_path):
    stored = safetensors_files.find(written(tmp_path, TWO))["b"]
    with stored.file.open("r+b") as file:
        file.truncate(stored.start + 4)
    with pytest.raises(WeightsError, match="truncated"):
        stored.rows(0, 2)


def test_a_full_disk_is_told_with_the_file(tmp_path):
    def blocks(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError) as told:
        safetensors_files.write(tmp_path, {"a": ("F32", (2,))}, blocks)
    assert told.value.filename == str(tmp_path / "model.safetensors")
