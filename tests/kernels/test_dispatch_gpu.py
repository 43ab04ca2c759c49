"""The ragged exchange on GPUs: what it refuses, and what the CUDA compiler makes of it. Its values and its protocol are in
`test_protocols` and `test_gpu_copies`."""

import jax.numpy as jnp
import pytest
from test_gpu_aot import needs_cuda, run_program

from meshpar_kernels.dispatch.gpu import unsupported

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from meshpar_kernels import all_gather, all_reduce, all_to_all, collective_permute
from meshpar_kernels import expert_combine, expert_dispatch, ragged_all_to_all

config, what = open(sys.argv[1]).read(), sys.argv[2]
devices = topologies.get_topology_desc("", platform="cuda", target_config=config, topology="1x1x8").devices
axes = ("a",) if what == "rows" else ("a", "b")
mesh = Mesh(np.array(devices).reshape((8,) if what == "rows" else (4, 2)), axes)
split = NamedSharding(mesh, P(axes))

def rows(x, output, *runs):
    return ragged_all_to_all(x, output, *runs, axis_name=axes, implementation="pallas")[0]

def experts(x, expert):
    buffer, d = expert_dispatch(x, expert, experts=64, axis_name=axes, rows=512, exchange="pallas")
    return expert_combine(buffer * 2, d)

def blocks(x):
    return all_to_all(x, axes, split_axis=1, concat_axis=0, implementation="pallas")

def shift(x):
    return collective_permute(x, axes, [(i, i + 1) for i in range(7)], implementation="pallas")

def switch(x, y):
    every = all_gather(x, axes, implementation="pallas")
    return all_reduce(every * 2, axes, implementation="pallas")[:8], all_gather(y, axes, implementation="pallas")[:8]

def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=split)

i32 = jnp.int32
function, structs = {
    "rows": (rows, [struct(8 * 2048, 7168), struct(8 * 4096, 7168), *[struct(64, dtype=i32)] * 4]),
    "experts": (experts, [struct(8 * 1024, 4096), struct(8 * 1024, 4, dtype=i32)]),
    "switch": (switch, [struct(8 * 1000, 1000), struct(8 * 64, 999, dtype=jnp.int8)]),
    "blocks": (blocks, [struct(8 * 1024, 8 * 1000)]),
    "shift": (shift, [struct(8 * 1024, 1000, dtype=jnp.int8)]),
}[what]
with jax.default_device(devices[0]):
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=what != "switch")
    compiled = jax.jit(mapped).trace(*structs).lower(lowering_platforms=("cuda",)).compile()
print("RESULT", compiled.as_text().count("mosaic_gpu"))
"""


@needs_cuda
@pytest.mark.parametrize(
    "what", ["rows", *(pytest.param(w, marks=pytest.mark.slow) for w in ("experts", "blocks", "shift", "switch"))]
)
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_it_compiles_for_8_gpus_and_spills_nothing(target, what):
    """DeepSeek-V3's rows to 8 devices; over two mesh axes: experts' rows there and back, and the dense exchanges."""
    printed, facts = run_program(PROGRAM, target, what)
    assert int(printed) >= 1
    assert facts["spills"] == 0


def test_what_it_refuses():
    pytest.importorskip("absl", reason="jax.experimental.pallas.mosaic_gpu needs absl-py")
    assert unsupported(jnp.bfloat16, 7168, 8) == ()
    assert [*unsupported(jnp.dtype(jnp.int8), 100, 16)] == [
        "the rows are int8; the kernel takes float32, bfloat16, float16 and int32",
        "a row has 100 elements, which must be a multiple of 128",
        "16 devices: NVLink joins at most 8 in one machine",
    ]
    assert "more than 200 KiB of shared memory" in unsupported(jnp.float32, 1 << 14, 2)[0]
