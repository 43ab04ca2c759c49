"""The process in which a compiler runs: ``python -m meshpar._src.verify.compiler_process JOB``.

It reads a job from a folder and writes the result into it. A compiler that aborts ends this process, not the caller's.
"""

from __future__ import annotations

import json
import re
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

MODULE, JOB, RESULT = "module.mlir", "job.json", "result.zip"
PARTITIONED, FINAL, FACTS = "partitioned.txt", "final.txt", "facts.json"
_PARTITIONED = re.compile(r"after_(tpu-)?spmd-partitioning\.before_.*\.txt\Z")
_ALLOCATIONS = "*after_optimizations-buffer-assignment.txt"
_TEMPORARIES = re.compile(r"^allocation \d+: size (\d+), preallocated-temp:", re.MULTILINE)
"""The allocations of temporaries in the default memory; those in other memories have a ``color`` after the size."""
MEMORY = {
    "peak": "peak_memory_in_bytes",
    "arguments": "argument_size_in_bytes",
    "outputs": "output_size_in_bytes",
    "aliased": "alias_size_in_bytes",
    "temporaries": "temp_size_in_bytes",
    "code": "generated_code_size_in_bytes",
}


def main(folder: Path) -> None:
    """Compile the job in a folder; write ``result.zip``: facts, the text right after partitioning, the final text."""
    job = json.loads((folder / JOB).read_text())
    facts, texts = compile_job((folder / MODULE).read_bytes(), job, folder / "dump")
    part = folder / "part.zip"
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=4) as out:
        out.writestr(FACTS, json.dumps(facts))
        for name, text in texts.items():
            out.writestr(name, text)
    part.rename(folder / RESULT)


def compile_job(module: bytes, job: dict[str, Any], dump: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """(facts, texts); facts have ``error`` if the compiler rejects the program."""
    import jax

    from ..compat.compile_only_devices import compile_parts
    from ..hardware.topology import topology_devices

    cpu = job["topology"].startswith("cpu:")
    if cpu:
        jax.config.update("jax_num_cpu_devices", int(job["topology"][4:]))
        devices = jax.devices("cpu")
    else:
        devices = list(topology_devices(job["topology"]))
    by_id = {d.id: d for d in devices}
    dumps = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": ".*spmd-partitioning.*"}
    options = {**dumps, **job["options"]}
    began = time.perf_counter()
    try:
        executable = compile_parts(module, [by_id[i] for i in job["devices"]], job["facts"], options, job["fast"])
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error), "compile_seconds": time.perf_counter() - began}, {}
    memory = memory_of(executable.get_compiled_memory_stats(), cpu, _allocations(dump))
    facts = {"memory": memory, "compile_seconds": time.perf_counter() - began}
    texts = {FINAL: "\n\n".join(m.to_string() for m in executable.hlo_modules())}
    partitioned = [p for p in sorted(dump.glob("*")) if _PARTITIONED.search(p.name)]
    if partitioned:
        texts[PARTITIONED] = max(partitioned, key=lambda p: p.stat().st_size).read_text()
    return facts, texts


def _allocations(dump: Path) -> str:
    """XLA's dump of the buffer assignment of the largest module; "" without a dump."""
    files = sorted(dump.glob(_ALLOCATIONS), key=lambda p: p.stat().st_size)
    return files[-1].read_text() if files else ""


def memory_of(stats: Any, cpu: bool, allocations: str = "") -> dict[str, int]:
    """The attributes of :class:`verify.aot.Memory`, in bytes, from XLA's ``CompiledMemoryStats``.

    For CPUs XLA's peak lacks temporaries. For TPUs (libtpu 0.0.42) it is the sum of the arguments and results, in the host's memory
    too, and of the largest of the peaks of temporaries in each memory. Where that may be the host's, the temporaries of the device
    are the ones that the compiler allocates.

    Args:
      stats: of the executable.
      cpu: it is for CPUs.
      allocations: XLA's dump of the buffer assignment; "": no dump.
    """
    memory = {name: getattr(stats, attribute) for name, attribute in MEMORY.items()}
    host = {name: getattr(stats, f"host_{attribute}", 0) for name, attribute in MEMORY.items() if name != "peak"}
    fixed, fixed_on_host = (m["arguments"] + m["outputs"] - m["aliased"] for m in (memory, host))
    memory["host"] = fixed_on_host + host["temporaries"]
    if cpu:
        memory["peak"] = fixed + memory["temporaries"]
    elif memory["host"]:
        allocated = [int(n) for n in _TEMPORARIES.findall(allocations)]
        most = sum(allocated) if allocated else memory["temporaries"]
        memory["peak"] = fixed + min(memory["peak"] - fixed - fixed_on_host, most)
    return memory


if __name__ == "__main__":
    main(Path(sys.argv[1]))
