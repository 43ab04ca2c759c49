"""Cycles of attention on TPUs by the compiler's schedules, without a TPU: splash attention, this package's kernels, XLA's loop.

    python benchmarks/attention_cycles.py                # all chips
    python benchmarks/attention_cycles.py --chips v5e --strategies local

Needs libtpu but no TPU; nothing is timed. Each program computes the result of causal attention and its three gradients: `local`, of
one sequence of 8192 tokens on one device; `ulysses` and `gathered`, of 128K tokens over 8 devices (`shapes.ATTENTION`).

Columns, in millions of cycles of one core. `XLA`: the compiler's `estimated_cycles` of the fusions of the chunked loop, times
their executions. `splash` (JAX's splash attention) and `kernels`: the same for the fusions around the kernels, plus, for every
kernel, the scheduled bundles of its body times the steps of its grid. That is an upper bound of the bundles: steps whose block is
hidden by the mask execute few of them, and each step executes one of the body's branches. A loop over blocks of gathered keys
counts with the blocks of all 8 devices, as on the last device. Copies of a kernel's operands overlap with its bundles.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernels_aot import CHIPS, EIGHT, ENVIRONMENT
from tables import Table

DEVICES = 8
LOCAL_TOKENS = 8192
IMPLEMENTATIONS = {"XLA": "xla", "splash": "splash", "kernels": "pallas_tpu"}


def kernel_steps(jaxpr: Any, times: int = 1) -> Iterator[tuple[str, int]]:
    """(name, grid steps) of every kernel of a program; a loop of unknown length runs `DEVICES` times."""
    from jax.extend.core import ClosedJaxpr, Jaxpr

    for equation in jaxpr.eqns:
        parameters = equation.params
        if "grid_mapping" in parameters:
            yield parameters["name"], times * math.prod(parameters["grid_mapping"].grid)
            continue
        inner = times * (DEVICES if "cond_jaxpr" in parameters else parameters.get("length", 1))
        for value in parameters.values():
            for each in value if isinstance(value, tuple | list) else (value,):
                if isinstance(each, ClosedJaxpr | Jaxpr):
                    yield from kernel_steps(getattr(each, "jaxpr", each), inner)


def program(strategy: str, implementation: str, chip: str) -> tuple[Any, list[Any]]:
    """The traced step and its arguments."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import PartitionSpec as P

    from meshpar_kernels import ContextParallel, ring_attention
    from meshpar_kernels.published_model_shapes import ATTENTION

    s = ATTENTION["llama3-8b-128k"]
    alone = strategy == "local"
    tokens = LOCAL_TOKENS if alone else s.tokens
    devices = topologies.get_topology_desc(platform="tpu", topology_name=(CHIPS if alone else EIGHT)[chip]).devices
    options: dict[str, Any] = {"causal": True, "implementation": implementation}
    if alone:
        sharding: Any = jax.sharding.SingleDeviceSharding(devices[0])

        def attention(q, k, v):
            return ring_attention(q, k, v, None, **options)

    else:
        mesh = jax.sharding.Mesh(np.array(devices), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
        split = P(None, "a")
        sharding = jax.NamedSharding(mesh, split)

        def local(q, k, v):
            return ring_attention(q, k, v, "a", parallel=ContextParallel(strategy), **options)

        attention = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split)

    def step(q, k, v, grad):
        out, back = jax.vjp(attention, q, k, v)
        return out, *back(grad)

    arguments = [
        jax.ShapeDtypeStruct((1, tokens, heads, s.head_dim), jnp.bfloat16, sharding=sharding)
        for heads in (s.heads, s.kv_heads, s.kv_heads, s.heads)
    ]
    return jax.jit(step).trace(*arguments), arguments


def compile_one(strategy: str, implementation: str, chip: str) -> dict:
    """Compile in this process: cycles of the fusions, and grid steps of the kernels."""
    from meshpar._src.verify.hlo import cycles

    traced, _ = program(strategy, implementation, chip)
    text = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
    return {"fusions": cycles(text), "kernels": list(kernel_steps(traced.jaxpr.jaxpr))}


def bundles_of(folder: Path, kernel: str) -> int:
    """Scheduled bundles of a kernel; of the largest if several are called so."""
    found = []
    for path in folder.glob("*schedule-analysis_final_bundles.txt"):
        if re.search(rf"-{re.escape(kernel)}(\.\d+)?-\d+-schedule", path.name):
            found.append(int(re.search(r"total scheduled bundles:\s+(\d+)", path.read_text())[1]))
    return max(found)


def million_cycles(strategy: str, implementation: str, chip: str) -> float:
    """Compile in a process of its own, and add up fusions and kernels."""
    with tempfile.TemporaryDirectory() as folder:
        dump = {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"}
        command = [sys.executable, __file__, "--one", strategy, implementation, chip]
        environment = os.environ | ENVIRONMENT | (dump if implementation != "xla" else {})
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        facts = json.loads(done.stdout.splitlines()[-1])
        kernels = sum(steps * bundles_of(Path(folder), name) for name, steps in facts["kernels"])
    return (facts["fusions"] + kernels) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--strategies", default="local,ulysses,gathered")
    parser.add_argument("--one", nargs=3, metavar=("STRATEGY", "IMPLEMENTATION", "CHIP"))
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(compile_one(*arguments.one)))
        return
    table = Table("strategy", "chip", *(f"{name}, M cycles" for name in IMPLEMENTATIONS))
    for strategy in arguments.strategies.split(","):
        for chip in arguments.chips.split(","):
            found = [million_cycles(strategy, i, chip) for i in IMPLEMENTATIONS.values()]
            table.add_row(strategy, chip, *(f"{cycles:.0f}" for cycles in found))


if __name__ == "__main__":
    main()
