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
from meshpar._src.cost.device_computation import computation_of
from meshpar._src.hardware.chips import CHIPS

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


def test_a_plan_that_is_gone_leaves_none_of_its_kernels_behind(few_objects):
    """Else they would be looked through at every later collection; a search makes hundreds of plans."""
    made = plan_step(layout=FSDP, donate_argnums=0)
    assert made.seconds
    assert made.memory.peak
    kernels = weakref.ref(computation_of(made))
    del made
    gc.collect()
    assert kernels() is None


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
