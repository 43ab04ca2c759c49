"""The GPU kernels of routing, run by Pallas's interpreter, against the definitions in NumPy."""

import functools

import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest
from gpu_machine import Gpus
from kernel_cases import ROUTERS, odd_logits

from meshpar_kernels import combine, permute, route
from meshpar_kernels.routing import gpu, gpu_rows

RNG = np.random.default_rng(5)


def make(logits, k, *, block=None, bias=None, **options):
    """The kernel's results, with the options that `meshpar_kernels.route` would fill in."""
    options = {
        "score": "softmax",
        "groups": 1,
        "top_groups": options.get("groups", 1),
        "group_top": 2,
        "renormalize": True,
        "scale": 1.0,
    } | options
    call = functools.partial(gpu.route, k=k, block=block, interpret=True, **options)
    bias = None if bias is None else jnp.asarray(bias, jnp.float32)
    return jax.jit(call)(jnp.asarray(logits), bias)


@pytest.mark.parametrize(("name", "experts"), [*((n, 16) for n in ROUTERS if n != "capacity"), ("mixtral", 12)])
def test_route(name, experts):
    """Odd logits of every kind, in blocks that do not divide the tokens; experts that are no power of two."""
    options = dict(ROUTERS[name])
    logits = odd_logits(experts=experts)
    expert, weight, rank, counts = make(logits, block=16, **options)
    want = oracle.route(logits, **options)
    for got, exact in zip((expert, counts, rank), (want[0], *want[2:4]), strict=True):
        np.testing.assert_array_equal(got, exact)
    np.testing.assert_allclose(weight, want[1], atol=1e-6)


@pytest.mark.parametrize(("dtype", "k", "width"), [(jnp.bfloat16, 3, 1500), (jnp.float32, 1, 64)])
def test_gather_sum(dtype, k, width):
    """-1 and indices out of range add nothing, nor does the NaN that the first row holds."""
    x = jnp.asarray(RNG.normal(size=(9, width)), dtype).at[0].set(jnp.nan)
    index = RNG.integers(-1, 10, (7, k))
    index[index == 0] = -1
    weight = RNG.normal(size=(7, k)).astype(np.float32)
    weight[index < 0] = np.nan
    got = jax.jit(functools.partial(gpu.triton_gather_sum, interpret=True))(x, jnp.asarray(index), jnp.asarray(weight))
    assert got.dtype == dtype
    index[index == 9] = -1
    # `combine` of the oracle is the same sum, and looks at no row that is -1
    want = oracle.combine(x, index, weight)
    tolerance = 2.0**-8 if dtype == jnp.bfloat16 else 1e-6
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_lowered_for_a_gpu_the_kernels_are_taken(monkeypatch):
    monkeypatch.setenv("MESHPAR_KERNELS", "pallas")

    def layer(x, logits):
        plan = route(logits, 2)
        return combine(permute(x, plan), plan, weight=plan.weight)

    arguments = (jnp.zeros((24, 64), jnp.bfloat16), jnp.zeros((24, 8)))
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")  # newer versions want to know
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        text = jax.jit(layer).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton") >= 3


def test_refusals():
    with pytest.raises(NotImplementedError, match="E=8192 is above 4096"):
        jax.eval_shape(lambda x: route(x, 2, implementation="pallas_gpu"), jnp.zeros((3, 8192)))
    plan = route(jnp.zeros((3, 64)), 40)
    with pytest.raises(NotImplementedError, match="k=40 rows to sum are more than 32"):
        combine(jnp.zeros((120, 8)), plan, implementation="pallas_gpu")


@pytest.mark.parametrize(
    ("dtype", "k", "columns", "weighted"),
    [("float32", 1, 384, True), ("float16", 3, 2048, True), ("float32", 2, 5120, False)],
)
def test_rows_are_gathered_by_the_mosaic_kernel(dtype, k, columns, weighted, monkeypatch):
    """On the model of the machine: rows in any order, none where an index is out of range, not even NaN."""
    monkeypatch.setattr(gpu_rows, "BLOCKS", 1)
    monkeypatch.setattr(gpu_rows._compat, "multiprocessors", lambda: 3)
    x = RNG.integers(-3, 4, (9, columns)).astype(dtype)
    x[0] = np.nan
    index = RNG.integers(1, 9, (10, k)).astype(np.int32)
    index[3, 0], index[4, -1] = -1, 9
    weight = 2.0 ** RNG.integers(-2, 3, (10, k)).astype(np.float32) if weighted else None
    ((got,),) = Gpus(1).run(lambda _: gpu_rows.gather_sum(x, index, weight))
    valid = ((index >= 0) & (index < 9))[..., None]
    rows = np.where(valid, x[np.where(valid[..., 0], index, 1)].astype(np.float64), 0)
    want = (rows if weight is None else rows * weight[..., None]).sum(1)
    np.testing.assert_array_equal(got, want.astype(dtype))


def test_what_the_mosaic_kernel_refuses(monkeypatch):
    pytest.importorskip("absl")
    monkeypatch.setattr(gpu_rows._compat, "gpu_architecture", lambda: (9, 0))
    index = jnp.zeros((4, 2), jnp.int32)
    assert gpu_rows.unsupported(jnp.zeros((4, 7168), jnp.bfloat16), index) == ()
    assert "multiples of 128 columns" in gpu_rows.unsupported(jnp.zeros((4, 100)), index)[0]
    assert "rows are int32" in gpu_rows.unsupported(jnp.zeros((4, 128), jnp.int32), index)[0]
    assert "more than 32" in gpu_rows.unsupported(jnp.zeros((4, 128)), jnp.zeros((4, 33), jnp.int32))[0]
    monkeypatch.setattr(gpu_rows._compat, "gpu_architecture", lambda: (8, 0))
    assert gpu_rows.unsupported(jnp.zeros((4, 128)), index) == (
        "the GPU is sm_80; there is a kernel for sm_90a and sm_100a",
    )
