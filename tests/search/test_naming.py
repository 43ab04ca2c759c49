"""Names of axes by the dims that they shard."""

import pytest

import meshpar as mp
from meshpar._src.search.space import Point, axis_names, renamed


@pytest.mark.parametrize(
    ("mesh", "layout", "names"),
    [
        ("a=8, b=32", "vocab, batch: b; heads, mlp, seq: a", "a=model, b=data"),
        ("a=16, b=8, c=2", "batch: a+c; heads, mlp, seq: b; embed: a+c", "a=data, b=model, c=data2"),
        ("a=8, b=2, c=16", "expert: a; batch: b+c+a; embed: a+b+c", "a=expert, b=data2, c=data"),
        ("a=4, b=4", "batch: a; seq: b", "a=data, b=context"),
        ("a=128, b=2", "batch: b+a; embed: a", "a=data, b=replica"),
        ("a=4, b=2", "batch: a+b; embed: b", "a=replica, b=data"),
        ("a=2, b=4, c=2", "mlp: a; heads: b", "a=model, b=model2, c=idle"),
        ("a=16", "batch: a; opt.embed: a", "a=data"),
        ("a=16", "", "a=idle"),
    ],
)
def test_axes_are_named_by_what_they_shard(mesh, layout, names):
    sizes = tuple((a, int(n)) for a, n in (part.split("=") for part in mesh.split(", ")))
    expected = dict(part.split("=") for part in names.split(", "))
    assert axis_names(sizes, mp.Layout(layout).rules) == expected


def test_given_axes_keep_their_names():
    sizes = (("slice", 2), ("model", 4), ("data", 8))
    rules = mp.Layout("batch: slice+model; mlp: data").rules
    assert axis_names(sizes, rules, {"slice"}) == {"slice": "slice", "model": "data", "data": "model"}
    assert axis_names(sizes, rules, {"slice", "data"}) == {"slice": "slice", "data": "data", "model": "data2"}


def test_the_order_of_axes_and_rules_is_that_of_the_candidate():
    point = Point((("data", 4), ("model", 2)), mp.Layout("mlp: data; batch: model; embed: model+data").rules)
    found = renamed(point)
    assert (found.mesh, found.layout) == ("model=4, data=2", "mlp: model; batch: data; embed: data+model")
