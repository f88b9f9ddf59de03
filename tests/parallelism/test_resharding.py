# SPDX-License-Identifier: Apache-2.0
"""Arrays move between meshes: no bit changes, the old arrays are deleted, and only missing parts are sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallelism import resharding
from parallelism.mesh import make_mesh
from parallelism.resharding import bytes_received, reshard, to_mesh

FSDP, MIXED, COPIES = {"fsdp": 8}, {"data": 2, "fsdp": 2, "model": 2}, {"data": 8}
WHOLE = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)  # 512 bytes


def laid(shape, dtype, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


@pytest.mark.parametrize("devices", [slice(None), slice(None, None, -1)], ids=["same order", "turned round"])
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize(
    ("start", "spec", "end", "new"),
    [(FSDP, P("fsdp"), MIXED, P("fsdp", "model")), (MIXED, P(None, ("data", "model")), COPIES, P()),
     (COPIES, P(), FSDP, P(None, "fsdp")), (COPIES, P(), MIXED, P())],
)  # fmt: skip
def test_arrays_are_whole_on_the_other_mesh_and_gone_from_the_old(start, spec, end, new, memory, devices):
    where = NamedSharding(make_mesh(end, jax.devices()[devices]), new, memory_kind=memory)
    array = jax.device_put(WHOLE, NamedSharding(make_mesh(start), spec, memory_kind=memory))
    moved = reshard({"weight": array}, {"weight": laid(WHOLE.shape, WHOLE.dtype, where)})["weight"]
    assert moved.sharding == where and array.is_deleted()
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(shard.data, WHOLE[shard.index])


def test_an_array_in_two_places_is_moved_once_and_shared_again():
    """The frozen base of adapters is also their reference model."""
    array = jax.device_put(WHOLE, NamedSharding(make_mesh(FSDP), P("fsdp")))
    layout = laid(WHOLE.shape, WHOLE.dtype, NamedSharding(make_mesh(COPIES), P()))
    moved = reshard({"base": array, "reference": array}, {"base": layout, "reference": layout})
    assert moved["base"] is moved["reference"] and array.is_deleted()
    np.testing.assert_array_equal(moved["base"], WHOLE)


@pytest.mark.parametrize("devices", [slice(None), slice(None, None, -1)], ids=["same order", "turned round"])
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_large_stacks_of_layers_are_moved_a_layer_at_a_time(monkeypatch, devices, memory):
    stack = np.arange(6 * 16 * 8, dtype=np.float32).reshape(6, 16, 8)
    before = NamedSharding(make_mesh(FSDP), P(None, "fsdp"), memory_kind=memory)
    after = NamedSharding(make_mesh(MIXED, jax.devices()[devices]), P(None, "fsdp", "model"), memory_kind=memory)
    monkeypatch.setattr(resharding, "LARGE_BYTES", stack.nbytes)
    array = jax.device_put(stack, before)
    assert resharding._in_parts(array, after)
    moved = reshard(array, laid(stack.shape, stack.dtype, after))
    assert moved.sharding == after and array.is_deleted()
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(shard.data, stack[shard.index])
    for spec in (P("fsdp"), P(("data", "fsdp"), "model")):  # which split it
        assert not resharding._in_parts(moved, NamedSharding(make_mesh(MIXED), spec))


def test_on_another_mesh_arrays_keep_their_specs_and_those_without_are_on_every_device():
    before, after = make_mesh(FSDP), make_mesh(MIXED)
    split = jax.device_put(WHOLE, NamedSharding(before, P(None, "fsdp")))
    moved = to_mesh({"split": split, "count": np.int32(7), "one": jnp.ones(3)}, after)
    assert {name: array.sharding for name, array in moved.items()} == {
        "split": NamedSharding(after, P(None, "fsdp")), "count": NamedSharding(after, P()),
        "one": NamedSharding(after, P()),
    }  # fmt: skip
    np.testing.assert_array_equal(moved["split"], WHOLE)
    assert split.is_deleted() and int(moved["count"]) == 7


def test_a_mesh_that_does_not_divide_an_array_moves_none_of_them():
    before = make_mesh({"data": 4, "fsdp": 2})
    tree = [
        jax.device_put(WHOLE, NamedSharding(before, P("data"))),
        jax.device_put(WHOLE[:4], NamedSharding(before, P("data"))),
    ]
    with pytest.raises(ValueError, match="should evenly divide"):
        to_mesh(tree, make_mesh(COPIES))
    assert not any(array.is_deleted() for array in tree)


def test_counts_keys_and_what_stays_come_along():
    before, after = (make_mesh(axes) for axes in (FSDP, MIXED))
    keys = jax.random.split(jax.random.key(0), 8)
    tree = {
        "step": jax.device_put(jnp.uint32(7), NamedSharding(before, P())),
        "keys": jax.device_put(keys, NamedSharding(before, P("fsdp"))),
        "stays": jax.device_put(WHOLE, NamedSharding(after, P("fsdp"))),
    }
    specs = {"step": P(), "keys": P(("data", "fsdp")), "stays": P("fsdp")}
    to = {name: laid(tree[name].shape, tree[name].dtype, NamedSharding(after, spec)) for name, spec in specs.items()}
    stays, moved = tree["stays"], reshard(tree, to)
    assert moved["stays"] is stays and int(moved["step"]) == 7
    np.testing.assert_array_equal(*(jax.random.key_data(of) for of in (moved["keys"], keys)))


@pytest.mark.parametrize(
    ("start", "spec", "end", "new", "most", "total"),
    [
        (COPIES, P(), FSDP, P("fsdp"), 0, 0),  # each device has its part already
        (FSDP, P("fsdp"), COPIES, P(), 448, 8 * 448),  # each misses seven eighths
        (FSDP, P("fsdp"), MIXED, P("data"), 192, 8 * 192),  # halves; each device has a quarter of one
        # Devices 0 to 3 want rows 0 to 7, even ones the left half of them, and have two rows each; so the others.
        (FSDP, P("fsdp"), MIXED, P("data", "model"), 96, 8 * 96),
        (FSDP, P("fsdp"), {"fsdp": 2, "data": 4}, P("data"), 128, 6 * 128 + 2 * 64),
    ],
)
def test_what_a_device_misses_is_counted(start, spec, end, new, most, total):
    array = laid(WHOLE.shape, WHOLE.dtype, NamedSharding(make_mesh(start), spec))
    moved = bytes_received([array], [laid(WHOLE.shape, WHOLE.dtype, NamedSharding(make_mesh(end), new))])
    assert moved == (most, total)


def test_a_layer_at_a_time_takes_less_memory_by_the_compilers_count():
    """From all devices on one dimension to two dimensions, and back, the compiler gathers the whole array."""
    shape, one, two = (32, 64, 32), P(None, "fsdp"), P(None, "fsdp", "model")
    for (before, old), (after, new) in (((FSDP, one), (MIXED, two)), ((MIXED, two), (FSDP, one))):
        array, to = (NamedSharding(make_mesh(mesh), spec) for mesh, spec in ((before, old), (after, new)))
        part = NamedSharding(to.mesh, P(*new[1:]))
        with jax.set_mesh(to.mesh):
            jitted = jax.jit(resharding._laid, static_argnums=1, out_shardings=to)
            compiled = [jitted.lower(laid(shape, jnp.float32, array), how).compile() for how in (part, None)]
        by_layers, whole = (program.memory_analysis().temp_size_in_bytes for program in compiled)
        assert by_layers < 0.5 * whole and whole >= 4 * 32 * 64 * 32
