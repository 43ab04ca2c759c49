"""The loss of `examples/train_lm.py` with matmuls in 8 and 4 bits, under its layouts.

    python benchmarks/low_precision.py [--steps 500] [--formats float8 mxfp8 nvfp4] [--layouts dp fsdp …]
    python benchmarks/low_precision.py --steps 0 --compile v5p:4x4x4 "4x h100:8" [--formats …]

Each format of `mp.train.Precision` trains the same byte-level Transformer from the same weights on the same batches, on 2 or 4
virtual CPU devices. Norms, the embedding and the logits are not quantized; in NVFP4 the matrices after the products of gated
layers are not either (:data:`KEEP`), since its recipe keeps the most sensitive matmuls in bfloat16, about 15 % of them (NVIDIA,
"Pretraining Large Language Models with NVFP4", 2025). ``loss``: mean over the last 50 steps, in nats per byte; ``held out``: bits
per byte. In parentheses: the difference to bfloat16 under the first layout, since no layout changes the losses beyond rounding.

``--compile``: first, the step of Llama 3 8B with 64 sequences of 2,048 tokens and FSDP over all devices, planned and compiled.
Norms are not quantized; the embedding is no matmul, and stays in bfloat16. ``all-gathers``: bytes that a device sends in a step,
and in parentheses their fraction of bfloat16's. ``compiled``: bytes of all collectives of the compiled program, as a fraction of
the plan's; merged collectives are equal ones that XLA computes once.
"""

import argparse
import contextlib
import io
import itertools
import statistics
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_lm
from tables import Table

import llama
import meshpar as mp
from meshpar._src.hardware.topology import chip_of, device_count
from plan_vs_compiler import compiled_sends, differences, planned_sends

KEEP = {"float8": "*norm, vocab", "mxfp8": "*norm, vocab", "nvfp4": "*norm, vocab, */down"}
FORMATS = tuple(KEEP)


def trained(name: str, layout: str, steps: int) -> tuple[float, float]:
    """(mean loss of the last 50 steps, held-out bits per byte)."""
    plain = train_lm.loss_of
    mesh = "data=2, model=2" if "megatron" in layout else "data=2"
    train_lm.loss_of = mp.train.Precision(name, reduce="float32", keep=KEEP.get(name, ()))(plain)
    try:
        sizes = ["--layers", "2", "--embed", "64", "--batch", "8", "--eval-batches", "16"]
        with contextlib.redirect_stdout(io.StringIO()):
            result = train_lm.main([*sizes, "--layout", layout, "--mesh", mesh, "--steps", str(steps)])
    finally:
        train_lm.loss_of = plain
    return statistics.fmean(result.losses[-50:]), result.held_out_bits_per_byte


def step_of(name: str, topology: str) -> tuple[object, ...]:
    """(step, its arguments, the dims) of Llama 3 8B with matmuls in a format."""

    def model(config: llama.Config) -> SimpleNamespace:
        plain = llama.Llama(config)
        quantized = mp.train.Precision(name, keep="*norm")(plain.apply) if name in FORMATS else plain.apply
        return SimpleNamespace(init=plain.init, apply=quantized)

    chip = chip_of(topology)
    attention = "xla" if chip is not None and chip.switch else "splash"
    return llama.target(llama.LLAMA3_8B, 64, 2048, model=model, attention=attention)


def compare(topology: str, formats: Sequence[str], table: Table) -> None:
    """Add a row for bfloat16 and for each format: the plan's gathers, and the collectives of plan and compiled program."""
    base = 0.0
    for name in ("bfloat16", *formats):
        step, args, dims = step_of(name, topology)
        mesh = f"data={device_count(topology)}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = mp.compile(
                step, *args, mesh=mesh, topology=topology, layout=llama.FSDP, dims=dims, donate_argnums=0,
                lowering="shard_map", effort="fast",
            )  # fmt: skip
        plan = compiled.plan
        every = differences(plan, compiled.collectives)
        gathered = sum(c.total_bytes for c in plan.collectives if c.op == "all-gather")
        base = base or gathered
        planned, got = (
            sum(size * n for (_, _, size, _), n in sends.items())
            for sends in (planned_sends(plan), compiled_sends(compiled.collectives, plan.sizes))
        )
        unequal = sum(not d.merged for d in every)
        equal = f"{unequal} differ" if unequal else "equal" + f", {len(every)} merged" * bool(every)
        cells = f"{gathered / 1e9:.2f} GB ({gathered / base:.3f})", f"{got / planned:.5f}"
        table.add_row(topology, name, *cells, equal, f"{1e3 * plan.seconds:.0f} ms")
        print(topology, name, *cells, *every[:4], file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--layouts", nargs="+", choices=train_lm.LAYOUTS, default=[*train_lm.LAYOUTS])
    parser.add_argument("--compile", nargs="+", metavar="TOPOLOGY")
    args = parser.parse_args(argv)
    if args.compile:
        table = Table("topology", "format", "all-gathers", "compiled", "collectives", "planned step")
        for topology in args.compile:
            compare(topology, args.formats, table)
        print()
    if not args.steps:
        return
    table = Table("layout", "format", "loss", "held out")
    plain = trained("bfloat16", args.layouts[0], args.steps)
    table.add_row(args.layouts[0], "bfloat16", *(f"{x:.4f}" for x in plain))
    for layout, name in itertools.product(args.layouts, args.formats):
        got = trained(name, layout, args.steps)
        cells = (f"{a:.4f} ({100 * (a / b - 1):+.2f} %)" for a, b in zip(got, plain, strict=True))
        table.add_row(layout, name, *cells)


if __name__ == "__main__":
    main()
