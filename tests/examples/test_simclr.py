"""SimCLR of the examples: its loss against a loop over views, and what its plan sends."""

import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
import resnet
import simclr


def test_the_loss_is_that_of_a_loop_over_views():
    z = np.random.default_rng(0).normal(size=(8, 5))
    labels = np.arange(8) // 2
    got = simclr.nt_xent(jnp.asarray(z, jnp.float32), jnp.asarray(labels))
    losses = []
    for i, a in enumerate(z):
        similar = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) / 0.1 for b in z]
        partner = similar[i ^ 1]
        losses.append(np.log(sum(np.exp(s) for k, s in enumerate(similar) if k != i)) - partner)
    assert float(got) == pytest.approx(np.mean(losses), rel=1e-5)


def test_a_sharded_batch_gathers_projections_not_images(monkeypatch):
    """With an encoder of two blocks."""
    monkeypatch.setattr(resnet, "STAGES", (1, 1))
    step, args, dims = simclr.simclr()
    plan = mp.plan(step, *args, dims=dims, mesh="data=64", topology="v5e:8x8", layout="batch: data")
    gathered = [c for c in plan.collectives if c.op == "all-gather"]
    views = 8192 * 128 * 4 * 63 / 64
    assert sum(c.total_bytes for c in gathered) < 3 * views
    assert max(c.bytes for c in gathered) == pytest.approx(views)
