"""The order of dims in which unreduced sums are reduced: on CPUs the scattered dim first, on TPUs whole sums as products make them;
and the same numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import weights
from jax.sharding import AbstractMesh, AxisType
from lowered import jaxpr_of, of_kind
from same_results import assert_close

import meshpar as mp

RNG = np.random.default_rng(0)
FSDP = "batch: data; embed: data"


normal = functools.partial(weights, RNG)


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
    plan = mp.plan(step, STATE, X, mesh=mesh, layout=FSDP, dims=DIMS, overlap="off")
    return sorted(eqn.params["scatter_dimension"] for eqn in of_kind(jaxpr_of(plan, mesh), "reduce_scatter"))


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [
        (FSDP, "data=8"),
        ("batch: data; expert: model; embed: data", "data=2, model=2, idle=2"),
    ],
)
def test_the_same_numbers(layout, mesh):
    mesh = mp.mesh(mesh)
    got = mp.jit(step, mesh=mesh, layout=layout, dims=DIMS, lowering="shard_map")(STATE, X)
    assert_close(got, step(STATE, X), 1e-5, 1e-5)
    moved = [np.abs(np.asarray(got[0][k]) - STATE[k]).max() for k in STATE]
    assert min(moved) > 1e-2


def test_the_scattered_dim_is_the_first_one():
    assert scattered_dims(mp.mesh("data=8")) == [0] * 5


def test_other_compilers_get_sums_as_they_are():
    """Where the weights have `embed`: first, second or third."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    assert scattered_dims(mesh) == [0, 0, 1, 1, 2]
