"""Texts of errors: the problem, the facts, and fixes."""

import ast
import json
import warnings
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar as mp
from meshpar._src.dims import PathDims
from meshpar._src.entry.tracing import annotation_of
from meshpar._src.flax import Leaf

F32 = jnp.float32
DIMS = {"params/up": "embed mlp", "params/down": "mlp embed", "x": "batch embed"}


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, F32)


def loss(params, x):
    return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - x) ** 2)


def arguments(embed: int = 16, mlp: int = 32, batch: int = 8):
    return {"up": shape(embed, mlp), "down": shape(mlp, embed)}, shape(batch, embed)


def cudnn(x):
    return jax.nn.dot_product_attention(x, x, x, implementation="cudnn")


def plan(layout, dims=DIMS, fn=loss, args=None, mesh="data=4, model=2", **options):
    return mp.plan(fn, *(args or arguments()), mesh=mp.mesh(mesh), layout=layout, dims=dims, **options)


def text(kind, call, *args, **kwargs) -> str:
    """The text of the error of this class that a call raises."""
    with pytest.raises(kind) as error:
        call(*args, **kwargs)
    assert type(error.value) is kind
    assert isinstance(error.value, mp.errors.MeshparError)
    return str(error.value)


# -- exact texts

E = mp.errors
CALLS = [
    (E.UnknownDimError, lambda: plan("batch: data; embd: model")),
    (E.UnknownAxisError, lambda: plan("batch: data; mlp: modl")),
    (E.AxisConflictError, lambda: mp.Layout("batch: data+model+data")),
    (E.DivisibilityError, lambda: plan("batch: data; mlp: data", args=arguments(mlp=30))),
    (E.PatternError, lambda: plan("batch: data", dims=DIMS | {"params/upp": "embed mlp"})),
    (E.PatternError, lambda: plan("batch: data", dims={"params/{up,dwn}": "_ _", **DIMS})),
    (E.PatternError, lambda: plan("batch: data", dims={"params/*": "_ _", **DIMS})),
    (E.LayoutSyntaxError, lambda: plan("batch: data", dims=DIMS | {"params/up": "embed embed"})),
    (E.RankError, lambda: plan("batch: data", dims=DIMS | {"x": "batch seq embed"})),
    (E.MeshError, lambda: mp.mesh("data=8, model=2")),
    (E.MeshError, lambda: mp.virtual_devices(16)),
]
TEXTS = """\
rule `embd: model` names dim `embd`, which no value of the program has
  rule    embd: model
  fix     did you mean `embed`?
          remove the rule, or name the dim (dims=…, Flax metadata, mp.named)

rule `mlp: modl` names axis `modl`, which the mesh (data=4, model=2) does not have
  rule    mlp: modl
  fix     did you mean `model`?

rule `batch: data+model+data` asks for axis `data` twice
  rule    batch: data+model+data
  fix     name each axis once: `batch: data+model`

params/down: dim `mlp` of size 30 does not divide over data=4: 30 is not a multiple of 4
  tensor  params/down  float32[30, 16]
  dims    mlp embed
  rule    mlp: data
  fix     mesh="data=2, model=4"
          `mlp?: data` splits it only where it divides
          `mlp` of 28 or 32: the nearest multiples of 4

the dims= pattern 'params/upp' matches no tensor; a pattern matches a complete path
  pattern params/upp
  fix     did you mean 'params/up'?
          paths are: params/up, params/down, x

the dims= pattern 'params/{up,dwn}' matches no tensor by its 'dwn'
  pattern params/{up,dwn}
  fix     did you mean 'params/down'?
          leave 'dwn' out

the dims= pattern 'params/up' is never used: 'params/*' comes first and matches the same tensors
  tensor  params/up
  fix     the first pattern that matches wins: put the narrower one first

dims of pattern 'params/up' 'embed embed': the dim `embed` stands twice in one value
  fix     give the second one another name, e.g. `embed_out` or `kv_embed`

x has 2 dimensions, but the pattern 'x' names 3: `batch seq embed`
  tensor  x  [8, 16]
  dims    batch seq embed
  fix     name 2 dims (`_` for one without a name, `...` for any number of them)

mesh (data=8, model=2) needs 16 devices, but there are 8 (cpu)
  fix     call mp.virtual_devices(16) before the first use of a device, for 16 CPU stand-ins
          use a smaller mesh: the sizes must multiply to at most 8

mp.virtual_devices(16) came too late: JAX has made its 8 CPU devices already
  fix     call mp.virtual_devices before anything that touches a device (jax.devices(), jnp.ones, …)
"""


@pytest.mark.parametrize(("call", "says"), list(zip(CALLS, TEXTS.strip().split("\n\n"), strict=True)))
def test_the_text_of_an_error(call, says):
    assert text(*call) == says


# -- names in the layout


def test_an_indivisible_dim_is_reported_of_the_parameter():
    """Not of the optimizer state, which comes first in the state and takes the names of its parameter."""
    tx = optax.adam(1e-3)
    w = {"up": shape(6, 8)}
    state = {"opt": jax.eval_shape(tx.init, w), "params": w}
    x = shape(8, 6)

    def step(state, x):
        updates, opt = tx.update(jax.grad(lambda p: (x @ p["up"]).sum())(state["params"]), state["opt"])
        return {"opt": opt, "params": optax.apply_updates(state["params"], updates)}

    with pytest.raises(mp.errors.DivisibilityError, match=r"^state/params/up: dim `embed` of size 6"):
        mp.plan(step, state, x, mesh="data=4", layout="embed: data", dims={"*/up": "embed mlp", "x": "batch _"})


def test_misspelled_name_of_an_argument():
    """The layout has a name of the known schemes, so that the names of the argument may be wrong."""
    x = shape(8, 4)
    with pytest.raises(mp.errors.UnknownDimError) as e:
        mp.plan(jnp.sin, x, mesh="data=4", layout="batch: data", dims={"x": "bacth embed"})
    assert "or, if `bacth` is misspelled, correct the names of x: bacth embed" in str(e.value)


@pytest.mark.parametrize("name", ["mpl", "ml", "mlpp", "embde"])
def test_optional_dim_that_is_misspelled(name):
    error = text(mp.errors.UnknownDimError, plan, f"batch: data; {name}?: model")
    assert f"names dim `{name}`" in error
    assert f"did you mean `{'embed' if name == 'embde' else 'mlp'}`?" in error
    for absent in ("heads", "kv_heads", "q", "ml2"):  # which the program lacks
        plan(f"batch: data; {absent}?: model")


def test_unknown_dim_in_init_is_a_misspelling_only_where_a_name_is_near():
    def init(layout):
        create = lambda: {"up": jnp.ones((16, 32))}  # noqa: E731
        return mp.init(create, mesh="data=4, model=2", layout=layout, dims={"up": "embed mlp"}).plan()

    assert init("batch: data; embed: data").outputs[0].dims == ("embed", "mlp")  # the batch's rule
    assert "did you mean `embed`?" in text(mp.errors.UnknownDimError, init, "embd: data")
    assert "give `embed` a rule of its own: `embed: none`" in text(mp.errors.UnknownDimError, init, "embd: data")
    removed, own = text(mp.errors.UnknownDimError, init, [("embd", "data")]).split("\n")[-2:]
    assert "remove the rule" in removed
    assert own.strip() == "give `embed` a rule of its own: ('embed', None)"


@pytest.mark.parametrize(
    ("mesh", "fix"),
    [("data=8", 'mesh="data=2, model=4", with rules for `model`: its devices else do the same work'),
     ("model=8", 'mesh="model=2, data=4", with rules for `data`: its devices else do the same work'),
     ("slice=2, data=4", 'mesh="slice=4, data=2"')],
)  # fmt: skip
def test_a_mesh_whose_axis_divides_has_all_devices(mesh, fix):
    axis = mesh.rpartition(" ")[2].partition("=")[0]
    error = text(mp.errors.DivisibilityError, lambda: plan(f"mlp: {axis}", args=arguments(mlp=30), mesh=mesh))
    assert f"  fix     {fix}\n" in error
    plan(f"mlp: {axis}", args=arguments(mlp=30), mesh=fix.split('"')[1])


def test_errors_have_their_facts_as_attributes():
    with pytest.raises(mp.errors.UnknownAxisError) as error:
        plan("mlp: modl")
    assert (error.value.dim, error.value.axis, error.value.rule) == ("mlp", "modl", "mlp: modl")
    assert error.value.fixes[0] == "did you mean `model`?"
    assert isinstance(error.value, ValueError)


# -- joins


def swapped(strict):
    dims = DIMS | {"params/down": "embed mlp"}  # the wrong way round
    return plan("batch: data", dims=dims, args=arguments(16, 16), strict=strict)


def test_a_join_is_an_error_when_strict_and_one_warning_otherwise():
    error = text(mp.errors.JoinError, swapped, strict=True)
    assert " are the same dim of the program\n" in error
    assert "mp.rename(x, " in error
    assert "plan without strict=True" in error
    with pytest.warns(mp.errors.JoinWarning) as caught:
        p = swapped(strict=False)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert message.startswith("two names of one dim of the program: ")
    assert len(message.splitlines()) == 3
    assert 'warnings.simplefilter("ignore", mp.errors.JoinWarning)' in message
    assert all(f"params/{name} names it" in said for name in ("up", "down") for said in (error, message))
    assert [{j.first, j.second} for j in p.joins] == [{"embed", "mlp"}]
    assert caught[0].filename == __file__


def test_a_join_of_swapped_names_suggests_to_swap_them():
    dims = {"*/up": "embed mlp", "*/down": "embed mlp", "x": "batch embed"}  # the second is the wrong way round
    with warnings.catch_warnings():
        warnings.simplefilter("error", mp.errors.JoinWarning)
        for _ in range(2):  # one that is an error is one again
            with pytest.raises(mp.errors.JoinWarning, match=r"are the names of one array swapped\? ") as caught:
                plan("batch: data", dims=dims, args=arguments(16, 16))
    assert '"*/down": "mlp embed"' in str(caught.value)
    error = text(mp.errors.JoinError, plan, "batch: data", dims=dims, args=arguments(16, 16), strict=True)
    assert 'swap the names of one array: "*/up": "mlp embed"' in error


def test_a_join_is_reported_once_for_all_programs_of_a_model():
    """An initializer, a plan, a check, and an evaluation of the same weights; another model has a warning of its own."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    dims = {"*/conv*": "in out", "x": "batch _"}

    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params["conv_0"]) @ params["conv_1"])

    def init(key):
        params = {name: jax.random.normal(key, (8, 8)) for name in ("conv_0", "conv_1")}
        return {"params": params, "opt": optimizer.init(params)}

    def step(state, x):
        updates, opt = optimizer.update(jax.grad(loss)(state["params"], x), state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    state, x = jax.eval_shape(init, jax.random.key(0)), shape(8, 8)
    options = {"mesh": "data=8", "layout": "batch: data", "dims": dims}
    programs = [step, step, lambda state, x: loss(state["params"], x), lambda weights, x: loss(weights["params"], x)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for program in programs:
            mp.plan(program, state, x, **options)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert '"*/conv*": "in out" names it `' in message
    assert "state/params/conv_" in message
    assert "opt" not in message
    with pytest.warns(mp.errors.JoinWarning, match="w1 names it"):
        mp.plan(
            lambda w0, w1, x: x @ w0 @ w1,
            *[shape(8, 8)] * 3,
            **options | {"dims": {"w0": "in out", "w1": "in out", "x": "batch _"}},
        )


# -- patterns


@pytest.mark.parametrize(
    ("paths", "pattern", "found"),
    [
        ({"params/down": 2, "state/0/v_row/down": 1}, "*/down", "*params/down"),
        ({"params/layer/down": 2, "state/0/v_row/layer/down": 1}, "*/layer/down", "*params/layer/down"),
        ({"params/layer/down": 2, "state/0/v_row/layer/down": 1}, "*/down", "*params*/down"),
        ({"state/params/down": 2, "state/0/mu/down": 2, "state/0/v/down": 1}, "*/down", "*params/down"),
        ({"x/down": 2, "x/v/down": 1}, "*/down", "*x/down"),
        ({"down": 2, "v/down": 1}, "*/down", None),  # no parent tells them apart
        ({"params/down": 3}, "*/down", None),
        ({"params/down": 1}, "params/down", None),
    ],
)
def test_rank_of_a_pattern_that_matches_more_than_parameters(paths, pattern, found):
    leaves = [Leaf(path, shape(*[8] * rank), None, None) for path, rank in paths.items()]
    error = text(
        mp.errors.RankError, lambda: [annotation_of(x, PathDims({pattern: "mlp embed"}), set(), leaves) for x in leaves]
    )
    if found is None:
        assert "match only" not in error
    else:
        assert f'fix     match only arrays with 2 dims: {{"{found}": "mlp embed"}}' in error
        assert any(annotation_of(x, PathDims({found: "mlp embed"}), set()) for x in leaves)


def test_rank_of_flax_metadata():
    box = nn.LogicallyPartitioned(shape(16, 32), ("embed", "heads", "mlp"))
    args = {"params": {"w": box}}, shape(8, 16)
    fn = lambda variables, x: x @ variables["params"]["w"].value  # noqa: E731
    error = text(mp.errors.RankError, plan, "batch: data", dims={"x": "batch embed"}, fn=fn, args=args)
    assert "variables/params/w has 2 dimensions, but its Flax metadata names 3" in error
    assert "tensor  variables/params/w  [16, 32]" in error
    assert "dims    embed heads mlp" in error
    assert "fix     name every dimension in the metadata" in error


# -- errors of the program


def renames(x):
    return mp.rename(x * 2, sequence="kv_seq")


def averages(x):
    return jax.lax.pmean(x.sum(), "data")


RENAMED = ["mp.rename: the value has no dim `sequence`", "[8, 16]", "its dims there are: batch, seq"]
AVERAGED = ["`data` is not an axis inside a step", "delete the pmean"]


@pytest.mark.parametrize(
    ("kind", "fn", "says"), [(E.UnknownDimError, renames, RENAMED), (E.UnsupportedError, averages, AVERAGED)]
)
def test_an_error_of_the_program_names_its_line(kind, fn, says):
    error = text(kind, plan, "batch: data", dims={"x": "batch seq"}, fn=fn, args=(shape(8, 16),))
    line = f"test_errors.py:{fn.__code__.co_firstlineno + 1}"
    assert [part for part in [*says, line] if part not in error] == []


# -- what is no array, no mesh, no layout


@pytest.mark.parametrize(
    ("value", "path", "says"),
    [
        ("abc", "extra", "the text 'abc' is not a JAX array"),
        ({"a": ["abc"]}, "extra/a/0", "the text 'abc' is not a JAX array"),
        (np.array([None, "q"], object), "extra", "an array of object is not a JAX array"),
        (np.array(["abc"]), "extra", "an array of <U3 is not a JAX array"),
        ({"b": object()}, "extra/b", "an object is not a JAX array"),
    ],
)
def test_arguments_that_are_no_arrays(value, path, says):
    step = mp.jit(lambda x, extra: x, mesh=mp.mesh("data=8"), layout="", dims={"x": "batch _"})
    for call in (step, step.plan, step.lower):
        error = text(mp.errors.UnsupportedError, call, np.ones((8, 2)), value)
        assert error.startswith(f"{path}: {says}")
    assert ("static_argnames='extra'" in error) == (path == "extra")


def test_a_donated_array_is_not_used_again():
    mesh = mp.mesh("data=8")
    step = mp.jit(lambda state, x: ({"w": state["w"] + x}, x), mesh=mesh, layout="batch: data",
                  dims={"state/w": "batch _", "x": "batch _"}, donate_argnames="state")  # fmt: skip
    state = jax.device_put({"w": np.ones((8, 2), np.float32)}, jax.NamedSharding(mesh, jax.P("data")))
    step(state, np.ones((8, 2), np.float32))
    error = text(mp.errors.UnsupportedError, step, state, np.ones((8, 2), np.float32))
    assert error.startswith("state/w: this array was donated to an earlier call")


STEP = {"mesh": "data=8", "layout": ""}
ABSTRACT, MANUAL = (
    jax.sharding.AbstractMesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Manual)
)
OTHERS = [  # (class, call, texts of the error)
    (E.UnknownDimError, lambda: plan("batch: data; zzz: model"), ["dims there are: batch, embed, mlp"]),
    (
        E.UnknownDimError,
        lambda: plan("batch: data; seq: model", {"x": "batch length"}, lambda x: x + 1, (jnp.ones((8, 4), int),)),
        ["did you mean `length`?", 'names={"length": "seq"}'],
    ),
    (
        E.UnknownAxisError,
        lambda: plan("mlp: model", mesh="data=8"),
        [
            """give the mesh that axis: mp.mesh("data=4, model=2")
          so that rules for `model` have no effect: mp.mesh("data=8, model=1")"""
        ],
    ),
    (E.UnknownAxisError, lambda: plan("batch: expert"), ["axes there are: data, model"]),
    (E.UnknownAxisError, lambda: plan("batch: dp"), ["fix     write `batch: data`"]),
    (
        E.UnknownAxisError,
        lambda: plan("batch: data+slice", mesh="dp_shard=8"),
        ["fix     write `batch: dp_shard+slice`"],
    ),
    (
        E.MeshError,
        lambda: mp.plan(lambda x: x, shape(8), mesh="data=3, model=2", topology="v5e:4x4", layout=""),
        ['fix     make the sizes multiply to 16: mesh="data=8, model=2", or write -1'],
    ),
    (
        E.MeshError,
        lambda: mp.plan(lambda x: x, shape(8), mesh="slice=2, data=3, model=2", topology="2x v5e:2x4", layout=""),
        ['fix     make the sizes multiply to 16: mesh="slice=2, data=4, model=2", or write -1'],
    ),
    (
        E.UnsupportedError,
        lambda: plan("batch: data", {"x": "batch _ _ _"}, cudnn, (jnp.ones((8, 64, 4, 64), jnp.bfloat16),)),
        ["only on a machine that has cuDNN", "test_errors.py:", "fix     mp.layers.attention(q, k, v, causal=True)"],
    ),
    (
        E.UnknownAxisError,
        lambda: plan("batch: slice"),
        ['mp.mesh("slice=1, data=4, model=2")', 'mp.mesh("slice=2, data=2, model=2")'],
    ),
    (E.UnknownAxisError, lambda: plan("batch: expert", mesh="data=3"), ['mp.mesh("data=3, expert=1")']),
    (
        E.DivisibilityError,
        lambda: plan("batch: data+model", args=arguments(batch=4)),
        [
            "x: dim `batch` of size 4 does not divide over data=4 × model=2: 4 is not a multiple of 8",
            "`batch` of 8: the nearest multiple of 8",
        ],
    ),
    (
        E.DivisibilityError,
        lambda: plan("seq: data", {"x": "batch seq"}, lambda x: jnp.tanh(x[:, :-1]), args=(shape(8, 17),)),
        ["fix     `seq?: data` splits it only where it divides: only the input is 17, the activations are 16"],
    ),
    (
        E.DivisibilityError,
        lambda: mp.Layout("embed: data").spec("embed", mp.mesh("data=4, model=2"), (10,), path="w"),
        [
            "w: dim `embed` of size 10 does not",
            ": 10 is not a multiple of 4",
            "`embed` of 8 or 12: the nearest multiples of 4",
        ],
    ),
    (
        E.LayoutSyntaxError,
        lambda: jax.eval_shape(lambda x: mp.named(x, "a a"), shape(2, 2)),
        ["mp.named dims 'a a': the dim `a` stands twice in one value"],
    ),
    (
        E.RankError,
        lambda: plan("batch: data", {"x": "batch _"}, lambda x: mp.named(x, "batch seq embed"), args=(shape(8, 16),)),
        ["the value has 2 dimensions, but mp.named names 3: `batch seq embed`", "tensor  the value  [8, 16]"],
    ),
    (E.LayoutSyntaxError, lambda: mp.rename(jnp.ones((2, 2))), ["mp.rename needs at least one name"]),
    (E.LayoutSyntaxError, lambda: mp.rename(jnp.ones((2, 2)), seq="a b"), ["'a b' is not a name"]),
    (
        E.MeshError,
        lambda: mp.jit(loss, mesh=ABSTRACT, layout="batch: data", dims=DIMS).check(*arguments()),
        ["an abstract mesh has no devices to run on, and a check runs the step"],
    ),
    (
        E.UnsupportedError,
        lambda: mp.jit(lambda x: {"x": x, "name": "abc"}, **STEP)(np.ones((8, 2))),
        ["name: a function returns JAX arrays, and the text 'abc'"],
    ),
    (
        E.UnsupportedError,
        lambda: mp.jit(lambda x, sizes: x, **STEP, static_argnames="sizes")(np.ones(8), [1]),
        ["sizes: a static argument must have a hash, and a list has none"],
    ),
    (
        E.UnsupportedError,
        lambda: mp.jit(lambda x, sizes: x, **STEP, static_argnames="sizes").plan(np.ones(8), sizes=[1]),
        ["sizes: a static argument must have a hash, and a list has none"],
    ),
    *(
        (E.UnsupportedError, lambda given=given: mp.jit(loss, **STEP, **given), [next(iter(given)), *says])
        for what in ("static", "donate")
        for given, says in (
            ({f"{what}_argnames": "parms"}, [": the function has no argument `parms`", "did you mean `params`?"]),
            ({f"{what}_argnums": 7}, [": ", "7", "2 positional arguments"]),
        )
    ),
    (E.UnsupportedError, lambda: mp.jit(42, **STEP), ["mp.jit takes a function, not 42"]),
    (E.UnsupportedError, lambda: mp.jit(mp.jit(loss, **STEP), **STEP), ["loss.on(mesh, layout=…)"]),
    (E.UnsupportedError, lambda: mp.plan(mp.jit(loss, **STEP), **STEP), ["loss.plan"]),
    (
        E.UnsupportedError,
        lambda: mp.compile(mp.jit(loss, **STEP), layout="batch: data", lowering="shard_map"),
        ["layout, lowering: the result of mp.jit has its own"],
    ),
    (E.LayoutSyntaxError, lambda: mp.jit(loss, **STEP, dims=["batch"]), ["'batch' is not a pair"]),
    (E.LayoutSyntaxError, lambda: mp.jit(loss, **STEP, dims={"x": 3}), ["pattern 'x' 3 are no dims"]),
    (E.MeshError, lambda: mp.jit(loss, mesh=(4, 2), layout=""), ["mesh=(4, 2) is no mesh"]),
    (E.MeshError, lambda: mp.jit(loss, mesh=MANUAL, layout=""), ["a mesh with Manual axes"]),
    (E.MeshError, lambda: mp.search(loss, *arguments()), ["needs a chip", 'topology="v5e:2x4"']),
    (E.UnsupportedError, lambda: mp.jit(loss, **STEP).plan(topology="v5e:2x4"), ["`topology` is an option of mp.plan"]),
    (E.UnknownAxisError, lambda: mp.Layout("data: batch").check_axes(ABSTRACT), ["swapped: write `batch: data`"]),
    (
        E.UnknownAxisError,
        lambda: mp.Layout("model: modl").check_axes(ABSTRACT, dims={"model"}),
        ["which the mesh (data=4, model=2) does not have\n  rule    model: modl\n  fix     did you mean `model`?"],
    ),
    (
        E.PatternError,
        lambda: mp.shardings(
            {"a": {"fc1": {"kernel": jnp.ones((4, 4))}}}, "x: data", "data=4", dims={".*fc1.*kernel": "x y"}
        ),
        ["not regular expressions: did you mean '*fc1*kernel'"],
    ),
    (E.LayoutSyntaxError, lambda: mp.Layout(42), ["Layout(42) is neither text nor a list of rules"]),
]


@pytest.mark.parametrize(("kind", "call", "says"), OTHERS)
def test_other_errors(kind, call, says):
    error = text(kind, call)
    assert [part for part in says if part not in error] == []


@pytest.mark.parametrize(
    "layout", [{"btach": "data"}, [("btach", "data")], "btach: data"], ids=["dict", "list", "text"]
)
@pytest.mark.parametrize("run", [mp.jit, mp.init])
def test_a_misspelt_dim_is_refused_in_every_form_of_a_layout(layout, run):
    step = run(lambda x: x * 2, mesh="data=8", layout=layout, dims={"x": "batch embed"})
    with pytest.raises(E.UnknownDimError, match="names dim `btach`, which no value of the program has") as caught:
        step.plan(shape(8, 4))
    assert caught.value.fixes[0] == "did you mean `batch`?"


def test_a_rule_list_may_have_dims_of_other_models_and_says_which_have_no_effect():
    rules = [("batch", "data"), ("mlp", "model"), ("batches", None)]  # `batch` has a rule: `batches` is no misspelling
    idle = r"nothing of this program is split over `model`, of size 2, .*\(mlp: model\)"
    with pytest.warns(mp.errors.ReplicatedWarning, match=idle):
        plan = mp.plan(lambda x: x * 2, shape(8, 4), mesh="data=4, model=2", layout=rules, dims={"x": "batch embed"})
    said = [
        "no value is split over `model`: its devices all do the same work",
        "rules without effect, since the program has no such dim: mlp",
    ]
    assert list(plan.notes) == said
    assert json.loads(plan.to_json())["notes"] == said
    assert all(f"note  {line}" in str(plan) for line in said)
    assert plan.replan(layout="batch: data+model").notes == ()


LAYOUTS = ["batch: data", {"batch": "data"}, [("batch", "data"), ("mlp", "one")], "batch: data; mlp?: model"]


@pytest.mark.parametrize("layout", [*LAYOUTS, mp.Layout("batch: data; mlp: model", optional="mlp")])
def test_no_warning_where_no_rule_asks_for_the_idle_axis(layout):
    mesh = "data=4, model=2, one=1"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mp.plan(lambda x: x * 2, shape(8, 4), mesh=mesh, layout=layout, dims={"x": "batch embed"})


@pytest.mark.parametrize("layout", [{"batch": "data"}, [("batch", "data")]], ids=["dict", "list"])
def test_a_rule_list_without_any_effect_warns_once(layout):
    step = mp.jit(lambda x: x * 2, mesh="data=8", layout=layout, dims={"x": "rows columns"})
    with pytest.warns(mp.errors.ReplicatedWarning, match="Dims of the program: columns, rows") as said:
        step(jnp.ones((8, 4)))
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(jnp.ones((8, 4)))  # it was said; and a state need not have the dims of the batch
        mp.init(lambda: {"w": jnp.ones(8)}, mesh="data=8", layout=layout, dims={"w": "columns"})()


class Net(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def on_data(mode, w, x):
    return x if w["up"][0, 0] > 0 else x @ w["up"]


def on_batch(mode, w, x):
    return np.asarray(x)


def on_module(net, x):
    return x if net.up.kernel[...].sum() > 0 else -x


@pytest.mark.parametrize(
    ("fn", "args", "argument"),
    [
        (on_data, (1, {"up": np.ones((4, 4))}, np.ones((8, 4))), "w/up"),
        (on_batch, (1, {"up": np.ones((4, 4))}, np.ones((8, 4))), "x"),
        (on_module, (Net(), np.ones((8, 4))), "net/up/kernel"),
    ],
)
@pytest.mark.parametrize("lowering", ["auto", "jit"])
def test_errors_of_tracing_name_the_function_and_the_argument(fn, args, argument, lowering):
    """As jax.jit's do: the function with its line, and the argument that the value depends on."""
    static = {"static_argnums": 0} if args[0] == 1 else {}
    step = mp.jit(fn, mesh="data=8", layout="batch: data", dims={"x": "batch _"}, lowering=lowering, **static)
    with pytest.raises((jax.errors.TracerBoolConversionError, jax.errors.TracerArrayConversionError)) as ours:
        step(*args)
    line = f"while tracing the function {fn.__name__} at {__file__}:{fn.__code__.co_firstlineno} for jit"
    assert line in str(ours.value)
    assert f"the value of the argument {argument}." in str(ours.value)
    with pytest.raises(type(ours.value)) as theirs:
        (nnx.jit if fn is on_module else jax.jit)(fn, **static)(*args)
    assert line in str(theirs.value)


# -- every error has a fix

PACKAGE = Path(mp.__file__).parent
ERRORS = {k for k, v in vars(mp.errors).items() if isinstance(v, type) and issubclass(v, mp.errors.MeshparError)}


def constructions():
    """(file and line, class, call) of every place that makes a MeshparError."""
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text("utf8")
        for node in ast.walk(ast.parse(source)) if "Error(" in source else ():
            called = node.func if isinstance(node, ast.Call) else None
            name = getattr(called, "id", getattr(called, "attr", ""))
            if name in ERRORS:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", name, node


def test_every_place_that_raises_an_error_gives_a_fix():
    found = list(constructions())
    assert len(found) > 200
    without = []
    for where, name, node in found:
        fixes = next((k.value for k in node.keywords if k.arg == "fixes"), None)
        given = any(k.arg is None for k in node.keywords)  # **facts
        if not given and (fixes is None or (isinstance(fixes, ast.List) and not fixes.elts)):
            without.append(f"{where}: {name}")
    assert without == []


@pytest.fixture(autouse=True)
def every_error_has_a_fix(monkeypatch):
    """Every error that a test of this module meets says what to write instead."""
    made = []
    init = mp.errors.MeshparError.__init__

    def noted(self, *args, **facts):
        init(self, *args, **facts)
        made.append(self)

    monkeypatch.setattr(mp.errors.MeshparError, "__init__", noted)
    yield
    assert [str(e) for e in made if not e.fixes] == []
