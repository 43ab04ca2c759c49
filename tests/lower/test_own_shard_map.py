"""A shard_map of the user's own inside a step: under both lowerings, with its gradients, and over a factored mesh."""

import dataclasses
import functools

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import weights
from jax import lax
from jax.sharding import PartitionSpec as P
from lowered import assert_sends_the_plan
from same_results import assert_close

import meshpar as mp
from meshpar._src.hardware.topology import Stage
from meshpar._src.lower import LOWERINGS
from meshpar.errors import MeshError, UnknownAxisError, UnsupportedError

MESH = "data=4, model=2"
DIMS = {"w/up": "embed mlp", "w/down": "mlp embed", "x": "batch embed"}
LAYOUT = "batch: data; mlp: model"

normal = functools.partial(weights, np.random.default_rng(0))
W = {"up": normal(16, 32), "down": normal(32, 16)}
X = normal(8, 16)
SPECS = (P("data"), P(None, "model"), P("model"))


def mapped(body, in_specs, out_specs, **options):
    mesh = options.pop("mesh", None) or mp.mesh(MESH)
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def megatron(x, up, down):
    return lax.psum(jax.nn.gelu(x @ up) @ down, "model")


def written_out(w, x):
    return jnp.sum((jax.nn.gelu(x @ w["up"]) @ w["down"]) ** 2)


close = functools.partial(assert_close, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("lowering", "check_vma", "layout"),
    covering.pairs(["jit", "shard_map"], [False, True], [LAYOUT, "batch: model; embed: data", ""]),
)
def test_values_and_gradients_are_those_of_the_function_written_out(lowering, check_vma, layout):
    def loss(w, x):
        return jnp.sum(mapped(megatron, SPECS, P("data"), check_vma=check_vma)(x, w["up"], w["down"]) ** 2)

    step = mp.jit(jax.value_and_grad(loss), mesh=MESH, layout=layout, dims=DIMS, lowering=lowering)
    close(step(W, X), jax.value_and_grad(written_out)(W, X))


@pytest.mark.parametrize("lowering", ["jit", "shard_map"])
def test_layers_in_a_loop_rematerialised(lowering):
    """Residuals keep the sharding that the shard_map gives them: nothing is gathered for the backward pass."""
    stacks = {"up": 0.1 * normal(3, 16, 32), "down": 0.1 * normal(3, 32, 16)}

    def loss(layer):
        def of(w, x):
            h, _ = lax.scan(lambda h, p: (h + layer(h, p["up"], p["down"]), None), x, w)
            return jnp.sum(h**2)

        return of

    plain = loss(lambda x, up, down: jax.nn.gelu(x @ up) @ down)
    dims = {"w/up": "layers embed mlp", "w/down": "layers mlp embed", "x": "batch embed"}
    for layer in (mapped(megatron, SPECS, P("data")), jax.checkpoint(mapped(megatron, SPECS, P("data")))):
        step = mp.jit(jax.value_and_grad(loss(layer)), mesh=MESH, layout=LAYOUT, dims=dims, lowering=lowering)
        close(step(stacks, X), jax.value_and_grad(plain)(stacks, X))
        assert {c.op for c in step.plan(stacks, X).collectives} == {"all-reduce"}


def test_the_plan_lists_what_the_body_sends_and_no_more():
    def loss(w, x):
        return jnp.sum(mapped(megatron, SPECS, P("data"))(x, w["up"], w["down"]) ** 2)

    plan = assert_sends_the_plan(loss, W, X, layout=LAYOUT, dims=DIMS, mesh=MESH)
    (reduced,) = (c for c in plan.collectives if c.axes == ("model",))
    assert (reduced.op, reduced.shape, reduced.count) == ("all-reduce", (2, 16), 1)
    assert reduced.bytes == 2 * 2 * 16 * 4 * 1 / 2
    assert "test_own_shard_map.py" in reduced.source


def every_collective(x, w):
    """One of each, in control flow too; the result of the whole is that of :func:`without_collectives`."""
    here = lax.axis_index("data")
    y = lax.all_gather(x, "data", tiled=True) @ w  # [8, 32 / 2]
    y = lax.psum_scatter(y, "data", tiled=True) / 4
    y = lax.ppermute(y, "data", [(i, (i + 1) % 4) for i in range(4)])
    y = lax.ppermute(y, ("data", "model"), [(i, (i + 2) % 8) for i in range(8)])
    y = lax.all_to_all(y, "model", 0, 1, tiled=True)
    y = lax.all_to_all(y, "model", 1, 0, tiled=True)

    def one(carry, scale):
        return carry + lax.pmean(scale * y, "model") + here, lax.pmax(jnp.sum(carry), ("data", "model"))

    total, most = lax.scan(one, jnp.zeros_like(y), jnp.arange(3.0))
    total = lax.cond(most[-1] > -1e9, lambda t: jax.nn.relu(t), lambda t: lax.psum(t, "model"), total)
    total = lax.fori_loop(0, 2, lambda i, t: t + lax.pmean(jnp.sum(t), ("data", "model")), total)
    return total, most


def without_collectives(x, w):
    y = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    y = np.roll(y, 4, 0).reshape(4, 2, 2, 16)  # rows by `data`, columns by `model`: [data, row, model, column]
    here = np.arange(4).reshape(4, 1, 1, 1)
    mean = y.mean(2, keepdims=True)
    steps = [np.zeros_like(y)]
    for scale in range(3):
        steps.append(steps[-1] + scale * mean + here)
    most = np.array([max(t[d, :, m].sum() for d in range(4) for m in range(2)) for t in steps[:3]])
    total = np.maximum(steps[-1], 0)
    for _ in range(2):
        total = total + np.mean([total[d, :, m].sum() for d in range(4) for m in range(2)])
    return total.reshape(8, 32), most


ONE_OF_EACH = {"layout": "batch: data; mlp: model", "dims": {"x": "batch embed", "w": "embed mlp"}}


def one_of_each():
    return mapped(every_collective, (P("data"), P(None, "model")), (P("data", "model"), P()), check_vma=False)


@pytest.mark.parametrize("lowering", ["jit", "shard_map"])
def test_every_collective(lowering):
    run = mp.jit(one_of_each(), mesh=MESH, lowering=lowering, **ONE_OF_EACH)
    close(run(X, W["up"]), without_collectives(X, W["up"]))


def test_over_a_mesh_that_is_factored_over_the_torus():
    plan = mp.plan(one_of_each(), X, W["up"], mesh=MESH, **ONE_OF_EACH)
    plan = dataclasses.replace(plan, torus={"data": (Stage(2, "x"), Stage(2, "y")), "model": (Stage(2, "z"),)})
    run, ins, _ = LOWERINGS["shard_map"](plan, mp.mesh(MESH))
    close(tuple(jax.jit(run, in_shardings=ins)(X, W["up"])), without_collectives(X, W["up"]))


@pytest.mark.parametrize("lowering", ["jit", "shard_map"])
def test_manual_over_some_axes_only(lowering):
    """The others are as if they were not there: what the layout splits over them is gathered."""

    def loss(w, x):
        part = mapped(megatron, (P(), P(None, "model"), P("model")), P(), axis_names={"model"})
        return jnp.sum(part(x, w["up"], w["down"]) ** 2)

    step = mp.jit(jax.value_and_grad(loss), mesh=MESH, layout=LAYOUT, dims=DIMS, lowering=lowering)
    close(step(W, X), jax.value_and_grad(written_out)(W, X))


@pytest.mark.parametrize("lowering", ["jit", "shard_map"])
def test_over_an_abstract_mesh(lowering):
    inner = mapped(megatron, SPECS, P("data"), mesh=mp.mesh(MESH).abstract_mesh)
    run = mp.jit(lambda w, x: inner(x, w["up"], w["down"]), mesh=MESH, layout=LAYOUT, dims=DIMS, lowering=lowering)
    close(run(W, X), jax.nn.gelu(X @ W["up"]) @ W["down"])


def test_a_mesh_that_is_not_the_plans_is_refused():
    def plan(mesh):
        inner = mapped(megatron, SPECS, P("data"))
        return mp.plan(lambda w, x: inner(x, w["up"], w["down"]), W, X, mesh=mesh, layout="batch: data", dims=DIMS)

    with pytest.raises(UnknownAxisError, match=r"`model`.*does not have"):
        plan("data=4, tensor=2")
    with pytest.raises(MeshError, match=r"`data=4`.*`data=2`"):
        plan("data=2, model=4")
    with pytest.raises(MeshError, match="order"):
        plan("model=2, data=4")


def test_one_inside_another_needs_the_jit_lowering():
    def outer(x):
        inner = jax.shard_map(
            lambda y: lax.psum(y, "model"), in_specs=P(None, "model"), out_specs=P(), axis_names={"model"}
        )
        return inner(x)

    def run(lowering):
        fn = mapped(outer, P("data"), P("data"), axis_names={"data"})
        return mp.jit(fn, mesh=MESH, layout="batch: data", dims={"x": "batch embed"}, lowering=lowering)(X)

    close(run("jit"), X[:, :8] + X[:, 8:])
    with pytest.raises(UnsupportedError, match="has shard_map in its body"):
        run("shard_map")


@pytest.mark.parametrize(
    ("out_spec", "sent"),
    [(P("data"), []), (P("model"), ["collective-permute"])],  # the result is stored over `data`
)
def test_a_result_has_the_names_of_the_operands_dims_and_its_own_axes(out_spec, sent):
    mesh = mp.mesh("data=2, model=2")

    def step(x):
        return mapped(lambda part: part * 2, P("data"), out_spec, mesh=mesh, check_vma=False)(x) + 1

    plan = mp.plan(step, X, mesh=mesh, layout="batch: data", dims={"x": "batch embed"})
    assert [c.op for c in plan.collectives] == sent
    assert [(h.dims, h.spec) for h in plan.outputs] == [(("batch", "embed"), P("data"))]
