"""The order of dims in which the shard_map lowering settles sums on CPUs: what is transposed there, and the same numbers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import meshpar as mp
from meshpar.lower import LOWERINGS
from meshpar.lower.orders import Orders

RNG = np.random.default_rng(0)
FSDP = "batch: data; embed: data"


def normal(*shape):
    return (RNG.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)


STATE = {
    "up": normal(16, 24), "down": normal(24, 16), "query": normal(16, 4, 2), "out": normal(4, 2, 16), "experts": normal(2, 16, 8),
}  # fmt: skip
X = RNG.normal(size=(16, 4, 16)).astype(np.float32) / 4
DIMS = {
    "state/up": "embed mlp", "state/down": "mlp embed", "state/query": "embed heads head_dim",
    "state/out": "heads head_dim embed", "state/experts": "expert embed mlp", "x": "batch seq embed",
}  # fmt: skip


def loss(state, x):
    y = x + jax.nn.silu(x @ state["up"]) @ state["down"]
    y = y + jnp.einsum("bshd,hde->bse", jnp.tanh(jnp.einsum("bse,ehd->bshd", y, state["query"])), state["out"])
    return jnp.square(jnp.tanh(jnp.einsum("bse,nem->bsnm", y, state["experts"]))).sum() / 16


def step(state, x):
    value, grads = jax.value_and_grad(loss)(state, x)
    return jax.tree.map(lambda p, g: p - g, state, grads), value


def scattered_dims(mesh):
    """The dim of every reduce-scatter that the program does, unless nothing reads it."""
    plan = mp.plan(step, STATE, X, mesh=mesh, layout=FSDP, dims=DIMS)
    run, _, _ = LOWERINGS["shard_map"](plan, mesh)
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "reduce_scatter":
                found.append(eqn.params["scatter_dimension"])
            for param in eqn.params.values():
                body = getattr(param, "jaxpr", param)
                if hasattr(body, "eqns"):
                    walk(body)

    walk(jax.make_jaxpr(run)(*[jax.ShapeDtypeStruct(v.shape, v.aval.dtype) for v in plan.program.inputs]).jaxpr)
    return sorted(found)


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [
        ("batch: data", "data=8"),
        (FSDP, "data=8"),
        ("batch: data; mlp: data", "data=8"),
        ("batch: data; heads, mlp: model; embed: data", "data=4, model=2"),
        ("batch: data; expert: model; embed: data", "data=2, model=2, idle=2"),
    ],
)
def test_the_same_numbers(layout, mesh):
    mesh = mp.mesh(mesh)
    got = mp.jit(step, mesh=mesh, layout=layout, dims=DIMS, lowering="shard_map")(STATE, X)
    want = jax.jit(step)(STATE, X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    moved = [np.abs(np.asarray(want[0][k]) - STATE[k]).max() for k in STATE]
    assert min(moved) > 1e-2


def test_the_scattered_dim_is_the_first_one():
    assert scattered_dims(mp.mesh("data=8")) == [0] * 5


def test_other_compilers_get_sums_as_they_are():
    """Where the weights have `embed`: first, second or third."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    assert scattered_dims(mesh) == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("as_they_are", [False, True])
def test_no_product_is_made_together_with_its_transpose(as_they_are, monkeypatch):
    """In a form that XLA's library for CPUs does not know; as they are, some would be."""
    if as_they_are:
        monkeypatch.setattr(Orders, "passed", lambda *_: None)
    fn = mp.jit(step, mesh=mp.mesh("data=8"), layout="batch: data", dims=DIMS, lowering="shard_map")
    products = re.findall(r" dot\(.*?lhs_contracting_dims={([\d,]+)}", fn.lower(STATE, X).compile().as_text())
    assert len(products) == 14  # three of every weight, and two of `up`: nobody asks for the gradient of `x`
    assert ("0" in products) == as_they_are
