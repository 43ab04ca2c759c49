"""Facts from the real TPU compiler, without a TPU. `benchmarks/kernels_aot.py` prints all of them."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import covering
import pytest

ROOT = Path(__file__).parents[2]
CHIPS = ["v5e", "v5p", "v6e", "tpu7x"]
ENVIRONMENT = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs the TPU compiler, which is in libtpu: pip install 'jax[tpu]'",
)

PROGRAM = """
import json, sys
sys.path[:0] = sys.argv[1:3]
import kernels_aot
print(json.dumps([kernels_aot.compile_one(k, *sys.argv[3:5]) for k in sys.argv[5:]]))
"""
SCHEDULE = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true"


def compiled(chip: str, shape: str, *kernels: str, **more: str) -> list[dict]:
    """Facts of each kernel, from one process of its own: a bad shape may abort the compiler. `more` is its environment."""
    environment = os.environ | ENVIRONMENT | more
    paths = [str(ROOT), str(ROOT / "benchmarks")]
    command = [sys.executable, "-c", PROGRAM, *paths, shape, chip, *kernels]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("shape", "chip"), [("g64", chip) for chip in CHIPS])
def test_grouped_matmul_needs_no_memory(shape, chip):
    """Forward and gradients, and with weights of 8 bits: under 1 MiB beyond inputs and outputs."""
    for facts in compiled(chip, shape, "forward", "d lhs", "d rhs", "int8", "d lhs int8"):
        assert facts["temp"] < 1 << 20


@pytest.mark.parametrize(("chip", "model"), covering.each(CHIPS, ["mixtral-8x7b", "deepseek-v3"]))
def test_routing_has_no_large_temporary(model, chip):
    """`route` nothing of its logits' size, `combine` nothing of the rows', `permute` and `combine` row indices alone."""
    from meshpar_kernels.published_model_shapes import MODELS

    kernels = ["route", "permute", "combine", "permute by plan", "combine by plan"]
    choose, copy, add, *by_plan = compiled(chip, model, *kernels)
    choices = 8192 * MODELS[model].k * 4
    assert choose["temp"] < 512 << 10
    # for tpu7x XLA places the blocks of indices and weights, padded to 128 lanes, in HBM; for other chips in VMEM
    padded = 3 * 128 // 32 * choices + (64 << 10) if chip == "tpu7x" else 0
    assert max(copy["temp"], add["temp"]) <= padded
    for facts in by_plan:
        assert facts["temp"] < 8 * choices + (512 << 10) + padded


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_ring_attention_hides_its_sends_and_holds_no_scores(chip):
    """128K tokens over 8 devices, balanced: what travels does so around the attention; bytes and memory are as in the costs."""
    import jax
    import jax.numpy as jnp

    from meshpar_kernels import attention_costs
    from meshpar_kernels.published_model_shapes import ATTENTION

    s = ATTENTION["llama3-8b-128k"]
    each = s.tokens // 8
    q, k = (jax.ShapeDtypeStruct((1, each, n, s.head_dim), jnp.bfloat16) for n in (s.heads, s.kv_heads))
    cost = attention_costs(q, k, k, 8, causal=True).of["ring"]
    assert any("mirrored" in s.why for s in cost.forward)
    most, planned = cost.memory, (sum(s.bytes(8) for s in cost.forward), cost.bytes_sent)
    found = compiled(chip, "llama3-8b-128k", "ring", "ring backward")
    if chip != "tpu7x":
        assert tuple(facts["sent"]["collective-permute"] for facts in found) == planned
    for facts in found:
        assert facts["ops"] == ["collective-permute"]
        assert facts["hidden"]
        assert all(facts["hidden"])
        assert facts["temp"] < 1.6 * most < each * each * s.heads * 4 / 8


def scheduled(chip: str, shape: str, kernel: str) -> tuple[dict, list[str]]:
    """Facts of a kernel, and what its scheduled bundles do one after the other."""
    import kernels_aot

    with tempfile.TemporaryDirectory() as folder:
        (facts,) = compiled(chip, shape, kernel, LIBTPU_INIT_ARGS=SCHEDULE.format(folder))
        return facts, kernels_aot.order_of(Path(folder))


@pytest.mark.parametrize(
    ("name", "chip"),
    [*itertools.product(("llama3-8b-up", "llama3-8b-down"), ("v5e", "v6e"))],
)
def test_fused_matmuls_multiply_while_they_send(name, chip):
    """Four buffers of a block, no gathered operand; the matmuls stand between the start of a send and the wait for it."""
    from meshpar_kernels.published_model_shapes import FUSED

    shape = FUSED[name]
    facts, order = scheduled(chip, name, "all_gather_matmul" if shape.gathers else "matmul_reduce_scatter")
    buffers = 4 * shape.rows * 2 * (shape.k if shape.gathers else shape.n)
    # a program that is nothing but the kernel copies its result, as with XLA's own collectives
    result = shape.rows * shape.n * 2 * (8 if shape.gathers else 1)
    assert facts["temp"] < buffers + result + (1 << 20)
    matmuls = order.index("matmul")
    assert order.count("matmul") == 1  # nothing is waited for between matmuls
    if shape.gathers:
        assert "send" in order[:matmuls]
        assert order[matmuls + 1 :] == ["wait"]
    else:  # the tile before last has left, then this one leaves
        assert order[matmuls + 1 : matmuls + 3] == ["wait", "send"]


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "model"), covering.each([*CHIPS, "v5e:16x16"], ["mixtral-8x7b", "deepseek-v3"]))
def test_rows_go_straight_to_their_experts(model, chip):
    """Also where XLA refuses its own ragged all-to-all (v5e:16x16): XLA sends integers only, and rows are where the kernel
    wants them."""
    ragged, experts = compiled(chip, model, "ragged_all_to_all", "dispatch, combine")
    assert set(ragged["exchanged"]) == set(experts["exchanged"]) == {"s32"}
    assert not any(shape.startswith("bf16") for shape in experts["copied"])


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_all_sends_start_before_the_first_wait(chip):
    """But that for the sizes of ragged runs, in scalar memory."""
    assert scheduled(chip, "mixtral-8x7b", "ragged_all_to_all")[1] == ["wait", "send", "wait"]
    assert scheduled(chip, "16MiB", "all_to_all")[1] == ["send", "wait"]


@pytest.mark.parametrize("topology", ["v4:2x2x1", pytest.param("v5e:2x2", marks=pytest.mark.slow)])
def test_what_is_not_refused_compiles(topology):
    """Odd M, K, N, H and experts; on v4, whose on-chip memory is a quarter. Some of them must be refused."""
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("compile_odd.py")), topology]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [f"{name}: {problem}" for name, _, problem in found if problem] == []
    refused = {name for name, reasons, _ in found if reasons}
    assert {"gather_sum 100 float32", "gather_sum 2880 bfloat16", "quantized (64, 192, 136, 3) int8"} < refused
    assert not refused & {
        "gather_sum 384 bfloat16",
        "grouped_matmul (512, 2048, 1408, 2) bfloat16 False",
        "route (40, 60, 6)",
        "quantized (7, 256, 130, 2) float8_e4m3fn backward",
        "quantized (128, 768, 256, 2) int8",
    }
