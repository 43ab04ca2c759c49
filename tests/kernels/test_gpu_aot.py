"""Facts from the real CUDA compiler, without a GPU. `benchmarks/gpu_compile.py` prints all of them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import covering
import gpu_compile as gpu
import pytest

ROOT = Path(__file__).parents[2]


def has_cuda() -> bool:
    """Whether JAX's CUDA plugin is installed, with or without a GPU."""
    return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13)) if _plugins() else False


def _plugins() -> bool:
    return importlib.util.find_spec("jax_plugins") is not None


needs_cuda = pytest.mark.skipif(
    not has_cuda(), reason="needs the CUDA compiler, which is in JAX's plugin: pip install jax-cuda12-plugin"
)


def run_program(program: str, target: str) -> tuple[str, dict[str, int]]:
    """What a program prints after "RESULT ", and what the assembler says; it gets the path of the target's description."""
    config = ROOT / "meshpar" / "_src" / "hardware" / "targets" / f"{gpu.TARGETS[target]}.txtpb"
    environment = gpu.compile_environment() | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", program, str(config)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (printed,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return printed.removeprefix("RESULT "), gpu.ptxas_facts(done.stdout + done.stderr)


MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148}
TARGETS = [*MULTIPROCESSORS]
slow = pytest.mark.slow
SHAPES = ("mixtral-8x7b-up", "mixtral-8x7b-down", "deepseek-v3-up", "deepseek-v3-down")


@needs_cuda
@pytest.mark.parametrize(
    ("shape", "target"),
    [
        *(("g64", target) for target in TARGETS),
        *(pytest.param(*case, marks=slow) for case in covering.each(SHAPES[::3], TARGETS)),
    ],
)
def test_grouped_matmul_spills_nothing_and_needs_no_memory(shape, target):
    kernels = ["forward", "d lhs", "d rhs"] + (["swiglu"] if shape.endswith("-up") else [])
    for kernel in kernels:
        assert_compiled_well(gpu.compile_facts(kernel, shape, target), 1 << 20, MULTIPROCESSORS[target])


@needs_cuda
@pytest.mark.parametrize(
    ("kernel", "form", "target"),
    [
        ("forward", "cluster", "sm_90a"),
        ("d rhs", "ping-pong, cluster", "sm_90a"),
        ("forward", "cluster", "sm_100a"),
        ("d rhs", "cluster", "sm_100a"),
    ],
)
def test_the_forms_that_only_the_tuner_tries_compile_as_well(kernel, form, target):
    facts = gpu.compile_facts(kernel, "g64", target, form)
    assert_compiled_well(facts, 1 << 20, MULTIPROCESSORS[target])


def assert_compiled_well(facts, memory, multiprocessors):
    assert facts["temp"] < memory, facts
    assert facts["spills"] == 0, facts
    assert not facts.get("serialized"), facts
    assert_all_blocks_run_at_once(facts, multiprocessors)


def assert_all_blocks_run_at_once(facts, multiprocessors):
    """One on each multiprocessor, most of whose shared memory it has as stages; and no warpgroup waits for registers."""
    assert facts["grid"] == multiprocessors, facts
    assert facts["resident"] == 1, facts
    assert facts["shared"] > 160 << 10, facts
    assert facts.get("spare registers", 0) >= 0, facts


@needs_cuda
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("kernel", "shape"),
    [("ag-matmul", "llama3-8b-up"), pytest.param("matmul-rs", "llama3-8b-down", marks=pytest.mark.slow)],
)
def test_fused_matmuls_over_nvlink_do_not_spill_and_have_one_receive_buffer(kernel, shape, target):
    """Compiled for 8 GPUs: beside operands and result, the rows or the sums of the seven others."""
    from meshpar_kernels.published_model_shapes import FUSED

    s = FUSED[shape]
    memory = 7 * s.rows * (s.k if s.gathers else s.n) * 2 + (1 << 20)
    left = MULTIPROCESSORS[target] - 32  # which are left to NCCL
    assert_compiled_well(gpu.compile_facts(kernel, shape, target), memory, left)


@needs_cuda
@slow
@pytest.mark.parametrize(
    ("kernel", "shape", "target"),
    [
        ("scaled", "deepseek-v3-up", "sm_90a"),
        ("exchange", "deepseek-v3", "sm_90a"),
        ("route", "deepseek-v3", "sm_90a"),
        ("permute", "mixtral-8x7b", "sm_90a"),
    ],
)
def test_other_kernels_spill_nothing(kernel, shape, target):
    facts = gpu.compile_facts(kernel, shape, target)
    assert facts.get("spills", 0) == 0, facts
    assert not facts.get("serialized"), facts
    assert facts.get("spare registers", 0) >= 0, facts


def test_what_the_assembler_says_is_read():
    """Of our kernels only, and the most of each."""
    text = """
ptxas info    : Compiling entry function 'meshpar_a' for 'sm_90a'
    0 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
ptxas info    : Compiling entry function 'fusion' for 'sm_90a'
    0 bytes stack frame, 99 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers
ptxas info    : Compiling entry function 'meshpar_b' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers
"""
    warning = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to {} '{}'\n"
    text += warning.format("insufficient register resources for the wgmma pipeline in function", "meshpar_b")
    text += warning.format("non wgmma instructions defining accumulator registers in the function", "fusion")
    assert gpu.ptxas_facts(text) == {"spills": 16, "registers": 168, "serialized": 1}
    assert gpu.ptxas_facts("nothing") == {}
    text += "\tsetmaxnreg.dec.sync.aligned.u32 \t24;\n\tsetmaxnreg.inc.sync.aligned.u32 \t72;\n"
    sizes = [132, 1, 1, 0, 0, 0, 384, 1, 1, 100 << 10]
    numbers = ", ".join(f"i32 {n}" for n in sizes)
    launch = f"@mosaic_gpu_launch_kernel(ptr %0, {numbers},"
    launched = {"grid": 132, "shared": 100 << 10, "resident": 2, "spare registers": 40 * 384 - 24 * 128 - 72 * 256}
    second = f"  %9 = call i32 {launch} i32 0, ptr %1, ptr %2)\n"  # from 0.11 on
    for line in (f"  call void {launch} ptr %1, ptr %2)\n", second):
        found = gpu.ptxas_facts(text + line)
        assert {name: found[name] for name in launched} == launched
    assert launched["spare registers"] < 0  # it would wait for ever


def test_blocks_that_a_multiprocessor_holds():
    """By what runs out first: registers, shared memory, threads, blocks (CUDA's occupancy calculator says the same)."""
    assert gpu.resident_blocks(168, 384, 0) == 1
    assert gpu.resident_blocks(65, 128, 0) == 7  # 72 registers each
    assert gpu.resident_blocks(32, 128, 227 << 10) == 1
    assert gpu.resident_blocks(32, 128, 113 << 10) == 2
    assert gpu.resident_blocks(32, 128, 114 << 10) == 1
    assert gpu.resident_blocks(32, 1024, 0) == 2
    assert gpu.resident_blocks(16, 32, 0) == 32
