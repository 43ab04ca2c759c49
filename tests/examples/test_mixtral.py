"""The Mixtral of the examples: its experts against a loop over tokens, its plan, and equal runs under a layout."""

import collections
import dataclasses
import math

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from lowered import same

import llama
import meshpar as mp
import mixtral


def routed(chances: np.ndarray, chosen: int, places: int) -> np.ndarray:
    """What ``mixtral.route`` returns, token by token."""
    batch, seq, experts = chances.shape
    out = np.zeros((batch, seq, experts, places))
    for b in range(batch):
        full = collections.Counter()
        ranked = np.argsort(-chances[b], axis=-1)[:, :chosen]
        for rank in range(chosen):
            for s in range(seq):
                e = ranked[s, rank]
                if full[e] < places:
                    out[b, s, e, full[e]] = chances[b, s, e] / chances[b, s, ranked[s]].sum()
                full[e] += 1
    return out


@pytest.mark.parametrize("places", [2, 12])
def test_places_are_given_out_in_the_order_of_the_sequence_first_choices_first(places):
    chances = np.random.default_rng(0).dirichlet(np.ones(4), size=(3, 12)).astype(np.float32)
    got = mixtral.route(chances, 2, places)
    expected = routed(chances, 2, places)
    assert (expected.sum((-1, -2)) < 0.99).any() == (places == 2)  # some tokens find no place where there are few
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.fixture(scope="module")
def real():
    rng = np.random.default_rng(0)
    batch = {k: rng.integers(0, mixtral.TINY.vocab, (8, 16), dtype=np.int32) for k in ("inputs", "targets")}
    return jax.jit(mixtral.create_state, static_argnums=0)(mixtral.TINY, jax.random.key(0)), batch


def test_experts_with_room_for_all_are_a_weighted_sum(real):
    config = mixtral.TINY
    params = jax.tree.map(lambda box: box.unbox(), real[0]["params"], is_leaf=lambda x: hasattr(x, "unbox"))
    p = jax.tree.map(lambda w: np.asarray(w[0], np.float64), params["layers"]["experts"])
    x = np.random.default_rng(1).normal(size=(2, 6, config.embed)).astype(np.float32)
    roomy = mixtral.Experts(dataclasses.replace(config, capacity=float(config.experts)))
    got, _ = jax.jit(roomy.apply)({"params": jax.tree.map(lambda w: w[0], params["layers"]["experts"])}, x)
    expected = np.zeros(x.shape)
    for b, s in np.ndindex(2, 6):
        chances = np.exp(x[b, s] @ p["router"])
        best = np.argsort(-chances)[: config.chosen]
        for e in best:
            gate = x[b, s] @ p["gate"][e]
            hidden = gate / (1 + np.exp(-gate)) * (x[b, s] @ p["up"][e])
            expected[b, s] += chances[e] / chances[best].sum() * (hidden @ p["down"][e])
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.slow
def test_no_layout_changes_a_number(real):
    how = {"meshes": ["data=2, model=2, idle=2"], "lowerings": ("jit",), "tolerance": 1e-4}
    same(mixtral.train_step(mixtral.TINY), *real, layout=mixtral.FSDP_EXPERT, dims=llama.DIMS, **how)


def test_expert_parallelism_exchanges_tokens_and_gathers_no_expert_over_its_axis():
    step, args, dims = mixtral.mixtral_8x7b()
    mesh = AbstractMesh((16, 8), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    plan = mp.plan(step, *args, dims=dims, layout=mixtral.FSDP_EXPERT, mesh=mesh)
    named, total, _ = plan.program.coverage()
    assert named >= 0.99 * total
    big = [c for c in plan.collectives if c.total_bytes > 1e8]
    exchanged = [c for c in big if c.op == "all-to-all"]
    assert {c.axes for c in exchanged} == {("model",)}
    assert sum(c.count or 0 for c in exchanged) == 6 * 32  # there and back: forward, again, and backward
    places = math.ceil(1.25 * 2 * 2048 / 8)
    rows = 8 * 128 * places * 4096 * 2 / 128  # bytes of a device's tokens at all their experts
    assert all(c.bytes == pytest.approx(rows * 7 / 8) for c in exchanged)
    assert all(c.axes == ("data",) for c in big if "expert" in c.dims.split() and c.op != "all-to-all")


def test_every_weight_can_be_split_over_all_devices():
    step, args, dims = mixtral.mixtral_8x7b()
    plan = mp.plan(
        step, *args, dims=dims, layout=mixtral.FSDP_ALL_EXPERT, mesh="data=16, model=8", topology="v5p:4x4x8"
    )
    weights = 46_702_792_704
    assert plan.argument_bytes() == pytest.approx(3 * 4 * weights / 128, rel=1e-3)  # with two moments, float32
