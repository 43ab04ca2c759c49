"""`route`, `permute`, `combine` against NumPy: the reference, and the kernels in interpreters and on the model of a GPU; gradients,
bad input."""

import functools
import types

import covering
import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest
from gpu_machine import Gpus
from interpreters import race_detection
from jax.test_util import check_grads
from kernel_cases import RNG, ROUTERS, make, odd_logits

from meshpar_kernels import RoutePlan, combine, permute, route
from meshpar_kernels.routing import gpu, gpu_rows, tpu_gather
from meshpar_kernels.routing.reference import Router


def compare(plan: RoutePlan, want, rtol=2e-6, atol=1e-7) -> None:
    expert, weight, counts, rank, offsets, dropped = want
    np.testing.assert_array_equal(plan.expert, expert)
    np.testing.assert_allclose(plan.weight, weight, rtol=rtol, atol=atol)
    np.testing.assert_array_equal(plan.counts, counts)
    np.testing.assert_array_equal(plan.rank, rank)
    np.testing.assert_array_equal(plan.offsets, offsets)
    assert int(plan.dropped) == dropped


def by_triton(logits, k, *, bias=None, **options):
    """By the kernel for GPUs in Pallas's interpreter, in blocks of 16 tokens, with the defaults of `route`."""
    defaults = {"score": "softmax", "groups": 1, "group_top": 2, "renormalize": True, "scale": 1.0}
    options = defaults | {"top_groups": options.get("groups", 1)} | options
    call = jax.jit(functools.partial(gpu.route, how=Router(k=k, **options), block=16, interpret=True))
    expert, weight, rank, counts = call(jnp.asarray(logits), None if bias is None else jnp.asarray(bias, jnp.float32))
    offsets = jnp.concatenate([jnp.zeros(1, int), jnp.cumsum(counts)])
    return RoutePlan(expert, weight, counts, rank, offsets, expert.size - offsets[-1])


def by_pallas(logits, k, **options):
    """By the kernel for TPUs in the TPU interpreter, with race detection."""
    with race_detection():
        return jax.block_until_ready(make(logits, k, implementation="pallas", **options))


ROUTES = [
    *((make, name, 40, 16) for name in ROUTERS),
    *((by_triton, name, 40, 16) for name in ROUTERS if name != "capacity"),
    (by_triton, "mixtral", 40, 12),  # no power of two
    (by_pallas, "deepseek-v3", 130, 16),
    (by_pallas, "deepseek-v2", 40, 128),
]


@pytest.mark.parametrize(("function", "name", "tokens", "experts"), ROUTES)
def test_route_is_the_definition(function, name, tokens, experts):
    """Odd logits of every kind."""
    options = dict(ROUTERS[name])
    if "bias" in options:
        options["bias"] = options["bias"].astype(np.float32)
    logits = odd_logits(tokens, experts)
    tolerance = {} if function is make else {"rtol": 1e-5, "atol": 1e-6}
    compare(function(logits, **options), oracle.route(logits, **options), **tolerance)


def test_route_in_bfloat16_and_where_probabilities_underflow():
    logits = jnp.asarray(odd_logits(), jnp.bfloat16)
    compare(make(logits, 2), oracle.route(np.asarray(logits.astype(jnp.float32)), 2))
    far = np.array([[-400.0, -300.0, -400.0, 400.0]], np.float32)
    np.testing.assert_array_equal(make(far, 2).expert, [[3, 1]])


def test_expert_with_nan_bias_is_never_chosen():
    bias = np.array([0.0, np.nan, 0.0, -np.inf], np.float32)
    plan = make(RNG.normal(size=(5, 4)).astype(np.float32), 3, bias=bias)
    assert set(np.asarray(plan.expert).ravel()) == {0, 2, 4}
    assert int(plan.dropped) == 5


@pytest.mark.parametrize("capacity", [None, 0, 3])
def test_no_tokens(capacity):
    plan = make(np.zeros((0, 4), np.float32), 2, capacity=capacity)
    assert (plan.expert.shape, int(plan.dropped)) == ((0, 2), 0)
    buffer = permute(jnp.zeros((0, 8)), plan, weight=plan.weight)
    assert buffer.shape == (0, 8)
    assert combine(buffer, plan, weight=plan.weight).shape == (0, 8)
    jax.grad(lambda x: permute(x, plan, weight=plan.weight).sum())(jnp.zeros((0, 8)))


def test_capacity_zero_drops_everything():
    plan = make(RNG.normal(size=(5, 4)).astype(np.float32), 2, capacity=0)
    assert plan.buffer_rows == 0
    assert int(plan.dropped) == 10
    buffer = permute(jnp.ones((5, 8)), plan)
    assert buffer.shape == (0, 8)
    np.testing.assert_array_equal(combine(buffer, plan), np.zeros((5, 8)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": 5}, "k=5 is not within 1…E, E=4"),
        ({"k": 0}, "k=0"),
        ({"k": 1, "groups": 3}, "groups=3 does not divide E=4"),
        ({"k": 1, "groups": 2, "top_groups": 3}, "top_groups=3"),
        ({"k": 3, "groups": 2, "top_groups": 1}, "hold fewer than k=3"),
        ({"k": 1, "groups": 2, "group_top": 0}, "group_top=0"),
        ({"k": 1, "capacity": -1}, "capacity=-1"),
        ({"k": 1, "score": "tanh"}, "score must be one of"),
        ({"k": 1, "bias": np.zeros(3)}, r"bias must be \[E\]=\[4\]"),
        ({"k": 1, "implementation": "fast"}, "no implementation 'fast'"),
    ],
)
def test_route_says_what_is_wrong(options, words):
    with pytest.raises(ValueError, match=words):
        make(np.zeros((2, 4), np.float32), **options)


def test_shapes_that_do_not_fit_the_plan():
    plan = make(np.zeros((3, 4), np.float32), 2)
    with pytest.raises(ValueError, match=r"x must be \[3, H\]"):
        permute(jnp.zeros((4, 8)), plan)
    with pytest.raises(ValueError, match=r"y must be \[6, H\]"):
        combine(jnp.zeros((3, 8)), plan)
    with pytest.raises(ValueError, match=r"weight must be \[T, k\]=\[3, 2\]"):
        combine(jnp.zeros((6, 8)), plan, weight=jnp.zeros((3,)))
    with pytest.raises(ValueError, match="floating point"):
        route(jnp.zeros((3, 4), jnp.int32), 2)
    with pytest.raises(ValueError, match=r"\[T, E\]"):
        route(jnp.zeros((3,)), 1)


def test_refusal_carries_every_reason():
    with pytest.raises(NotImplementedError, match=r"4 groups of 12 experts(.|\n)*These can: pallas_tpu, reference"):
        make(np.zeros((3, 12), np.float32), 2, groups=4, top_groups=2, implementation="pallas_gpu")
    plan = make(np.zeros((3, 4), np.float32), 2)
    with pytest.raises(NotImplementedError, match=r"float16(.|\n)*These can: pallas_gpu, reference"):
        permute(jnp.zeros((3, 8), jnp.float16), plan, implementation="pallas_tpu")


@pytest.mark.parametrize(("name", "weighted"), covering.each(ROUTERS, [False, True]))
def test_permute_and_combine_are_the_definition(name, weighted):
    logits = odd_logits()
    plan = make(logits, **ROUTERS[name])
    rows = oracle.buffer_rows(*(np.asarray(v) for v in (plan.expert, plan.rank, plan.offsets)))
    np.testing.assert_array_equal(plan.rows, rows)
    weight = plan.weight if weighted else None
    x = RNG.normal(size=(40, 24)).astype(np.float32)
    y = RNG.normal(size=(plan.buffer_rows, 24)).astype(np.float32)
    want = oracle.permute(x, rows, plan.buffer_rows, weight)
    np.testing.assert_allclose(permute(jnp.asarray(x), plan, weight=weight), want, rtol=1e-5)
    want = oracle.combine(y, rows, weight)
    got = combine(jnp.asarray(y), plan, weight=weight)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_combine_sums_in_float32():
    plan = make(np.zeros((1, 4), np.float32), 4)
    y = jnp.asarray([[256.0]] + [[1.0]] * 3, jnp.bfloat16)  # in bfloat16 256 + 1 is 256
    assert float(combine(y, plan)[0, 0]) == 260.0  # 259 rounded once


def test_unused_rows_do_not_leak():
    plan = make(odd_logits(), 2, capacity=4)
    used = int(plan.offsets[-1])
    assert used < plan.buffer_rows
    y = RNG.normal(size=(plan.buffer_rows, 8)).astype(np.float32)
    dirty = jnp.asarray(y).at[used:].set(jnp.nan)

    def loss(y, weight):
        return (combine(y, plan, weight=weight) ** 2).sum()

    value, grads = jax.value_and_grad(loss, (0, 1))(dirty, plan.weight)
    want, want_grads = jax.value_and_grad(loss, (0, 1))(jnp.asarray(y), plan.weight)
    assert value == want
    jax.tree.map(np.testing.assert_array_equal, grads, want_grads)


@pytest.mark.parametrize("name", ["deepseek-v3", "capacity"])
def test_gradients(name):
    options = dict(ROUTERS[name])
    # far apart, so that no choice flips under the step of the numerical derivative
    logits = RNG.permuted(np.tile(np.linspace(-3, 3, 16), (12, 1)), axis=1).astype(np.float32)
    x = RNG.normal(size=(12, 8)).astype(np.float32)

    def weights(logits):
        return make(logits, **options).weight

    check_grads(weights, (logits,), order=1, modes=["rev"], atol=2e-2, rtol=2e-2, eps=1e-3)

    plan = make(logits, **options)
    y = RNG.normal(size=(plan.buffer_rows, 8)).astype(np.float32)
    check = functools.partial(check_grads, order=1, modes=["rev"], atol=2e-2, rtol=2e-2)
    check(lambda x, w: permute(x, plan, weight=w), (x, plan.weight))
    check(lambda y, w: combine(y, plan, weight=w), (y, plan.weight))


def test_unroutable_rows_have_no_gradient():
    logits = jnp.asarray(odd_logits())
    grads = jax.grad(lambda x: (make(x, 2).weight ** 2).sum())(logits)
    assert np.isfinite(grads).all()
    np.testing.assert_array_equal(grads[jnp.array([3, 5, 11])], 0)


def test_sharded_operand_is_refused():
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    logits = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=spec)
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(ValueError, match="shard_map"):
        jax.eval_shape(lambda x: route(x, 2), logits)


# -- kernels that gather and sum rows


def summed_by_tpu(mode, block, x, index, weight):
    with race_detection(dma_execution_mode=mode):
        return jax.block_until_ready(tpu_gather.gather_sum(x, index, weight, block=block))


def summed_by_mosaic(x, index, weight):
    x, index, weight = (None if a is None else np.asarray(a) for a in (x, index, weight))
    ((found,),) = Gpus(1).run(lambda _: gpu_rows.gather_sum(x, index, weight))
    return found


TRITON = jax.jit(functools.partial(gpu.triton_gather_sum, interpret=True))
GATHERS = [
    (functools.partial(summed_by_tpu, "eager", 32), jnp.bfloat16, 2, 128, True),
    (functools.partial(summed_by_tpu, "on_wait", 16), jnp.float32, 1, 256, False),
    (TRITON, jnp.bfloat16, 3, 1500, True),
    (TRITON, jnp.float32, 1, 64, True),
    (summed_by_mosaic, jnp.float32, 1, 384, True),
    (summed_by_mosaic, jnp.float16, 3, 2048, True),
    (summed_by_mosaic, jnp.float32, 2, 5120, False),
]


@pytest.mark.parametrize(("function", "dtype", "k", "width", "weighted"), GATHERS)
def test_gather_sum(function, dtype, k, width, weighted, monkeypatch):
    """-1 and indices out of range add nothing, nor does the NaN that the first row has; small integers, so that sums are exact."""
    monkeypatch.setattr(gpu_rows, "BLOCKS", 1)
    monkeypatch.setattr(gpu_rows._compat, "multiprocessors", lambda: 3)
    x = jnp.asarray(RNG.integers(-3, 4, (9, width)), dtype).at[0].set(jnp.nan)
    index = RNG.integers(1, 9, (20, k)).astype(np.int32)
    index[3, 0], index[4, -1] = -1, 9
    weight = 2.0 ** RNG.integers(-2, 3, (20, k)).astype(np.float32) if weighted else None
    got = function(x, jnp.asarray(index), None if weight is None else jnp.asarray(weight))
    assert got.dtype == dtype
    want = oracle.combine(x, np.where(index == 9, -1, index), weight)
    np.testing.assert_array_equal(got, want.astype(dtype))


def test_gradients_use_the_kernel():
    plan = make(RNG.normal(size=(16, 4)).astype(np.float32), 2)
    x = jnp.asarray(RNG.normal(size=(16, 128)), jnp.float32)

    def loss(x, weight):
        y = permute(x, plan, implementation="pallas_tpu")
        return (combine(y, plan, weight=weight, implementation="pallas_tpu") ** 2).sum()

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, plan.weight))
    assert text.count("name=meshpar_gather_sum") == 4  # two forward, two backward


def test_a_missing_wait_is_flagged(monkeypatch):
    """The race detector sees what could go wrong here: summing rows before they arrive."""
    copy = tpu_gather.pltpu.make_async_copy

    def without_wait(*args):
        return types.SimpleNamespace(start=copy(*args).start, wait=lambda: None)

    monkeypatch.setattr(tpu_gather.pltpu, "make_async_copy", without_wait)
    with pytest.raises(RuntimeError, match="found a race between two memory accesses"):
        summed_by_tpu("eager", 16, jnp.ones((16, 128), jnp.float32), jnp.zeros((16, 1), jnp.int32), None)


def test_what_the_gpu_kernels_refuse(monkeypatch):
    with pytest.raises(NotImplementedError, match="E=8192 is above 4096"):
        jax.eval_shape(lambda x: route(x, 2, implementation="pallas_gpu"), jnp.zeros((3, 8192)))
    with pytest.raises(NotImplementedError, match="k=40 rows to sum are more than 32"):
        combine(jnp.zeros((120, 8)), route(jnp.zeros((3, 64)), 40), implementation="pallas_gpu")
    pytest.importorskip("absl")
    monkeypatch.setattr(gpu_rows._compat, "gpu_architecture", lambda: (9, 0))
    index = jnp.zeros((4, 2), jnp.int32)
    assert gpu_rows.unsupported(jnp.zeros((4, 7168), jnp.bfloat16), index) == ()
    assert "multiples of 128 columns" in gpu_rows.unsupported(jnp.zeros((4, 100)), index)[0]
    assert "rows are int32" in gpu_rows.unsupported(jnp.zeros((4, 128), jnp.int32), index)[0]
    assert "more than 32" in gpu_rows.unsupported(jnp.zeros((4, 128)), jnp.zeros((4, 33), jnp.int32))[0]
    monkeypatch.setattr(gpu_rows._compat, "gpu_architecture", lambda: (8, 0))
    (reason,) = gpu_rows.unsupported(jnp.zeros((4, 128)), index)
    assert reason == "the GPU is sm_80; there is a kernel for sm_90a and sm_100a"
