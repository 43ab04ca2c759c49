"""Workarounds: each is recorded whole, and the compiler still does what it works around."""

import dataclasses
import importlib.util
import re
from pathlib import Path

import jax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.lower.quirks import QUIRKS, psum_scatter

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")


@pytest.mark.parametrize("quirk", QUIRKS)
def test_a_workaround_says_where_it_was_seen_and_which_test_shows_it(quirk):
    assert all(dataclasses.astuple(quirk))
    assert re.search(r"\d+\.\d+", quirk.compiler)
    path, _, name = quirk.test.partition("::")
    assert f"def {name}(" in (Path(__file__).parents[2] / path).read_text()


SHAPES = [((2048, 4, 128), 0), ((1792, 2048), 1)]


def compiled_to(scatter):
    """The collectives of a TPU program that reduce-scatters an array of each of SHAPES over 16 devices."""

    def local(*xs):
        return [scatter(2 * x, "a", dim) for x, (_, dim) in zip(xs, SHAPES, strict=True)]

    specs = tuple(P(*["a" if i == dim else None for i in range(len(shape))]) for shape, dim in SHAPES)
    mesh = mp.mesh("a=16", topology="v5e:4x4")
    run = jax.shard_map(local, mesh=mesh, in_specs=(P(),) * len(SHAPES), out_specs=list(specs), check_vma=False)
    whole = jax.sharding.NamedSharding(mesh, P())
    xs = [jax.ShapeDtypeStruct(shape, "bfloat16", sharding=whole) for shape, _ in SHAPES]
    found = mp.compile_lowered(jax.jit(run), *xs, mesh=mesh).final_collectives
    return sorted(c.op for c in found)


@needs_libtpu
def test_scatters_that_the_tpu_compiler_makes_all_reduces():
    plain = compiled_to(lambda x, axes, dim: lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True))
    assert plain == ["all-reduce"] * len(SHAPES)
    assert compiled_to(psum_scatter) == ["reduce-scatter"] * len(SHAPES)
