"""Routers against float64 NumPy: choices, weights, drops, losses, and their derivatives."""

import functools

import jax
import jax.numpy as jnp
import moe_oracle as oracle
import numpy as np
import pytest

from meshpar._src.layers.moe import ROUTERS
from meshpar.errors import MeshparError

B, S, E = 4, 8, 8
T = B * S
R = np.random.default_rng(0)
LOGITS = R.normal(size=(B, S, E)) * 2
LOGITS[1, 2] = 0.5  # ties: the lowest expert
LOGITS[0, 1, 3] = -np.inf  # one expert barred
BAD = LOGITS.copy()
BAD[2, 0, 1], BAD[2, 1], BAD[3, 4, 0] = np.nan, -np.inf, np.inf
MASK = R.random((B, S)) > 0.2
NOISE = R.normal(size=(B, S, E))
BIAS = R.normal(size=E) * 0.2
DIRECTION = R.normal(size=(B, S, E))
READ = R.normal(size=(T, E))


def flat(x):
    return np.asarray(x, np.float64).reshape(T, *np.shape(x)[2:])


CASES = {  # name → (router, its arguments, the oracle's further arguments)
    "top_k": ("top_k", {"k": 3}, {}),
    "switch": ("switch", {}, {}),
    "switch_max": ("switch_max", {}, {}),
    "ntlb": ("ntlb", {}, {}),
    "ntlb of four stages": ("ntlb", {"stages": 4}, {}),
    "gshard": ("gshard", {}, {}),
    "noisy_top_k": ("noisy_top_k", {"k": 2, "noise": NOISE.astype("f")}, {"noise": flat(NOISE)}),
    "deepseek_v3": (
        "deepseek_v3",
        {"k": 3, "bias": BIAS.astype("f"), "expert_groups": 4, "top_groups": 2, "scale": 2.5},
        {"bias": BIAS.astype("f").astype(float), "row": S},
    ),
    "expert_choice": ("expert_choice", {"capacity": 2.0}, {}),
}


def expected(case, logits, mask, **more):
    name, kwargs, own = CASES[case]
    kwargs = {k: v for k, v in {**kwargs, **own, **more}.items() if v is not None or k == "capacity"}
    return getattr(oracle, name)(flat(logits), np.ones(T, bool) if mask is None else mask.reshape(-1), **kwargs)


def got(case, logits, mask, **more):
    name, kwargs, _ = CASES[case]
    return jax.jit(lambda x: ROUTERS[name](x, mask=mask, **{**kwargs, **more}))(np.asarray(logits, np.float32))


def dense(routing, experts=E):
    """[T, E]: weights and choices by expert."""
    weight, kept = np.zeros((T, experts + 1)), np.zeros((T, experts + 1), int)
    expert, values = np.asarray(routing.expert).reshape(T, -1), np.asarray(routing.weight).reshape(T, -1)
    for j in range(expert.shape[1]):
        weight[np.arange(T), expert[:, j]] += values[:, j]
        kept[np.arange(T), expert[:, j]] += 1
    assert kept[:, :-1].max() <= 1
    assert (weight[:, -1] == 0).all()
    return weight[:, :-1], kept[:, :-1].astype(bool)


def agree(routing, want, experts=E):
    weight, kept = dense(routing, experts)
    np.testing.assert_array_equal(kept, want.kept)
    np.testing.assert_allclose(weight, want.weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(routing.load, want.load)
    assert int(routing.dropped) == want.dropped
    assert set(routing.losses) == set(want.losses)
    for name, value in want.losses.items():
        np.testing.assert_allclose(routing.losses[name], value, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_against_the_oracle(case, limited):
    more = {"capacity": 0.6, "groups": 4} if limited else {}
    logits, mask = (BAD, MASK) if limited else (LOGITS, None)
    routing, want = got(case, logits, mask, **more), expected(case, logits, mask, **more)
    agree(routing, want)
    if limited:  # padding goes nowhere
        assert (np.asarray(routing.expert)[~MASK] == E).all()
        assert want.dropped > 0 or case in ("expert_choice", "ntlb of four stages")


@pytest.mark.parametrize("case", CASES)
def test_derivatives(case):
    more = {} if case == "expert_choice" else {"capacity": 1.0}
    logits = np.where(np.isinf(LOGITS), -1.0, LOGITS)
    logits[1, 2] = DIRECTION[1, 2]  # no ties: a step must not change a choice

    def number(x):
        want = expected(case, x, MASK, **more)
        return (want.weight * READ).sum() + sum(want.losses.values())

    name, kwargs, _ = CASES[case]
    run = jax.jit(jax.value_and_grad(lambda x: _scalar(ROUTERS[name](x, mask=MASK, **{**kwargs, **more}))))
    value, grad = run(logits.astype("f"))
    h = 1e-6
    slope = (number(logits + h * DIRECTION) - number(logits - h * DIRECTION)) / (2 * h)
    np.testing.assert_allclose((grad * DIRECTION).sum(), slope, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(value, number(logits), rtol=1e-4)
    assert (np.asarray(grad)[~MASK] == 0).all()


def _scalar(routing):
    every = jnp.arange(E)
    weight = jnp.zeros((*routing.expert.shape[:-1], E))
    for j in range(routing.expert.shape[-1]):
        weight += jnp.where(routing.expert[..., j : j + 1] == every, routing.weight[..., j : j + 1], 0)
    return (weight.reshape(T, E) * READ).sum() + sum(routing.losses.values())


@pytest.mark.slow
def test_bad_tokens_do_not_leak():
    """Gradients stay finite, and those of the other tokens are what they are without the bad ones."""
    bad = np.isnan(BAD).any(-1) | np.isposinf(BAD).any(-1) | np.isneginf(BAD).all(-1)
    for case, (name, kwargs, _) in CASES.items():
        route = functools.partial(ROUTERS[name], **kwargs)
        grads = []
        for x, mask in ((BAD, None), (LOGITS, ~bad)):
            grad = jax.jit(jax.grad(lambda x, route=route, mask=mask: _scalar(route(x, mask=mask))))
            grads.append(np.asarray(grad(x.astype("f"))))
        assert np.isfinite(grads[0]).all(), case
        np.testing.assert_allclose(grads[0][~bad], grads[1][~bad], rtol=1e-5, atol=1e-7, err_msg=case)


def test_two_levels():
    outer, inner = R.normal(size=(B, S, 4)) * 2, R.normal(size=(B, S, 4, 6)) * 2
    want = oracle.two_level(flat(outer), flat(inner), MASK.reshape(-1), k=4, outer_k=2, capacity=1.0, groups=2)
    route = functools.partial(ROUTERS["two_level"], k=4, outer_k=2, capacity=1.0, groups=2, mask=MASK)
    routing = jax.jit(route)(outer.astype("f"), inner.astype("f"))
    agree(routing, want, 24)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # -inf times 0 in NumPy
def test_groups_without_an_expert_are_excluded_in_two_levels():
    """A group whose logit is -inf, one whose experts all are, one with a single expert left, and a token without any expert."""
    outer, inner = R.normal(size=(B, S, 4)) * 2, R.normal(size=(B, S, 4, 6)) * 2
    outer[0, 1, 2], inner[1, 2, 0], inner[3, 3], inner[2, 4, 1, :5] = (-np.inf,) * 4
    want = oracle.two_level(flat(outer), flat(inner), np.ones(T, bool), k=4, outer_k=2)
    route = functools.partial(ROUTERS["two_level"], k=4, outer_k=2)
    routing = jax.jit(route)(outer.astype("f"), inner.astype("f"))
    agree(routing, want, 24)
    assert (np.asarray(routing.expert)[3, 3] == 24).all()

    def number(outer, inner):
        routing = route(outer, inner)
        return sum(routing.losses.values()) + routing.weight[..., 0].sum()

    grads = jax.jit(jax.grad(number, (0, 1)))(outer.astype("f"), inner.astype("f"))
    assert all(np.isfinite(g).all() for g in grads)


def test_hash():
    ids = R.integers(0, 50, (B, S))
    routing = ROUTERS["hash"](ids, experts=E, k=2, mask=MASK)
    expert = np.asarray(routing.expert)
    assert (expert[~MASK] == E).all()
    for i in np.unique(ids):  # one pair of experts an id
        assert len(np.unique(expert[(ids == i) & MASK], axis=0)) <= 1
    assert (expert[MASK][:, 0] != expert[MASK][:, 1]).all()
    assert (np.asarray(routing.weight)[MASK] == 0.5).all()
    spread = np.bincount(np.asarray(ROUTERS["hash"](np.arange(8000), experts=E).expert)[:, 0], minlength=E)
    assert spread.min() > 850
    assert spread.max() < 1150


def test_randomness_is_the_keys():
    """GShard's second expert is used with twice its weight; noise changes choices; both only with a key."""
    logits = np.tile(np.array([2.0, 0.0, -9, -9], "f"), (400, 1))[None]
    chance = 2 / (1 + np.exp(2.0))
    gshard = jax.jit(ROUTERS["gshard"])
    routing = gshard(logits, key=jax.random.key(0))
    share = (np.asarray(routing.expert)[..., 1] < 4).mean()
    assert abs(share - chance) < 4 * np.sqrt(chance * (1 - chance) / 400)
    assert int(routing.dropped) == 0  # skipped on purpose, not dropped
    assert (gshard(logits).expert[..., 1] == 1).all()
    route = jax.jit(functools.partial(ROUTERS["noisy_top_k"], noise=NOISE.astype("f"), k=2))
    keys = jax.random.key(1), jax.random.key(1), None
    one, again, plain = (route(LOGITS.astype("f"), key=key).expert for key in keys)
    assert (one == again).all()
    assert (one != plain).any()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: ROUTERS["top_k"](x, k=9), "k=9 is not within 1…8"),
        (lambda x: ROUTERS["top_k"](x, k=1, capacity=0.0), "capacity=0.0 must be above 0"),
        (lambda x: ROUTERS["top_k"](x, k=1, groups=3), "groups=3 does not divide the 32 tokens"),
        (lambda x: ROUTERS["top_k"](x.reshape(8, 4, E), k=1, groups=16, mask=MASK), "mask must be"),
        (lambda x: ROUTERS["top_k"](x[:3, :4], k=1, groups=2), "does not cut tokens of shape"),
        (lambda x: ROUTERS["switch"](x, k=2), "one expert, not k=2"),
        (lambda x: ROUTERS["switch_max"](x, k=2), 'router="switch_max": a token goes to one expert, not k=2'),
        (lambda x: ROUTERS["ntlb"](x, k=2), "not k=2 after stages=2"),
        (lambda x: ROUTERS["ntlb"](x, stages=9), "1 to E=8 stages, not k=1 after stages=9"),
        (lambda x: ROUTERS["gshard"](x, k=1), "two experts, not k=1"),
        (lambda x: ROUTERS["deepseek_v3"](x, k=1, expert_groups=3), "of 3 groups of 8"),
        (lambda x: ROUTERS["deepseek_v3"](x, k=3, expert_groups=4, top_groups=1), "hold fewer than k=3"),
        (lambda x: ROUTERS["deepseek_v3"](x, k=1, expert_groups=0), "of 0 groups of 8"),
        (lambda x: ROUTERS["two_level"](x, x[..., None], k=3, outer_k=2), "does not divide k=3"),
        (lambda x: ROUTERS["two_level"](x, x[..., None], k=9, outer_k=9), "outer_k=9 is not within 1…8"),
        (lambda x: ROUTERS["expert_choice"](x, capacity=None), 'router="expert_choice" takes a capacity'),
        (lambda x: ROUTERS["hash"](x, experts=4), "ids must be integers"),
        (lambda x: ROUTERS["top_k"](x.astype("i4"), k=1), "logits must be float"),
    ],
)
def test_bad_arguments(call, says):
    with pytest.raises(MeshparError, match=says):
        jax.eval_shape(call, LOGITS.astype("f"))


@pytest.mark.parametrize("name", sorted(ROUTERS.keys() - {"hash", "two_level"}))
def test_no_groups(name):
    router = functools.partial(ROUTERS[name], k=2 if name == "gshard" else 1, capacity=1.0, groups=0)
    with pytest.raises(MeshparError, match="groups=0 does not divide"):
        jax.eval_shape(router, LOGITS.astype("f"))
