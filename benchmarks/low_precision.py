"""The loss of `examples/train_lm.py` with matmuls in 8 and 4 bits, under its layouts.

    python benchmarks/low_precision.py [--steps 500] [--formats float8 mxfp8 nvfp4] [--layouts dp fsdp …]

Each format of `mp.train.Precision` trains the same byte-level Transformer from the same weights on the same batches, on 2 or 4
virtual CPU devices. Norms, the embedding and the logits are not quantized. ``loss``: mean over the last 50 steps, in nats per byte;
``held out``: bits per byte. In parentheses: the difference to bfloat16 under the first layout, since no layout
changes the losses beyond rounding.
"""

import argparse
import contextlib
import io
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_lm
from tables import Table

import meshpar as mp

KEEP = "*norm, vocab"
FORMATS = ("float8", "mxfp8", "nvfp4")


def trained(name: str, layout: str, steps: int) -> tuple[float, float]:
    """(mean loss of the last 50 steps, held-out bits per byte)."""
    plain = train_lm.loss_of
    mesh = "data=2, model=2" if "megatron" in layout else "data=2"
    keep = KEEP if name in FORMATS else ()
    train_lm.loss_of = mp.train.Precision(name, reduce="float32", keep=keep)(plain)
    try:
        sizes = ["--layers", "2", "--embed", "64", "--batch", "8", "--eval-batches", "16"]
        with contextlib.redirect_stdout(io.StringIO()):
            result = train_lm.main([*sizes, "--layout", layout, "--mesh", mesh, "--steps", str(steps)])
    finally:
        train_lm.loss_of = plain
    return statistics.fmean(result.losses[-50:]), result.held_out_bits_per_byte


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--layouts", nargs="+", choices=train_lm.LAYOUTS, default=[*train_lm.LAYOUTS])
    args = parser.parse_args(argv)
    table = Table("layout", "format", "loss", "held out")
    plain = trained("bfloat16", args.layouts[0], args.steps)
    table.add_row(args.layouts[0], "bfloat16", *(f"{x:.4f}" for x in plain))
    for layout, name in itertools.product(args.layouts, args.formats):
        got = trained(name, layout, args.steps)
        cells = (f"{a:.4f} ({100 * (a / b - 1):+.2f} %)" for a, b in zip(got, plain, strict=True))
        table.add_row(layout, name, *cells)


if __name__ == "__main__":
    main()
