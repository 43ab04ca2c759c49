"""Which loops are pipelines: stacks by metadata, by path or by ``dims=``, of modules and of plain trees; loops that are none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar.errors import ReplicatedWarning, UnknownDimError

LAYERS, EMBED, MICROBATCHES = 4, 8, 4
MESH, LAYOUT = "stage=2, data=2, idle=2", "batch: data; layers: stage"
X = np.random.default_rng(0).normal(size=(16, EMBED)).astype(np.float32)


def updated(params, gradients):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def compared(step, *args, dims, **options):
    """The plan of a step, after a run that equals the unsharded one."""
    run = mp.jit(step, **{"mesh": MESH, "layout": LAYOUT, "dims": dims, **options})
    got, want = run(*args), jax.jit(step)(*args)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    return run.plan(*args)


def assert_pipeline(plan, microbatches=MICROBATCHES):
    assert plan.pipeline is not None
    assert (plan.pipeline.layers, plan.pipeline.stages, plan.pipeline.microbatches) == (LAYERS, 2, microbatches)
    gathered = [c for c in plan.collectives if c.op == "all-gather" and "stage" in c.axes]
    assert all("batch" in c.dims for c in gathered), "activations move, weights do not"


def test_arrays_that_dims_alone_names():
    """No path says ``params``: weights are arguments of their own."""

    def step(up, down, x):
        def loss(weights, x):
            h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w[0]) @ w[1], None), x, weights)
            return jnp.mean(h * h)

        value, gradients = mp.train.accumulate_gradients(jax.value_and_grad(loss), MICROBATCHES)((up, down), x)
        return *updated((up, down), gradients), value

    r = np.random.default_rng(1)
    up, down = (r.normal(size=(LAYERS, EMBED, EMBED)).astype(np.float32) / 3 for _ in range(2))
    dims = {"up": "layers embed mlp", "down": "layers mlp embed", "x": "batch embed"}
    assert_pipeline(compared(step, up, down, X, dims=dims))


def test_layers_of_nnx_that_are_arguments():
    """A module with layers that ``nnx.vmap`` makes and ``nnx.scan`` applies, updated in place."""
    nnx = pytest.importorskip("flax.nnx")
    stacked = {nnx.PARTITION_NAME: "layers"}

    class Model(nnx.Module):
        def __init__(self):
            @nnx.split_rngs(splits=LAYERS)
            @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=stacked)
            def stack(rngs):
                return nnx.Linear(EMBED, EMBED, use_bias=False, rngs=rngs)

            self.layers = stack(nnx.Rngs(0))

        def __call__(self, x):
            scan = nnx.scan(
                lambda layer, x: x + jnp.tanh(layer(x)),
                in_axes=(0, nnx.Carry),
                out_axes=nnx.Carry,
                transform_metadata=stacked,
            )
            return scan(self.layers, x)

    def step(model, x):
        graph, params = nnx.split(model)
        loss = lambda params, x: jnp.mean(nnx.merge(graph, params)(x) ** 2)  # noqa: E731
        value, gradients = mp.train.accumulate_gradients(jax.value_and_grad(loss), MICROBATCHES)(params, x)
        nnx.update(model, updated(params, gradients))
        return value

    model, other = Model(), Model()
    run = mp.jit(step, mesh=MESH, layout=LAYOUT, dims={"model/layers/kernel": "layers embed _", "x": "batch embed"})
    assert_pipeline(run.plan(model, X))
    np.testing.assert_allclose(run(model, X), nnx.jit(step)(other, X), rtol=1e-5)
    np.testing.assert_allclose(model.layers.kernel[...], other.layers.kernel[...], rtol=1e-5, atol=1e-6)


def by_index(w):
    return [w[i] for i in range(LAYERS)]


def taken(w):
    return [jnp.take(w, i, 0) for i in range(LAYERS)]


@pytest.mark.parametrize(
    ("layers", "microbatches"), [(by_index, 1), (jnp.unstack, MICROBATCHES), (taken, MICROBATCHES)]
)
def test_a_python_loop_over_layers_gathers_them_and_a_warning_says_so(layers, microbatches):
    def step(params, x):
        def loss(params, x):
            for w in layers(params["w"]):
                x = x + jnp.tanh(x @ w)
            return jnp.mean(x * x)

        gradient = jax.value_and_grad(loss)
        return (mp.train.accumulate_gradients(gradient, microbatches) if microbatches > 1 else gradient)(params, x)

    params = {"w": np.random.default_rng(2).normal(size=(LAYERS, EMBED, EMBED)).astype(np.float32) / 3}
    dims = {"params/w": "layers _ embed", "x": "batch embed"}
    with pytest.warns(ReplicatedWarning, match="`layers` is split over stage, and .*test_find.py:.*jax.lax.scan"):
        plan = compared(step, params, X, dims=dims)
    assert plan.pipeline is None
    assert [note for note in plan.notes if "`layers`" in note and "stage" in note and "jax.lax.scan" in note]
    for layout in ("batch: data", "batch, layers: data"):  # no warning: the axis has the batch, as in FSDP
        plan.replan(layout=layout)


@pytest.mark.parametrize("sizes", [(8, 8), (8, 16)])
def test_a_list_of_layers_is_no_stack_and_the_error_says_how_to_make_one(sizes):
    def step(layers, x):
        for layer in layers:
            x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
        return x

    layers = [{"up": np.ones((EMBED, n), np.float32), "down": np.ones((n, EMBED), np.float32)} for n in sizes]
    dims = {"*/up": "embed mlp", "*/down": "mlp embed", "x": "batch embed"}
    with pytest.raises(UnknownDimError, match="`layers` numbers the layers of a list, as of layers/0/down") as error:
        mp.plan(step, layers, X, mesh=MESH, layout=LAYOUT, dims=dims)
    assert "jax.lax.scan" in str(error.value)


def test_a_loop_without_a_carry_runs_all_layers_at_once():
    """Every layer is independent of the others (here: an update by a scan over the layers): no stage is idle."""

    def step(params):
        return {"w": jax.lax.map(lambda w: w - 0.1 * w @ w.T, params["w"])}

    params = {"w": np.random.default_rng(3).normal(size=(LAYERS, EMBED, EMBED)).astype(np.float32) / 3}
    plan = compared(step, params, dims={"params/w": "layers _ embed"}, layout="layers: stage")
    assert plan.pipeline is None
    assert not plan.collectives
