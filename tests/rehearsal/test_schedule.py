# SPDX-License-Identifier: Apache-2.0
"""A schedule is replayed to the times that its table of prices implies, worked out by hand."""

import dataclasses

import pytest

from rehearsal import hlo, memory, schedule
from rehearsal.assumptions import Assumptions

# 1 GHz, so that 1000 cycles are 1 us; rings at 1 GB/s and permutes at 0.5 GB/s, so that 1000 bytes are 1 and 2 us.
GIVEN = Assumptions(
    peak_flops=1e12, memory_bandwidth=1e12, ring_bandwidth=1e9, permute_bandwidth=0.5e9, clock_hz=1e9,
    kernel_efficiency=0.5, dcn_bandwidth=0.1e9, host_bandwidth=0.25e9,
)  # fmt: skip
MESH = {"data": 2, "fsdp": 4}
US = pytest.approx


def work(name: str, cycles: int, operand: str = "a") -> str:
    return f'  %{name} = f32[250] negate(%{operand}), backend_config={{"estimated_cycles":"{cycles}"}}\n'


def replay(body: str, computations: str = "") -> schedule.Replayed:
    text = f"{computations}ENTRY %m (a: f32[250]) -> f32[250] {{\n  %a = f32[250] parameter(0)\n{body}}}\n"
    return schedule.replay(hlo.parse(text), GIVEN, MESH)


GATHER = "  %s = (f32[250], f32[1000]) all-gather-start(%a), replica_groups=[2,4]<=[8], dimensions={0}\n"
GATHERED = "  %d = f32[1000] all-gather-done(%s)\n"


def test_instructions_follow_one_another():
    assert replay(work("x", 1000) + work("y", 500)).seconds * 1e6 == US(1.5)


@pytest.mark.parametrize(("cycles", "seconds", "exposed"), [(1000, 3.0, 2.0), (3000, 3.0, 0.0), (5000, 5.0, 0.0)])
def test_an_asynchronous_gather_runs_beside_the_core(cycles, seconds, exposed):
    """Each of 4 devices sends 3 times its 1000 bytes: 3 us."""
    found = replay(GATHER + work("x", cycles) + GATHERED)
    assert found.seconds * 1e6 == US(seconds)
    assert found.exposed_seconds * 1e6 == US(exposed)
    assert [c.axes for c in found.costs if c.category == "collective"] == ["fsdp"]


@pytest.mark.parametrize(
    ("collective", "seconds", "axes"),
    [
        ("all-reduce(%a), replica_groups=[2,4]<=[8]", 2 * 3 / 4, "fsdp"),
        ("all-reduce(%a), replica_groups={}", 2 * 7 / 8, "data*fsdp"),
        ("reduce-scatter(%a), replica_groups=[4,2]<=[2,4]T(1,0)", 1 / 2, "data"),
        ("all-to-all(%a), replica_groups={{0,1,2,3},{4,5,6,7}}", 4 / 4, "fsdp"),
    ],
)
def test_a_synchronous_collective_stops_the_core(collective, seconds, axes):
    found = replay(f"  %c = f32[250] {collective}, dimensions={{0}}\n" + work("x", 1000))
    assert found.seconds * 1e6 == US(1 + seconds)
    assert found.exposed_seconds * 1e6 == US(seconds)
    assert found.costs[0].axes == axes


TO_HOSTS = (
    'channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
    '_xla_megascale_transfer_type="ALL_REDUCE"}'
)


@pytest.mark.parametrize(("cycles", "seconds", "exposed"), [(4000, 10.0, 6.0), (12000, 12.0, 0.0)])
def test_a_sum_over_slices_goes_through_the_hosts_beside_the_core(cycles, seconds, exposed):
    """Of two slices each chip sends its 1000 bytes, at a tenth of a GB/s: 10 us."""
    body = (
        f"  %t = token[] after-all()\n  %s = (f32[250], u32[], token[]) send(%a, %t), {TO_HOSTS}\n"
        f"  %r = (f32[250], u32[], token[]) recv(%t), {TO_HOSTS}\n{work('x', cycles)}"
        f"  %u = token[] send-done(%s), {TO_HOSTS}\n  %d = (f32[250], token[]) recv-done(%r), {TO_HOSTS}\n"
    )
    text = f"ENTRY %m (a: f32[250]) -> f32[250] {{\n  %a = f32[250] parameter(0)\n{body}}}\n"
    found = schedule.replay(hlo.parse(text), GIVEN, {"dcn_data": 2} | MESH)
    assert (found.seconds * 1e6, found.exposed_seconds * 1e6) == (US(seconds), US(exposed))
    assert [(c.kind, c.axes) for c in found.costs if c.category == "collective"] == [("all-reduce", "dcn_data")]


ON_HOST = """
  %%s = (f32[250]{0%s}, f32[250]{0%s}, u32[]{:S(2)}) copy-start(%%a)
  %%t = (f32[250]{0%s}, f32[250]{0%s}, u32[]{:S(2)}) copy-start(%%a)
{work}  %%u = f32[250]{0%s} copy-done(%%s)
  %%v = f32[250]{0%s} copy-done(%%t)
"""


@pytest.mark.parametrize(
    ("first", "second", "seconds"),
    [(("", ":S(5)"), ("", ":S(5)"), 8.0), (("", ":S(5)"), (":S(5)", ""), 4.0), (("", ""), ("", ""), 1.0)],
)
def test_copies_to_and_from_the_host_go_over_its_link_beside_the_core(first, second, seconds):
    """Two of 1000 bytes at 0.25 GB/s: one after the other in one direction, together in both."""
    text = ON_HOST % (*first, *second, first[0], second[0])
    assert replay(text.replace("{work}", work("x", 1000))).seconds * 1e6 == US(seconds, rel=1e-2)


def permute(name: str, step: int) -> str:
    pairs = ",".join(f"{{{n},{(n + step) % 8}}}" for n in range(8))
    return f"  %{name} = (f32[250], f32[250]) collective-permute-start(%a), source_target_pairs={{{pairs}}}\n"


@pytest.mark.parametrize(("steps", "seconds"), [((1, -1), 2.0), ((1, 1), 4.0)])
def test_permutes_of_one_direction_queue(steps, seconds):
    """1000 bytes take 2 us on a link; the other way round is another link."""
    body = permute("p", steps[0]) + permute("q", steps[1])
    body += "  %pd = f32[250] collective-permute-done(%p)\n  %qd = f32[250] collective-permute-done(%q)\n"
    assert replay(body).seconds * 1e6 == US(seconds)


SCATTER = """%scatter (i: f32[250]) -> f32[125] {
  %i = f32[250] parameter(0)
  %r = f32[250] all-reduce(%i), replica_groups=[4,2]<=[2,4]T(1,0), channel_id=7
  ROOT %d = f32[125] slice(%r), slice={[0:125]}
}

"""


@pytest.mark.parametrize(("emitter", "kind", "seconds"), [("", "all-reduce", 1.0), ("X", "reduce-scatter", 0.5)])
def test_a_collective_within_a_fusion_is_not_overlooked(emitter, kind, seconds):
    """An all-reduce and a slice in one fusion only scatter where the compiler says that it is such a program."""
    config = f', backend_config={{"emitter":"{emitter and "SingleInputAllReduceScatterFusion"}"}}'
    found = replay(f"  %f = f32[125] fusion(%a), kind=kCustom, calls=%scatter{config}\n", SCATTER)
    assert found.seconds * 1e6 == US(seconds)
    assert [(c.kind, c.axes, c.asynchronous) for c in found.costs] == [(kind, "data", False)]


CHAIN = """%first (i: f32[250]) -> (f32[250], f32[1000]) {
  %i = f32[250] parameter(0)
  %g = f32[1000] all-gather(%i), replica_groups=[2,4]<=[8], channel_id=3
  ROOT %s = (f32[250], f32[1000]) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%middle (i: f32[250], x: f32[4,4]) -> f32[4,4] {
  %i = f32[250] parameter(0)
  %x = f32[4,4] parameter(1)
  %g = f32[1000] all-gather(%i), replica_groups=[2,4]<=[8], channel_id=3
  ROOT %m = f32[4,4] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%last (i: f32[250]) -> f32[1000] {
  %i = f32[250] parameter(0)
  %g = f32[1000] all-gather(%i), replica_groups=[2,4]<=[8], channel_id=3
  ROOT %e = f32[1000] custom-call(%i, %g), custom_call_target="AsyncCollectiveDone"
}

"""


@pytest.mark.parametrize(("cycles", "seconds", "exposed"), [(1000, 3.0, 2.0), (5000, 5.0, 0.0)])
def test_a_collective_that_goes_on_over_several_fusions_is_one(cycles, seconds, exposed):
    body = (
        "  %x = f32[4,4] parameter(1)\n  %f = (f32[250], f32[1000]) fusion(%a), kind=kCustom, calls=%first\n"
        "  %c = f32[4,4] fusion(%a, %x), kind=kOutput, calls=%middle, "
        f'backend_config={{"estimated_cycles":"{cycles}"}}\n'
        "  %d = f32[1000] fusion(%a), kind=kCustom, calls=%last\n"
    )
    found = replay(body, CHAIN)
    assert found.seconds * 1e6 == US(seconds)
    assert found.exposed_seconds * 1e6 == US(exposed)
    [gather] = [c for c in found.costs if c.category == "collective"]
    assert (gather.count, gather.kind, gather.asynchronous) == (1, "all-gather", True)


def test_what_never_started_is_named():
    with pytest.raises(ValueError, match="d waits for an instruction that did not start"):
        replay("  %d = f32[1000] all-gather-done(%a)\n")


LOOP = """%b (p: (s32[], f32[250])) -> (s32[], f32[250]) {{
  %p = (s32[], f32[250]) parameter(0)
  %a = f32[250] get-tuple-element(%p), index=1
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
{body}  %n = s32[] add(%i, %one), backend_config={{"estimated_cycles":"0"}}
  ROOT %o = (s32[], f32[250]) tuple(%n, %a)
}}

%c (q: (s32[], f32[250])) -> pred[] {{
  %q = (s32[], f32[250]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %limit = s32[] constant({trips})
  ROOT %l = pred[] compare(%j, %limit), direction=LT
}}

"""
WHILE = """  %zero = s32[] constant(0)
  %t = (s32[], f32[250]) tuple(%zero, %a)
  %w = (s32[], f32[250]) while(%t), condition=%c, body=%b, metadata={op_name="jit(s)/jvp()/while"}
"""


def test_a_loop_is_its_body_so_many_times():
    found = replay(WHILE, LOOP.format(body=GATHER + work("x", 1000) + GATHERED, trips=100))
    assert found.seconds * 1e6 == US(300)
    assert found.exposed_seconds * 1e6 == US(200)
    gather = next(c for c in found.costs if c.category == "collective")
    assert (gather.count, gather.seconds * 1e6) == (100, US(300))
    [(seconds, events)] = found.timelines.values()
    assert seconds * 1e6 == US(300)
    assert {(e.lane, round(e.start * 1e6, 6), round(e.seconds * 1e6, 6)) for e in events if e.seconds} == {
        ("rings fsdp", 0.0, 3.0), ("core", 0.0, 1.0),
    }  # fmt: skip


def test_what_queues_from_one_iteration_to_the_next_is_not_forgotten():
    """The program waits for a gather of 3 us at once, but the ring still works on another, for which it never waits."""
    late = GATHER.replace("%s", "%u")
    found = replay(WHILE, LOOP.format(body=GATHER + GATHERED + late, trips=10))
    assert found.seconds * 1e6 == US(3 + 9 * 6)


KERNEL = """  %q = bf16[2,4,256,64] parameter(1)
  %k = bf16[2,2,256,64] parameter(2)
  %splash_{name}.1 = bf16[2,4,256,64] custom-call(%q, %k, %k), custom_call_target="tpu_custom_call"{more}
"""
FORWARD = 2 * 2 * 4 * 256 * 256 * 64


@pytest.mark.parametrize(("name", "flops"), [("fwd", FORWARD), ("dkv", 2 * FORWARD), ("dq", 1.5 * FORWARD)])
def test_attention_kernels_are_booked_at_half_of_peak(name, flops):
    """Forward 2 * batch * heads * length^2 * head dim, by the queries' heads where keys have fewer."""
    found = replay(KERNEL.format(name=name, more=""))
    assert found.flops == flops
    assert found.seconds == US(flops / 0.5e12)


FUSED = """  %q = bf16[2,4,256,64] parameter(1)
  %k = bf16[2,2,256,64] parameter(2)
  %splash_mha_dkv.1 = (f32[2,128,64], f32[2,128,64], {dq}bf16[2,2,256,64], bf16[2,2,256,64]) custom-call(%q, %k, %k), \
custom_call_target="tpu_custom_call"
"""


@pytest.mark.parametrize(("dq", "times"), [("", 2), ("bf16[2,2,4,256,64], ", 2.5)], ids=["alone", "fused"])
def test_the_backward_kernel_of_keys_and_values_computes_a_product_more_if_it_returns_dq_too(dq, times):
    assert replay(FUSED.format(dq=dq)).flops == times * FORWARD


WINDOWED = """  %t = s8[1,8,3] parameter(3)
  %q = bf16[2,4,4096,64] parameter(1)
  %k = bf16[2,2,4096,64] parameter(2)
  %splash_fwd.1 = bf16[2,4,4096,64] custom-call(%t, %q, %k), custom_call_target="tpu_custom_call", f={kernel={
"xprof_metadata":"{\\"block_q\\": 512, \\"block_kv\\": 256}"
}}
"""


def test_a_sliding_window_spares_what_the_kernel_skips():
    """3 blocks of 256 keys for a row of 16 blocks, where causal attention visits half of them."""
    assert replay(WINDOWED).flops == 4 * 2 * 4 * 4096 * 4096 * 64 * 3 * 256 / 4096


def test_other_kernels_go_by_what_they_declare_or_stop_the_replay():
    declared = ', backend_config={"custom_call_config":{"cost_estimate":{"flops":"1000000"}}}'
    text = KERNEL.replace("splash_{name}", "grouped")
    assert replay(text.format(more=declared)).flops == 1_000_000
    with pytest.raises(ValueError, match=r"the kernel grouped\.1 declares no FLOPs"):
        replay(text.format(more=""))


WRITING = """%write (s: f32[8,1000], x: f32[250], i: s32[]) -> (f32[8,1000], f32[250]) {
  %s = f32[8,1000] parameter(0)
  %x = f32[250] parameter(1)
  %i = s32[] parameter(2)
  %grouped.1 = (f32[1,1000], f32[250]) custom-call(%x), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config": {"cost_estimate": {
"bytes_accessed":1000,
"flops":1000000
}}}
  %first = f32[1,1000] get-tuple-element(%grouped.1), index=0
  %second = f32[250] get-tuple-element(%grouped.1), index=1
  %stack = f32[8,1000] dynamic-update-slice(%s, %first, %i, %i)
  ROOT %t = (f32[8,1000], f32[250]) tuple(%stack, %second)
}

"""
WRITE = """  %b = f32[8,1000] parameter(1)
  %j = s32[] parameter(2)
  %f = (f32[8,1000], f32[250]) fusion(%b, %a, %j), kind=kCustom, calls=%write
"""


def test_a_kernel_in_a_fusion_is_a_kernel_and_writes_a_slice_of_the_array():
    """As the compiler fuses a kernel with the write of its result into the stack of what is saved for each layer."""
    [cost] = [cost for cost in replay(WRITE, WRITING).costs if cost.category == "kernel"]
    assert (cost.flops, cost.seconds) == (1_000_000, US(1_000_000 / 0.5e12))
    assert cost.bytes == 4 * (250 + 1000 + 250 + 1)


CACHE = """  %k = bf16[8,2,1024,128] parameter(1)
  %decode_kernel.1 = (bf16[8,2,128], bf16[8,2,1024,128]) custom-call(%a, %k), custom_call_target="tpu_custom_call", \
backend_config={{"custom_call_config":{{"cost_estimate":{{"flops":"{flops}","bytes_accessed":"2000000"}}}}}}
"""


@pytest.mark.parametrize(("flops", "us"), [(1000, 2 / 0.25), (10_000_000, 10 / 0.5)])
def test_the_kernel_that_decodes_reads_the_cache_once_at_a_share_of_the_bandwidth(flops, us):
    """2 MB at a quarter of 1 TB/s; its results are in the memory of its operands."""
    text = f"ENTRY %m (a: f32[250]) -> f32[250] {{\n  %a = f32[250] parameter(0)\n{CACHE.format(flops=flops)}}}\n"
    given = dataclasses.replace(GIVEN, decode_efficiency=0.25)
    (cost,) = schedule.replay(hlo.parse(text), given, MESH).costs
    assert (cost.category, cost.bytes, cost.seconds * 1e6) == ("attention kernel", 2_000_000, US(us))


def test_an_instruction_without_cycles_is_priced_by_the_bytes_that_it_moves():
    assert replay("  %x = f32[250] negate(%a)\n").seconds == US(2000 / 1e12)


STEP = """%fused (x: f32[1024,1024]) -> f32[1024,1024] {
  %x = f32[1024,1024] parameter(0)
  ROOT %y = f32[1024,1024] negate(%x)
}

ENTRY %m (p: f32[1024,1024], b: s32[8]) -> f32[1024,1024] {
  %p = f32[1024,1024] parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %o = f32[1024,1024] parameter(1), metadata={op_name="state.optimizer[0].mu[\\'w\\']"}
  %h = f32[2048,1024] broadcast(%b), metadata={op_name="jit(s)/jvp()/mlp/up"}
  %g = f32[1024,1024] add(%h, %p), metadata={op_name="jit(s)/transpose(jvp())/dot"}
  %f = f32[1024,1024] fusion(%g), kind=kLoop, calls=%fused
  %b = s32[8] parameter(2), metadata={op_name="batch[\\'tokens\\']"}
  ROOT %r = f32[1024,1024] add(%f, %o)
}
"""


def test_buffers_live_from_their_instruction_to_their_last_use():
    """4 MiB each of parameters, moment and gradient, 8 MiB that end with the gradient's product."""
    found = hlo.parse(STEP.replace("  %b = s32[8] parameter(2)", "  %b2 = s32[8] parameter(2)").replace("(%b)", "(%p)"))
    used = memory.usage(found, dict.fromkeys(found.instructions["m"], 1.0))
    mib = {kind: size / 2**20 for kind, size in used.by_class().items() if size}
    assert mib == {"parameters": 4, "optimizer": 4, "gradients": 4, "temporaries": 8}
    assert [(b.kind, b.name) for b in used.largest(2)] == [("temporaries", "mlp/up"), ("parameters", "w")]
    assert [round(sum(by.values()) / 2**20) for _, by in used.over_time] == [4, 8, 16, 20, 8, 8, 12]


ROOT_BEFORE_THE_END = """ENTRY %m (p: f32[1024,1024]) -> (f32[1024,1024]) {
  %p = f32[1024,1024] parameter(0), metadata={op_name="batch['x']"}
  %g = f32[1024,1024] negate(%p)
  ROOT %r = (f32[1024,1024]) tuple(%g)
  %h = f32[2048,1024] broadcast(%p)
}
"""


def test_what_a_computation_returns_lives_to_its_end():
    """4 MiB of the result beside the 8 MiB of an instruction that the compiler has put after the root."""
    found = hlo.parse(ROOT_BEFORE_THE_END)
    used = memory.usage(found, dict.fromkeys(found.instructions["m"], 1.0))
    assert [round(sum(by.values()) / 2**20) for _, by in used.over_time] == [4, 8, 8, 16]


KERNEL_IN_PLACE = """ENTRY %m (p: f32[1024,1024]) -> f32[1024,1024] {
  %p = f32[1024,1024] parameter(0), metadata={op_name="batch['x']"}
  %g = f32[1024,1024] negate(%p)
  %k = (f32[1024,1024], f32[1024,1024]) custom-call(%p, %g), custom_call_target="tpu_custom_call", ALIASING
  %a = f32[1024,1024] get-tuple-element(%k), index=0
  %b = f32[1024,1024] get-tuple-element(%k), index=1
  ROOT %r = f32[1024,1024] add(%a, %b)
}
"""


@pytest.mark.parametrize(
    ("aliasing", "mib"), [("output_to_operand_aliasing={{1}: (1, {})}", 12), ("api_version=1", 16)]
)
def test_a_result_of_a_kernel_that_takes_the_memory_of_an_operand_adds_none(aliasing, mib):
    """4 MiB each of the batch, the operand and a result; the other result is the operand's buffer."""
    found = hlo.parse(KERNEL_IN_PLACE.replace("ALIASING", aliasing))
    used = memory.usage(found, dict.fromkeys(found.instructions["m"], 1.0))
    assert sum(used.by_class().values()) / 2**20 == mib


def test_a_moment_on_the_host_takes_no_memory_of_the_device():
    on_host = STEP.replace("%b)", "%p)").replace("%o = f32[1024,1024] ", "%o = f32[1024,1024]{1,0:S(5)} ")
    found = hlo.parse(on_host.replace("  %b = s32[8] parameter(2)", "  %b2 = s32[8] parameter(2)"))
    assert memory.usage(found, dict.fromkeys(found.instructions["m"], 1.0)).by_class()["optimizer"] == 0
