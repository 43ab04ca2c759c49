"""Collectives, trips and cycles out of HLO text: written by hand, and compiled for CPUs with counts known beforehand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar._src.verify.hlo import collectives, cycles
from meshpar._src.verify.hlo_text import arrays, byte_size, elements


def module(body: str, extra: str = "", devices: int = 8, tables: str = "") -> str:
    """A module whose entry has these lines; ``%a`` is its parameter, f32[8,16] of 512 bytes."""
    return f"""HloModule m, num_partitions={devices}
{tables}
{extra}
ENTRY %main (a: f32[8,16]) -> f32[8,16] {{
  %a = f32[8,16]{{1,0}} parameter(0)
{body}
}}
"""


def only(text: str):
    (found,) = collectives(text)
    return found


KINDS = {
    "all-gather": ("%x = f32[32,16]{1,0} all-gather(%a), replica_groups=[2,4]<=[8], dimensions={0}", 2048 * 3 / 4, 4),
    "all-gather of the async form": (
        "%x = (f32[8,16]{1,0}, f32[32,16]{1,0}) all-gather-start(%a), replica_groups=[2,4]<=[8], dimensions={0}",
        *(2048 * 3 / 4, 4),
    ),
    "all-reduce": ("%x = f32[8,16]{1,0} all-reduce(%a), replica_groups={{0,1},{2,3},{4,5},{6,7}}", 2 * 512 / 2, 2),
    "all-reduce over everything": ("%x = f32[8,16]{1,0} all-reduce(%a), replica_groups={}", 2 * 512 * 7 / 8, 8),
    "all-reduce that is counted at its start": (
        "%s = f32[8,16] all-reduce-start(%a), replica_groups={}\n  ROOT %d = f32[8,16] all-reduce-done(%s)",
        *(2 * 512 * 7 / 8, 8),
    ),
    "reduce-scatter": ("%x = f32[2,16]{1,0} reduce-scatter(%a), replica_groups=[2,4]<=[8]", 512 * 3 / 4, 4),
    "ragged-all-to-all of what fits": (
        "%out = f32[4,16]{1,0} constant({...})\n  %n = s32[4]{0} constant({...})\n"
        "  %x = f32[4,16]{1,0} ragged-all-to-all(%a, %out, %n, %n, %n, %n), replica_groups=[2,4]<=[8]",
        *(256 * 3 / 4, 4),
    ),
    "all-to-all": ("%x = f32[8,16]{1,0} all-to-all(%a), replica_groups=[1,8]<=[8]", 512 * 7 / 8, 8),
    "collective-permute": (
        "%x = (f32[8,16], f32[8,16], u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}",
        *(512, 0),
    ),
    "collective-permute to itself": ("%x = f32[8,16] collective-permute(%a), source_target_pairs={{0,0},{1,1}}", 0, 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_on_the_wire(kind):
    line, sent, group = KINDS[kind]
    found = only(module(f"  {line}"))
    assert found.op == kind.split(" ")[0]
    assert (found.bytes, found.group, found.count) == (sent, group, 1)


def test_several_operands_add_up():
    text = module(
        "  %b = bf16[4]{0} constant({...})\n"
        "  %x = (f32[8,16]{1,0}, bf16[4]{0}) all-reduce(%a, %b), replica_groups=[4,2]<=[8]"
    )
    assert only(text).bytes == 2 * (512 + 8) / 2
    assert only(text).shape == "f32[8,16], bf16[4]"


@pytest.mark.parametrize(
    ("groups", "members"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", (0, 4)),
        ("[2,4]<=[8]", (0, 1, 2, 3)),
        ("[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("[2,4]<=[2,2,2]T(1,0,2)", (0, 1, 4, 5)),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", (0, 4)),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", (0, 1, 2, 3)),
        ("mesh['x'=8] {'x':(1)2}", (0, 4)),
        ("mesh['x'=8] {'x':(2)4}", (0, 1, 2, 3)),
        ("{}", tuple(range(8))),
    ],
)
def test_every_way_of_writing_groups(groups, members):
    found = only(module(f"  %x = f32[8,16]{{1,0}} all-reduce(%a), replica_groups={groups}, use_global_device_ids=true"))
    assert found.members == members
    assert found.group == len(members)


def test_axes_of_a_mesh():
    sizes = {"data": 2, "seq": 2, "model": 2}
    for groups, axes in {"{{0,4}}": ("data",), "{{0,1,2,3}}": ("seq", "model"), "{{0,1}}": ("model",)}.items():
        assert only(module(f"  %x = f32[8,16] all-reduce(%a), replica_groups={groups}")).axes(sizes) == axes
    moved = only(module("  %x = f32[8,16] collective-permute(%a), source_target_pairs={{0,0},{1,3},{3,1}}"))
    assert moved.axes(sizes) == ("seq",)


def loop(
    condition: str, body: str, state: str = "%t = (f32[8,16]{1,0}, s32[], s32[]) tuple(%a, %start, %limit)"
) -> str:
    """A loop over (array, counter, limit) whose body all-reduces the array: 7/4 · 512 = 896 bytes a trip."""
    shape = "(f32[8,16]{1,0}, s32[], s32[])"
    return module(
        f"  %start = s32[] constant(2)\n  %limit = s32[] constant(12)\n  {state}\n"
        f"  %w = {shape} while(%t), condition=%cond, body=%body",
        extra=f"""
%cond (p: {shape}) -> pred[] {{
  %p = {shape} parameter(0)
  %i = s32[] get-tuple-element(%p), index=1
  %n = s32[] get-tuple-element(%p), index=2
  %c = s32[] constant(12)
{condition}
}}

%body (p: {shape}) -> {shape} {{
  %p = {shape} parameter(0)
  %x = f32[8,16]{{1,0}} get-tuple-element(%p), index=0
  %y = f32[8,16]{{1,0}} all-reduce(%x), replica_groups={{}}
  %i = s32[] get-tuple-element(%p), index=1
  %n = s32[] get-tuple-element(%p), index=2
  %one = s32[] constant(1)
  %two = s32[] constant(2)
{body}
}}
""",
    )


UP = "  %j = s32[] add(%i, %one)\n  ROOT %r = (f32[8,16]{1,0}, s32[], s32[]) tuple(%y, %j, %n)"
CONDITIONS = {
    "  ROOT %go = pred[] compare(%i, %n), direction=LT": 10,
    "  ROOT %go = pred[] compare(%i, %c), direction=LE": 11,
    "  ROOT %go = pred[] compare(%c, %i), direction=GT": 10,
    "  ROOT %go = pred[] compare(%i, %c), direction=NE": 10,
    "  ROOT %go = pred[] compare(%i, %c), direction=GT": 0,
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_trips_from_the_condition(condition):
    found = only(loop(condition, UP))
    assert found.count == CONDITIONS[condition]
    assert found.total_bytes == CONDITIONS[condition] * 896


def test_trips_of_unrolled_and_downward_loops():
    less = "  ROOT %go = pred[] compare(%i, %n), direction=LT"
    twice = "  %k = s32[] add(%i, %two)\n  %j = s32[] add(%k, %one)\n  ROOT %r = (f32[8,16], s32[], s32[]) tuple(%y, %j, %n)"
    assert only(loop(less, twice)).count == 4  # 2, 5, 8, 11
    down = "  %j = s32[] subtract(%i, %one)\n  ROOT %r = (f32[8,16], s32[], s32[]) tuple(%y, %j, %n)"
    above = loop("  ROOT %go = pred[] compare(%i, %one), direction=GE", down)
    assert only(above.replace("%c = s32[] constant(12)", "%one = s32[] constant(1)")).count == 2


def test_elements_of_a_tuple_written_short():
    """``%p#1`` instead of an instruction of its own, as newer versions of XLA print it."""
    text = loop("  ROOT %go = pred[] compare(%i, %n), direction=LT", UP)
    for k, name in enumerate(("x", "i", "n")):
        lines = [line for line in text.splitlines() if not line.startswith(f"  %{name} = ")]
        text = "\n".join(lines).replace(f"%{name},", f"%p#{k},").replace(f"%{name})", f"%p#{k})")
    assert "all-reduce(%p#0)" in text
    assert "compare(%p#1, %p#2)" in text
    assert (only(text).count, only(text).bytes) == (10, 896)


def test_trips_of_very_long_loops():
    less = "  ROOT %go = pred[] compare(%i, %n), direction=LT"
    text = loop(less, UP).replace("%limit = s32[] constant(12)", "%limit = s32[] constant(1000002)")
    assert only(text).count == 1_000_000
    assert only(text.replace("direction=LT", "direction=NE")).count is None


def test_a_loop_that_nobody_can_count_counts_once_and_says_so():
    doubled = "  %j = s32[] multiply(%i, %two)\n  ROOT %r = (f32[8,16], s32[], s32[]) tuple(%y, %j, %n)"
    found = only(loop("  ROOT %go = pred[] compare(%i, %n), direction=LT", doubled))
    assert found.count is None
    assert found.total_bytes == 896


def test_xlas_own_count_goes_first():
    text = loop("  ROOT %go = pred[] compare(%i, %n), direction=LT", UP)
    known = 'body=%body, backend_config={"known_trip_count":{"n":"7"}}'
    assert only(text.replace("body=%body", known)).count == 7


def test_of_a_conditional_the_branch_that_sends_most():
    text = module(
        "  %k = s32[] constant(0)\n  %x = f32[8,16]{1,0} conditional(%k, %a, %a), branch_computations={%quiet, %loud}",
        extra="""
%quiet (p: f32[8,16]) -> f32[8,16] {
  ROOT %p = f32[8,16]{1,0} parameter(0)
}

%loud (q: f32[8,16]) -> f32[8,16] {
  %q = f32[8,16]{1,0} parameter(0)
  ROOT %y = f32[8,16]{1,0} all-reduce(%q), replica_groups={}
}
""",
    )
    assert only(text).name == "y"


def test_a_tpu_fusion_that_reduces_and_scatters():
    text = module(
        "  %x = f32[2,16]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.3",
        extra="""
%all-reduce-scatter.3 (p: f32[8,16]) -> f32[2,16] {
  %p = f32[8,16]{1,0} parameter(0)
  %y = f32[8,16]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8]
  %z = u32[] constant(0)
  ROOT %s = f32[2,16]{1,0} dynamic-slice(%y, %z, %z), dynamic_slice_sizes={2,16}
}
""",
    )
    assert (only(text).op, only(text).bytes) == ("reduce-scatter", 512 * 3 / 4)


def test_a_tpu_collective_spread_over_fusions_counts_once():
    part = """
%part.{n} (p: f32[8,16]) -> f32[32,16] {{
  %p = f32[8,16]{{1,0}} parameter(0)
  %g.{n} = f32[32,16]{{1,0}} all-gather(%p), channel_id=6, replica_groups=[2,4]<=[8], frontend_attributes={{chain_id="0"}}
  ROOT %r.{n} = f32[32,16]{{1,0}} custom-call(%g.{n}), custom_call_target="{target}"
}}
"""
    targets = ["AsyncCollectiveStart", "Step", "AsyncCollectiveDone"]
    extra = "".join(part.format(n=n, target=t) for n, t in enumerate(targets))
    body = "\n".join(f"  %x.{n} = f32[32,16]{{1,0}} fusion(%a), kind=kCustom, calls=%part.{n}" for n in range(3))
    assert only(module(body, extra)).name == "g.0"


DCN = {
    "ALL_GATHER": ("all-gather", 3 * 512, 4),
    "ALL_REDUCE": ("all-reduce", 2 * 512 * 3 / 4, 4),
    "REDUCE_SCATTER": ("reduce-scatter", 512 * 3 / 4, 4),
    "ALL_TO_ALL": ("all-to-all", 512 * 3 / 4, 4),
    "ONE_TO_ONE": ("collective-permute", 512, 0),
}


@pytest.mark.parametrize("kind", DCN)
def test_what_the_tpu_runtime_sends_between_slices(kind):
    """Four slices of 8 devices: the program is of one slice, and the first axis of the mesh joins them."""
    target = {
        "ALL_TO_ALL": "{{100000,200000,300000,400000},{100001,200001,300001,400001}}",
        "ONE_TO_ONE": "{{100000->200000},{200000->100000}}",
    }.get(kind, '"{1,2,3,4}x{0:7}"')
    text = module(
        "  %t = token[] after-all()\n  %s = (f32[8,16]{1,0}, u32[], token[]) send(%a, %t), is_host_transfer=true, "
        f'frontend_attributes={{_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}\n'
        "  %d = token[] send-done(%s), is_host_transfer=true"
    )
    found = only(text)
    assert (found.op, found.bytes, found.group) == DCN[kind]
    assert found.dcn
    assert found.axes({"slice": 4, "data": 4, "model": 2}) == ("slice",)


def test_other_host_transfers_are_no_collectives():
    text = module("  %t = token[] after-all()\n  %s = (f32[8,16], u32[], token[]) send(%a, %t), is_host_transfer=true")
    assert collectives(text) == []


def test_cycles_times_trips():
    text = loop("  ROOT %go = pred[] compare(%i, %n), direction=LT", UP)
    cost = 'backend_config={"window_config":{"estimated_cycles":"100"}}'
    cost = f"%n = s32[] get-tuple-element(%p), index=2\n  %f = f32[8,16] fusion(%x), calls=%none, {cost}\n  %one"
    text = text.replace("%n = s32[] get-tuple-element(%p), index=2\n  %one", cost)
    once = "%w = (f32[8,16]{1,0}, s32[], s32[]) while"
    text = text.replace(
        once, f'%e = f32[8,16] fusion(%a), calls=%none, backend_config={{"estimated_cycles":"7"}}\n  {once}'
    )
    assert cycles(text) == 10 * 100 + 7


def test_the_users_line():
    tables = """
FileNames
1 "/home/me/.venv/lib/site-packages/flax/linear.py"
2 "/home/me/train.py"

FunctionNames
1 "Dense.__call__"
2 "Model.block"

FileLocations
1 {file_name_id=1 function_name_id=1 line=298 end_line=298 column=4 end_column=4}
2 {file_name_id=2 function_name_id=2 line=12 end_line=12 column=4 end_column=4}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}

"""
    line = '  %x = f32[8,16] all-reduce(%a), replica_groups={}, metadata={op_name="jit(step)/dot" stack_frame_id=2}'
    found = only(module(line, tables=tables))
    assert (found.source, found.op_name) == ("/home/me/train.py:12 (block)", "jit(step)/dot")
    old = '  %x = f32[8,16] all-reduce(%a), metadata={op_name="d" source_file="/home/me/train.py" source_line=3}'
    assert only(module(old)).source == "/home/me/train.py:3"


def test_shapes():
    text = "(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, s4[8], pred[], f8e4m3fn[5], c64[2])"
    assert byte_size(arrays(text)) == 12 + 4 + 1 + 5 + 16
    assert elements("(f32[2]{0}, (s32[], u8[]), /*index=2*/pred[])") == ["f32[2]{0}", "(s32[], u8[])", "pred[]"]
    assert elements("f32[2]") == ["f32[2]"]


def test_programs_of_known_counts(mesh):
    """Nested scans over two mesh axes, compiled for 8 CPU devices: every collective, its bytes and its trips."""

    def local(x):  # f32[4,16]: 256 bytes on each device
        def outer(c, _):
            g = lax.all_gather(c, "data", axis=0, tiled=True)  # 1024 bytes, of 4 devices
            s = lax.psum_scatter(jnp.sin(g), "data", scatter_dimension=0, tiled=True)
            p = lax.ppermute(s, "data", [(i, (i + 1) % 4) for i in range(4)])

            def inner(d, _):
                return jnp.cos(lax.psum(d, "model")), None

            q, _ = lax.scan(inner, p, None, length=3)
            t = lax.all_to_all(jnp.concatenate([q, jnp.tanh(q)]), ("data", "model"), 0, 0, tiled=True)  # 512 bytes
            return t[:4] + t[4:], None

        y, _ = lax.scan(outer, x, None, length=10)
        return jnp.sin(lax.all_gather(y, ("data", "model"), axis=0, tiled=True))  # 2048 bytes

    spec = P(("data", "model"))
    fn = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False))
    text = fn.lower(jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=NamedSharding(mesh, spec))).compile().as_text()
    found = {}
    for c in collectives(text):
        count, sent, axes = found.get(c.op, (0, 0.0, set()))
        found[c.op] = (count + c.count, sent + c.total_bytes, axes | {c.axes(dict(mesh.shape))})
    both = ("data", "model")
    assert found == {
        "all-gather": (11, 10 * 1024 * 3 / 4 + 2048 * 7 / 8, {("data",), both}),
        "reduce-scatter": (10, 10 * 1024 * 3 / 4, {("data",)}),
        "collective-permute": (10, 10 * 256, {("data",)}),
        "all-reduce": (30, 30 * 2 * 256 / 2, {("model",)}),
        "all-to-all": (10, 10 * 512 * 7 / 8, {both}),
    }
