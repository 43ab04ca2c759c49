"""Time of a plan: FLOPs and bytes by hand, bounds, what counts as the model's, and the report."""

import dataclasses
import functools
import gc
import math
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

import meshpar as mp
from meshpar._src.cost.flops import reread_bytes
from meshpar._src.cost.kernel_time import kernel_times
from meshpar._src.cost.kernels import computation_of
from meshpar._src.hardware.chips import CHIPS

F32 = 4
BF16 = 2


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def plan(fn, *args, layout="", mesh="data=16", topology="v5e:4x4", dims=None, **kwargs):
    return mp.plan(fn, *args, mesh=mesh, topology=topology, layout=layout, dims=dims, **kwargs)


HBM = 0.89 * 8.1e11


def beside(products, traffic, elements):
    """Seconds of a kernel on a v5e: its products beside its traffic and 100 elements a cycle of 1.5 GHz."""
    return math.hypot(products, traffic + elements / (100 * 1.5e9))


def test_a_product_by_hand():
    """Its result, which no other op reads in the kernel, takes half of an elementwise op on a v5e."""
    made = plan(lambda a, b: a @ b, array(1024, 512), array(512, 2048))
    (op,) = made.time.ops
    assert (op.name, op.count) == ("dot_general", 1)
    assert op.flops == 2 * 1024 * 512 * 2048
    assert op.bytes == BF16 * (1024 * 512 + 512 * 2048 + 1024 * 2048)
    assert op.seconds == pytest.approx(beside(op.flops / 1.97e14, op.bytes / HBM, 1024 * 2048 / 2))
    assert "test_time.py" in op.source
    assert made.time.compute == op.flops / 1.97e14
    assert made.time.memory == op.bytes / HBM


def test_reductions_are_done_by_the_kernel_that_makes_or_reads_the_same():
    """A residual sum and its norm are one kernel, and the two sums of a norm's gradient; a sum that needs a maximum is another."""
    n = 1024 * 2048
    x, y = array(1024, 2048), array(1024, 2048)

    def norm(x, y):
        z = x + y
        return z, (z.astype(jnp.float32) ** 2).sum(-1)

    (op,) = plan(norm, x, y).time.ops
    assert op.bytes == 3 * BF16 * n + F32 * 1024
    assert op.seconds == pytest.approx(op.bytes / HBM + (n + 1024) / (100 * 1.5e9))

    def both(x, y):
        z = x.astype(jnp.float32) * y.astype(jnp.float32)
        return z.sum(0), (z * 2).sum(1)

    (op,) = plan(both, x, y).time.ops
    assert op.bytes == 2 * BF16 * n + F32 * (1024 + 2048)

    def softmax(x):
        most = x.max(-1, keepdims=True)
        return jnp.exp(x - most).astype(jnp.float32).sum(-1)

    assert [op.bytes // (BF16 * n) for op in plan(softmax, x).time.ops] == [
        1
    ]  # with the maximum of a row in the same kernel
    assert [op.bytes // (BF16 * n) for op in plan(softmax, array(512, 4096)).time.ops] == [1, 1]  # the row is too long


def test_a_product_does_the_sums_of_what_it_makes_and_reads_the_rest_for_them():
    """A norm's gradient: the cotangent that a product makes, and what was normalised."""
    n = 1024 * 2048

    def fn(a, b, x):
        made = a @ b
        wide = made.astype(jnp.float32)
        return made, wide.sum(0), (wide * x.astype(jnp.float32)).sum(0)

    (op,) = plan(fn, array(1024, 512), array(512, 2048), array(1024, 2048)).time.ops
    assert op.bytes == BF16 * (1024 * 512 + 512 * 2048 + 2 * n) + 2 * F32 * 2048


@pytest.mark.parametrize(("topology", "goes_on"), [("v5e:4x4", False), ("tpu7x:2x2x2", True)])
def test_a_sum_that_products_wait_for_runs_beside_those_that_do_not_where_programs_go_on(topology, goes_on):
    def fn(x, w, v, y, u):
        return jnp.tanh(x @ w) @ v, y @ u

    dims = {"x": "batch mlp", "w": "mlp embed", "v": "embed out", "y": "batch embed", "u": "embed out"}
    shapes = (4096, 8192), (8192, 2048), (2048, 1024), (4096, 2048), (2048, 1024)
    made = plan(fn, *(array(*s) for s in shapes), mesh="data=2, model=8", topology=topology, layout="mlp: model; batch: data",
                dims=dims)  # fmt: skip
    (sent,) = made.collectives
    assert sent.op == "all-reduce"
    *_, apart = [op for op in made.time.ops if op.name == "dot_general"]
    assert apart.seconds < sent.seconds
    kernels = sum(op.seconds for op in made.time.ops)
    assert made.time.seconds == pytest.approx(kernels + sent.seconds - goes_on * apart.seconds)


def test_results_that_are_gathered_apart_are_copied_to_their_place():
    def step(state):
        return {"params": state["params"] - state["opt"], "opt": state["opt"]}

    state = dict.fromkeys(("params", "opt"), array(4096, 4096, dtype=jnp.float32))
    made = plan(step, state, layout="opt.embed: data", dims={"state/*": "embed mlp"}, donate_argnums=0)
    (copy,) = [op for op in made.time.ops if op.name == "move"]
    assert copy.bytes == 2 * F32 * 4096 * 4096
    assert made.time.seconds >= sum(op.seconds for op in made.time.ops)


@pytest.mark.parametrize(
    ("topology", "m", "n", "k", "padded"),
    [("v5e:4x4", 1, 100, 200, 16 * 128 * 256), ("v5e:4x4", 100, 1, 200, 16 * 128 * 256),
     ("v6e:4x4", 16, 300, 256, 16 * 512 * 256), ("v5e:4x4", 16, 128, 128, 16 * 128 * 128)],
)  # fmt: skip
def test_dims_round_up_to_the_matrix_unit(topology, m, n, k, padded):
    (op,) = plan(lambda a, b: a @ b, array(m, k), array(k, n), topology=topology).time.ops
    assert op.flops == 2 * padded


@pytest.mark.parametrize(("topology", "rows"), [("v5e:4x4", 128), ("v5p:2x2x4", 256)])
def test_few_rows_take_as_long_as_loading_the_weights(topology, rows):
    def seconds(fn):
        ops = plan(fn, array(8, 1024), array(1024, 2048), topology=topology).time.ops
        return next(op.matmul_seconds for op in ops if op.name == "dot_general") * CHIPS[topology[:3]].flops

    assert seconds(lambda x, w: x @ w) == pytest.approx(2 * rows * 1024 * 2048)
    assert seconds(lambda x, w: x @ jax.lax.sort(w)) == pytest.approx(2 * 16 * 1024 * 2048)  # w is no argument


def test_a_convolution_by_hand():
    def fn(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    made = plan(fn, array(8, 16, 16, 128), array(3, 3, 128, 256))
    assert made.time.model_flops == 2 * (8 * 16 * 16) * 256 * (3 * 3 * 128)
    (op,) = made.time.ops
    assert op.flops == made.time.model_flops
    assert op.bytes == BF16 * (8 * 16 * 16 * (128 + 256) + 3 * 3 * 128 * 256)
    work = math.hypot(op.flops / 1.97e14, 8 * 16 * 16 * 256 / (100 * 1.5e9))
    assert op.seconds == pytest.approx(work + op.bytes / HBM)  # it waits for its traffic


def test_a_grouped_product_counts_each_row_once():
    made = plan(jax.lax.ragged_dot, array(256, 128), array(4, 128, 384), array(4, dtype=jnp.int32))
    assert made.time.model_flops == 2 * 256 * 128 * 384


@pytest.mark.parametrize(("topology", "kernels"), [("v5p:2x2x4", 1), ("v5e:4x4", 0), ("v6e:4x4", 0)])
def test_a_softmax_that_two_matmuls_read_is_stored_on_v5p(topology, kernels):
    """The recomputed forward pass and the gradient of the values read it; on v5e and v6e each of both divides the exponentials.

    The kernel of the scores stores their exponents in float32, with the sum of each row. The gradient of the scores, which two
    matmuls read, is stored after its cast.
    """

    def attention(q, k, v):
        p = jax.nn.softmax((q @ k.T).astype(jnp.float32), -1).astype(v.dtype)
        return jnp.square((p @ v).astype(jnp.float32)).sum()

    gradient = jax.grad(jax.checkpoint(attention), argnums=(0, 1, 2))
    ops = plan(gradient, *[array(2048, 128)] * 3, topology=topology).time.ops
    stored = [op for op in ops if op.name == "convert_element_type"]
    assert len(stored) == kernels + 1
    scores = 2048 * 2048
    written = BF16 * kernels  # on chips with one core it stays in VMEM
    assert stored[-1].bytes == (F32 + BF16 + written) * scores + 2 * F32 * 2048  # with the sums of rows
    made = [op for op in ops if op.bytes == F32 * (scores + 2048) + 2 * BF16 * 2048 * 128]
    assert len(made) == kernels


def test_int8_and_float32_have_their_own_rates():
    x = array(4096, 4096, dtype=jnp.int8)
    (fast,) = plan(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.int32), x, x).time.ops
    assert fast.seconds == pytest.approx(beside(2 * 4096**3 / 3.94e14, (1 + 1 + 4) * 4096**2 / HBM, 4096**2 / 2))
    h100 = CHIPS["h100"]
    assert h100.matmul_rate("float32") == h100.matmul_rate("bfloat16") / 2  # TF32
    assert CHIPS["v5p"].matmul_rate("float32") == CHIPS["v5p"].matmul_rate("bfloat16")


LAYERS, TOKENS, EMBED, MLP = 6, 4096, 512, 2048


def loss(params, x, remat):
    def layer(x, p):
        return x + jax.nn.relu(x @ p["up"]) @ p["down"], None

    body = jax.checkpoint(layer, prevent_cse=False) if remat else layer
    return (jax.lax.scan(body, x, params)[0].astype(jnp.float32) ** 2).sum()


def step(params, x, remat=False):
    g = jax.grad(loss)(params, x, remat)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, g)


PARAMS = {"up": array(LAYERS, EMBED, MLP), "down": array(LAYERS, MLP, EMBED)}
DIMS = {"params/up": "layers embed mlp", "params/down": "layers mlp embed", "x": "tokens embed"}
FSDP = "tokens: data; embed: data"


def plan_step(layout=FSDP, remat=False, **kwargs):
    return plan(
        lambda params, x: step(params, x, remat), PARAMS, array(TOKENS, EMBED), layout=layout, dims=DIMS, **kwargs
    )


FORWARD = 2 * 2 * TOKENS * EMBED * MLP * LAYERS


def test_a_loop_reads_of_a_stack_the_slice_that_it_works_on():
    def fn(xs):
        return jax.lax.scan(lambda total, x: (total + jax.lax.sort(x), None), jnp.zeros(4096, jnp.bfloat16), xs)[0]

    ops = {op.name: op.bytes for op in plan(fn, array(64, 4096)).time.ops}
    assert ops["slice"] == BF16 * 4096  # a sort takes an array: read from the stack, and not written to HBM


@pytest.mark.parametrize(
    ("topology", "unroll", "copied"), [("2x h100:8", 1, 4), ("2x h100:8", True, 0), ("v5e:4x4", 1, 0)]
)
def test_matmuls_of_a_loop_read_copies_of_its_slices_on_gpus(topology, unroll, copied):
    def fn(x, weights):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, weights, unroll=unroll)[0]

    ops = plan(fn, array(8, 512), array(4, 512, 512), topology=topology).time.ops
    assert sum(op.bytes * op.count for op in ops if op.name == "slice") == copied * 2 * BF16 * 512 * 512
    assert sum(op.bytes * op.count for op in ops if op.name == "dot_general") == 4 * BF16 * (512 * 512 + 2 * 8 * 512)


def test_the_models_flops_are_those_of_both_passes_without_recomputation_and_redundant_work():
    plain, remat, replicated = plan_step().time, plan_step(remat=True).time, plan_step(layout="").time
    split = plan_step(layout="tokens: data").time
    assert {t.model_flops for t in (plain, remat, replicated, split)} == {3 * FORWARD}
    # relu(x @ up) again; the second product is not needed
    assert remat.compute - plain.compute == pytest.approx(FORWARD / 2 / 16 / 1.97e14)
    assert replicated.compute == pytest.approx(16 * split.compute)
    assert replicated.mfu < split.mfu


def splash_attention(length, heads, fused):
    """JAX's TPU kernel for q, k and v [batch, heads, length, head_dim], causal."""
    blocks = dict.fromkeys(("block_q", "block_kv", "block_kv_compute"), 128)
    blocks |= dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), 128)
    blocks |= {} if fused else dict.fromkeys(("block_q_dq", "block_kv_dq"), 128)
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((length, length))] * heads)
    sizes = splash_attention_kernel.BlockSizes(**blocks, use_fused_bwd_kernel=fused)
    return jax.vmap(splash_attention_kernel.make_splash_mha_single_device(mask, block_sizes=sizes))


def heads_last(attention):
    return lambda *qkv: jnp.swapaxes(attention(*(jnp.swapaxes(x, 1, 2) for x in qkv)), 1, 2)


@pytest.mark.parametrize(
    "kind", ["matmuls", "layer", "splash", "splash in shard_map", "splash, fused", "flash in shard_map"]
)
def test_attention_counts_six_matmuls_of_all_scores_whichever_kernel_computes_it(kind):
    """Recomputed by ``jax.checkpoint`` and in its kernels; 2 · batch · heads · seq² · head_dim a matmul."""
    batch, heads, length, width = 8, 2, 256, 128
    dims = "batch heads seq! head_dim!"
    rule = mp.kernel_rule(f"{dims}, {dims}, {dims} -> {dims}")
    of = {
        "matmuls": lambda: heads_last(functools.partial(jax.nn.dot_product_attention, is_causal=True)),
        "layer": lambda: heads_last(functools.partial(mp.layers.attention, causal=True)),
        "splash": lambda: rule(splash_attention(length, heads, False)),
        "splash in shard_map": lambda: in_shard_map(splash_attention(length, heads, False)),
        "splash, fused": lambda: in_shard_map(splash_attention(length, heads, True)),
        "flash in shard_map": lambda: in_shard_map(flash_attention.flash_attention),
    }

    def in_shard_map(fn):
        mesh = jax.sharding.AbstractMesh((16,), ("data",))
        return jax.shard_map(fn, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"), check_vma=False)

    def step(*qkv):
        return jax.value_and_grad(lambda qkv: jax.checkpoint(of[kind]())(*qkv).astype(jnp.float32).sum())(qkv)

    x = array(2 * batch, heads, length, width)
    flops = plan(step, x, x, x, layout="batch: data", dims={"*": "batch heads seq head_dim"}).time.model_flops
    assert flops == pytest.approx(6 * 2 * 2 * batch * heads * length**2 * width, rel=0.01)


def test_bounds_and_utilisation():
    made = plan_step()
    time = made.time
    assert made.seconds == time.seconds
    assert all(c.seconds > 0 for c in made.collectives)
    assert time.communication == pytest.approx(sum(c.seconds * c.count for c in made.collectives))
    faster = dataclasses.replace(made, chip=made.chip.ideal()).time
    assert faster.compute == time.compute  # nothing was measured there: the peak
    assert time.overlapped == max(time.compute, time.memory, time.communication)
    assert time.serial == pytest.approx(time.compute + time.memory + time.vector + time.starts + time.communication)
    assert time.overlapped <= time.seconds <= time.serial
    assert time.mfu == pytest.approx(time.model_flops / (time.seconds * 16 * 1.97e14))
    assert 0 < time.mfu < 1


@pytest.mark.parametrize(
    ("topology", "waits"),
    [
        ("v5e:4x4", {"reduce-scatter"}),
        ("v5p:2x2x4", {"reduce-scatter", "all-gather"}),
        ("tpu7x:2x2x2", set()),
        ("2x h100:8", set()),
    ],
)
def test_weights_hide_behind_the_kernels_of_their_loop_where_programs_go_on(topology, waits):
    made = plan(step, PARAMS, array(2**22, EMBED), layout=FSDP, dims=DIMS, overlap="xla", topology=topology)
    fsdp = made.time
    roofline = sum(o.seconds * o.count for o in fsdp.ops)
    on_top = sum(c.seconds * c.count for c in made.collectives if c.op in waits)
    assert fsdp.communication >= on_top
    assert (on_top > 0) == bool(waits)
    # the last gradient of a loop has nothing beside it
    assert fsdp.seconds == pytest.approx(roofline + on_top, rel=0.06)


def test_a_plan_that_is_gone_leaves_none_of_its_kernels_behind():
    """Else they would be looked through at every later collection; a search makes hundreds of plans."""
    made = plan_step(layout=FSDP, donate_argnums=0)
    assert made.seconds
    assert made.memory.peak
    kernels = weakref.ref(computation_of(made))
    del made
    gc.collect()
    assert kernels() is None


def test_what_a_loop_reads_is_in_memory_and_not_what_that_was_made_from():
    """The second loop reads what the first one stacks up: not the weights that the first one read."""

    def fn(w, x):
        _, stack = jax.lax.scan(lambda c, p: (c, jax.nn.relu(x @ p)), 0.0, w)
        return jax.lax.scan(lambda c, y: (c + (y * 2.0).astype(jnp.float32).sum(), None), 0.0, stack)[0]

    wide = 64  # weights are 64 times what a step of the second loop reads
    made = plan(fn, array(LAYERS, wide * 128, 128), array(128, wide * 128))
    sums = [o for o in made.time.ops if o.name == "reduce_sum"]
    assert [o.count for o in sums] == [LAYERS]
    assert sums[0].bytes == pytest.approx(BF16 * 128 * 128, rel=1e-3)


def test_moving_the_operands_of_a_kernel_is_none_of_its_flops():
    @mp.kernel_rule("rows inner!, inner! columns -> rows columns")
    def product(x, w):
        return x @ w

    made = plan(product, array(1024, 512), array(512, 256), layout="rows: data; inner: data",
                dims={"x": "rows _", "w": "inner columns"})  # fmt: skip
    assert [c.op for c in made.collectives] == ["all-gather"]
    assert [o.name for o in made.time.ops if o.flops] == ["kernel"]
    assert sum(o.flops * o.count for o in made.time.ops) == 2 * 1024 * 512 * 256 / 16


@pytest.mark.parametrize(
    ("topology", "m", "again"),
    [
        ("v5p:2x2x2", 2048, 0.0),  # 32 MiB of rows stay in its 64 of VMEM
        ("v5p:2x2x2", 4096, 1.0),  # 64 do not
        ("tpu7x:2x2x1", 2048, 1.0),  # a device has 32
        ("h100:8", 8192, 0.0),  # has caches
    ],
)
def test_operands_that_do_not_stay_on_the_chip_are_read_for_every_tile(topology, m, again):
    n, k = 28672, 8192
    (op,) = plan(lambda a, b: a @ b, array(m, k), array(k, n), mesh="data=8", topology=topology).time.ops
    once = BF16 * (m * k + k * n + m * n)
    side = math.sqrt(9.4e6 / (4 + 2 * BF16))  # of a tile: its sums, and two buffers of its result
    more = BF16 * k * (m * (n / side - 1) + n * (m / side - 1))
    assert op.bytes == pytest.approx(once + again * more)


def test_blocks_of_a_product_that_stay_on_the_chip_are_read_once():
    """Of 4096 rows on a v5p, 64 MiB, a block of a ring of 8 has 8; the columns, 28672 long, do not stay in any case."""
    m, n, k = 8 * 4096, 28672, 8192
    where = {"mesh": "data=8", "topology": "v5p:2x2x2", "layout": "rows: data"}
    made = plan(lambda a, b: a @ b, array(m, k), array(k, n), dims={"a": "rows inner", "b": "inner columns"}, **where)
    (run,) = made.runs.values()
    again = functools.partial(reread_bytes, made, made.chip, run)
    assert again(0) > 0
    assert again(0, (True, False, True), 8) == 0
    assert 0 < again(0, (False, True, True), 8) < again(0)
    assert again(0, (True, True, False), 8) == 0  # of the contracted dim


def test_arrays_beside_a_product_make_its_tiles_smaller():
    m, n, k = 4096, 28672, 8192

    def bytes_of(*others):
        made = plan(
            lambda a, b, *c: sum(c, a @ b), array(m, k), array(k, n), *others, mesh="data=8", topology="v5p:2x2x2"
        )
        (op,) = made.time.ops
        return op.bytes - BF16 * m * n * len(others)

    assert bytes_of() < bytes_of(array(m, n)) < bytes_of(array(m, n), array(m, n))


def test_halves_that_are_joined_are_in_memory_and_a_product_takes_in_no_slices():
    n, heads, head_dim = 1024, 16, 128

    def rotated(x, w, angle):
        q = jnp.einsum("nd,dhk->nhk", x, w)
        a, b = q[..., : head_dim // 2], q[..., head_dim // 2 :]
        return 3 * jnp.concatenate([a * angle - b, b * angle + a], -1)

    made = plan(rotated, array(n, 2048), array(2048, heads, head_dim), array(n, 1, head_dim // 2))
    product, *others = made.time.ops
    q = BF16 * n * heads * head_dim
    assert product.flops
    assert product.bytes == BF16 * (n * 2048 + 2048 * heads * head_dim)  # its result stays in VMEM
    assert len(others) == 3  # a half each, and what joins them
    assert others[-1].bytes == 2 * q


def test_a_matmul_inside_the_kernel_of_a_pad_reads_its_operands_as_often():
    """No array as large as the matmul's result is read or written there: that leaves no more room for tiles than a plain one."""
    x, w = array(8 * 16384, 8192), array(8192, 16384)

    def traffic(fn):
        return sum(k.bytes for k in kernel_times(plan(fn, x, w, mesh="data=8", topology="v5e:2x4")).values())

    plain, padded = traffic(lambda x, w: x @ w), traffic(lambda x, w: jnp.pad(x @ w, ((0, 8), (0, 0))))
    assert padded == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize(
    "layout", ["mlp, embed: model+data", "batch: data; mlp: model", "batch: data; mlp: model; embed: data"]
)
@pytest.mark.parametrize("topology", ["v5e:4x4", "v5p:2x2x4"])
def test_an_estimate_is_not_below_its_lower_bound(layout, topology):
    """Collectives over one axis share links: however they overlap with kernels, they take their time one after the other."""

    def loss(params, x):
        return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - x) ** 2)

    made = plan(
        jax.grad(loss), {"up": array(512, 2048), "down": array(2048, 512)}, array(64, 512), layout=layout, mesh="data=4, model=4",
        topology=topology, dims={"*/up": "embed mlp", "*/down": "mlp embed", "x": "batch embed"},
    )  # fmt: skip
    assert made.time.overlapped <= made.time.seconds
    sent = [sum(c.seconds * c.count for c in made.collectives if axis in c.axes) for axis in ("data", "model")]
    assert 0 < max(sent) <= made.time.seconds


def test_the_estimate_of_a_step_of_short_kernels_is_within_its_bounds():
    """The shortest kernel of a v5e takes 1.2 µs, a thousand times as long as the traffic of these."""

    def fn(x, w):
        return jnp.tanh(x @ w).sum(0, keepdims=True) @ w

    made = plan(fn, array(16, 128), array(128, 128), mesh="data=1", topology="v5e:1x1")
    time, text = made.time, " ".join(str(made).split())
    assert time.overlapped < time.seconds <= time.serial < 1.1 * time.seconds
    assert time.starts == pytest.approx(
        sum(1.2e-6 - o.matmul_seconds - o.traffic_seconds - o.vector_seconds for o in time.ops)
    )
    assert time.to_dict()["starts"] == time.starts
    assert "if nothing overlaps: starts of kernels" in text
    assert "bound by starts of kernels 100" in text
    assert max(o.traffic_seconds for o in time.ops) < 1.2e-6


GROUPS, GROUP_SIZE, FEATURES, HIDDEN, EXPERTS, SLOTS, CHOICES = 4, 32, 16, 64, 4, 20, 2


def masks_of_positions(logits):
    chances, best = jax.lax.top_k(jax.nn.softmax(logits), CHOICES)
    choice = jax.nn.one_hot(best, EXPERTS, dtype=jnp.int32)
    position = jnp.cumsum(choice.reshape(GROUPS, -1, EXPERTS), 1).reshape(choice.shape) * choice - 1
    slot = jax.nn.one_hot(position, SLOTS)
    return slot.sum(2), (slot * chances[..., None, None]).sum(2)


def masks_of_gshard(logits):
    chances = left = jax.nn.softmax(logits)
    combine = 0.0
    for _ in range(CHOICES):
        choice = jax.nn.one_hot(jnp.argmax(left, -1), EXPERTS)
        gate, left = (chances * choice).sum(-1), left * (1 - choice)
        position = (jnp.cumsum(choice, 1) - choice) * choice
        kept = choice * (position < SLOTS)
        slot = jax.nn.one_hot((position * kept).sum(-1).astype(jnp.int32), SLOTS)
        combine += jnp.einsum("gt,gtx,gts->gtxs", gate, kept, slot)
    return combine.astype(bool).astype(jnp.float32), combine


@pytest.mark.parametrize("dispatch", [masks_of_positions, masks_of_gshard])
@pytest.mark.parametrize("remat", [False, True])
def test_model_flops_of_experts_are_those_of_active_parameters(dispatch, remat):
    """6 FLOPs a token and active parameter, although experts have 320 rows for 256 choices, and einsums dispatch them."""

    def layer(x, p):
        send, combine = dispatch(x @ p["router"])
        hidden = jax.nn.gelu(jnp.einsum("xgse,xem->xgsm", jnp.einsum("gtxs,gte->xgse", send, x), p["up"]))
        return x + jnp.einsum("gtxs,xgse->gte", combine, jnp.einsum("xgsm,xme->xgse", hidden, p["down"])), None

    def step(params, x):
        def loss(params):
            return (jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, params)[0] ** 2).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    shapes = {"router": (FEATURES, EXPERTS), "up": (EXPERTS, FEATURES, HIDDEN), "down": (EXPERTS, HIDDEN, FEATURES)}
    params = {name: jax.ShapeDtypeStruct((2, *shape), jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((GROUPS, GROUP_SIZE, FEATURES), jnp.float32)
    active = 2 * (FEATURES * EXPERTS + CHOICES * 2 * FEATURES * HIDDEN)
    made = mp.plan(step, params, x, mesh="data=4", topology="v5e:2x2", layout="")
    assert made.time.model_flops == pytest.approx(6 * GROUPS * GROUP_SIZE * active)


def test_one_hot_labels_leave_the_flops_of_the_logits():
    """The head and its gradients count, the lookup of the embedding by a one-hot matmul does not."""

    def loss(params, tokens):
        labels = jax.nn.one_hot(tokens, 64)
        values = (labels @ params["table"]) @ params["head"]
        return ((values * labels).sum() - jax.nn.logsumexp(values, -1).sum()) + (values * labels).sum()

    params = {"table": jax.ShapeDtypeStruct((64, 16), jnp.float32), "head": jax.ShapeDtypeStruct((16, 64), jnp.float32)}
    tokens = jax.ShapeDtypeStruct((8, 4), jnp.int32)
    made = mp.plan(jax.grad(loss), params, tokens, mesh="data=4", topology="v5e:2x2", layout="", dims={})
    assert made.time.model_flops == 6 * 8 * 4 * 16 * 64
