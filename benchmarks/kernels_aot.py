"""The Pallas kernels compiled for TPUs, without a TPU: temporaries, FLOPs and schedules.

    python benchmarks/kernels_aot.py                          # every kernel, shape and chip
    python benchmarks/kernels_aot.py --chips v5e --only g64   # one chip and shape
    python benchmarks/kernels_aot.py --bundles                # and the schedule of the loops

Needs libtpu (`pip install 'jax[tpu]'`) but no TPU: nothing runs, so no column is a measured time. Each compilation is a process of
its own, since a bad shape may abort the compiler.

Columns. `temporaries`: KiB that the program allocates beyond its inputs and outputs. `FLOPs`: the compiler's count over 2·M·K·N;
for a kernel, the count that the kernel declares. `rows`: rows that pass through the matrix unit over M, computed from the tiles,
for equal groups and for a multinomial load. With `--bundles`, `matrix unit`: cycles of the unit for the matmuls of the main inner
loop over the instruction bundles of that loop. The cycles are assumed (see `matrix_unit_share`), not measured: above 100 % either
the unit is the limit or the assumption is too high. `sent`: bytes of a device for each kind of collective (on tpu7x the kinds
only); `hidden` means that every permute of a loop starts before the attention and ends after it. For a dense exchange: the
compiler's estimate of the cycles of the fusions around it.

Kernels. `ragged_dot` is XLA's op. `permute` and `combine` are given the row indices; `by plan` computes them too. `route` is
given the logits, or computes them in the same program (`route with logits`). `gathered rows` is the forward matmul of M/8 tokens'
rows selected by `lhs_indices`. Attention is over 8 devices, gathered K/V over one mesh axis for each torus dimension. Kernels that
communicate are compiled for 8 devices. With `--bundles` their `order` lists the events of the schedule: `send` starts remote
copies, `matmul` multiplies, `wait` blocks on copies, local ones included.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from kernel_bundles import matrix_unit_share, order_of
from tables import Table

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
EIGHT = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4", "tpu7x": "tpu7x:2x2x1"}
ONE_CORE = ("v5p",)
"""Chips with two TensorCores, on which the fused matmuls, which multiply on one, do not run."""

DENSE = ("all_to_all", "collective_permute")
"""Kernels that are compared with XLA's collective ("native")."""

QUANTIZED = ("quantized_all_gather", "quantized_reduce_scatter")
CODES = ("int8", "float8_e4m3fn")

TOKENS = 8192
ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def cases() -> list[tuple[str, str]]:
    """(kernel, shape) of every row of the table."""
    from meshpar_kernels.published_model_shapes import ATTENTION, FUSED, MATMULS

    matmul = ["forward", "d lhs", "d rhs"]
    baselines = ["ragged_dot", "ragged_dot d lhs", "ragged_dot d rhs"]
    rows = [(kernel, shape) for shape in MATMULS for kernel in matmul]
    rows += [("swiglu", shape) for shape in MATMULS if shape.endswith("-up")]
    rows += [(kernel, shape) for shape in MATMULS for kernel in ("int8", "d lhs int8")]
    rows += [("gathered rows", shape) for shape in MATMULS]
    rows += [(kernel, "g64") for kernel in baselines]
    models = ["mixtral-8x7b", "deepseek-v3"]
    routing = ["route", "route with logits", "permute", "combine", "permute by plan", "combine by plan"]
    rows += [(kernel, m) for m in models for kernel in routing]
    rows += [("all_gather_matmul" if s.gathers else "matmul_reduce_scatter", name) for name, s in FUSED.items()]
    rows += [
        (kernel, m)
        for m in models
        for kernel in ("ragged_all_to_all", "dispatch, combine", "dispatch, combine, padded")
    ]
    rows += [(kernel, "16MiB") for kernel in ("all_gather", "reduce_scatter")] + [("all_reduce_small", "1MiB")]
    rows += [(f"{kernel}{form}", "16MiB") for kernel in DENSE for form in ("", " native")]
    rows += [(f"{kernel} {dtype}", "16MiB") for kernel in QUANTIZED for dtype in CODES]
    strategies = ["ring", "ulysses", "gathered"]
    return rows + [(f"{s}{way}", shape) for shape in ATTENTION for s in strategies for way in ("", " backward")]


def build(kernel: str, shape: str):
    """The function to compile, its arguments' shapes and dtypes, and the FLOPs that it needs."""
    import jax
    import jax.numpy as jnp

    from meshpar_kernels import combine, grouped_matmul, permute, route
    from meshpar_kernels.published_model_shapes import MATMULS, MODELS
    from meshpar_kernels.routing import tpu_gather

    bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32
    if shape in MATMULS:
        s = MATMULS[shape]
        lhs, rhs, out = ((s.m, s.k), bf16), ((s.groups, s.k, s.n), bf16), ((s.m, s.n), bf16)
        sizes = ((s.groups,), i32)

        def forward(lhs, rhs, sizes):
            return grouped_matmul(lhs, rhs, sizes, implementation="pallas")

        def ragged(lhs, rhs, sizes):
            return jax.lax.ragged_dot(lhs, rhs, sizes)

        def back(function, which):
            """The gradient of a linear function, which needs no forward pass."""

            def call(lhs, rhs, grad, sizes):
                def matmul(x):
                    pair = (x, rhs) if which == 0 else (lhs, x)
                    return function(*pair, sizes)

                return jax.vjp(matmul, (lhs, rhs)[which])[1](grad)[0]

            return call

        both = [lhs, rhs, out, sizes]
        if kernel == "swiglu":

            def swiglu(lhs, gate, up, sizes, scale):
                how = {"activation": "silu", "row_scale": scale, "implementation": "pallas"}
                return grouped_matmul(lhs, (gate, up), sizes, **how)

            return swiglu, [lhs, rhs, rhs, sizes, ((s.m,), f32)], 2 * s.flops
        if kernel == "gathered rows":
            tokens, indices = ((s.m // 8, s.k), bf16), ((s.m,), i32)

            def gathered(lhs, rhs, sizes, indices):
                return grouped_matmul(lhs, rhs, sizes, lhs_indices=indices, implementation="pallas")

            return gathered, [tokens, rhs, sizes, indices], s.flops
        quantized_rhs, scale = ((s.groups, s.k, s.n), jnp.int8), ((s.groups, s.k // 128, s.n), f32)

        def quantized(lhs, rhs, scale, sizes):
            return grouped_matmul(lhs, rhs, sizes, rhs_scale=scale, implementation="pallas")

        def quantized_back(lhs, rhs, scale, grad, sizes):
            return jax.vjp(lambda lhs: quantized(lhs, rhs, scale, sizes), lhs)[1](grad)[0]

        functions = {
            "int8": (quantized, [lhs, quantized_rhs, scale, sizes]),
            "d lhs int8": (quantized_back, [lhs, quantized_rhs, scale, out, sizes]),
            "forward": (forward, [lhs, rhs, sizes]),
            "d lhs": (back(forward, 0), both),
            "d rhs": (back(forward, 1), both),
            "ragged_dot": (ragged, [lhs, rhs, sizes]),
            "ragged_dot d lhs": (back(ragged, 0), both),
            "ragged_dot d rhs": (back(ragged, 1), both),
        }
        return *functions[kernel], s.flops

    m = MODELS[shape]
    rows = TOKENS * m.k

    def choose(logits, bias):
        return route(
            logits,
            m.k,
            score=m.score,
            bias=bias if m.bias else None,
            groups=m.groups,
            top_groups=m.top_groups,
            renormalize=m.renormalize,
            scale=m.scale,
            implementation="pallas",
        )

    logits, bias = ((TOKENS, m.experts), f32), ((m.experts,), f32)
    if kernel == "route":
        return choose, [logits, bias], None
    if kernel == "route with logits":
        x, router = ((TOKENS, 64), f32), ((64, m.experts), f32)
        return lambda x, router, bias: choose(x @ router, bias), [x, router, bias], None
    if kernel.endswith("by plan"):
        plan = jax.eval_shape(choose, *(jax.ShapeDtypeStruct(*a) for a in (logits, bias)))
        leaves, tree = jax.tree.flatten(plan)
        given = [(leaf.shape, leaf.dtype) for leaf in leaves]

        def spread(x, p):
            return permute(x, p, implementation="pallas")

        def sum_back(y, p):
            return combine(y, p, weight=p.weight, implementation="pallas")

        many, work = (TOKENS, spread) if kernel.startswith("permute") else (rows, sum_back)
        first = ((many, m.embed), bf16)
        return lambda x, *leaves: work(x, tree.unflatten(leaves)), [first, *given], None
    if kernel == "permute":
        arguments = [((TOKENS, m.embed), bf16), ((rows,), i32)]
        return lambda x, token: tpu_gather.gather_sum(x, token[:, None], None), arguments, None
    arguments = [((rows, m.embed), bf16), ((m.k, TOKENS), i32), ((m.k, TOKENS), f32)]
    return lambda y, row, weight: tpu_gather.gather_sum(y, row.T, weight.T), arguments, None


def build_shared(kernel: str, shape: str):
    """(function of one of 8 devices on axis "a", arguments with their sharded dims, sharded dim of the result, FLOPs)."""
    import jax.numpy as jnp

    from meshpar_kernels import collective_matmul, collectives, exchange
    from meshpar_kernels.published_model_shapes import FUSED, MODELS

    bf16, f32 = jnp.bfloat16, jnp.float32
    if shape in MODELS:
        return *build_exchange(kernel, shape), 0, None
    if shape in FUSED:
        s = FUSED[shape]
        flops = 2 * 8 * s.rows * s.k * s.n
        if s.gathers:
            arguments = [((8 * s.rows, s.k), bf16, 0), ((s.k, 8 * s.n), bf16, 1)]
            return (
                (lambda x, w: collective_matmul.all_gather_matmul(x, w, "a", implementation="pallas")),
                arguments,
                1,
                flops,
            )
        arguments = [((8 * s.rows, 8 * s.k), bf16, 1), ((8 * s.k, s.n), bf16, 0)]

        def scatter(x, w):
            return collective_matmul.matmul_reduce_scatter(x, w, "a", implementation="pallas", comm_dtype=bf16)

        return scatter, arguments, 0, flops
    rows = int(shape.removesuffix("MiB")) * 2**20 // 4 // 1024
    if kernel == "all_gather":
        return (lambda x: collectives.all_gather(x, "a", implementation="pallas")), [((rows, 1024), f32, 0)], None, None
    if kernel == "reduce_scatter":
        return (
            (lambda x: collectives.reduce_scatter(x, "a", implementation="pallas")),
            [((rows, 1024), f32, None)],
            0,
            None,
        )
    name, _, form = kernel.partition(" ")
    if name in QUANTIZED:
        gathers = name == "quantized_all_gather"

        def quantized(x):
            return getattr(exchange, name)(x, "a", dtype=form, implementation="native")

        return quantized, [((rows, 1024), bf16, 0 if gathers else None)], None if gathers else 0, None
    if name in DENSE:
        how = {"implementation": form or "pallas"}
        ring = [(i, (i + 1) % 8) for i in range(8)]
        functions = {
            "all_to_all": lambda x: exchange.all_to_all(x, "a", **how),
            "collective_permute": lambda x: exchange.collective_permute(x, "a", ring, **how),
        }
        return functions[name], [((8 * rows, 1024), f32, 0)], 0, None
    small = [((rows, 1024), f32, None)]
    return (lambda x: collectives.all_reduce_small(x, "a", implementation="pallas")), small, None, None


def build_exchange(kernel: str, model: str):
    """(function of one of 8 devices on axis "a", arguments) of the exchange of a model's tokens with their experts."""
    import jax.numpy as jnp

    from meshpar_kernels import expert_combine, expert_dispatch, ragged_all_to_all
    from meshpar_kernels.published_model_shapes import MODELS

    bf16, i32 = jnp.bfloat16, jnp.int32
    m = MODELS[model]
    rows = TOKENS * m.k // 8  # buffers have room for twice the balanced load
    if kernel == "ragged_all_to_all":
        numbers = [((64,), i32, 0)] * 4

        def send(x, output, *runs):
            return ragged_all_to_all(x, output, *runs, axis_name="a", implementation="pallas")[0]

        return send, [((8 * rows, m.embed), bf16, 0), ((16 * rows, m.embed), bf16, 0), *numbers]
    exchange = "padded" if "padded" in kernel else "pallas"

    def there_and_back(x, expert):
        each = -(-2 * rows // 8 // 16) * 16
        buffer, d = expert_dispatch(x, expert, experts=m.experts, axis_name="a", rows=each, exchange=exchange)
        return expert_combine(buffer * 2, d)

    return there_and_back, [((TOKENS, m.embed), bf16, 0), ((TOKENS, m.k), i32, 0)]


def shared_kernels() -> set[str]:
    """The kernels that communicate with other devices."""
    fused = {"all_gather_matmul", "matmul_reduce_scatter", "all_gather", "reduce_scatter", "all_reduce_small"}
    fused |= {f"{kernel} {dtype}" for kernel in QUANTIZED for dtype in CODES}
    fused |= {f"{kernel}{form}" for kernel in DENSE for form in ("", " native")}
    return fused | {"ragged_all_to_all", "dispatch, combine", "dispatch, combine, padded"}


def compile_shared(kernel: str, shape: str, chip: str) -> dict:
    """Compile a communicating kernel for groups of 8 devices, in this process; `chip` may be a slice ("v5e:16x16")."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = topologies.get_topology_desc(platform="tpu", topology_name=EIGHT.get(chip, chip)).devices
    mesh = Mesh(np.array(devices).reshape(-1, 8), ("others", "a"))
    function, arguments, split, flops = build_shared(kernel, shape)

    def spec(dim):
        return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, "a")

    specs = tuple(spec(dim) for *_, dim in arguments)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=spec(split), check_vma=False)
    structs = [
        jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(mesh, p))
        for (s, d, _), p in zip(arguments, specs, strict=True)
    ]
    compiled = jax.jit(mapped).trace(*structs).lower(lowering_platforms=("tpu",)).compile()
    counted = (compiled.cost_analysis() or {}).get("flops")
    text = compiled.as_text()
    return {
        "temp": compiled.memory_analysis().temp_size_in_bytes,
        "flops": counted / flops if counted and flops else None,
        "cycles": estimated_cycles(text),
        "gathered": re.findall(r"= \(?(\w+)\[[^=]* all-gather(?:-start)?\(", text),
        "exchanged": re.findall(r"= \(?(\w+)\[[^=]* all-to-all(?:-start)?\(", text),
        "copied": re.findall(r"= (\w+\[[\d,]*\])\S* copy\(", text),
    }


def estimated_cycles(text: str) -> int:
    """The compiler's estimate of the cycles of a program's fusions; it has none for collectives and Pallas kernels."""
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text)))


def compile_one(kernel: str, shape: str, chip: str) -> dict:
    """Compile one kernel for one chip, in this process."""
    import jax
    from jax.experimental import topologies

    from meshpar_kernels.published_model_shapes import ATTENTION

    if shape in ATTENTION:
        return compile_attention(kernel, shape, chip)
    if kernel in shared_kernels():
        return compile_shared(kernel, shape, chip)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    function, arguments, flops = build(kernel, shape)
    structs = [jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in arguments]
    lowered = jax.jit(function).trace(*structs).lower(lowering_platforms=("tpu",))
    compiled = lowered.compile()
    counted = (compiled.cost_analysis() or {}).get("flops")
    return {
        "temp": compiled.memory_analysis().temp_size_in_bytes,
        "flops": counted / flops if counted and flops else None,
    }


def compile_attention(kernel: str, shape: str, chip: str) -> dict:
    """Compile causal attention, or its gradient ("… backward", with the residuals of the forward pass), over 8 devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import PartitionSpec as P

    from meshpar._src.verify.hlo import collectives
    from meshpar_kernels import ContextParallel, ring_attention
    from meshpar_kernels.published_model_shapes import ATTENTION

    s = ATTENTION[shape]
    strategy, _, way = kernel.partition(" ")
    topology = topologies.get_topology_desc(platform="tpu", topology_name=EIGHT[chip])
    devices = np.array(topology.devices)
    if strategy == "gathered":  # an axis for each torus dimension, and for the cores of a chip
        places = {d: (*d.coords, d.core_on_chip) for d in topology.devices}
        devices = np.array(sorted(places, key=lambda d: places[d]))
        devices = devices.reshape([n for n in np.max([*places.values()], 0) + 1 if n > 1])
    axes = ("ring",) if strategy != "gathered" else ("x", "y", "z")[: devices.ndim]
    mesh = jax.sharding.Mesh(devices, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    split = P(None, axes)

    def local(q, k, v):
        return ring_attention(q, k, v, axes, causal=True, parallel=ContextParallel(strategy), implementation="pallas")

    attention = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split)

    def backward(q, k, v, grad):
        return jax.vjp(attention, q, k, v)[1](grad)

    def struct(heads: int) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(mesh, split)
        return jax.ShapeDtypeStruct((1, s.tokens, heads, s.head_dim), jnp.bfloat16, sharding=sharding)

    arguments = [struct(s.heads), struct(s.kv_heads), struct(s.kv_heads), *([struct(s.heads)] if way else [])]
    lowered = jax.jit(backward if way else attention).trace(*arguments).lower(lowering_platforms=("tpu",))
    compiled = lowered.compile()
    text = compiled.as_text()
    found = collectives(text)
    ops = ("all-gather", "reduce-scatter", "all-to-all", "collective-permute", "all-reduce")
    sent = {op: sum(c.total_bytes for c in found if c.op == op) for op in ops}
    return {
        "temp": compiled.memory_analysis().temp_size_in_bytes,
        "flops": None,
        "ops": [op for op in ops if re.search(rf"= \S.* {op}(-start)?\(", text)],
        "sent": sent,
        "hidden": hidden_permutes(text),
    }


def hidden_permutes(text: str) -> list[bool]:
    """For every computation of a scheduled program with permutes and attention: does attention run while they do?

    Attention is a conditional (a block that may be fully masked), a loop or a kernel (splash attention).
    """
    found = []
    for body in re.split(r"\n}\n", text):
        lines = body.splitlines()
        starts = [i for i, line in enumerate(lines) if " collective-permute-start(" in line]
        ends = [i for i, line in enumerate(lines) if " collective-permute-done(" in line]
        work = [i for i, line in enumerate(lines) if re.search(r" (conditional|while)\(|tpu_custom_call", line)]
        if starts and ends and work:
            found.append(any(max(starts[:1]) < i < max(ends) for i in work))
    return found


def run_one(kernel: str, shape: str, chip: str, bundles: bool) -> dict:
    """`compile_one` in a process of its own."""
    environment = os.environ | ENVIRONMENT
    with tempfile.TemporaryDirectory() as folder:
        if bundles:
            environment["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        command = [sys.executable, __file__, "--one", kernel, shape, chip]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            tail = (done.stderr.strip().splitlines() or ["no output"])[-1]
            return {"error": f"exit {done.returncode}: {tail[:120]}"}
        facts = json.loads(lines[-1])
        if bundles:
            facts["loops"] = matrix_unit_share(Path(folder), chip)
            if kernel in shared_kernels():
                facts["order"] = order_of(Path(folder))
    return facts


def executed(shape: str) -> str:
    """Rows through the matrix unit over M: equal groups / a multinomial load."""
    import numpy as np

    from meshpar_kernels.grouped_matmul import schedule
    from meshpar_kernels.grouped_matmul import tpu_tile_sizes as tpu_tiles
    from meshpar_kernels.published_model_shapes import MATMULS
    from meshpar_kernels.tuning_table import MatmulKey

    s = MATMULS[shape]
    tile = tpu_tiles.pick_tile(MatmulKey("grouped_matmul", s.m, s.k, s.n, s.groups), 2)
    even = [s.m // s.groups] * s.groups
    load = np.random.default_rng(0).multinomial(s.m, np.full(s.groups, 1 / s.groups)).tolist()
    ratios = [schedule.executed_rows(x, s.m, tile.m, tpu_tiles.ROW_CHUNKS, 16) / s.m for x in (even, load)]
    return f"{ratios[0]:.2f} / {ratios[1]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--only", default="", help="text that the name of the kernel or the shape contains")
    parser.add_argument("--bundles", action="store_true")
    parser.add_argument("--one", nargs=3, metavar=("KERNEL", "SHAPE", "CHIP"))
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    if arguments.one:
        print(json.dumps(compile_one(*arguments.one)))
        return
    from meshpar_kernels.published_model_shapes import MATMULS

    schedule = ("matrix unit in the main loop", "order") if arguments.bundles else ()
    table = Table("kernel", "shape", "chip", "temporaries, KiB", "FLOPs", "rows", "sent", *schedule)
    for kernel, shape in cases():
        if arguments.only not in f"{kernel} {shape}":
            continue
        for chip in arguments.chips.split(","):
            if chip in ONE_CORE and kernel in ("all_gather_matmul", "matmul_reduce_scatter"):
                continue
            facts = run_one(kernel, shape, chip, arguments.bundles)
            if "error" in facts:
                table.add_row(kernel, shape, chip, facts["error"])
                continue
            flops = "" if facts["flops"] is None else f"{facts['flops']:.2f}"
            rows = executed(shape) if shape in MATMULS and "ragged" not in kernel else ""
            sent = ", ".join(f"{op} {facts['sent'][op] / 1e9:.2f} GB" for op in facts.get("ops", []))
            sent += f"{facts['cycles']} cycles around it" if kernel.split()[0] in DENSE else ""
            sent += "; hidden" if facts.get("hidden") and all(facts["hidden"]) else ""
            loops = []
            for loop in facts.get("loops", []):
                share = "unknown" if loop["share"] is None else f"{loop['share']:.0%}"
                loops.append(f"{share} ({loop['matmuls']} matmuls, {loop['bundles']} bundles)")
            cells = [kernel, shape, chip, f"{facts['temp'] / 1024:.0f}", flops, rows, sent]
            table.add_row(*cells, *([", ".join(loops), ", ".join(facts.get("order", []))] if schedule else []))


if __name__ == "__main__":
    main()
