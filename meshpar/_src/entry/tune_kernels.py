"""The command ``meshpar tune-kernels``: measures tiles of grouped matmuls for the user's tuning table."""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console

from meshpar_kernels import tuning_table
from meshpar_kernels._compat import device_kind
from meshpar_kernels.grouped_matmul import tuner
from meshpar_kernels.isolation import WorkerError
from meshpar_kernels.published_model_shapes import MATMULS, MatmulShape
from meshpar_kernels.tuning_table import MatmulKey

from ...errors import CheckError, TargetError
from ..console import console_of
from ..progress import Counted, progress_line
from ..report.document import shown_text
from ..report.tables import GROUP, Cell, Table, number
from ..units import format_seconds
from .cli_target import parse_options

ABOUT = """\
Measure tiles of the grouped matmuls (mixtures of experts) on this machine's TPU or GPU, and save the best in a
table that the kernels read when a program is traced.

Each tile's result is compared with XLA's before it is timed; tiles with wrong results are never stored. The table
is in the user's cache folder, or at MESHPAR_KERNEL_TABLE; it extends the table of the package.

  meshpar tune-kernels
  meshpar tune-kernels --shape mixtral-8x7b-up --shape "rows=8192, k=2048, n=1408, groups=64"
  meshpar tune-kernels --list"""
EXIT = """\
exit status: 0: success; 1: the kernel gives wrong values on this device, and no tile of that matmul is stored;
2: bad input, or no accelerator that has kernels."""

OpenBench = Callable[[MatmulKey], AbstractContextManager[tuner.Bench]]
DTYPES = ("bfloat16", "float16", "float32")


def add_command(commands: Any) -> None:
    """Add the parser of this command."""
    about = "time tiles of the kernels on this machine's TPU or GPU, for a table"
    sub = commands.add_parser("tune-kernels", help=about, description=ABOUT, epilog=EXIT)
    sub.set_defaults(run=_run, debug=False, accelerator=True)
    shapes = f'one of {", ".join(MATMULS)}, or "rows=…, k=…, n=…, groups=…"'
    shapes += "; may be given again (default: those that have a name)"
    sub.add_argument("--shape", action="append", metavar="NAME|SIZES", help=shapes)
    sub.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="(%(default)s)")
    sub.add_argument("--table", type=Path, help="the file to extend (default: the user's table)")
    sub.add_argument("--list", action="store_true", help="print the tables without measuring")


def matmul_keys(shapes: list[str] | None) -> Iterator[MatmulKey]:
    """The matmuls of a layer with these sizes: forward, with a gate, and the two gradients.

    Raises:
      TargetError: no shape of this name, or no such sizes.
    """
    for text in shapes or list(MATMULS):
        s = MATMULS.get(text) or _sizes(text)
        yield MatmulKey("grouped_matmul", s.m, s.k, s.n, s.groups)
        if text not in MATMULS or text.endswith("-up"):
            yield MatmulKey("grouped_matmul", s.m, s.k, s.n, s.groups, matrices=2)
        yield MatmulKey("grouped_matmul", s.m, s.n, s.k, s.groups, transposed=True)
        yield MatmulKey("grouped_matmul_transpose", s.m, s.k, s.n, s.groups)


def _sizes(text: str) -> MatmulShape:
    """The shape in text such as ``"rows=8192, k=2048, n=1408, groups=64"``.

    Raises:
      TargetError: the text is not a shape.
    """
    given = parse_options([text]) if "=" in text else {}
    if set(given) != {"rows", "k", "n", "groups"} or not all(isinstance(n, int) and n > 0 for n in given.values()):
        raise TargetError(
            f"tune-kernels: no shape {text!r}",
            fixes=[f"one of {', '.join(MATMULS)}", '"rows=8192, k=2048, n=1408, groups=64"'],
        )
    return MatmulShape(given["rows"], given["k"], given["n"], given["groups"])


def _run(args: argparse.Namespace) -> int:
    """``meshpar tune-kernels``: time the tiles of the kernels on this machine's device, and write the table; exit
    status 0.

    With --list, print the table instead.
    """
    console = console_of(sys.stdout)
    file = args.table or tuning_table.path()
    wanted = [] if args.list else list(matmul_keys(args.shape))
    platform = "" if args.list else tuner.platform()
    if not (args.list or platform):
        analytic = "kernels without an entry take the analytic choice"
        raise TargetError(
            "tune-kernels: JAX finds no TPU and no NVIDIA GPU here, so there is nothing to time",
            fixes=[f"run it on the machine whose kernels are to be tuned; {analytic}"],
        )
    try:
        if args.list:
            tables = tuning_table.merge(tuning_table.read(tuning_table.SHIPPED), tuning_table.read(file))
        else:
            bench = functools.partial(tuner.isolated_bench, dtype=args.dtype)
            tables = tune_matmuls(wanted, args.dtype, platform, device_kind(), bench, file, console)
    except ValueError as error:  # the file's
        raise TargetError(str(error), fixes=["`meshpar tune-kernels --help` lists the options"]) from None
    _show(tables, file)
    return 0


def tune_matmuls(
    wanted: list[MatmulKey],
    dtype: str,
    platform: str,
    kind: str,
    bench: OpenBench,
    file: Path,
    console: Console,
) -> tuning_table.Table:
    """Measure the tiles of each matmul, with a progress line for each, and extend the file after each.

    Args:
      platform, kind: of the device that `bench` measures on.
      bench: of a matmul, open while its tiles are measured.

    Returns:
      The tables: device → shape class → dtype → measured tile.

    Raises:
      CheckError: the kernel gives wrong values for a matmul; none of its tiles are stored.
      ValueError: the file is not a table.
    """
    found: tuning_table.Table = {}
    tuning_table.read(file)  # before hours are spent
    for key in dict.fromkeys(wanted):
        choices = tuner.candidates(key, dtype, platform)
        if not choices:
            console.print(f"{key.shape_class}: the kernel has no tile for it")
            continue
        try:
            tuned = _tuned(key, choices, bench, tuner.limit_of(dtype))
        except tuner.WrongValueError as error:
            raise CheckError(
                f"tune-kernels: {key.shape_class} on {kind}: {error}; none of its tiles are stored",
                fixes=["report it with the shapes and the chip; other shapes can be tuned"],
            ) from error
        except (NotImplementedError, WorkerError) as error:
            console.print(f"{key.shape_class}: {error}")
            continue
        for config, error in tuned.wrong.items():
            console.print(f"[red]{key.shape_class}: {config} is wrong by {error:.2g}, and not timed[/red]")
        one: tuning_table.Table = {kind: {key.shape_class: {dtype: tuned.entry}}}
        found = tuning_table.merge(found, one)
        tuning_table.write(file, tuning_table.merge(tuning_table.read(file), one))
    return found


def _tuned(key: MatmulKey, choices: Sequence[Any], bench: OpenBench, limit: float) -> tuner.Tuned:
    """The measured tiles of a matmul; a progress line has the number of tiles and the best time."""
    times: list[float] = []

    def done(_: Any, seconds: float | None) -> None:
        times.append(math.inf if seconds is None else seconds)
        tell(Counted(f"best {format_seconds(min(times))}", len(times), len(choices)))

    with progress_line(f"tuning {key.shape_class}", "auto") as tell, bench(key) as measured:
        return tuner.tune(measured, choices, limit=limit, done=done)


def _show(tables: tuning_table.Table, file: Path) -> None:
    """Print a table of tuned tiles, with the measured and the analytic choice's milliseconds."""
    rows: list[list[Cell]] = []
    attributes: list[str] = []
    for kind, classes in tables.items():
        rows.append([Cell(kind), *[Cell("")] * 4])
        attributes.append(GROUP)
        for shape, dtypes in classes.items():
            for dtype, entry in dtypes.items():
                c = entry.config
                options = {"stages": c.stages, "blocks": c.num_sms, "cluster": c.cluster, "ping-pong": c.pingpong}
                given = " ".join(f"{k}={v}" if v is not True else k for k, v in options.items() if v)
                times = (number(f"{1e3 * s:.3f}", s) for s in (entry.seconds, entry.analytic_seconds))
                rows.append([*map(Cell, (f"{shape} {dtype}", str(c.tile), given)), *times])
                attributes.append("")
    columns = [("matmul", ""), ("rows, K, N", ""), ("options", ""), ("ms", "n"), ("analytic", "n")]
    title = f"tiles of the grouped matmuls: medians, also of the analytic choice; {file}"
    if rows:
        print(shown_text(Table(columns, rows, title, attributes).terminal()))
    else:
        print(f"No tile was measured yet: neither the shipped table nor {file} has an entry.")
