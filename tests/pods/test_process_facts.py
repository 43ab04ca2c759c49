"""What processes compare before a first run, field by field: two sheets that differ in one thing differ in that field."""

import importlib.metadata
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar._src.dims import PathDims
from meshpar._src.pods.data import SAMPLES
from meshpar._src.pods.process_agreement import Sheet, facts_of

X = np.arange(32, dtype=np.float32).reshape(8, 4)
TABLE = np.arange(12, dtype=np.float32)


def double(x, n=2):
    return jnp.sum(x * n) + jnp.sum(x, 0)


def triple(x, n=2):
    return jnp.sum(x * 3) + jnp.sum(x, 0)


def with_table(scale):
    table = TABLE * scale

    def double(x, n=2):
        return jnp.sum(x * n) + jnp.sum(x, 0) + jnp.sum(jnp.asarray(table))

    return double


class Opaque:
    """Its text has an address, which differs from process to process."""


def sheet(fn=double, x=X, mesh="data=4, model=2", layout="batch: data", dims="batch embed", statics=(), **options):
    step = mp.jit(fn, mesh=mesh, layout=layout, dims={"x": dims}, **{"lowering": "shard_map", **options})
    return Sheet(fn, step.plan(x), PathDims({"x": dims}), statics), [x]


def read(made):
    return facts_of(*made)


def named(fn, name):
    fn.__qualname__ = name
    return fn


def reversed_mesh():
    return jax.sharding.Mesh(np.array(jax.devices()[:8])[::-1].reshape(4, 2), ("data", "model"))


CASES = {  # field → (what differs, a sheet that has it, the line that says so)
    "function": [("name", lambda: sheet(named(lambda x, n=2: double(x, n), "evaluate")), "evaluate")],
    "lowering": [
        ("lowering", lambda: sheet(lowering="jit"), "jit, "),
        ("overlap", lambda: sheet(overlap="ring"), "overlap ring"),
        ("strict", lambda: sheet(strict=True), "strict True"),
    ],
    "mesh": [
        ("sizes", lambda: sheet(mesh="data=2, model=4"), "data=2, model=4"),
        ("names", lambda: sheet(mesh="data=4, m=2"), "m=2"),
    ],
    "devices": [("order", lambda: sheet(mesh=reversed_mesh()), "7, 6, 5")],
    "layout": [
        ("rules", lambda: sheet(layout="batch: data; embed: model"), "embed: model"),
        ("optional", lambda: sheet(layout=mp.Layout("batch: data", optional=True)), "batch"),
        ("resolve", lambda: sheet(layout=mp.Layout("batch: data", resolve="cost")), "by cost"),
    ],
    "dims": [("names", lambda: sheet(dims="batch features"), "x: batch features")],
    "donated": [("an argument", lambda: sheet(donate_argnums=0), "x")],
    "static arguments": [
        ("value", lambda: sheet(statics=(1,)), "1"),
        ("type", lambda: sheet(statics=(1.0,)), "1.0"),
        ("boolean", lambda: sheet(statics=(True,)), "True"),
    ],
    "compiler options": [("one", lambda: sheet(compiler_options={"xla_cpu_x": True}), "xla_cpu_x")],
    "shapes": [
        ("size", lambda: sheet(x=np.ones((16, 4), np.float32)), "float32[16, 4]"),
        ("dtype", lambda: sheet(x=X.astype(np.int32)), "int32[8, 4]"),
    ],
    "program": [("an op", lambda: sheet(triple), "3.0")],
    "constants": [("values", lambda: sheet(with_table(2)), "float32[12]")],
    "values": [
        ("one number", lambda: sheet(x=np.where(X == 5, 6, X).astype(np.float32)), "x: float32[8, 4]"),
        ("on one device", lambda: sheet(x=jnp.asarray(X) + 1), "x: float32[8, 4]"),
    ],
    "versions": [(p, sheet, f"{p} 9.9.9") for p in ("jax", "flax", "optax", "orbax-checkpoint")],
    "data": [("rows", sheet, "rows=8: 1234")],
    "settings": [],  # below, one by one
}
ALSO = {  # what follows: other sizes and code make another program, value or function
    "shapes": {"values", "program"},
    "program": {"function"},
    "constants": {"program", "function"},
}


@pytest.fixture(scope="module")
def base():
    return read(sheet())


def test_every_fact_has_a_case(base):
    assert set(CASES) == set(base)


@pytest.mark.parametrize(("field", "what"), [(f, w[0]) for f, cases in CASES.items() for w in cases])
def test_what_differs_is_seen_in_its_field(base, monkeypatch, field, what):
    _, made, says = next(case for case in CASES[field] if case[0] == what)
    if field == "versions":
        version = importlib.metadata.version
        monkeypatch.setattr(importlib.metadata, "version", lambda p: "9.9.9" if p == what else version(p))
    if field == "data":
        monkeypatch.setitem(SAMPLES, "rows=8: 1234", None)
    found = read(made())
    differ = {f for f in base if found[f] != base[f]}
    assert field in differ
    assert differ <= {field} | ALSO.get(field, set())
    assert any(says in line for line in found[field])


def test_static_arguments_that_are_equal_in_python_differ(base):
    statics = [read(sheet(statics=(s,)))["static arguments"] for s in (1, 1.0, True, "1", np.float32(1))]
    assert len({tuple(s) for s in statics}) == len(statics)


def test_addresses_do_not_differ(base):
    first, second = (read(sheet(statics=(Opaque(), print))) for _ in range(2))
    assert first == second


SETTINGS = {
    "jax_enable_x64": True,
    "jax_default_matmul_precision": "highest",
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": False,
    "jax_numpy_dtype_promotion": "strict",
    "jax_use_shardy_partitioner": False,
    "jax_debug_nans": True,
}


@pytest.mark.parametrize(("name", "value"), SETTINGS.items())
def test_a_setting_of_jax_is_seen(base, name, value):
    made, before = sheet(), getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        found = read(made)
    finally:
        jax.config.update(name, before)
    assert {f for f in base if found[f] != base[f]} == {"settings"}
    assert f"{name}={value}" in found["settings"]


@pytest.mark.parametrize("name", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_flags_of_compilers_are_seen_and_dumps_are_not(base, monkeypatch, name):
    made = sheet()
    monkeypatch.setenv(name, "--xla_some_flag=3")
    assert any("--xla_some_flag=3" in line for line in read(made)["settings"])
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    without = read(made)["settings"]
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_dump_to=/tmp/x")
    assert read(made)["settings"] == without


def test_values_far_inside_a_large_array_are_seen():
    """The hash is of all bytes; weak types are another program."""
    x = np.zeros((64, 1024), np.float32)
    y = x.copy()
    y[40, 777] = 1
    assert read(sheet(x=x))["values"] != read(sheet(x=y))["values"]
    plain, leaves = sheet()
    program = plain.plan.program
    weak = jax.make_jaxpr(lambda x: x)(2.0).in_avals[0]
    assert weak.weak_type
    changed = replace(program, inputs=[type(program.inputs[0])(weak, ())])
    with_weak = replace(plain, plan=replace(plain.plan, program=changed))
    assert "weak" in read((with_weak, leaves))["shapes"][0]
