"""The error of a program that does not fit: figures, tensors, and rules that hold less."""

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar._src.units import format_memory
from meshpar._src.verify.out_of_memory_error import GIB, capacity_of, out_of_memory

TPU = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (37.29G) exceeds "
    "available HBM (15.75G)."
)
OLD_TPU = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 18.31G of 15.75G hbm."


@pytest.fixture(scope="module")
def plan():
    def step(w, x):
        def loss(w):
            return (jnp.tanh(x @ w["up"]) @ w["down"]).astype(jnp.float32).sum()

        return jax.tree.map(lambda p, g: p - g, w, jax.grad(loss)(w))

    shapes = {"up": (16384, 65536), "down": (65536, 16384), "x": (1024, 16384)}
    w = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    x, dims = w.pop("x"), {"w/up": "embed mlp", "w/down": "mlp embed", "x": "batch embed"}
    options = {"mesh": "data=8, model=2", "topology": "v5e:4x4", "donate_argnames": "w"}
    return mp.plan(step, w, x, layout="batch: data", dims=dims, **options)


def test_figures_of_the_compiler(plan):
    error = out_of_memory(TPU, "v5e:4x4", plan, None)
    assert (error.needed, error.capacity) == (37.29 * GIB, 15.75 * GIB)
    assert error.headline.splitlines()[0] == (
        "DOES NOT FIT: out of memory on v5e:4x4: the program's temporaries alone need 37.29 GiB, but a device has 15.75 GiB"
    )
    old = out_of_memory(OLD_TPU, "v5e:4x4", plan, None)
    assert (old.needed, old.capacity) == (18.31 * GIB, 15.75 * GIB)
    assert "the program needs 18.31 GiB, but a device has 15.75 GiB" in str(old)
    assert error.log == TPU


def test_the_tensors(plan):
    lines = str(out_of_memory(TPU, "v5e:4x4", plan, None)).splitlines()
    assert lines[1].startswith(f"  by meshpar's estimate a device needs {format_memory(plan.memory.peak)} at the peak")
    assert "2.00 GiB  w/down  bfloat16[65536, 16384]" in lines[2]
    assert lines[2].endswith("mlp embed")
    assert any(line.split()[0:3] == ["4.00", "MiB", "x"] and line.endswith("batch:data embed") for line in lines)


def test_rules_that_hold_less_are_planned(plan):
    error = out_of_memory("", "v5e:4x4", plan, 1.5 * GIB, needed=5 * GIB)
    rules = [fix.split("`")[1] for fix in error.fixes if fix.startswith("add ")]
    assert rules
    assert set(rules) <= {f"{d}: {a}" for d in ("embed", "mlp") for a in ("data", "model")}
    for fix, rule in zip(error.fixes, rules, strict=False):
        peak = plan.replan(layout=f"batch: data; {rule}").memory.peak
        assert peak < plan.memory.peak
        assert f"{format_memory(peak)} instead of {format_memory(plan.memory.peak)}" in fix
        assert fix.endswith(", which fits") == (peak <= 1.5 * GIB)


def test_a_program_without_a_plan_has_the_compilers_words():
    error = out_of_memory(TPU, "v5e:2x2", None, None)
    assert f"  | {TPU}" in str(error)
    unknown = out_of_memory("RESOURCE_EXHAUSTED: no figures", "v5e:2x2", None, 15.75 * GIB)
    assert "the program does not fit, but a device has 15.75 GiB" in str(unknown)
    assert unknown.needed is None


def test_capacities():
    assert capacity_of("v5e:4x4") == 15.75 * GIB
    assert capacity_of("2x tpu7x:2x2x1") == 94.75 * GIB
    assert capacity_of("h200:8") == 151397597184
    assert capacity_of("cpu:8") is None
