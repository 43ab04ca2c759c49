"""The notation for dims, path patterns, near names."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshpar._src.dims import (
    PathDims,
    did_you_mean,
    fit_dims,
    format_dims,
    near,
    parse_dims,
    path_matches,
)
from meshpar.errors import LayoutSyntaxError, RankError


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("batch seq embed", ("batch", "seq", "embed")),
        ("  batch\n seq ", ("batch", "seq")),
        ("", ()),
        ("batch _ _", ("batch", None, None)),
        (("batch", None, "_"), ("batch", None, None)),
        (["head-dim", "kv_heads"], ("head-dim", "kv_heads")),
        ("... embed", (..., "embed")),
        ("batch ... embed", ("batch", ..., "embed")),
    ],
)
def test_parse(text, want):
    assert parse_dims(text) == want


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seq seq", "the dim `seq` stands twice in one value"),
        ("batch, seq", "'batch,' is not a name"),
        ("1st", "'1st' is not a name"),
        ("seq'", '"seq\'" is not a name'),  # primed by inference alone
        ((1, "a"), "1 is not a name"),
        ("... a ...", "`...` stands twice"),
    ],
)
def test_parse_refuses(text, says):
    with pytest.raises(LayoutSyntaxError, match=r"^dims ") as error:
        parse_dims(text)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("dims", "rank", "want"),
    [
        ("a b", 2, ("a", "b")),
        ("a ... b", 2, ("a", "b")),
        ("a ... b", 4, ("a", None, None, "b")),
        ("...", 0, ()),
        ("... b", 3, (None, None, "b")),
    ],
)
def test_fit(dims, rank, want):
    assert fit_dims(parse_dims(dims), (2,) * rank, path="x", origin="the test") == want


@pytest.mark.parametrize(("dims", "rank"), [("a b", 1), ("a b", 3), ("a ... b", 1), ("", 1)])
def test_fit_refuses_another_rank(dims, rank):
    with pytest.raises(RankError, match=f"x has {rank} dimension"):
        fit_dims(parse_dims(dims), (2,) * rank, path="x", origin="the test")


@pytest.mark.parametrize("dims", ["batch seq", "batch _ embed", "... embed", ""])
def test_format_is_the_inverse_of_parse(dims):
    assert format_dims(parse_dims(dims)) == dims


def test_first_matching_pattern_wins():
    dims = PathDims({"*/query/kernel": "embed heads", "*/kernel": "embed mlp"})
    assert dims.match("layer/query/kernel") == ("*/query/kernel", ("embed", "heads"))
    assert dims.match("layer/mlp/kernel") == ("*/kernel", ("embed", "mlp"))
    assert dims.match("layer/bias") is None


def test_path_dims_are_values():
    one = PathDims({"*/kernel": "embed mlp"})
    two = PathDims([("*/kernel", ("embed", "mlp"))])
    assert one == two
    assert hash(one) == hash(two)
    assert one != PathDims({"*/kernel": "mlp embed"})
    assert PathDims(None).match("x") is None


def test_pattern_with_bad_dims_says_which():
    with pytest.raises(LayoutSyntaxError, match="dims of pattern 'x'"):
        PathDims({"x": "a a"})


def test_near_names():
    assert near("embd", ["mlp", "embed", "heads"]) == ["embed"]
    assert near("zzz", ["mlp", "embed"]) == []
    assert did_you_mean("embd", ["mlp", "embed"], "dims") == ["did you mean `embed`?"]
    assert did_you_mean("zzz", ["mlp", "embed"], "dims") == ["dims there are: embed, mlp"]
    assert did_you_mean("zzz", [], "dims") == ["dims there are: none"]


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("batch/tokens", ["batch/tokens"], ["batch/tokens/0"]),
        ("*/kernel", ["params/layer/0/kernel", "kernel"], ["my_kernel"]),
        ("a*.c", ["a/b.c"], ["a/b.c/d", "abxc"]),
        ("*/[qkv]/kernel", ["a/q/kernel", "a/v/kernel", "k/kernel"], ["a/o/kernel", "a/qk/kernel"]),
        ("*/layer_[0-2]/w", ["p/layer_0/w", "p/layer_2/w"], ["p/layer_3/w"]),
        ("*/conv?/w", ["a/conv1/w", "conv_/w"], ["a/conv/w", "a/conv10/w", "a/conv//w"]),
        ("*/{up,gate}/kernel", ["mlp/up/kernel", "mlp/gate/kernel"], ["mlp/down/kernel", "mlp/up,gate/kernel"]),
        ("p/w[0]", ["p/w[0]", "p/w0"], ["p/w"]),  # brackets of a path, and as a pattern
        ("p/{", ["p/{"], ["p/"]),
        ("p/[^a]", ["p/^", "p/a"], ["p/b"]),  # no negation
    ],
)
def test_path_patterns(pattern, matching, other):
    assert all(path_matches(pattern, path) for path in matching)
    assert not any(path_matches(pattern, path) for path in other)


def by_backtracking(pattern: str) -> re.Pattern[str]:
    """The pattern as a regular expression, which takes time exponential in the number of ``*``."""
    tokens = re.findall(r"[*?]|\[[^\[\]/]+\]|\{[^{}]*\}|[^*?\[{]+|[\[{]", pattern)

    def expression(token: str) -> str:
        if token in ("*", "?"):
            return ".*" if token == "*" else "[^/]"
        if token.startswith("[") and token.endswith("]"):
            return "[" + re.escape(token[1:-1]).replace(r"\-", "-") + "]"
        if token.startswith("{") and token.endswith("}"):
            return f"(?:{'|'.join(map(re.escape, token[1:-1].split(',')))})"
        return re.escape(token)

    return re.compile("".join(map(expression, tokens)) + r"\Z", re.DOTALL)


PARTS = st.sampled_from(["\n", *"* * ? a b / ab [ab] [a-c] [^b] [b-] {a,ab} {b,} {a/b,c} [ { ] .".split()])


@given(pattern=st.lists(PARTS, max_size=7).map("".join), path=st.text("abc/^-.{[\n", max_size=10))
@example(pattern="*{ab,a}*b", path="ab")
@example(pattern="*{a,ab}{bcd,c}", path="abc")
@settings(max_examples=300)
def test_patterns_match_as_by_a_regular_expression(pattern, path):
    reference = by_backtracking(pattern)
    assert path_matches(pattern, path) == (
        pattern in (path, "/" + path) or any(map(reference.match, (path, "/" + path)))
    )


def test_patterns_with_many_stars_match_in_little_time():
    assert not path_matches("*a" * 30 + "b", "a" * 60)  # a backtracking search takes more than 10^15 steps
    assert path_matches("*a" * 30 + "*", "a" * 60)
    assert not path_matches("*" * 10_000 + "b", "a" * 10_000)


@pytest.mark.parametrize("pattern", ["w[z-a]", "[a--b]", "*/{up,down}/[9-0]*"])
def test_ranges_in_the_wrong_order(pattern):
    with pytest.raises(LayoutSyntaxError, match="whose end is before its start"):
        path_matches(pattern, "w/up/3")
    assert path_matches(pattern, pattern)  # a path with brackets
