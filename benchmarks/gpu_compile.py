"""The Pallas kernels compiled for NVIDIA GPUs, without a GPU: registers, spills, temporaries, blocks.

    pip install -e ".[aot]"
    python benchmarks/gpu_compile.py                         # every kernel, shape and form, for h200 and b200
    python benchmarks/gpu_compile.py --only g64 --json out.json

Nothing runs, and no time is measured; `benchmarks/device.py` does that on a GPU. Each case is compiled in a process of its own.

Columns. `form`: of the kernel, where it differs from the default (`device_cases.FORMS`). `regs`, `spills`: registers of a thread
and bytes spilled, as ptxas reports them (for the Triton kernels only where a ptxas is installed). `temp`: KiB of the program
beyond its operands and results. `grid`, `smem KiB`, `blocks/SM`: of the Mosaic kernels' launches. A row says so where ptxas
serializes `wgmma` instructions.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGETS = {"sm_90a": "h200", "sm_100a": "b200"}
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


# --- without a GPU -------------------------------------------------------------------------------


def compile_one(kernel: str, shape: str, target: str, form: str = "") -> dict[str, Any]:
    """Compile our kernel for a GPU that is not here, in one of `device_cases.FORMS`. What ptxas says goes to the output, for
    `ptxas_facts`."""
    import device_cases
    import jax
    import nvlink_cases
    from jax.experimental import topologies

    config = (ROOT / "meshpar" / "_src" / "hardware" / "targets" / f"{TARGETS[target]}.txtpb").read_text()
    shared = (kernel, shape) in nvlink_cases.names()
    layout = f"1x1x{nvlink_cases.COMPILED_FOR if shared else 1}"
    topology = topologies.get_topology_desc("", platform="cuda", target_config=config, topology=layout)
    if shared:
        compiled = nvlink_cases.compile_case(shape, topology.devices)
        return {"temp": compiled.memory_analysis().temp_size_in_bytes}
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    case = device_cases.make(kernel, shape)
    structs = [jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in case.arguments]
    with tempfile.TemporaryDirectory() as folder, jax.default_device(topology.devices[0]):
        ours = device_cases.with_config(kernel, device_cases.FORMS[form]) if form else case.ours
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
    """Facts of kernels from ptxas' log and the launches.

    Maximum of registers and spilled bytes; number of kernels with serialized `wgmma`s, which ptxas reports if it cannot analyse the
    accesses to the accumulators. Of Mosaic kernels: largest grid, largest shared memory of a block in bytes, fewest blocks of a
    multiprocessor, and registers that remain after the warpgroups' requests (negative: a warpgroup would block for ever).
    """
    found: dict[str, int] = {}
    name, registers, asked = "", 0, {"inc": 0, "dec": 0}
    for line in text.splitlines():
        wanted = re.search(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", line)
        if wanted:
            asked[wanted[1]] = max(asked[wanted[1]], int(wanted[2]))
        launch = re.search(r"call \w+ @mosaic_gpu_launch_kernel\(ptr [^,]+, ((?:i32 \d+, ){10})", line)
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
    """Compile each kernel and print its row."""
    import device_cases
    import nvlink_cases

    print("Compiled only: nothing was run, and no time is measured.\n")
    line = f"{'kernel':<10}{'shape':<19}{'target':<9}{'form':<20}{'regs':>6}{'spills':>8}{'temp KiB':>10}"
    print(line + f"{'grid':>6}{'smem KiB':>10}{'blocks/SM':>11}")
    rows = []
    for kernel, shape in [*device_cases.names(), *nvlink_cases.names()]:
        if only not in f"{kernel} {shape}":
            continue
        for target, form in [(t, form) for t in targets for form in device_cases.forms(kernel, t)]:
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


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="part of 'kernel shape'")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--json", type=Path, help="a file to write the rows to as well")
    parser.add_argument("--compile-one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile_one:
        print("ROW " + json.dumps(compile_one(*options.compile_one)))
        return
    rows = compile_table(options.only, options.targets.split(","))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
