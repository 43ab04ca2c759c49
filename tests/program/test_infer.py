"""Inference: every dim of a step has its name, from those of the parameters and the batch alone."""

import itertools
import warnings

import covering
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from arrays import f32
from jax import export, lax

import meshpar as mp
from meshpar._src.dims import format_dims

MESH = jax.sharding.AbstractMesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
NAMES = "batch seq kv_seq embed heads d mlp vocab layers channels out_channels height width"
SIZES = dict(zip(NAMES.split(), (2, 6, 10, 12, 4, 8, 20, 30, 3, 5, 7, 16, 18), strict=True))


def i32(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.int32)


def plan(fn, *args, dims, **kw) -> mp.Plan:
    return mp.plan(fn, *args, mesh=MESH, layout="", dims=dims, **kw)


def names(held) -> list[str]:
    return [format_dims(h.dims) for h in held]


def dims_of(p: mp.Plan, value) -> str:
    return " ".join(d or "_" for d in p.program.dims(value))


# -- one op at a time


def attention(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


OPS = [
    # dot_general in every form
    ("batch seq embed, embed mlp -> batch seq mlp", lambda x, w: x @ w),
    ("batch seq embed, embed heads d -> batch seq heads d", lambda x, w: jnp.einsum("bse,ehd->bshd", x, w)),
    ("batch seq heads d, batch kv_seq heads d -> batch heads seq kv_seq", attention),
    ("batch seq heads d, heads d embed -> batch seq embed", lambda x, w: jnp.einsum("bshd,hde->bse", x, w)),
    ("embed seq, mlp embed -> embed seq mlp", lambda a, b: lax.dot_general(a, b, (((), ()), ((0,), (1,))))),
    ("batch seq embed -> batch embed", lambda x: x.sum(1)),
    ("batch seq embed -> batch seq _", lambda x: x.max(-1, keepdims=True)),
    ("batch seq embed -> batch embed", lambda x: jnp.argmax(x, 1)),
    ("batch seq vocab -> batch seq _", lambda x: lax.top_k(x, 3)[1]),
    ("batch seq embed -> embed seq batch", lambda x: jnp.swapaxes(x, 0, 2)),
    ("batch seq embed -> batch embed", lambda x: x[:, 2]),
    ("batch seq -> batch _ seq", lambda x: jnp.stack([x, x], 1)),
    ("batch embed -> batch _ embed", lambda x: x[:, None] * jnp.ones((1, 9, 1))),
    ("batch seq vocab -> batch seq vocab", lambda x: jax.nn.softmax(x)),
    ("batch seq -> batch _", lambda x: jnp.fft.rfft(x, axis=-1).real),
    # reshapes split and merge
    ("batch seq heads d -> batch seq (heads d)", lambda x: x.reshape(2, 6, 32)),
    ("batch seq heads d -> batch seq heads d", lambda x: x.reshape(2, 6, 32).reshape(2, 6, 4, 8) * 2),
    ("batch seq heads d -> batch seq heads d", lambda x: x.reshape(12, 32).reshape(2, 6, 4, 8)),
    ("batch seq heads d -> (heads d)", lambda x: x.reshape(12, 32).sum(0)),
    ("batch seq -> batch seq", lambda x: x[:, None, :, None].reshape(2, 6)),
    ("batch seq -> batch seq seq-inner", lambda x: x.reshape(2, 3, 2) * 2),  # the name stays on the major part
    ("seq embed -> embed seq", lambda x: lax.reshape(x, (12, 6), dimensions=(1, 0)) * 2),
    # what is cut from a named dim has its name, and keeps one of its own
    ("batch seq -> batch seq, batch seq", lambda x: jnp.split(x, [2], 1)),
    ("batch embed, heads -> batch embed, batch heads", lambda x, b: (x[:, :2], x[:, 2:6] + b)),
    # from one piece of a dim without a name nothing passes to the others
    ("batch _:12, heads -> batch _, batch heads, batch _", lambda x, b: (x, x[:, :4] + b, x[:, 4:])),
    (
        "batch _:12, heads -> batch _, batch _, batch heads",
        lambda x, b: (x, jnp.split(x, [8], 1)[0], jnp.split(x, [8], 1)[1] + b),
    ),
    ("batch _:12, heads -> batch _, batch heads", lambda x, b: (x, x[:, 8:] + b)),
    # what all pieces are called the whole is called too
    ("batch _:8, heads -> batch heads, batch heads, batch heads", lambda x, b: (x, x[:, :4] + b, x[:, 4:] + b)),
    ("batch _:7, seq -> batch seq, batch seq", lambda x, b: (x, x[:, 1:] + b)),
    ("batch _:7, seq -> batch seq, batch seq, batch seq", lambda x, b: (x, x[:, 1:] + b, x[:, :-1])),
    # what is put together has the name of what it is made of
    ("batch seq, batch _:3 -> batch seq", lambda x, y: jnp.concatenate([y, x], 1)),
    ("batch d -> batch d", lambda x: jnp.concatenate([-x[:, 4:], x[:, :4]], 1)),
    # loops and branches
    (
        "seq batch mlp, _:20 _:20 -> batch mlp",
        lambda x, w: lax.scan(lambda h, x: (jnp.tanh(x + h @ w), None), jnp.zeros((2, 20)), x)[0],
    ),
    ("batch embed -> batch embed", lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) + x, jnp.zeros((2, 12)))),
    (
        "batch embed -> batch embed",
        lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + x, jnp.zeros((2, 12))),
    ),
    (
        "batch embed, embed mlp -> batch mlp",
        lambda x, w: lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: jnp.zeros((2, 20)), x),
    ),
    (
        "batch embed, embed mlp -> batch mlp",
        lambda x, w: lax.switch(1, [lambda x: jnp.zeros((2, 20)), lambda x: jnp.tanh(x @ w)], x) + 1,
    ),
    # the same dim twice: the key side is primed, however it is transposed, unless it is renamed
    ("batch seq heads d -> batch heads seq seq'", lambda x: attention(x, x * 2)),
    ("batch seq heads d -> batch heads seq' seq", lambda x: jnp.swapaxes(attention(x, x * 2), 2, 3)),
    ("batch seq heads d -> batch heads seq kv_seq", lambda x: attention(x, mp.rename(x * 1, seq="kv_seq"))),
]
"""(dims of the operands -> dims of the results, function); ``_:12`` is a dim of this size without a name."""
KEEP = [
    lambda x: jnp.cumsum(x, 1),
    lambda x: jnp.sort(x, 1),
    lambda x: jnp.pad(x, ((0, 0), (1, 0))),
    lambda x: jnp.concatenate([x, x], 1),
    lambda x: lax.dynamic_slice(x, (0, 1), (2, 3)),
    lambda x: lax.dynamic_update_slice(x, jnp.ones((2, 3)), (0, 1)),
    lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), "VALID"),
    lambda x: lax.stop_gradient(x) + lax.optimization_barrier(x),
    lambda x: lax.associative_scan(jnp.add, x, axis=1),
    lambda x: jnp.pad(x, ((0, 0), (0, 20))),
]
"""Functions of an array ``batch seq``, whose result has the same names."""


@pytest.mark.parametrize(("rule", "fn"), [*OPS, *(("batch seq -> batch seq", fn) for fn in KEEP)])
def test_names_of_results(rule, fn):
    operands, results = (side.split(", ") for side in rule.split(" -> "))
    shapes = [[d.partition(":") for d in dims.split()] for dims in operands]
    args = [f32(*(int(n) if n else SIZES[d] for d, _, n in shape)) for shape in shapes]
    dims = {f"xs/{i}": " ".join(d for d, *_ in shape) for i, shape in enumerate(shapes)}
    assert names(plan(lambda xs: fn(*xs), args, dims=dims, strict=True).outputs) == results


def test_a_dim_that_a_reshape_splits_takes_the_names_of_its_parts():
    """A fused projection, ``heads·d``, that is split and used with named weights."""

    def fn(x, fused, out):
        return jnp.einsum("bshd,hde->bse", (x @ fused).reshape(2, 6, 4, 8), out)

    dims = {"x": "batch seq embed", "out": "heads d embed"}
    p = plan(fn, f32(2, 6, 12), f32(12, 32), f32(4, 8, 12), dims=dims)
    assert names([p.inputs[1], p.outputs[0]]) == ["embed (heads d)", "batch seq embed"]


def test_two_names_that_are_put_together_are_listed():
    dims = {"x": "batch seq", "y": "batch kv_seq"}
    with pytest.warns(mp.errors.JoinWarning, match="kv_seq = seq|seq = kv_seq"):
        p = plan(lambda x, y: (x, y, jnp.concatenate([x, y], 1)), f32(2, 6), f32(2, 10), dims=dims)
    assert names(p.outputs[:2]) == ["batch seq", "batch kv_seq"]
    assert set(p.program.sub_dims(p.program.outputs[2], 1)[0][0]) == {"seq", "kv_seq"}


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: mp.named(x, "c b"),
        lambda x: mp.named(jnp.tanh(x), "c b"),
        lambda x: mp.named(x.T, "b c"),
        lambda x: mp.named(x.sum(1), "c"),
        lambda x: mp.named(x @ jnp.ones((4, 4)), "c d"),
        lambda x: mp.named(mp.named(x, "a b") + 1, "c b"),
    ],
    ids=["the argument", "elementwise", "transpose", "sum", "matmul", "twice"],
)
def test_two_names_of_one_dim_are_reported(fn):
    with pytest.warns(mp.errors.JoinWarning, match="a = c"):
        p = plan(fn, f32(4, 4), dims={"x": "a b"})
    assert [(j.first, j.second) for j in p.joins] == [("a", "c")]


def test_a_replan_refuses_joined_names_only_if_it_is_strict():
    with pytest.warns(mp.errors.JoinWarning):
        p = mp.plan(lambda x: mp.named(x, "seq embed"), f32(4, 4), dims={"x": "batch embed"}, layout="", mesh="data=2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert p.replan(layout="batch: data").inputs[0].spec == jax.sharding.PartitionSpec("data")
        with pytest.raises(mp.errors.JoinError, match="batch"):
            p.replan(layout="batch: data", strict=True)


@pytest.mark.parametrize(
    ("groups", "kernel", "dims"),
    [
        (1, (3, 3, 6, 7), "_ _ channels out_channels"),
        (6, (3, 3, 1, 6), "_ _ _ channels"),
        (6, (3, 3, 1, 12), "_ _ _ out_channels"),
        (2, (3, 3, 3, 8), "_ _ group_in out_channels"),
    ],
)
def test_convolutions_and_their_gradients(groups, kernel, dims):
    def conv(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            jnp.tanh(x), w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    def step(w, x):
        dw, dx = jax.grad(lambda w, x: jnp.sum(conv(x, w) ** 2), argnums=(0, 1))(w, x)
        return w - dw, dx, conv(x, w)

    patterns = {"x": "batch height width channels", "w": dims}
    p = plan(step, f32(*kernel), f32(2, 16, 18, 6), dims=patterns, strict=True)
    assert names(p.outputs) == [patterns["w"], patterns["x"], f"batch height width {dims.split()[-1]}"]


def test_operations_with_indices():
    def take(logits, labels):
        return jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]

    p = plan(take, f32(2, 6, 30), i32(2, 6), dims={"logits": "batch seq vocab"})
    assert names([p.outputs[0], p.inputs[1]]) == ["batch seq"] * 2
    dims = {"x": "vocab embed", "i": "seq"}
    p = plan(lambda x, i, u: x.at[i].add(u), f32(30, 12), i32(6), f32(6, 12), dims=dims)
    assert names([p.outputs[0], p.inputs[2]]) == ["vocab embed", "seq embed"]
    dims = {"x": "tokens embed", "w": "experts embed mlp"}
    p = plan(lambda x, w, n: lax.ragged_dot(x, w, n), f32(12, 6), f32(3, 6, 20), i32(3), dims=dims)
    assert names(p.outputs) == ["tokens mlp"]


# -- control flow


def test_scan_carry_xs_ys_and_consts():
    def fn(x, w, stack, offset):
        def body(carry, layer):
            carry = jnp.tanh(carry @ w @ layer) + offset
            return carry, carry.sum(-1)

        return lax.scan(body, x, stack)

    dims = {"x": "batch embed", "stack": "layers _ embed"}
    p = plan(fn, f32(2, 12), f32(12, 20), f32(3, 20, 12), f32(12), dims=dims)
    assert names(p.outputs) == ["batch embed", "layers batch"]
    assert names(p.inputs) == ["batch embed", "embed _", "layers _ embed", "embed"]


def test_a_cached_jaxpr_is_apart_at_every_call_site():
    @jax.jit
    def activation(x):
        return jnp.tanh(x) * 2

    def fn(a, b):
        return activation(a), activation(b)

    p = plan(fn, f32(4, 4), f32(4, 4), dims={"a": "batch embed", "b": "heads mlp"}, strict=True)
    first, second = (o for o in p.program.root.ops if o.frames)
    assert first.frames[0].jaxpr is second.frames[0].jaxpr  # JAX shares it
    assert names(p.outputs) == ["batch embed", "heads mlp"]
    tanh = [o for o in p.program.root.walk() if o.name == "tanh"]
    assert [dims_of(p, o.outs[0]) for o in tanh] == ["batch embed", "heads mlp"]


def test_named_and_rename_under_transformations():
    def fn(x):
        return mp.rename(mp.named(x, "seq"), seq="kv_seq") * 2

    assert plan(lambda x: jax.vmap(fn)(x), f32(2, 6), dims={"x": "batch _"}).outputs[0].dims == ("batch", "kv_seq")
    assert names(plan(jax.grad(lambda x: fn(x).sum()), f32(6), dims={}).outputs) == ["seq"]
    np.testing.assert_array_equal(jax.jit(fn)(jnp.arange(3.0)), [0, 2, 4])
    np.testing.assert_array_equal(jax.grad(lambda x: fn(x).sum())(jnp.arange(3.0)), [2, 2, 2])
    np.testing.assert_array_equal(jax.jvp(fn, (jnp.arange(3.0),), (jnp.ones(3),))[1], [2, 2, 2])


# -- names that belong to values


def test_weights_and_activations_with_names_of_their_own():
    """As MaxText does: a weight's gradient and moments keep ``embed``, not ``activation_embed``."""

    def loss(params, x):
        x = mp.named(x, "activation_batch activation_embed")
        h = mp.named(jax.nn.relu(x @ params["up"]), "activation_batch activation_mlp")
        return jnp.sum((x + h @ params["down"]) ** 2)

    opt = optax.adam(1e-3)

    def step(params, opt_state, x):
        grads = jax.grad(loss)(params, x)
        updates, opt_state = opt.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, grads

    params = {"up": f32(12, 20), "down": f32(20, 12)}
    dims = {"params/up": "embed mlp", "params/down": "mlp embed"}
    with pytest.warns(mp.errors.JoinWarning):
        p = plan(step, params, jax.eval_shape(opt.init, params), f32(2, 12), dims=dims)
    for held in (*p.inputs, *p.outputs):
        if held.shape in [(12, 20), (20, 12)]:
            assert held.dims == (("embed", "mlp") if held.path.endswith("up") else ("mlp", "embed")), held.path
    joined = {frozenset((name, f"activation_{name}")) for name in ("embed", "mlp")}
    assert {frozenset((j.first, j.second)) for j in p.joins} == joined
    up, down = [o for o in p.program.root.walk() if o.name == "dot_general" and o.outs[0].shape[0] == 2][:2]
    assert dims_of(p, up.outs[0]).split()[0] == "activation_batch"
    assert dims_of(p, down.outs[0]).split()[0] == "activation_batch"


# -- optimizers

PARAMS = {"embedding": "vocab embed", "query": "embed heads d", "norm": "embed"}
PARAMS |= {"up": "embed mlp", "down": "mlp embed"}


def forward(params, tokens):
    x = params["embedding"][tokens] * params["norm"]
    q = jnp.einsum("bse,ehd->bshd", x, params["query"])
    x = x + jnp.einsum("bshd,ehd->bse", q, params["query"])
    x = x + jax.nn.silu(x @ params["up"]) @ params["down"]
    logits = x @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


MATRIX = optax.contrib.MuonDimensionNumbers
MUON = {"embedding": None, "query": MATRIX(0, (1, 2)), "norm": None, "up": MATRIX(), "down": MATRIX()}
OPTIMIZERS = {
    "adamw clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "sm3": lambda: optax.sm3(1e-3),
    "novograd": lambda: optax.novograd(1e-3),
    "muon": lambda: optax.contrib.muon(1e-3, muon_weight_dimension_numbers=MUON),
    "adan": lambda: optax.adan(1e-3),
    "multi steps": lambda: optax.MultiSteps(optax.adamw(1e-3), 2),
    "masked": lambda: optax.masked(optax.adamw(1e-3), {k: k != "norm" for k in PARAMS}),
    "multi transform": lambda: optax.multi_transform(
        {"a": optax.adamw(1e-3), "b": optax.adafactor(1e-3, min_dim_size_to_factor=4)},
        {k: "b" if k == "embedding" else "a" for k in PARAMS},
    ),
}


def parameter_of(path: str) -> str | None:
    return next((c for c in reversed(path.split("/")) if c in PARAMS), None)


def fitting(shape: tuple[int, ...], dims: str) -> set[str]:
    """The ways in which an array of this shape may carry some of a parameter's dims, in order."""
    names = dims.split()
    sizes = [SIZES[n] for n in names]
    if len(shape) == len(sizes) and all(m in (1, n) for m, n in zip(shape, sizes, strict=True)):
        return {" ".join("_" if m == 1 else n for n, m in zip(names, shape, strict=True))}
    picks = itertools.combinations(range(len(sizes)), len(shape))
    return {" ".join(names[i] for i in pick) for pick in picks if tuple(sizes[i] for i in pick) == shape}


@pytest.mark.parametrize(("name", "prefix"), covering.each(OPTIMIZERS, ["*/", "params/"]))
def test_optimizer_state_is_named_by_inference(name, prefix):
    """Also where the patterns match the optimizer state of the parameters, of any shape."""
    opt = OPTIMIZERS[name]()
    params = {k: f32(*(SIZES[d] for d in dims.split())) for k, dims in PARAMS.items()}

    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(forward)(params, tokens)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = jax.eval_shape(opt.init, params)
    dims = {f"{prefix}{k}": v for k, v in PARAMS.items()} | {"tokens": "batch seq"}
    p = plan(step, params, state, i32(2, 6), dims=dims, strict=True)
    seen = 0
    for held in (*p.inputs, *p.outputs):
        parameter = parameter_of(held.path)
        if parameter is None or not [n for n in held.shape if n > 1]:
            continue
        want = fitting(held.shape, PARAMS[parameter])
        assert format_dims(held.dims) in want, (held.path, held.shape, held.dims, want)
        seen += 1
    assert seen > 2 * len(PARAMS)


# -- an oracle that knows no rules


def test_gradients_agree_with_symbolic_shapes():
    """With one shape variable a name, JAX's own shape rules name the gradient of a GQA model with rematerialized layers."""
    sizes = {"b": 2, "s": 6, "e": 12, "g": 2, "r": 3, "d": 8, "m": 20, "v": 30, "n": 5}
    weights = {"embedding": "v e", "q": "n e g r d", "k": "n e g d", "v": "n e g d", "o": "n g r d e"}
    weights |= {"up": "n e m", "gate": "n e m", "down": "n m e", "scale": "n e"}

    def loss(params, tokens):
        x = params["embedding"][tokens]

        def layer(x, w):
            y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w["scale"]
            q = jnp.einsum("bse,egrd->bsgrd", y, w["q"])
            k, v = (jnp.einsum("bse,egd->bsgd", y, w[i]) for i in "kv")
            scores = jax.nn.softmax(jnp.einsum("bsgrd,btgd->bgrst", q, k))
            x = x + jnp.einsum("bsgrd,grde->bse", jnp.einsum("bgrst,btgd->bsgrd", scores, v), w["o"])
            return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"], None

        x, _ = lax.scan(jax.checkpoint(layer), x, {k: v for k, v in params.items() if k != "embedding"})
        return jnp.mean((x @ params["embedding"].T) ** 2)

    def arguments(size):
        params = {k: f32(*(size(d) for d in dims.split())) for k, dims in weights.items()}
        return params, i32(size("b"), size("s"))

    scope = export.SymbolicScope()
    symbols = {d: export.symbolic_shape(d, scope=scope)[0] for d in sizes}
    want = jax.eval_shape(jax.grad(loss), *arguments(symbols.__getitem__))
    dims = {f"params/{k}": v for k, v in weights.items()} | {"tokens": "b s"}
    p = plan(jax.grad(loss), *arguments(sizes.__getitem__), dims=dims, strict=True)
    got = {h.path: format_dims(h.dims) for h in p.outputs}
    assert got == {k: " ".join(map(str, leaf.shape)) for k, leaf in want.items()}
    named_dims, total, missing = p.program.coverage()
    assert named_dims == total, missing


def test_names_pass_into_operands_and_coverage_lists_what_has_no_name():
    """The contracted dim of a weight without names is named by what it is contracted with."""
    p = plan(lambda x, w: x @ w, f32(2, 12), f32(12, 20), dims={"x": "batch embed"})
    assert names(p.inputs) == ["batch embed", "embed _"]
    assert p.program.coverage()[:2] == (4, 6)
    empty = plan(lambda x: x * 2, f32(0, 12), dims={"x": "batch _"})
    assert empty.program.coverage()[:2] == (0, 2)  # the dims of size 0 do not count
    (line,) = p.unnamed
    assert line.startswith("dot_general [2, 20] dim 1 at ")
    assert "test_infer.py" in line
