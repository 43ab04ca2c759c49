"""``mp.shardings``: where a layout places the arrays of a tree, compared with what ``mp.init``, ``mp.jit`` and JAX do with it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp

LAYOUT = "batch: data; embed: data; mlp: model"
DIMS = {"*/up": "embed mlp", "*/down": "mlp embed"}


def create(key):
    up, down = jax.random.split(key)
    params = {"up": jax.random.normal(up, (16, 32)), "down": jax.random.normal(down, (32, 16)), "bias": jnp.zeros(16)}
    return {"params": params, "opt": optax.adam(1e-3).init(params), "step": jnp.zeros((), jnp.int32)}


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x == y


def test_they_are_those_of_init(mesh):
    shapes = jax.eval_shape(create, jax.random.key(0))
    state = mp.init(create, mesh=mesh, layout=LAYOUT, dims=DIMS)(jax.random.key(0))
    found = mp.shardings(shapes, LAYOUT, mesh, dims=DIMS)
    equal(found, jax.tree.map(lambda x: x.sharding, state))
    equal(found, mp.shardings(state, LAYOUT, mesh, dims=DIMS))
    assert found["params"]["up"].spec == P("data", "model")
    assert found["opt"][0].mu["down"].spec == P("model", "data")
    assert found["params"]["bias"].spec == found["step"].spec == P()


def test_names_of_flax_count(mesh):
    class Model(nnx.Module):
        def __init__(self, rngs):
            kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
            self.up = nnx.Linear(16, 32, kernel_init=kernel, rngs=rngs)

    with nnx.use_eager_sharding(False):
        model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    found = mp.shardings(model, LAYOUT, mesh)
    assert jax.tree.leaves(found["up"]["kernel"])[0] == NamedSharding(mesh, P("data", "model"))
    dense = nn.Dense(32, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp")))
    variables = jax.eval_shape(dense.init, jax.random.key(0), jnp.ones((1, 16)))
    boxed = mp.shardings(variables, LAYOUT, mesh)
    assert jax.tree.structure(boxed) == jax.tree.structure(variables)
    assert jax.tree.leaves(boxed["params"]["kernel"]) == [NamedSharding(mesh, P("data", "model"))]


def test_the_mesh_may_be_sizes_or_abstract():
    tree = {"w": jax.ShapeDtypeStruct((16, 32), jnp.float32)}
    dims = {"w": "embed mlp"}
    assert mp.shardings(tree, LAYOUT, "data=4, model=2", dims=dims)["w"].spec == P("data", "model")
    abstract = jax.sharding.AbstractMesh((16, 4), ("data", "model"))
    found = mp.shardings(tree, LAYOUT, abstract, dims=dims)["w"]
    assert (found.spec, dict(found.mesh.shape)) == (P("data", "model"), {"data": 16, "model": 4})
    assert found.shard_shape((16, 32)) == (1, 8)


@pytest.mark.parametrize(
    ("tree", "layout", "dims", "error"),
    [
        ({"w": jnp.ones((6, 4))}, "embed: data", {"w": "embed mlp"}, mp.errors.DivisibilityError),
        ({"w": jnp.ones((8, 4))}, "embed: expert", {"w": "embed mlp"}, mp.errors.UnknownAxisError),
        ({"w": jnp.ones((8, 4))}, "embed: data", {"w": "embed"}, mp.errors.RankError),
        ({"w": jnp.ones((8, 4))}, "embed: data", {"v": "embed mlp"}, mp.errors.PatternError),
        ({"w": jnp.ones((8, 4))}, "embed: data", None, mp.errors.UnknownDimError),
        ({"w": jnp.ones((8, 4))}, "embed", {"w": "embed mlp"}, mp.errors.LayoutSyntaxError),
    ],
)
def test_what_does_not_fit_is_an_error(mesh, tree, layout, dims, error):
    with pytest.raises(error):
        mp.shardings(tree, layout, mesh, dims=dims)


def test_leaves_that_are_no_arrays_have_none(mesh):
    found = mp.shardings({"w": jnp.ones((8, 4)), "name": "adam"}, "embed: data", mesh, dims={"w": "embed _"})
    assert found["name"] is None
    assert mp.shardings({}, "embed: data", mesh) == {}
    assert mp.shardings({"step": 3}, "embed: data", mesh)["step"].spec == P()
