# SPDX-License-Identifier: Apache-2.0
"""Reads and writes single arrays of a checkpoint in parts; they are plain zarr, as Orbax writes it.

With these functions, a model of any size is imported in little memory.
"""

import pathlib

import tensorstore


def create(folder: pathlib.Path, name: str, shape: tuple[int, ...], chunks: tuple[int, ...]) -> tensorstore.TensorStore:
    """Create and return a float32 array in the folder of a checkpoint's arrays; it replaces one of the same name.

    `name` is dotted, as in params.norm.scale. `chunks` is the size of a file in each dimension; each write should cover
    complete files.
    """
    metadata = {
        "shape": shape, "chunks": chunks, "dtype": "<f4", "dimension_separator": ".",
        "compressor": {"id": "zstd", "level": 1},
    }  # fmt: skip
    return tensorstore.open(_spec(folder, name) | {"metadata": metadata}, create=True, delete_existing=True).result()


def open_array(folder: pathlib.Path, name: str) -> tensorstore.TensorStore:
    """Return an array of a checkpoint for reading; files with several layers stay in memory after the first read.

    Reading a missing file is an error, and does not return zeros.
    """
    spec = _spec(folder, name) | {"fill_missing_data_reads": False}
    array = tensorstore.open(spec, open=True, read=True).result()
    layers = array.chunk_layout.read_chunk.shape[:1]
    if not layers or layers[0] == 1:
        return array
    kept = {"cache_pool": {"total_bytes_limit": 2 * array.size * array.dtype.numpy_dtype.itemsize}}
    return tensorstore.open(spec | {"context": kept}, open=True, read=True).result()


def _spec(folder: pathlib.Path, name: str) -> dict:
    return {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder / name}/"}}
