# SPDX-License-Identifier: Apache-2.0
"""The arrays of a checkpoint as files, opened one by one and read or written in parts: plain zarr, as Orbax writes it.

With these a model of any size is taken in or given out in little memory.
"""

import pathlib

import tensorstore

FAILURES = (OSError, ValueError)  # of opening and reading


def create(folder: pathlib.Path, name: str, shape: tuple[int, ...], chunks: tuple[int, ...]) -> tensorstore.TensorStore:
    """Return a new float32 array in the folder of a checkpoint's arrays, in place of what has its name.

    `name` is dotted, as in params.norm.scale; `chunks` says how much of each dimension is in a file, and what is
    written at once should be whole files.
    """
    metadata = {
        "shape": shape, "chunks": chunks, "dtype": "<f4", "dimension_separator": ".",
        "compressor": {"id": "zstd", "level": 1},
    }  # fmt: skip
    return tensorstore.open(_spec(folder, name) | {"metadata": metadata}, create=True, delete_existing=True).result()


def opened(folder: pathlib.Path, name: str) -> tensorstore.TensorStore:
    """Return an array of a checkpoint to read from; files of several layers are kept in memory once they are read."""
    array = tensorstore.open(_spec(folder, name), open=True, read=True).result()
    layers = array.chunk_layout.read_chunk.shape[:1]
    if not layers or layers[0] == 1:
        return array
    kept = {"cache_pool": {"total_bytes_limit": 2 * array.size * array.dtype.numpy_dtype.itemsize}}
    return tensorstore.open(_spec(folder, name) | {"context": kept}, open=True, read=True).result()


def _spec(folder: pathlib.Path, name: str) -> dict:
    return {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder / name}/"}}
