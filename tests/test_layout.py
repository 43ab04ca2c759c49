"""Layouts: reading them, who claims which axis, specs, and what holds for every layout."""

import itertools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar import Layout
from meshpar._src.layout import claim
from meshpar.errors import LayoutSyntaxError, RankError, UnknownAxisError, UnknownDimError
from meshpar.types import Rule

MAXTEXT = json.loads((Path(__file__).parent / "data" / "maxtext_rules.json").read_text())


def abstract(**sizes: int) -> jax.sharding.AbstractMesh:
    return jax.sharding.AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * len(sizes)
    )


def test_lines_and_semicolons_are_the_same():
    lines = Layout("""
        batch: data            # the examples
        heads, mlp, vocab: model

        embed: data
    """)
    assert lines == Layout("batch:data; heads,mlp,vocab:model; embed:data")
    assert lines.dims == ("batch", "heads", "mlp", "vocab", "embed")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("batch: data", Rule("batch", ("data",))),
        ("batch:slice+data", Rule("batch", ("slice", "data"))),
        ("batch: slice + data", Rule("batch", ("slice", "data"))),
        ("kv_heads?: model", Rule("kv_heads", ("model",), optional=True)),
        ("opt.embed: data", Rule("embed", ("data",), scope="opt")),
        ("params.embed?: data", Rule("embed", ("data",), optional=True, scope="params")),
        ('"*/embedding".vocab: model', Rule("vocab", ("model",), scope="*/embedding")),
        ('"a:b".vocab: model', Rule("vocab", ("model",), scope="a:b")),
        ("seq: none", Rule("seq", ())),
        ("seq: None", Rule("seq", ())),
        ("head-dim: model", Rule("head-dim", ("model",))),
    ],
)
def test_one_rule(text, rule):
    assert Layout(text).rules == (rule,)
    assert Layout(str(Layout(text))).rules == (rule,)


def test_a_rule_list_resolves_by_cost_and_text_by_order():
    assert Layout([("batch", "data")]).resolve == "cost"
    assert Layout("batch: data").resolve == "order"
    assert Layout("batch: data", resolve="cost").resolve == "cost"
    assert Layout(Layout([("batch", "data")])).resolve == "cost"
    with pytest.raises(LayoutSyntaxError, match="it is 'order' or 'cost'"):
        Layout("batch: data", resolve="best")  # type: ignore[arg-type]


def test_scopes():
    layout = Layout('opt.embed: data; "*/embedding".vocab: model; vocab: data')
    assert layout.spec("embed") == P()
    assert layout.spec("embed", scope="opt") == P("data")
    assert layout.spec("embed", scope="params") == P()
    assert layout.spec("vocab") == P("data")
    assert layout.spec("vocab", path="params/embedding") == P("model")
    assert layout.scopes_of("params/embedding", "params") == ("*/embedding",)
    assert layout.scopes_of("mu/embedding", "opt") == ("opt", "*/embedding")


def test_spec_checks_axes_and_rank(mesh):
    with pytest.raises(UnknownAxisError, match="names axis `dta`"):
        Layout("embed: dta").spec("embed", mesh)
    with pytest.raises(RankError):
        Layout("embed: data").spec("embed mlp", mesh, (4,))
    assert Layout("embed: data").spec("... embed", mesh, (2, 2, 4)) == P(None, None, "data")


def test_maxtext_rules_are_accepted_as_they_are():
    rules = MAXTEXT["logical_axis_rules"]
    layout = Layout(rules)
    assert [(r.dim, r.axes) for r in layout.rules] == [
        (name, (axes,) if isinstance(axes, str) else tuple(axes)) for name, axes in rules
    ]
    sizes = dict.fromkeys(MAXTEXT["mesh_axes"], 1) | {"fsdp": 4, "tensor": 2}
    layout.check_axes(abstract(**sizes))
    assert layout.spec("embed mlp", abstract(**sizes), (64, 128)) == P(
        ("fsdp", "context", "context_usp_ulysses", "expert"),  # `mlp` stands first
        ("fsdp_transpose", "tensor", "tensor_sequence", "autoregressive"),
    )


@pytest.mark.parametrize(
    "dims",
    [
        *itertools.permutations(["activation_batch", "activation_length", "activation_embed"]),
        *itertools.permutations(["embed", "mlp"]),
        *itertools.permutations(["embed", "q_heads", "kv"]),
        ("vocab", "embed_vocab"),
    ],
)
def test_maxtext_weights_lie_as_flax_lays_them(dims):
    import flax.linen as nn

    rules = [(k, v if isinstance(v, str) else tuple(v)) for k, v in MAXTEXT["logical_axis_rules"]]
    assert Layout(rules).spec(dims) == _trim(nn.logical_to_mesh_axes(dims, rules))


def _trim(spec: P) -> P:
    entries = list(spec)
    entries = [None if e == () else e[0] if isinstance(e, tuple) and len(e) == 1 else e for e in entries]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


@pytest.mark.parametrize("make", [list, dict, lambda pairs: Layout(dict(pairs))], ids=["pairs", "mapping", "layout"])
def test_the_left_sides_of_pairs_are_those_of_text(make):
    pairs = [("batch", ("slice", "data")), ("kv_heads?", "model"), ("opt.embed", "data"), ('"*/up".mlp', "model")]
    pairs += [["seq", None], ["embed", "data+model"], ("mlp", ["data", "model"])]
    left, right = (
        'batch: slice+data; kv_heads?: model; opt.embed: data; "*/up".mlp: model',
        "seq: none; embed, mlp: data+model",
    )
    layout = Layout(make(pairs))
    assert layout.rules == Layout(f"{left}; {right}").rules
    assert Layout(str(layout)).rules == layout.rules


@pytest.mark.parametrize(
    ("rules", "said", "fix"),
    [
        ({"*/up": P("data", "model")}, "'*/up' is not a dim", """dims={'*/up': "embed mlp"}"""),
        ([("params/up", "model")], "'params/up' is not a dim", '"params/up".mlp: model'),
        ({"embed mlp": "data"}, "'embed mlp' is not a dim", "write `dim: axis`"),
        ({"up.mlp": "data"}, "there is no scope `up`", '"*/up/*".mlp'),
        ({"batch": P(("slice", "data"))}, "is not a pair (name, axis)", None),
        ({"batch": "data model"}, "is not a pair (name, axis)", None),
        ({3: "data"}, "is not a pair (name, axis)", None),
        *(([pair], "logical axis rule", None) for pair in ("batch", ("batch",), ("batch", 3), (3, "data"), None)),
    ],
)
def test_keys_that_are_no_dims_are_refused(rules, said, fix):
    with pytest.raises(LayoutSyntaxError) as caught:
        Layout(rules)
    assert said in caught.value.headline
    assert fix is None or any(fix in line for line in caught.value.fixes)


NAMES = ["batch", "seq", "embed", "mlp", "heads"]
AXES = ["data", "model", "slice"]
rules_st = st.lists(
    st.builds(
        Rule,
        st.sampled_from(NAMES),
        st.lists(st.sampled_from(AXES), unique=True, max_size=3).map(tuple),
        st.booleans(),
        st.sampled_from([None, None, "opt", "params", "*/kernel"]),
    )
    | st.builds(Rule, st.sampled_from(NAMES), st.just(("slice", "data")), rounds=st.sampled_from([1, 2, 8])),
    max_size=8,
)
sizes_st = st.fixed_dictionaries({a: st.sampled_from([1, 2, 3, 4]) for a in AXES})
dims_st = st.lists(st.sampled_from([*NAMES, None]), max_size=4).filter(
    lambda d: all(d.count(n) == 1 for n in d if n is not None)
)


def layout_of(rules: list[Rule]) -> Layout:
    return Layout("; ".join(map(str, rules)))


@given(rules_st)
def test_text_round_trip(rules):
    layout = layout_of(rules)
    assert layout.rules == tuple(rules)
    assert Layout(str(layout)) == layout
    assert hash(Layout(str(layout))) == hash(layout)


@settings(max_examples=200)
@given(rules_st, sizes_st, dims_st, st.data())
def test_claims_hold_what_they_promise(rules, sizes, dims, data):
    layout = layout_of(rules)
    scopes = data.draw(st.sampled_from([(), ("opt",), ("params", "*/kernel")]))
    shape = [data.draw(st.sampled_from([1, 2, 3, 4, 6, 12, 24])) for _ in dims]
    items = [((d,) if d else (), n) for d, n in zip(dims, shape, strict=True)]
    axes, refused = claim(layout, items, sizes, scopes)

    used = [a for entry in axes for a in entry]
    assert len(used) == len(set(used))  # no axis twice
    for entry, size in zip(axes, shape, strict=True):
        assert size % math.prod(sizes[a] for a in entry) == 0  # divides
        assert size > 1 or not entry
    holding = [r for r in layout.rules if r.scope is None or r.scope in scopes]
    for entry, dim in zip(axes, dims, strict=True):  # only what some rule of the dim asks for
        assert not entry or any(r.dim == dim and set(entry) <= set(r.axes) for r in holding)
    for item in refused:
        assert axes[item] == ()
        assert not all(r.optional for r in holding if r.dim == dims[item])


@settings(max_examples=200)
@given(rules_st, sizes_st, dims_st, st.data())
def test_first_rule_wins(rules, sizes, dims, data):
    """The claims of a list of rules are those of its head, and then of its tail on what is left."""
    layout = layout_of(rules)
    shape = [data.draw(st.sampled_from([1, 2, 3, 4, 6, 12, 24])) for _ in dims]
    items = [((d,) if d else (), n) for d, n in zip(dims, shape, strict=True)]
    want: dict[int, tuple[str, ...]] = {}
    taken: set[str] = set()
    for rule in layout.rules:  # the semantic, said once more as plainly as can be
        if rule.scope is not None or rule.dim not in dims:
            continue
        i = dims.index(rule.dim)
        free = tuple(a for a in rule.axes if a not in taken)
        fits = shape[i] % math.prod(sizes[a] for a in free) == 0
        if i in want or shape[i] == 1 or not fits or (rule.axes and not free):
            continue
        want[i] = free
        taken |= set(free)
    axes, _ = claim(layout, items, sizes)
    assert axes == [want.get(i, ()) for i in range(len(dims))]


def test_dims_that_a_function_need_not_have(mesh):
    layout = Layout("batch: data; embed: data; mlp: model", optional="batch mlp")
    assert layout.optional == {"batch", "mlp"}
    assert Layout(layout) == layout != Layout(str(layout))
    assert Layout(layout, optional=True).optional == {"batch", "embed", "mlp"}
    w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    plan = mp.plan(lambda w: w * 2, w, mesh=mesh, layout=layout, dims={"w": "embed _"})
    assert plan.outputs[0].spec == P("data")
    with pytest.raises(UnknownDimError, match="`embed`"):
        mp.plan(lambda w: w * 2, w, mesh=mesh, layout=layout, dims={"w": "mlp _"})
    with pytest.raises(UnknownDimError, match=r"batch.*which no value"):  # spelt nearly as one that is there
        mp.plan(lambda w: w * 2, w, mesh=mesh, layout=layout, dims={"w": "embed batches"})
    with pytest.raises(UnknownDimError, match=r"no rule for `sequence`"):
        Layout("batch: data", optional="sequence")


@pytest.mark.parametrize(
    ("left", "right", "want"),
    [
        ("batch: data; embed: data", "mlp: model", "batch: data; embed: data; mlp: model"),
        ("batch: data; mlp: model; seq: x", "mlp: none; heads: model", "batch: data; mlp: none; seq: x; heads: model"),
        ("mlp: model; embed: data; mlp: data", "mlp: x", "mlp: x; embed: data"),
        ("mlp: model; embed: data", "mlp: x; seq: y; mlp: z", "mlp: x; mlp: z; embed: data; seq: y"),
        ("mlp: model", "mlp?: model", "mlp?: model"),
        ("mlp: model", "opt.mlp: data", "mlp: model; opt.mlp: data"),
        ('"*/up".mlp: model; mlp: x', '"*/up".mlp: data', '"*/up".mlp: data; mlp: x'),
        ("", "batch: data", "batch: data"),
        ("batch: data", "", "batch: data"),
    ],
)
def test_the_right_operand_wins(left, right, want):
    assert Layout(left) | right == Layout(want)
    assert left | Layout(right) == Layout(want)
    assert Layout(left) | Layout(right) == Layout(want)


def test_a_joined_layout_keeps_how_it_is_resolved_and_what_is_optional():
    flax_rules = Layout([("embed", "data"), ("mlp", "model")])
    assert (flax_rules | "mlp: none").resolve == "cost"
    assert (flax_rules | "mlp: none").from_pairs
    assert ("batch: data" | flax_rules).resolve == "order"
    assert str(flax_rules | {"heads": "model"}) == "embed: data; mlp, heads: model"
    assert (Layout("batch: data", optional=True) | Layout("seq: x", optional="seq")).optional == {"batch", "seq"}


@pytest.mark.parametrize("bad", [3, None, 1.5, {1, 2}])
def test_only_layouts_join(bad):
    with pytest.raises(TypeError):
        Layout("batch: data") | bad
    with pytest.raises(TypeError):
        bad | Layout("batch: data")


def test_a_joined_layout_must_be_one():
    with pytest.raises(mp.errors.LayoutSyntaxError):
        Layout("batch: data") | "mlp"
    with pytest.raises(mp.errors.AxisConflictError):
        "mlp: model+model" | Layout("batch: data")
