"""``mp.jit`` behaves as ``jax.jit``'s result does, and the layout never changes the result."""

import functools
import gc
import inspect
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import checkify
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar._src.dims import format_dims

DIMS = {"params/up": "embed mlp", "params/down": "mlp embed", "x": "batch embed"}
LAYOUT = "batch: data; mlp: model; embed: data"


def params(seed: int = 0):
    up, down = jax.random.split(jax.random.key(seed))
    return {"up": jax.random.normal(up, (16, 32)) / 4, "down": jax.random.normal(down, (32, 16)) / 6}


def batch(n: int = 8) -> np.ndarray:
    return np.random.default_rng(n).normal(size=(n, 16)).astype(np.float32)


def loss(params, x):
    return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - x) ** 2)


def train(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.fixture
def jit(mesh):
    return functools.partial(mp.jit, mesh=mesh, layout=LAYOUT, dims=DIMS)


def close(a, b) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), a, b)


# -- results


def test_results_lie_as_the_plan_says(jit, mesh):
    step = jit(train)
    got, plan = step(params(), batch()), step.plan(params(), batch())
    for leaf, held in zip(jax.tree.leaves(got), plan.outputs, strict=True):
        assert leaf.shape == held.shape
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, held.spec), leaf.ndim), held.path
        assert leaf.addressable_shards[0].data.nbytes == held.bytes
    assert got[0]["up"].sharding.spec == P("data", "model")
    assert got[0]["down"].sharding.spec == P("model", "data")


# -- arguments


def test_keywords_and_defaults(jit):
    calls = []

    @jit(dims={"x": "batch embed", "shift": "embed"}, layout="batch: data; embed: model")
    def fn(x, scale=2.0, *, shift=None):
        calls.append(None)
        y = x * scale
        return y if shift is None else y + shift

    x, shift = batch(), np.arange(16, dtype=np.float32)
    want = x * 3 + shift
    np.testing.assert_allclose(fn(x, 3.0, shift=shift), want, rtol=1e-6)
    np.testing.assert_allclose(fn(x=x, scale=3.0, shift=shift), want, rtol=1e-6)
    np.testing.assert_allclose(fn(shift=shift, scale=3.0, x=x), want, rtol=1e-6)
    assert len(calls) <= 2
    fn = jit(fn.__wrapped__, dims={"x": "batch embed"}, layout="batch: data; embed: model")
    np.testing.assert_allclose(fn(x), x * 2)
    np.testing.assert_allclose(fn(x=x), x * 2)


def test_variadic_arguments(mesh):
    dims = {"xs/0": "batch _", "y": "batch _"}
    fn = mp.jit(lambda *xs, **more: sum(xs) + sum(more.values()), mesh=mesh, layout="batch: data", dims=dims)
    np.testing.assert_allclose(fn(batch(), batch(), y=batch()), 3 * batch(), rtol=1e-6)
    assert [h.path for h in fn.plan(batch(), batch(), y=batch()).inputs] == ["xs/0", "xs/1", "y"]


# -- the cache


def test_cached_by_shape_and_dtype(jit):
    traces = []

    @jit(dims={"x": "batch embed"}, layout="batch: data; embed: model")
    def fn(x):
        traces.append(x.shape)
        return x * 2

    for n in (8, 8, 16, 8, 16):
        np.testing.assert_array_equal(fn(batch(n)), batch(n) * 2)
    assert len(traces) == len(set(traces)) == 2
    fn(batch().astype(np.float16))
    assert len(traces) == 3
    fn.plan(batch())
    fn.lower(batch())
    fn.plan(jax.ShapeDtypeStruct((8, 16), jnp.float32))
    assert len(traces) == 3
    fn.clear_cache()
    fn(batch())
    assert len(traces) == 4


# -- lower, trace, eval_shape, plan


def test_lower_from_shapes_with_statics_and_donation(jit):
    def fn(state, x, n, *, flip):
        return jax.tree.map(lambda a: -a if flip else a * n, state), x

    dims = {"state/w": "embed mlp", "x": "batch embed"}
    step = jit(fn, dims=dims, static_argnames=("n", "flip"), donate_argnames="state")
    w, x = jnp.ones((16, 32)), batch()
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), ({"w": w}, x))
    compiled = step.lower(*shapes, 3, flip=False).compile()
    arguments = jax.device_put(({"w": w}, x), step.lower(*shapes, 3, flip=False).compile().input_shardings[0])
    out, _ = compiled(*arguments)
    np.testing.assert_array_equal(out["w"], w * 3)
    assert arguments[0]["w"].is_deleted()
    assert not arguments[1].is_deleted()


def test_trace_and_eval_shape(jit):
    step = jit(train)
    traced = step.trace(params(), batch())
    assert isinstance(traced, jax.stages.Traced)
    want = jax.eval_shape(train, params(), batch())
    for got in (traced.out_info, step.eval_shape(params(), batch())):
        assert jax.tree.map(lambda s: (s.shape, s.dtype), got) == jax.tree.map(lambda s: (s.shape, s.dtype), want)
    run = jit(lambda x, n: jnp.zeros((n,)) + x.sum(), dims={"x": "batch embed"}, static_argnames="n", layout="")
    assert run.eval_shape(batch(), 3).shape == (3,)


def test_compiler_options_reach_every_way_of_compiling(jit):
    step = jit(train, compiler_options={"xla_no_such_option": True})
    for compiling in (
        lambda: step(params(), batch()),
        lambda: step.lower(params(), batch()).compile(),
        lambda: step.trace(params(), batch()).lower().compile(),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
            compiling()


@pytest.mark.parametrize("lowering", ["jit", "shard_map"])
def test_plan_of_the_function_is_that_of_its_jit(jit, mesh, lowering):
    """`mp.plan` and `mp.jit(…).plan` agree on what is left out."""
    step = jit(train, lowering=lowering)
    here = mp.plan(train, params(), batch(), mesh=mesh, layout=LAYOUT, dims=DIMS, lowering=lowering)
    assert here.overlap == step.plan(params(), batch()).overlap == {"jit": "off", "shard_map": "auto"}[lowering]
    assert here.to_json() == step.plan(params(), batch()).to_json()


def test_asking_for_overlap_alone_asks_for_the_lowering_that_has_it(mesh):
    plan = mp.plan(train, params(), batch(), mesh=mesh, layout=LAYOUT, dims=DIMS, overlap="ring")
    assert (plan.lowering, plan.overlap) == ("shard_map", "ring")


def test_without_jit_the_function_runs_as_written(jit):
    """Once, line by line, on concrete values; constraints over names mean nothing then."""
    runs = []

    def fn(x, fails=False):
        x = jax.lax.with_sharding_constraint(mp.named(x, "batch embed"), P("batch", "embed"))
        runs.append(isinstance(x, jax.core.Tracer))
        if fails:
            raise ValueError("not today")
        return x * 2

    step = jit(fn, dims={"x": "batch embed"}, layout="batch: data", static_argnames="fails")
    step(batch())
    runs.clear()
    with jax.disable_jit():
        np.testing.assert_array_equal(step(batch()), batch() * 2)
        with pytest.raises(ValueError, match="not today"):
            step(batch(), fails=True)
    assert runs == [False] * 2


# -- keywords that are options too


def clash(x, mesh=1.0, layout=0.0, timeout=0.0):
    return x * mesh + layout + timeout


HOW = {"mesh": "data=4", "layout": "batch: data", "dims": {"x": "batch _"}}


def test_a_keyword_that_is_an_option_and_an_argument_is_refused():
    with pytest.raises(mp.errors.UnsupportedError) as error:
        mp.plan(clash, batch(), **HOW)
    assert "`layout` is an option of plan and an argument of clash" in str(error.value)
    assert "kwargs={'layout': …}" in str(error.value)


def test_kwargs_and_positions_say_which_is_meant():
    def inputs(*args, **more):
        return [h.path for h in mp.plan(clash, *args, **HOW, **more).inputs]

    assert inputs(batch(), kwargs={}) == ["x"]
    assert inputs(batch(), kwargs={"mesh": 2.0, "layout": 1.0}) == ["x", "layout", "mesh"]
    assert inputs(batch(), 2.0, 3.0) == ["x", "mesh", "layout"]
    assert inputs(batch(), 2.0, 3.0, timeout=1.0) == ["x", "mesh", "layout", "timeout"]  # no option of plan's
    assert mp.check(clash, batch(), layout="batch: data", mesh="data=4", dims=HOW["dims"], kwargs={"mesh": 3.0}).ok


def test_a_jitted_step_takes_any_keyword():
    step = mp.jit(clash, **{**HOW, "mesh": mp.mesh("data=4")})
    np.testing.assert_allclose(step(batch(), mesh=2.0, layout=1.0), batch() * 2 + 1, rtol=1e-6)
    assert [h.path for h in step.plan(batch(), mesh=2.0).inputs] == ["x", "mesh"]
    with pytest.raises(mp.errors.UnsupportedError, match="`timeout` is an option of compile and an argument of clash"):
        step.compile(batch(), timeout=3.0)


# -- nnx


def linear(rows: int, columns: int, *names: str, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
    return nnx.Linear(rows, columns, rngs=rngs, kernel_init=init)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = linear(16, 32, "embed", "mlp", rngs=rngs)
        self.down = linear(32, 16, "mlp", "embed", rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.down(nnx.relu(self.up(x)))


def nnx_step(model, optimizer, x):
    value, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return value


def make():
    with nnx.use_eager_sharding(False):
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def test_nnx_modules_are_updated_in_place(mesh):
    (model, optimizer), (same, same_optimizer) = make(), make()
    traces = []

    def fn(model, optimizer, x):
        traces.append(0)
        return nnx_step(model, optimizer, x)

    step, reference = mp.jit(fn, mesh=mesh, layout=LAYOUT, dims={"x": "batch embed"}), nnx.jit(nnx_step)
    kernel, up = model.up.kernel, model.up
    for _ in range(3):
        value = step(model, optimizer, batch())
        np.testing.assert_allclose(value, reference(same, same_optimizer, batch()), rtol=1e-5)
    plan = step.plan(model, optimizer, batch())
    assert {h.path: format_dims(h.dims) for h in plan.inputs}["model/up/kernel"] == "embed mlp"
    assert len(traces) == 1
    assert model.up is up
    assert model.up.kernel is kernel
    assert model.calls[...] == 3
    assert optimizer.step[...] == 3
    moment = {"/".join(map(str, path)): x for path, x in nnx.to_flat_state(nnx.state(optimizer))}[
        "opt_state/0/mu/up/kernel"
    ]
    assert kernel[...].sharding.spec == moment[...].sharding.spec == P("data", "model")
    weights, others = (nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (model, same))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), weights, others)


@pytest.mark.parametrize("lowering", ["jit", "shard_map"])
def test_an_evaluation_under_another_layout_leaves_an_nnx_module_as_it_is(mesh, lowering):
    """Variables that the step changes have the shardings of its plan, others those that they had."""
    with nnx.use_eager_sharding(False):
        model = mp.init(lambda: Net(nnx.Rngs(0)), mesh=mesh, layout="embed: data; mlp: model")()
        fresh = Net(nnx.Rngs(0))  # its arrays are not placed: the first call places them
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    x = jnp.ones((8, 16))

    def evaluate(model, x):
        model.calls[...] += 1
        return jnp.mean((model(x) - x) ** 2)

    step = mp.jit(evaluate, mesh=mesh, layout="batch: data", dims={"x": "batch embed"}, lowering=lowering)
    loss = step(model, x)
    with pytest.warns(mp.errors.ReshardedWarning, match=r"`model`: .* model = step.put\(model=model\)"):
        loss = step(model, x)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert all(a is b for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
    assert int(model.calls[...]) == 4  # the model counts its calls as well
    np.testing.assert_allclose(loss, evaluate(model, x), rtol=1e-5)

    step(fresh, x)
    assert fresh.up.kernel[...].sharding.device_set == set(mesh.devices.flat)


def test_a_module_that_is_no_tree_is_freed(mesh, few_objects):
    class Scale(nnx.Module, pytree=False):
        def __init__(self):
            self.scale = nnx.Param(jnp.full(16, 3.0))

    module = Scale()
    run = mp.jit(lambda m, x: m.scale[...] * x, mesh=mesh, layout="batch: data", dims={"x": "batch embed"})
    close(run(module, jnp.ones((8, 16))), np.full((8, 16), 3.0))
    freed = weakref.ref(module)
    del module
    gc.collect()
    assert freed() is None


# -- methods


class Trainer(nnx.Module):
    def __init__(self):
        self.net = Net(nnx.Rngs(0))

    @mp.jit(mesh="data=4, model=2", layout=LAYOUT, dims={"x": "batch embed"})
    def __call__(self, x):
        return self.net(x)


TRACED = []


class Scaled(NamedTuple):
    w: jax.Array

    @mp.jit(mesh="data=4, model=2", layout=LAYOUT, dims={"self/w": "embed mlp", "x": "batch embed"})
    def apply(self, x, by=1.0):
        """x times w."""
        TRACED.append(by)
        return by * (x @ self.w)


def test_a_method_of_a_tree_of_arrays():
    first, second = Scaled(params(0)["up"]), Scaled(params(1)["up"])
    for scaled in (first, second):
        close(scaled.apply(batch(), by=2.0), 2 * batch() @ scaled.w)
        close(Scaled.apply(scaled, batch()), batch() @ scaled.w)
    assert len(TRACED) == 2  # with a number and without: once for both instances
    assert first.apply.trace(batch()).out_info.shape == Scaled.apply.trace(first, batch()).out_info.shape == (8, 32)
    assert list(inspect.signature(first.apply).parameters) == ["x", "by"]
    assert first.apply.__doc__ == "x times w."
    assert [h.path for h in first.apply.plan(batch()).inputs] == ["self/w", "x"]
    assert first.apply.shardings(batch())[0].spec == P("data")
    assert first.apply.put(x=batch()).sharding.spec == first.apply.put(batch()).sharding.spec == P("data")
    assert first.apply.eval_shape(batch()).shape == first.apply.abstract(batch()).shape == (8, 32)
    assert first.apply.check(batch()).ok
    assert mp.check(first.apply, batch(), layout=["batch: data", "mlp: model"], mesh="data=2, model=2").ok
    close(first.apply.on(layout="mlp: model")(batch()), batch() @ first.w)


def test_a_method_of_a_module_updates_it(mesh):
    with nnx.use_eager_sharding(False):
        trainer, alone = Trainer(), Net(nnx.Rngs(0))
    for _ in range(2):
        close(trainer(batch()), alone(batch()))
    assert trainer.net.calls[...] == 2
    assert trainer.net.up.kernel[...].sharding.spec == P("data", "model")


def test_a_method_whose_self_is_no_arrays(mesh):
    class Model:
        by = 3.0

        def scaled(self, x):
            return self.by * x

        plain = mp.jit(scaled, mesh=mesh, layout="batch: data", dims={"x": "batch embed"})
        static = mp.jit(scaled, mesh=mesh, layout="batch: data", dims={"x": "batch embed"}, static_argnames="self")

    close(Model().static(batch()), 3 * batch())
    with pytest.raises(mp.errors.UnsupportedError, match="self: a Model is not a JAX array") as e:
        Model().plain(batch())
    assert "static_argnames='self'" in str(e.value)


# -- modes of JAX


@pytest.mark.parametrize("lowering", ["jit", "shard_map"])
def test_checkify_inside_and_outside(jit, lowering):
    def positive(x):
        checkify.check(jnp.all(x > 0), "not all are positive")
        return jnp.log(x)

    how = {"layout": "batch: data", "lowering": lowering}
    outside = checkify.checkify(jit(positive, dims={"x": "batch _"}, **how))
    inside = jit(checkify.checkify(positive), dims={"args/0": "batch _"}, **how)
    for checked in (outside, inside):
        error, y = checked(np.ones((8, 4), np.float32))
        error.throw()
        np.testing.assert_array_equal(y, np.zeros((8, 4)))
        with pytest.raises(checkify.JaxRuntimeError, match="not all are positive"):
            checked(-np.ones((8, 4), np.float32))[0].throw()


# -- what holds for nnx.State, and shapes of modules


def test_a_state_is_a_tree_of_arrays(mesh):
    """`nnx.State` is updated no more than a dict is, also beside modules, which are."""
    model, _ = make()
    state = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    before = np.asarray(state["up"]["kernel"][...])

    def average(state, x):
        state["up"]["kernel"][...] *= 0.5
        return state

    def both(model, state, x):
        model(x)
        return average(state, x)

    for step, args in ((average, (state, batch())), (both, (model, state, batch()))):
        run = mp.jit(step, mesh=mesh, layout="mlp: model; embed: data", dims={"x": "batch embed"})
        got = run(*args)
        assert isinstance(got, nnx.State)
        np.testing.assert_array_equal(got["up"]["kernel"][...], before * 0.5)
        np.testing.assert_array_equal(state["up"]["kernel"][...], before)
        spec = {h.path: h.spec for h in run.plan(*args).inputs}
        assert spec["state/up/kernel"] == P("data", "model")
    assert model.calls[...] == 1


# -- leaves that are no arrays


@jax.tree_util.register_pytree_with_keys_class
class Dense:
    """A module as Equinox has them: a node with attributes, some of which are functions."""

    def __init__(self, w, act):
        self.w, self.act = w, act

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey(k), getattr(self, k)) for k in ("w", "act")], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_functions_in_modules_are_static(mesh):
    traces = []

    def step(module, x):
        traces.append(module.act)
        return Dense(module.w * 2, module.act), module.act(x @ module.w)

    how = {"layout": "batch: data; mlp: model", "dims": {"module/w": "embed mlp", "x": "batch embed"}}
    run = mp.jit(step, mesh=mesh, **how, donate_argnames="module")
    w = np.ones((16, 32), np.float32)
    for act in (jnp.tanh, jax.nn.relu, jnp.tanh):
        module, y = run(Dense(jnp.asarray(w), act), batch())
        assert module.act is act
        np.testing.assert_array_equal(module.w, 2 * w)
        np.testing.assert_allclose(y, act(batch() @ w), rtol=1e-5, atol=1e-6)
    assert traces == [jnp.tanh, jax.nn.relu]
    assert [h.path for h in run.plan(module, batch()).inputs] == ["module/w", "x"]
    assert run.lower(module, batch()).compile() is not None
    assert mp.check(run, Dense(w, jnp.tanh), batch(), layout="batch: data; mlp: model", mesh=mesh).ok


# -- where arguments belong


def test_shardings_and_put(jit, mesh):
    step = jit(train, lowering="shard_map")
    of_params, of_x = step.shardings(params(), jax.ShapeDtypeStruct((8, 16), np.float32))
    assert of_x == NamedSharding(mesh, P("data"))
    assert of_params == {"up": NamedSharding(mesh, P("data", "model")), "down": NamedSharding(mesh, P("model", "data"))}
    assert step.shardings(x=batch(), params=params()) == (of_x, of_params)

    everything = step.put(params(), batch())
    assert jax.tree.map(lambda x: x.sharding, everything) == (of_params, of_x)
    x = step.put(x=batch())
    assert x.sharding == of_x
    np.testing.assert_array_equal(x, batch())
    close(step(*everything), train(params(), batch()))


def test_put_by_names_alone_before_the_first_call(jit, mesh):
    step = jit(train)
    assert step.put(x=batch()).sharding == NamedSharding(mesh, P("data"))
    fresh = jit(lambda x, shift: x + shift, dims={"x": "batch embed"}, layout="batch: data; embed: model")
    with pytest.raises(mp.errors.UnsupportedError, match="shift: nothing determines its sharding yet"):
        fresh.put(shift=np.ones(16, np.float32))
    fresh.plan(batch(), np.ones(16, np.float32))
    assert fresh.put(shift=np.ones(16, np.float32)).sharding == NamedSharding(mesh, P("model"))


def test_shardings_and_put_of_modules(mesh):
    model, optimizer = make()
    step = mp.jit(nnx_step, mesh=mesh, layout=LAYOUT, dims={"x": "batch embed"})
    of_model, of_optimizer, _ = step.shardings(model, optimizer, batch())
    assert of_model["up"]["kernel"].get_value() == NamedSharding(mesh, P("data", "model"))
    assert jax.tree.structure(of_optimizer) == jax.tree.structure(nnx.state(optimizer))
    assert step.put(model=model, in_place=True) is model
    assert model.up.kernel[...].sharding == NamedSharding(mesh, P("data", "model"))


@pytest.mark.parametrize("layout", ["batch: data", "embed: data; mlp: model"])
def test_put_copies_a_module(mesh, layout):
    """A trainer that updates, or donates, its arrays does not change the sampler, also under an equal layout."""
    with nnx.use_eager_sharding(False):
        model = mp.init(lambda: Net(nnx.Rngs(0)), mesh=mesh, layout="embed: data; mlp: model")()
    apply = mp.jit(lambda model, x: model(x), mesh=mesh, layout=layout, dims={"x": "batch embed"})
    before, want = jax.tree.map(np.asarray, nnx.state(model, nnx.Param)), model(np.ones((8, 16), np.float32))
    sampler, x = apply.put(model, np.ones((8, 16), np.float32))
    for leaf in jax.tree.leaves(nnx.state(model)):
        leaf.delete()
    np.testing.assert_allclose(apply(sampler, x), want, rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, nnx.state(sampler, nnx.Param)), before)


def test_put_of_an_argument_with_the_name_of_its_option(jit):
    fn = jit(lambda x, in_place: x + in_place, dims={"x": "batch embed", "in_place": "embed"})
    with pytest.raises(mp.errors.UnsupportedError, match=r"`in_place` is an option of put and an argument"):
        fn.put(in_place=np.ones(16, np.float32))
    assert fn.put(kwargs={"in_place": np.ones(16, np.float32)}).sharding.spec == P("data")


def test_the_same_step_under_another_layout(jit, mesh):
    traces = []

    def fn(x):
        traces.append(1)
        return x * 2

    step = jit(fn, dims={"x": "batch embed"}, layout="batch: data")
    other = step.on(layout="embed: model")
    assert step(batch()).sharding.spec == P("data")
    assert other(batch()).sharding.spec == P(None, "model")
    assert len(traces) == 1
    assert other.on(lowering="shard_map").plan(batch()).overlap == "auto"
    with pytest.raises(mp.errors.UnsupportedError, match="no lowering"):
        step.on(lowering="shard")
