"""The exchanges on GPUs as the CUDA compiler makes them; their values and protocols: `test_protocols`, `test_gpu_copies`."""

import pytest
from test_gpu_aot import needs_cuda, run_program

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from meshpar_kernels import all_gather, all_reduce, all_to_all, collective_permute
from meshpar_kernels import expert_combine, expert_dispatch

devices = topologies.get_topology_desc("", platform="cuda", target_config=open(sys.argv[1]).read(), topology="1x1x8").devices
axes = ("a", "b")
mesh = Mesh(np.array(devices).reshape(4, 2), axes)
split = NamedSharding(mesh, P(axes))

def everything(tokens, expert, x, y):
    buffer, d = expert_dispatch(tokens, expert, experts=64, axis_name=axes, rows=512, exchange="pallas")
    every = all_gather(x, axes, implementation="pallas")
    return (
        expert_combine(buffer * 2, d),
        all_to_all(x, axes, split_axis=1, concat_axis=0, implementation="pallas"),
        collective_permute(y, axes, [(i, i + 1) for i in range(7)], implementation="pallas"),
        all_reduce(every * 2, axes, implementation="pallas")[:8],
        all_gather(y, axes, implementation="pallas")[:8],
    )

def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=split)

structs = struct(8 * 1024, 4096), struct(8 * 1024, 4, dtype=jnp.int32), struct(8 * 1000, 1000), struct(8 * 64, 999, dtype=jnp.int8)
with jax.default_device(devices[0]):
    mapped = jax.shard_map(everything, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=False)
    compiled = jax.jit(mapped).trace(*structs).lower(lowering_platforms=("cuda",)).compile()
print("RESULT", compiled.as_text().count("mosaic_gpu"))
"""


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_exchanges_compile_for_8_gpus_and_spill_nothing(target):
    """Over two mesh axes: experts' rows there and back, the dense exchanges, and the collectives of the NVLink switch."""
    printed, facts = run_program(PROGRAM, target)
    assert int(printed) >= 5
    assert facts["spills"] == 0
