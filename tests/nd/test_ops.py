"""Functions of named arrays against NumPy, eagerly and sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar import nd

RNG = np.random.default_rng(0)
A = RNG.normal(size=(8, 4, 6)).astype("f")
IDS = RNG.integers(0, 6, size=(8, 4))
X = nd.named(A, "batch seq embed")
W = nd.named(RNG.normal(size=(6, 16)).astype("f"), "embed mlp")


def softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


CASES = {  # name → (function of X and indices, dims of the result, expected)
    "einsum": (lambda x, i: nd.einsum(x, W, out="batch mlp seq"), "batch mlp seq", np.einsum("bse,em->bms", A, W.array)),
    "einsum reduced": (lambda x, i: nd.einsum(x, W, reduced="embed seq"), "batch mlp", np.einsum("bse,em->bm", A, W.array)),
    "einsum shared": (lambda x, i: nd.einsum(x, W), "batch seq mlp", A @ W.array),
    "sum": (lambda x, i: nd.sum(x, "seq embed"), "batch", A.sum((1, 2))),
    "mean out": (lambda x, i: nd.mean(x, out="embed batch"), "embed batch", A.mean(1).T),
    "all dims": (lambda x, i: nd.max(x), "", A.max()),
    "argmin": (lambda x, i: nd.argmin(x, "seq"), "batch embed", A.argmin(1)),
    "logsumexp": (lambda x, i: nd.logsumexp(x, "embed"), "batch seq", np.log(np.exp(A).sum(-1))),
    "softmax": (lambda x, i: nd.softmax(x, "seq"), "batch seq embed", softmax(A, 1)),
    "cumsum": (lambda x, i: nd.cumsum(x, "batch"), "batch seq embed", A.cumsum(0)),
    "shift": (lambda x, i: nd.shift(x, "batch", 2), "batch seq embed", np.concatenate([0 * A[:2], A[:-2]])),
    "shift back": (lambda x, i: nd.shift(x, "batch", -1), "batch seq embed", np.concatenate([A[1:], 0 * A[:1]])),
    "shift around": (lambda x, i: nd.shift(x, "batch", 3, wrap=True), "batch seq embed", np.roll(A, 3, 0)),
    "pad": (lambda x, i: nd.pad(x, 1.0, seq=(1, 2)), "batch seq embed", np.pad(A, ((0, 0), (1, 2), (0, 0)), constant_values=1)),
    "index": (lambda x, i: nd.index(x, seq=-1, embed=slice(1, 5, 2)), "batch embed", A[:, -1, 1:5:2]),
    "concat": (lambda x, i: nd.concat([x, nd.transpose(2 * x, "embed seq batch")], "seq"), "batch seq embed",
               np.concatenate([A, 2 * A], 1)),
    "reshape": (lambda x, i: nd.reshape(x, "group token embed", group=16), "group token embed", A.reshape(16, 2, 6)),
    "reshape with size 1": (lambda x, i: nd.reshape(nd.reshape(x, "one all", one=1), "b unit c", b=16, unit=1), "b unit c",
                            A.reshape(16, 1, 12)),
    "split": (lambda x, i: nd.split(x, "embed", heads=2, head=-1), "batch seq heads head", A.reshape(8, 4, 2, 3)),
    "merge": (lambda x, i: nd.merge(x, "embed batch", "all"), "all seq", A.transpose(2, 0, 1).reshape(48, 4)),
    "gather": (lambda x, i: nd.gather(W, i, "embed"), "batch seq mlp", np.asarray(W.array)[IDS]),
    "gather matched": (lambda x, i: nd.gather(x, i, "embed"), "batch seq", np.take_along_axis(A, IDS[..., None], 2)[..., 0]),
    "gather one matched": (lambda x, i: nd.gather(x, nd.index(i, seq=0), "embed"), "batch seq",
                           np.stack([A[b, :, IDS[b, 0]] for b in range(8)])),
    "one_hot": (lambda x, i: nd.one_hot(i, classes=6), "batch seq classes", np.eye(6)[IDS]),
    "top_k": (lambda x, i: nd.top_k(x, "seq", best=2)[0], "batch best embed", -np.sort(-A, 1)[:, :2]),
    "top_k indices": (lambda x, i: nd.top_k(x, "seq", best=2)[1], "batch best embed", np.argsort(-A, 1, kind="stable")[:, :2]),
    "where": (lambda x, i: nd.where(nd.arange(seq=4) < 2, x, 0.0), "batch seq embed", A * (np.arange(4) < 2)[:, None]),
    "elementwise": (lambda x, i: nd.elementwise(jnp.arctan2, x, 2.0), "batch seq embed", np.arctan2(A, 2.0)),
    "dropout of none": (lambda x, i: nd.dropout(x, jax.random.key(0), 0.0), "batch seq embed", A),
    "layer_norm": (lambda x, i: nd.layer_norm(x, "embed", 2.0, nd.arange(seq=4)), "batch seq embed",
                   (A - A.mean(-1, keepdims=True)) / np.sqrt(A.var(-1, keepdims=True) + 1e-6) * 2 + np.arange(4)[:, None]),
    "pool": (lambda x, i: nd.pool(jnp.mean, x, seq=2, batch=4), "batch seq embed", A.reshape(2, 4, 2, 2, 6).mean((1, 3))),
    "cross_entropy": (lambda x, i: nd.cross_entropy(x, i, "embed"), "batch seq",
                      -np.log(np.take_along_axis(softmax(A, 2), IDS[..., None], 2)[..., 0])),
    "cross_entropy of probabilities": (lambda x, i: nd.cross_entropy(x, nd.one_hot(i, embed=6) * 0.5, "embed"), "batch seq",
                                       -0.5 * np.log(np.take_along_axis(softmax(A, 2), IDS[..., None], 2)[..., 0])),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::meshpar.errors.JoinWarning")
@pytest.mark.parametrize("k", range(4))
def test_functions_have_the_numbers_of_numpy_under_a_layout(k):
    """Every fourth case, in one program."""
    ids, names = nd.named(IDS, "batch seq"), [*CASES][k::4]

    def step(x, i):
        return {name: CASES[name][0](x, i) for name in names}

    layout = ["batch?: data; seq?: model", "seq?: data; embed?: model"][k // 2]
    sharded = mp.jit(step, mesh="data=4, model=2", layout=layout, lowering=["jit", "shard_map"][k % 2])
    for results in (jax.jit(step)(X, ids), sharded(X, ids)):
        for name, got in results.items():
            _, dims, expected = CASES[name]
            assert got.dims == tuple(dims.split()), name
            np.testing.assert_allclose(got.array, expected, rtol=2e-5, atol=1e-6, err_msg=name)


def test_dropout_scales_what_remains_and_broadcasts_its_mask():
    x = nd.full(1.0, batch=64, seq=64)
    y = np.asarray(nd.dropout(x, jax.random.key(1), 0.25).array)
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
    assert abs((y == 0).mean() - 0.25) < 0.03
    rows = np.asarray(nd.dropout(x, jax.random.key(1), 0.25, "batch").array)
    assert (rows == rows[:, :1]).all()
    options = {"mesh": "data=4, model=2", "layout": "batch: data; seq: model"}
    sharded = mp.jit(lambda x: nd.dropout(x, jax.random.key(1), 0.25), **options)
    np.testing.assert_array_equal(sharded(x).array, y)


@pytest.mark.parametrize(("padding", "stride"), [("SAME", 1), ("VALID", 2)])
def test_a_convolution_with_several_batch_dims_and_sharded_rows(stride, padding):
    images = nd.named(RNG.normal(size=(2, 3, 16, 8, 4)).astype("f"), "member batch rows cols channels")
    kernel = nd.named(RNG.normal(size=(4, 3, 3, 5)).astype("f"), "channels kr kc features")

    def conv(x, w):
        return nd.conv(x, w, stride=stride, padding=padding, rows="kr", cols="kc")

    flat, hwio = jnp.asarray(images.array).reshape(6, 16, 8, 4), jnp.transpose(kernel.array, (1, 2, 0, 3))
    numbers = ("NHWC", "HWIO", "NHWC")
    expected = jax.lax.conv_general_dilated(flat, hwio, (stride, stride), padding, dimension_numbers=numbers)
    for layout in ("rows?: data; features: model", "member: model; cols?: data"):
        got = mp.jit(conv, mesh="data=4, model=1", layout=layout)(images, kernel)
        assert got.dims == ("member", "batch", "rows", "cols", "features")
        np.testing.assert_allclose(got.array.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)


def test_an_upsampling_convolution_is_the_gradient_of_a_convolution():
    x = nd.normal(jax.random.key(0), batch=2, rows=6, channels=3)
    w = nd.normal(jax.random.key(1), k=3, channels=3, features=4)
    up = nd.conv(x, w, stride=2, upsample=True, rows="k")
    forward = lambda y: nd.conv(y, nd.rename(w, channels="c"), stride=2, rows="k")  # noqa: E731
    (expected,) = jax.linear_transpose(lambda y: nd.rename(forward(y), c="channels"), up)(x)
    np.testing.assert_allclose(up.array, expected.array, rtol=1e-5, atol=1e-6)


def test_attention_is_the_weighted_mean_of_the_values():
    dims = "length", "memory", "memory"
    q, k, v = (nd.named(RNG.normal(size=(2, 5, 3, 4)).astype("f"), f"batch {d} heads d") for d in dims)
    mask = nd.arange(memory=5) <= nd.arange(length=5)
    got = nd.attention(q, k, v, key="d", memory="memory", mask=mask)
    scores = np.einsum("blhd,bmhd->bhlm", q.array, k.array) / 2
    weights = softmax(np.where(np.tril(np.ones((5, 5), bool)), scores, -np.inf), -1)
    assert got.dims == ("batch", "length", "heads", "d")
    np.testing.assert_allclose(got.array, np.einsum("bhlm,bmhd->blhd", weights, v.array), rtol=1e-5, atol=1e-6)
    options = {"mask": mask, "scale": 1.0, "dropout": lambda weights: 2 * weights}
    double = nd.attention(q * 0.5, k, v, key="d", memory="memory", **options)
    np.testing.assert_allclose(double.array, 2 * got.array, rtol=1e-5)


def test_positions_are_integers_and_slices():
    x = nd.named(A, "batch seq embed")
    got = nd.index(x, seq=np.int64(1))
    assert got.dims == ("batch", "embed")
    np.testing.assert_array_equal(got.array, A[:, 1])
    for bad in (True, jnp.int32(1), [0, 1]):
        with pytest.raises(mp.errors.LayoutSyntaxError, match=r"batch=.* is no integer or slice"):
            nd.index(x, batch=bad)
