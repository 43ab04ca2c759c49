"""Efficiencies from seconds: those that made the seconds come back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import bf16

import meshpar as mp
from meshpar._src.measurement import fit


def seconds_of(parts):
    """Seconds of layouts whose matmuls, memory traffic and links take these times at the peak rate, without overlap."""
    return lambda e: [float(p @ (1 / np.asarray(e))) for p in np.asarray(parts, float)]


PARTS = [[5.0, 1, 1], [1, 5, 1], [1, 1, 5], [3, 3, 1]]


@pytest.mark.parametrize("true", [(0.6, 0.8, 0.4), (0.05, 0.9, 0.2), (1.0, 1.0, 1.0)])
def test_known_efficiencies_come_back(true):
    found = fit(seconds_of(PARTS), (0.9, 0.9, 0.8), seconds_of(PARTS)(true), bounds=(0.02, 1.0))
    assert found.efficiencies == pytest.approx(true, rel=0.01)
    assert found.error < 1e-3
    assert not [n for n in found.notes if "apart" in n or "hardly" in n]


def test_one_layout_that_was_disturbed_counts_little():
    true = (0.6, 0.8, 0.4)
    parts = [*PARTS, [2, 4, 2], [4, 1, 3], [1, 2, 4]]
    measured = seconds_of(parts)(true)
    measured[3] *= 3
    found = fit(seconds_of(parts), (1, 1, 1), measured, bounds=(0.02, 1.0))
    assert found.efficiencies == pytest.approx(true, rel=0.15)


def test_rates_that_cannot_be_distinguished_change_alike_with_a_note():
    parts = [[2, 1, 1], [4, 2, 1], [2, 1, 4]]
    found = fit(seconds_of(parts), (0.8, 0.4, 0.5), seconds_of(parts)((0.4, 0.2, 0.25)), bounds=(0.02, 1.0))
    assert found.efficiencies == pytest.approx((0.4, 0.2, 0.25), rel=0.01)
    assert any(n.startswith("these layouts do not distinguish matmuls and memory traffic") for n in found.notes)
    alone = fit(seconds_of([[1, 1, 0]]), (0.8, 0.4, 0.5), [8.0], bounds=(0.02, 1.0))
    assert alone.planned == pytest.approx((8.0,), rel=0.01)
    assert alone.efficiencies[0] / alone.efficiencies[1] == pytest.approx(2)
    assert any(n.startswith("links hardly affect") for n in alone.notes)


def test_efficiencies_stay_within_bounds():
    """The other rates are fitted with the fixed ones."""
    much = fit(seconds_of(PARTS), (1, 1, 1), seconds_of(PARTS)((1.5, 0.5, 0.4)), bounds=(0.02, 1.0))
    assert much.efficiencies == pytest.approx((1, 0.5, 0.4), rel=0.2)
    assert "the efficiency of matmuls is at its upper bound, 1" in much.notes
    little = fit(seconds_of(PARTS), (1, 1, 1), seconds_of(PARTS)((0.05, 0.05, 0.015)), bounds=(0.02, 1.0))
    assert all(0.02 <= e <= 1.0 for e in little.efficiencies)
    assert "the efficiency of links is at its lower bound, 0.02" in little.notes


@pytest.mark.filterwarnings("ignore::meshpar.errors.TorusWarning")
def test_plans_priced_with_other_efficiencies_give_these_back():
    """Communication overlapped with matmuls, and kernels whose traffic overlaps with matmuls, as in plans."""

    def step(x, up, down, table):
        return jnp.sum(jax.nn.relu(x @ up) @ down) + jnp.sum(jnp.tanh(table) * table)

    gradient = jax.grad(step, (1, 2, 3))
    batch, embed, mlp = 8192, 1024, 4096
    shapes = bf16(batch, embed), bf16(embed, mlp), bf16(mlp, embed), bf16(batch, 2 * mlp)
    dims = {"x": "batch embed", "up": "embed mlp", "down": "mlp embed", "table": "batch wide"}
    base = mp.plan(gradient, *shapes, mesh="data=4, model=4", topology="v5e:4x4", layout="", dims=dims, overlap="off")
    layouts = ["batch: data+model", "mlp: model", "batch: data; mlp: model", "batch: data; embed: data", "embed: model"]
    plans = [base.replan(layout=text) for text in (*layouts, "wide: data; mlp: model")]

    def predict(e):
        return [p.replan(calibration=mp.types.Calibration("TPU v5 lite", "0.10.2", *e)).seconds for p in plans]

    true = (0.55, 0.7, 0.35)
    found = fit(predict, (1, 1, 0.8), predict(true), bounds=(0.02, 1.0))
    assert found.efficiencies == pytest.approx(true, rel=0.05)
