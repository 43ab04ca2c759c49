"""Random programs under random layouts on random meshes equal the unsharded run: values and gradients, both lowerings."""

import os
import random
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import run
import shrink
from statements import STATEMENTS
from writer import Input, Program, Skip, Writer

import meshpar as mp
from meshpar._src.lower import LOWERINGS
from meshpar._src.plan.steps import Reduce, rewrite_bodies
from meshpar._src.plan.verify import verify


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_sharded_is_unsharded(seed):
    rng = random.Random(seed)
    for lowering in 5 * ("auto", "jit"):
        case = programs.make_case(rng, statements=5)
        found = run.differences(case, lowering, run.unsharded(case))
        assert not found, f"\n{case}\n" + "\n".join(map(str, found))


# -- the fuzzer itself


def case_of(lines, outs, layout, mesh="x=4, y=2", grads=("v1",), **shapes):
    """A case by hand; inputs are named a, b, … by dim."""
    inputs = [Input(name, shape, "f", tuple("abc"[: len(shape)])) for name, shape in shapes.items()]
    made = dict.fromkeys((*shapes, *(line.split(" = ")[0] for line in lines)), ((8, 4), "f"))
    program = Program(inputs, [[line] for line in lines], list(outs), list(grads), 0, made)
    return programs.Case(program, mesh, mp.Layout(layout))


FAULTY = case_of(
    ["v3 = jnp.tanh(v1) * 2", "v4 = v3.sum(0)", "v5 = v2 - 1"], ["v4", "v5"], "a: x; b: y", v1=(8, 4), v2=(8,)
)


def test_a_planted_fault_is_found_and_made_small(monkeypatch):
    """A lowering that forgets to all-reduce is caught; what is left of the case is the sum."""

    def forgetful(plan, mesh, bound=(), lower=LOWERINGS["shard_map"]):
        def change(body):
            steps = (replace(s, over=()) if isinstance(s, Reduce) else s for s in body.steps)
            return replace(body, steps=tuple(steps))

        return lower(replace(plan, body=rewrite_bodies(plan.body, change)), mesh, bound)

    assert not run.differences(FAULTY, "shard_map")
    monkeypatch.setitem(LOWERINGS, "shard_map", forgetful)
    assert [d.leaf for d in run.differences(FAULTY, "shard_map")] == [0]
    small = shrink.shrink(FAULTY, lambda c: bool(run.differences(c, "shard_map")))
    assert small.program.lines == [["v4 = v1.sum(0)"]]
    assert small.program.grads == []


def test_a_single_wrong_copy_is_found(monkeypatch):
    """Every device's part is compared, not one of the copies alone."""
    case = case_of(["v3 = v1 + 1"], ["v3"], "a: x", grads=(), v1=(8, 4))
    reference = run.unsharded(case).results[0]
    (right,) = run.sharded(case, "shard_map", {})
    assert run.worst(0, right, reference) is None
    parts = [np.asarray(s.data) for s in right.addressable_shards]
    parts[5] = parts[5] + 1

    copies = [jax.device_put(p, s.device) for p, s in zip(parts, right.addressable_shards, strict=True)]
    wrong = jax.make_array_from_single_device_arrays(right.shape, right.sharding, copies)
    found = run.worst(0, wrong, reference)
    assert found is not None
    assert "device 5" in found.what


def test_what_a_comparison_of_values_alone_does_not_see():
    """Dtypes, NaN and infinities at other places, and, where they are asked for, the signs of zeros."""
    reference = np.array([0.0, -0.0, np.nan, np.inf, 1.0], np.float32)
    right = jnp.asarray(reference)
    assert run.worst(0, right, reference, signs=True) is None
    assert run.worst(0, right.astype(jnp.bfloat16), reference) is not None
    assert run.worst(0, jnp.abs(right), reference) is None
    assert run.worst(0, jnp.abs(right), reference, signs=True) is not None
    for k, wrong in ((2, 0.0), (3, np.nan), (3, -np.inf), (4, np.nan), (0, np.inf)):
        assert run.worst(0, right.at[k].set(wrong), reference) is not None
    for dtype in ("bfloat16", "float8_e4m3fn", "complex64", "uint8", "bool"):
        some = jnp.arange(5).astype(dtype)
        assert run.worst(0, some, np.asarray(some)) is None
        assert run.worst(0, some.at[1].set(some[0]), np.asarray(some)) is not None
    keys = jax.random.split(jax.random.key(0), 2)
    assert run.worst(0, keys[::-1], run.host(keys)) is not None


def test_each_call_is_compared_with_a_fresh_one(monkeypatch):
    """Results of the first call in place of the second one's differ in dtype."""
    case = case_of(["v3 = v1.astype(float)"], ["v3"], "a: x", grads=(), v1=(8, 4))
    case = replace(case, calls=(programs.Call(), programs.Call("x64")))
    assert not run.differences(case, "shard_map")
    real = run.sharded
    monkeypatch.setattr(run, "sharded", lambda *args: real(*args)[:1] * 2)
    assert [d.leaf for d in run.differences(case, "shard_map")] == [1]


def test_every_statement_can_be_written_alone():
    """None of them raises, and each of them makes something within a few attempts."""

    def made(name, seed):
        w = Writer(random.Random(seed), {"a": 8, "b": 4, "c": 6}, split=[8, 4])
        for shape, kind in (((8, 4), "f"), ((8,), "f"), ((8, 6, 4), "f"), ((8, 4), "i"), ((8,), "i")):
            w.fresh(shape, kind)
        with suppress(Skip, StopIteration):
            STATEMENTS[name][0](w)
        return w.lines

    assert [name for name in STATEMENTS if not any(made(name, seed) for seed in range(20))] == []
    with pytest.raises(ValueError, match="no statements named"):
        programs.make_program(random.Random(0), 1, among=["nothing"])


def test_rounding_is_distinguished_from_faults():
    """The f64 run says how far f32 is off: a sum that cancels may differ, by no more than that."""
    case = case_of(["v3 = (v1 * 3000 + jnp.tanh(v1)).sum() - (v1 * 3000).sum()"], ["v3"], "a: x", grads=(), v1=(8, 4))
    (exact,), (rounded,) = run.in_f64(case), run.unsharded(case).results
    assert exact.dtype == np.float64
    assert abs(exact - rounded) > run.MAX_ROUNDING * abs(exact)
    for lowering in ("shard_map", "jit"):
        assert not run.differences(case, lowering)


def test_a_sum_of_8_bit_floats_is_as_close_to_the_f64_run_as_the_unsharded_one():
    """Of 512 updates by -1 the unsharded run adds those until -16, where -1 is half a rounding; the shards' sums get further."""
    case = case_of(
        ["v3 = jnp.zeros(2, E4M3).at[(v1 * 0).astype(int)].add(E4M3(-1))"], ["v3"], "a: x+y", grads=(), v1=(512,)
    )
    (exact,), (rounded,) = run.in_f64(case), run.unsharded(case).results
    assert exact.tolist() == [-512, 0]
    assert rounded.tolist() == [-16, 0]
    (sharded,) = run.sharded(case, "shard_map", {})
    assert run.worst(0, sharded, rounded) is not None
    assert not run.differences(case, "shard_map")
    for wrong in ([64, 0], [-128, 128], [-128, np.nan]):
        copy = jax.device_put(jnp.asarray(wrong, sharded.dtype), sharded.sharding)
        assert not run.as_accurate(copy, rounded, exact), wrong


@pytest.mark.parametrize("overlap", ["off", "ring"])
def test_plans_of_random_programs_are_well_formed(overlap):
    for seed in range(8):
        plan = run.planned(programs.make_case(random.Random(seed)), overlap=overlap)
        if plan is not None:
            verify(plan)


def test_collectives_inside_and_outside_of_bodies_with_many_calls_in_flight():
    """In a process of its own, which is ended where it hangs; on threads as few as devices."""
    root = Path(__file__).parents[2]
    env = {**os.environ, "NPROC": "2", "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    flags = "--control 2 --calls 32 --cases 1 --outside 0 --tries 0 --patience 60".split()
    command = [sys.executable, "benchmarks/fuzz.py", *flags]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=200)
    assert len(re.findall(r"\| 1 \| \w+ \| 0 \| 0 \|", done.stdout)) == 2, done.stdout + done.stderr
