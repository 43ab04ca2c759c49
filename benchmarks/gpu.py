"""The kernels on an NVIDIA GPU, in ten minutes: values, then times, then the tuner, in one table.

    python benchmarks/gpu.py                       # everything; needs a GPU
    python benchmarks/gpu.py --only g64            # a part of it
    python benchmarks/gpu.py --compile-only        # no GPU needed: registers, spills, temporaries
    python benchmarks/gpu.py --json gpu.json       # where the table is written too (gpu.json)

1. Values over random loads and odd shapes, against NumPy in float64. **At the first wrong one it stops**, with exit status 1:
   times of wrong results mean nothing.
2. Times, against everything that does the same and is installed: XLA, jax's own kernels, tokamax, PyTorch. A result whose error
   is above 0.02 stops it too.
3. The tuner: other tiles than the kernels pick, each checked against the result of the one they pick.

Each (kernel, shape) is a process of its own with a time limit, and so is PyTorch: what crashes loses its own rows.
Our kernel runs last in its process. Without a GPU (and without `--compile-only`) the compile-only table is
printed, and says so. `benchmarks/tpu.py` is the same for a TPU.

Measured columns. `ms`: one call inside of one compiled loop, from the difference of a long and a short loop, the median of
five. `TFLOP/s`: of the operations that the result needs, 2·M·K·N. `GB/s`: of the bytes that must be moved once. `% peak`: of
the largest dense bfloat16 product, measured first; `% copy`: of a plain copy's bytes, measured first. `× ours`: how
much longer than our kernel. `error`: the largest difference to the reference over its largest value. `load`: equal
groups, or a multinomial draw.

With two GPUs or more the kernels over NVLink are checked and timed too, on at most 8: products fused with their gather
("ag-matmul") or scatter ("matmul-rs"), and the small all-reduce. There `GB/s` is of the bytes that a device sends, and `error`
against XLA's collectives.

Compile-only columns. `form`: of the kernel, where it is not the one that it picks (`gpu_cases.FORMS`). `regs`, `spills`: registers
of a thread and bytes spilled, as ptxas reports them (for the Triton kernels only where a ptxas is installed); a line says so
where it serializes `wgmma`s. `temp`: KiB beyond inputs and outputs of the program.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGETS = {"sm_90a": "h200", "sm_100a": "b200"}
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


# --- without a GPU -------------------------------------------------------------------------------


def compile_one(kernel: str, shape: str, target: str, form: str = "") -> dict[str, Any]:
    """Compile our kernel for a GPU that is not here, in one of `gpu_cases.FORMS`. What ptxas says goes to the output, for
    `ptxas_facts`."""
    import gpu_cases
    import gpu_shared
    import jax
    from jax.experimental import topologies

    config = (ROOT / "meshpar" / "hardware" / "targets" / f"{TARGETS[target]}.txtpb").read_text()
    shared = (kernel, shape) in gpu_shared.names()
    layout = f"1x1x{gpu_shared.COMPILED_FOR if shared else 1}"
    topology = topologies.get_topology_desc("", platform="cuda", target_config=config, topology=layout)
    if shared:
        compiled = gpu_shared.compile_case(shape, topology.devices)
        return {"temp": compiled.memory_analysis().temp_size_in_bytes}
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    case = gpu_cases.make(kernel, shape)
    structs = [jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in case.arguments]
    with tempfile.TemporaryDirectory() as folder, jax.default_device(topology.devices[0]):
        ours = gpu_cases.with_options(kernel, gpu_cases.FORMS[form]) if form else case.ours
        lowered = jax.jit(ours).trace(*structs).lower(lowering_platforms=("cuda",))
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
        assemble_triton(Path(folder), target)
    return {"temp": compiled.memory_analysis().temp_size_in_bytes}


def assemble_triton(folder: Path, target: str) -> None:
    """Let an installed ptxas report on the Triton kernels of a dump; XLA's own does not say."""
    ptxas = shutil.which("ptxas")
    for path in sorted(folder.glob("*.ptx")) if ptxas else []:
        if "meshpar_" in path.read_text():
            command = [str(ptxas), "-v", f"-arch={target}", "-o", os.devnull, str(path)]
            print(subprocess.run(command, capture_output=True, text=True, timeout=300).stderr)


REGISTERS, SHARED_BYTES, THREADS, BLOCKS = 65536, 228 << 10, 2048, 32
"""Of one multiprocessor, sm_90a and sm_100a alike; each block takes 1 KiB of shared memory more than it asks for (CUDA C++
programming guide, "Technical specifications per compute capability")."""


def resident_blocks(registers: int, threads: int, shared: int) -> int:
    """Blocks that run on a multiprocessor at the same time, for so many registers a thread (given to warps in eights of each of
    32 threads) and bytes of shared memory a block."""
    by_registers = REGISTERS // (-(-max(registers, 1) // 8) * 8 * -(-threads // 32) * 32)
    return min(by_registers, SHARED_BYTES // (shared + 1024), THREADS // threads, BLOCKS)


def ptxas_facts(text: str) -> dict[str, int]:
    """What the assembler and the launches say of our kernels.

    The most registers and spilled bytes of any; how many have `wgmma`s that wait for each other, which the assembler says where it
    cannot tell who touches the sums meanwhile. Of Mosaic kernels the largest grid, and block's shared memory in bytes; the
    fewest blocks that a multiprocessor holds; and the registers, by the assembler's count for all threads, that are left when
    the warpgroups have taken what they ask for (negative: one would wait for ever).
    """
    found: dict[str, int] = {}
    name, registers, asked = "", 0, {"inc": 0, "dec": 0}
    for line in text.splitlines():
        wanted = re.search(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", line)
        if wanted:
            asked[wanted[1]] = max(asked[wanted[1]], int(wanted[2]))
        launch = re.search(r"call void @mosaic_gpu_launch_kernel\(ptr [^,]+, ((?:i32 \d+, ){10})", line)
        if launch:
            *sizes, shared = (int(n) for n in re.findall(r"i32 (\d+)", launch[1]))
            grid, threads = math.prod(sizes[:3]), math.prod(sizes[6:])
            resident = resident_blocks(registers, threads, shared)
            for key, value, worst in (("grid", grid, max), ("shared", shared, max), ("resident", resident, min)):
                found[key] = worst(found.get(key, value), value)
            if asked["inc"]:
                spare = registers * threads - 128 * asked["dec"] - (threads - 128) * asked["inc"]
                found["spare registers"] = min(found.get("spare registers", spare), spare)
            asked = {"inc": 0, "dec": 0}
        serial = re.search(r"wgmma\.mma_async instructions are serialized.*'(meshpar\w*)'", line)
        if serial:
            found["serialized"] = found.get("serialized", 0) + 1
        entry = re.search(r"Compiling entry function '(\w+)'", line)
        name = entry[1] if entry else name
        if not name.startswith("meshpar"):
            continue
        for key, pattern in (("spills", r"(\d+) bytes spill stores"), ("registers", r"Used (\d+) registers")):
            match = re.search(pattern, line)
            if match and key == "registers":
                registers = int(match[1])
            if match:
                found[key] = max(found.get(key, 0), int(match[1]))
    return found


def compile_environment() -> dict[str, str]:
    """For compiling without a GPU: nothing is tuned on one, and the assembler reports."""
    flags = os.environ.get("XLA_FLAGS", "")
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_gpu_autotune_level=0".strip(),
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_HOST_LLVM": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def compile_facts(kernel: str, shape: str, target: str, form: str = "", limit: float = 300) -> dict[str, Any]:
    """`compile_one` in a process of its own."""
    rows, text = run_process(["--compile-one", kernel, shape, target, form], compile_environment(), limit)
    facts: dict[str, Any] = {"kernel": kernel, "shape": shape, "target": target, "form": form}
    return facts | (rows[-1] if rows else {"error": reason(text)}) | ptxas_facts(text)


# --- processes and tables ------------------------------------------------------------------------


def run_process(arguments: list[str], environment: dict[str, str], limit: float) -> tuple[list[dict[str, Any]], str]:
    """The rows that a process of this script printed, and all of its output; what ends it early is in there."""
    command = [sys.executable, __file__, *arguments]
    with tempfile.TemporaryFile("w+") as log:
        try:
            done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=limit)
            ending = "" if done.returncode == 0 else f"exit {done.returncode}"
        except subprocess.TimeoutExpired:
            ending = f"took longer than {limit:g} s"
        log.seek(0)
        text = log.read()
    rows = [json.loads(line[4:]) for line in text.splitlines() if line.startswith("ROW ")]
    return rows, f"{text}\n{ending}" if ending else text


def reason(text: str) -> str:
    """The last lines that say something."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("I0", "W0"))]
    return " | ".join(lines[-2:])[-300:] or "no output"


def compile_table(only: str, targets: list[str]) -> list[dict[str, Any]]:
    """Print what the CUDA compiler makes of each kernel."""
    import gpu_cases
    import gpu_shared

    print("Compiled only: nothing was run, and no time is measured.\n")
    line = f"{'kernel':<10}{'shape':<19}{'target':<9}{'form':<20}{'regs':>6}{'spills':>8}{'temp KiB':>10}"
    print(line + f"{'grid':>6}{'smem KiB':>10}{'blocks/SM':>11}")
    rows = []
    for kernel, shape in [*gpu_cases.names(), *gpu_shared.names()]:
        if only not in f"{kernel} {shape}":
            continue
        for target, form in [(t, form) for t in targets for form in gpu_cases.forms(kernel, t)]:
            facts = compile_facts(kernel, shape, target, form)
            rows.append(facts)
            line = f"{kernel:<10}{shape:<19}{target:<9}{form:<20}"
            if "error" in facts:
                print(line, facts["error"], flush=True)
                continue
            line += f"{facts.get('registers', '?'):>6}{facts.get('spills', '?'):>8}{facts['temp'] / 1024:>10.0f}"
            shared = f"{facts['shared'] / 1024:.0f}" if "shared" in facts else "-"
            line += f"{facts.get('grid', '-'):>6}{shared:>10}{facts.get('resident', '-'):>11}"
            print(line + ("   wgmma serialized" if facts.get("serialized") else ""), flush=True)
    return rows


WRONG = 2e-2
"""Error of a bfloat16 result, over its largest value, above which no time is taken for one."""


def stop(result: dict[str, Any], path: Path, why: str) -> None:
    """Write what there is, and end."""
    path.write_text(json.dumps(result | {"stopped": why}, indent=1))
    raise SystemExit(f"\nSTOPPED: {why}")


def values(limit: float) -> tuple[list[dict[str, Any]], str]:
    """Print the values, and what is wrong with them ("" if nothing is)."""
    rows, text = run_process(["--values"], dict(os.environ), limit)
    print("Values, against NumPy in float64 (largest error over largest value):")
    for row in rows:
        said = row.get("failed") or row.get("refused") or format(row["error"], ".1e")
        print(f"  {row['name']:<46}{said}{'   WRONG' if row['wrong'] else ''}")
    print()
    wrong = [row for row in rows if row["wrong"]]
    if wrong:
        return rows, f"{wrong[0]['name']} is wrong"
    return rows, f"the values: {reason(text)}" if "exit" in text[-40:] or "took longer" in text[
        -60:
    ] or not rows else ""


def tuned_table(only: str, limit: float, ends: float) -> list[dict[str, Any]]:
    """Print the best tile of each product, and how much faster it is than the one that the kernel picks."""
    import gpu_cases

    print(f"\n{'kernel':<9}{'shape':<19}{'best tile':<42}{'ms':>9}{'× picked':>10}   (random loads)")
    found = []
    for kernel, shape in gpu_cases.names():
        if kernel not in gpu_cases.MATMUL_KERNELS[:3] or only not in f"{kernel} {shape}":
            continue
        if time.monotonic() > ends:
            print(f"{kernel:<9}{shape:<19}not run: the time is spent (--budget)")
            continue
        rows, text = run_process(
            ["--tune", kernel, shape, "random"], dict(os.environ), min(limit, ends + 20 - time.monotonic())
        )
        timed = [row for row in rows if "seconds" in row and row.get("error", 0.0) <= WRONG]
        found.append({"kernel": kernel, "shape": shape, "tiles": rows})
        if not timed or timed[0]["tile"] is not None:
            print(f"{kernel:<9}{shape:<19}{reason(text)}")
            continue
        best = min(timed, key=lambda row: row["seconds"])
        more = [f"{name}={best[name]}" for name in ("cluster", "pingpong") if best.get(name)]
        name = "as picked" if best["tile"] is None else " ".join([str(tuple(best["tile"])), *more])
        speed = timed[0]["seconds"] / best["seconds"]
        print(f"{kernel:<9}{shape:<19}{name:<42}{best['seconds'] * 1e3:>9.3f}{speed:>10.2f}", flush=True)
    return found


def measured_table(only: str, facts: dict[str, Any], loads: list[str], limit: float, ends: float) -> list[dict]:
    """Print what each implementation takes; start no process after `ends`, and none after a wrong result of ours."""
    import gpu_cases

    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    print(
        f"{facts['device']}, jax {facts['jax']}: copy {facts['copy']:.0f} GB/s, product {facts['peak']:.0f} TFLOP/s\n"
    )
    head = (
        f"{'kernel':<9}{'shape':<19}{'load':<8}{'by':<24}{'ms':>9}{'TFLOP/s':>9}{'% peak':>8}{'GB/s':>7}{'% copy':>8}"
    )
    print(head + f"{'× ours':>8}{'error':>10}")
    table: list[dict[str, Any]] = []
    for kernel, shape in gpu_cases.names():
        for load in loads if kernel in gpu_cases.MATMUL_KERNELS else loads[:1]:
            if only not in f"{kernel} {shape}":
                continue
            if time.monotonic() > ends:
                print(f"{kernel:<9}{shape:<19}{load:<8}not run: the time is spent (--budget)")
                continue
            rows, text = run_process(["--measure", kernel, shape, load], environment, limit)
            if not any(row["name"] == "meshpar" for row in rows):
                rows.append({"name": "meshpar", "failed": reason(text)})
            torch_rows, text = [], "No module named 'torch'"
            if facts["platform"] == "gpu":
                torch_rows, text = run_process(["--measure-torch", kernel, shape, load], environment, limit)
            rows += torch_rows if torch_rows or "No module named 'torch'" in text else []
            if not torch_rows and "No module named 'torch'" not in text and "exit" in text:
                rows.append({"name": "torch", "failed": reason(text)})
            ours = next((r.get("seconds") for r in rows if r["name"] == "meshpar"), None)
            case = gpu_cases.make(kernel, shape)
            for row in rows:
                row |= {"kernel": kernel, "shape": shape, "load": load, "flops": case.flops, "bytes": case.bytes}
                print(measured_line(row, facts, ours), flush=True)
            table += rows
            if any(row["name"] == "meshpar" and row.get("error", 0.0) > WRONG for row in rows):
                return table
    return table


def measured_line(row: dict[str, Any], facts: dict[str, Any], ours: float | None) -> str:
    """One row as text."""
    line = f"{row['kernel']:<9}{row['shape']:<19}{row['load']:<8}{row['name']:<24}"
    if "failed" in row:
        return f"{line} {row['failed']}"
    if "seconds" not in row:
        return line
    seconds = max(row["seconds"], 1e-9)
    gbs = row["bytes"] / seconds / 1e9
    line += f"{seconds * 1e3:>9.3f}"
    if row["flops"]:
        tflops = row["flops"] / seconds / 1e12
        line += f"{tflops:>9.0f}{100 * tflops / facts['peak']:>7.0f}%"
    else:
        line += f"{'':>17}"
    line += f"{gbs:>7.0f}{100 * gbs / facts['copy']:>7.0f}%"
    line += f"{seconds / ours:>8.2f}" if ours else f"{'':>8}"
    return line + (f"{row['error']:>10.1e}" if "error" in row else "")


def main(platform: str = "gpu") -> None:
    """The command of `gpu.py` or, with "tpu", of `tpu.py`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="part of 'kernel shape'")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--loads", default="even,random")
    parser.add_argument("--limit", type=float, default=200, help="seconds for one process")
    parser.add_argument("--budget", type=float, default=570, help="seconds in all")
    parser.add_argument(
        "--json", type=Path, help=f"where what was found is written; on a device {platform}.json if not said"
    )
    parser.add_argument("--compile-one", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--measure-shared", help=argparse.SUPPRESS)
    parser.add_argument("--measure-torch", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--tune", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--values", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile_one:
        print("ROW " + json.dumps(compile_one(*options.compile_one)))
    elif options.measure or options.measure_shared or options.measure_torch or options.machine:
        import gpu_measure

        if options.measure:
            gpu_measure.measure(*options.measure)
        elif options.measure_shared:
            import gpu_shared

            gpu_shared.measure(options.measure_shared, gpu_measure.seconds_per_call)
        elif options.measure_torch:
            gpu_measure.measure_torch(*options.measure_torch)
        else:
            print("ROW " + json.dumps(gpu_measure.machine()))
    elif options.values:
        import gpu_values

        gpu_values.main()
    elif options.tune:
        import gpu_measure

        gpu_measure.tune(*options.tune)
    else:
        tables(options, platform)


def tables(options: argparse.Namespace, platform: str = "gpu") -> None:
    """Print the tables that the options ask for, and write them."""
    result: dict[str, Any] = {}
    began = time.monotonic()
    facts, text = ([], "") if options.compile_only else run_process(["--machine"], dict(os.environ), options.limit)
    if not facts or facts[-1]["platform"] != platform:
        if not options.compile_only:
            print(f"There is no {platform.upper()} that JAX can use here ({reason(text)}).")
        if platform == "tpu":
            print("benchmarks/kernels_aot.py compiles for TPUs that are not here.")
            return
        result["compiled"] = compile_table(options.only, options.targets.split(","))
    else:
        options.json = options.json or Path(f"{platform}.json")
        result["machine"] = facts[-1]
        result["values"], wrong = values(options.limit)
        if wrong:
            stop(result, options.json, wrong)
        loads, limit = options.loads.split(","), options.limit
        result["measured"] = measured_table(options.only, facts[-1], loads, limit, began + 0.7 * options.budget)
        for row in result["measured"]:
            if row["name"] == "meshpar" and row.get("error", 0.0) > WRONG:
                stop(result, options.json, f"{row['kernel']} {row['shape']} with {row['load']} groups is wrong")
        if facts[-1]["devices"] > 1 and platform == "gpu":
            import gpu_shared

            run = functools.partial(run_process, environment=dict(os.environ), limit=limit)
            result["shared"] = gpu_shared.table(options.only, facts[-1], run, reason, measured_line)
        result["tuned"] = tuned_table(options.only, limit, began + options.budget - 20)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
