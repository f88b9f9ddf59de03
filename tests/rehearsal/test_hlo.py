# SPDX-License-Identifier: Apache-2.0
"""The text of a compiled program is read as printed; what cannot be read is named, not guessed."""

import jax
import jax.numpy as jnp
import pytest

from rehearsal import hlo, roofline

LOOP = """HloModule jit_step, is_scheduled=true

FileNames
1 "{root}/layers/mlp.py"
2 "{root}/layers/products.py"
3 "/usr/lib/python3/jax/core.py"

FunctionNames
1 "MLP.__call__"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=28 end_line=28 column=1 end_column=9}}
2 {{file_name_id=2 function_name_id=1 line=7 end_line=7 column=1 end_column=9}}
3 {{file_name_id=3 function_name_id=1 line=9 end_line=9 column=1 end_column=9}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
3 {{file_location_id=3 parent_frame_id=3}}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %p = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %one = s32[]{{:T(128)}} constant(1)
  %next = s32[]{{:T(128)}} add(%i, %one)
  %x = f32[8]{{0:T(128)}} get-tuple-element(%p), index=1
  ROOT %out = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) tuple(%next, /*index=1*/%x)
}}

%condition (q: (s32[], f32[8])) -> pred[] {{
  %q = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) parameter(0)
  %j = s32[]{{:T(128)}} get-tuple-element(%q), index=0
  %limit = s32[]{{:T(128)}} constant(12)
  ROOT %less = pred[]{{:T(512)}} compare(%j, %limit), direction={direction}
}}

ENTRY %main (a: f32[8]) -> f32[8] {{
  %a = f32[8]{{0:T(128)}} parameter(0), metadata={{op_name="state.params[\\'mlp\\']"}}
  %zero = s32[]{{:T(128)}} constant(2)
  %start = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) tuple(%zero, %a)
  %loop = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) while(%start), condition=%condition, body=%body, m={{stack_frame_id=3}}
  %kernel = f32[8]{{0:T(128)S(1)}} custom-call(%a), custom_call_target="x", attributes={{a={{
"text":"two lines"
}}}}, metadata={{op_name="jit(step)/kernel"}}
  ROOT %r = f32[8]{{0:T(128)}} get-tuple-element(%loop), index=1
}}
"""


def module(direction: str = "LT") -> hlo.Module:
    return hlo.parse(LOOP.format(root=hlo.ROOT, direction=direction))


def test_a_loop_is_counted_by_its_start_its_limit_and_its_step():
    loop = module().instructions["main"]["loop"]
    assert module().trip_count(loop) == 10


def test_a_loop_without_a_counter_is_named():
    found = module("GT")
    with pytest.raises(ValueError, match="the loop loop ends on compare"):
        found.trip_count(found.instructions["main"]["loop"])


def test_a_source_is_the_innermost_line_of_ours_that_is_no_helper():
    found = module()
    assert found.source(found.instructions["main"]["loop"]) == "layers/mlp.py:28"


def test_attributes_may_go_over_several_lines():
    found = module()
    kernel = found.instructions["main"]["kernel"]
    assert kernel.op_name == "jit(step)/kernel"
    assert kernel.shapes[0].space == 1
    assert found.root("main").name == "r"


@pytest.mark.parametrize(
    ("kind", "size", "padded"),
    [
        ("f32[8,100]{1,0:T(8,128)}", 3200, 4096),
        ("bf16[4,512,32,128]{3,1,2,0:T(8,128)(2,1)S(3)}", 2 * 4 * 512 * 32 * 128, 2 * 4 * 512 * 32 * 128),
        ("f32[5]{0:T(1024)}", 20, 4096),
        ("s32[]{:T(128)}", 4, 4),
        ("f32[3,5]", 60, 60),
    ],
)
def test_bytes_count_the_padding_of_tiles(kind, size, padded):
    shape = hlo.parse(f"ENTRY %m (a: f32[1]) -> f32[1] {{\n  ROOT %a = {kind} parameter(0)\n}}").root("m").shapes[0]
    assert (shape.bytes, shape.padded_bytes) == (size, padded)


REDUCE = """ENTRY %%m (a: f32[4]) -> f32[4] {
  %%a = f32[4] parameter(0)
  ROOT %%g = f32[4] all-reduce(%%a), %s
}"""


@pytest.mark.parametrize(
    ("printed", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, x", [[0, 1], [2, 3]]),
        ("replica_groups={}, x", [[0, 1, 2, 3]]),
        ("replica_groups=[2,2]<=[4], x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", [[0, 2], [1, 3]]),
        ("replica_groups=[1,4]<=[4], x", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['axis_0'=4] {'axis_0'}, x", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, x", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}, x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=1,'b'=4], device_ids=([2,2]T(1,0)) {'b'}, x", [[0, 2, 1, 3]]),
        ("source_target_pairs={{0,1},{1,0}}, x", [[0, 1], [1, 0]]),
    ],
)
def test_groups_are_read_in_all_the_ways_they_are_printed(printed, groups):
    assert hlo.groups(hlo.parse(REDUCE % printed).root("m"), 4) == groups


def test_unknown_groups_are_named():
    with pytest.raises(ValueError, match="groups of all-reduce g cannot be read: 'new"):
        hlo.groups(hlo.parse(REDUCE % "replica_groups=new[3]").root("m"), 4)


def test_flops_of_products_are_those_of_their_sizes():
    """Also where the compiler has made a fusion or a call of them."""
    a, b = jax.ShapeDtypeStruct((5, 64, 96), jnp.float32), jax.ShapeDtypeStruct((5, 96, 32), jnp.float32)
    compiled = jax.jit(lambda a, b: jax.nn.relu(jnp.einsum("bij,bjk->bik", a, b)) + 1).lower(a, b).compile()
    found = hlo.parse(compiled.as_text())
    total = sum(roofline.flops(found, i) for i in found.computations[found.entry])
    assert total == 2 * 5 * 64 * 96 * 32


CONVOLUTION = """ENTRY %m (a: bf16[4,8,16], b: bf16[3,16,32]) -> bf16[4,8,32] {{
  %a = bf16[4,8,16] parameter(0)
  %b = bf16[3,16,32] parameter(1)
  ROOT %c = bf16[4,8,32] convolution(%a, %b), window={{{window}}}, dim_labels=b0f_0io->b0f
}}"""


@pytest.mark.parametrize(
    ("window", "positions"),
    [("size=3 pad=1_1", 8 * 3 - 2), ("size=3 pad=2_0", 8 * 3 - 3), ("size=3 pad=1_1 lhs_dilate=2", 4 + 4 + 4)],
)
def test_flops_of_a_convolution_leave_out_padding_and_holes(window, positions):
    """The TPU compiler writes products over batches as convolutions whose windows are mostly padding."""
    found = hlo.parse(CONVOLUTION.format(window=window))
    assert roofline.flops(found, found.root("m")) == 2 * 4 * 16 * 32 * positions
