"""The commands of the command line about processes and checkpoints: ``launch``, ``checkpoint``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import TargetError
from .launch import Job, launch

LAUNCH = """\
Start a script in several processes on this machine, each with its part of the devices, and watch them.

The script calls mp.distributed() first; it is the same that runs as one process, and on a pod. What process 0 writes is shown;
every process has a log. When one fails, the others are ended, and the first cause is said last.

  meshpar launch -n 4 --devices 8 train.py --steps 500
  meshpar launch -n 4 --restarts 3 --min 2 train.py --checkpoint runs/a
"""
LAUNCH_EXIT = """\
exit status: 0: well; 75: a process was lost, and no restarts are left (or the job was told to stop); 1: the script failed;
2: bad input: its arguments, mesh or layout."""


def add_commands(commands: Any) -> None:
    """Add the parsers of these commands."""
    raw = argparse.RawDescriptionHelpFormatter
    sub = commands.add_parser("launch", help="start a script in several processes of this machine", description=LAUNCH,
                              epilog=LAUNCH_EXIT, formatter_class=raw)  # fmt: skip
    sub.set_defaults(run=_launch, debug=False)
    add = sub.add_argument
    add("-n", "--processes", type=int, required=True, help="how many processes")
    add("--devices", type=int, help="devices of all processes together: CPU stand-ins, or GPUs of this machine")
    add("--restarts", type=int, default=0, help="start again so often after a loss (%(default)s)")
    add(
        "--min",
        type=int,
        dest="least",
        help="go on with what is left, at least this many processes (default: with all)",
    )
    add(
        "--timeout",
        type=float,
        default=30.0,
        help="seconds without a sign of life until a process is lost (%(default)s)",
    )
    add("--stuck", type=float, default=300.0, help="seconds that a process may stay behind the others (%(default)s)")
    add("--grace", type=float, default=30.0, help="seconds to save in, when the job is told to stop (%(default)s)")
    add("--logs", type=Path, metavar="DIR", help="where logs go (default: a temporary folder, kept after a failure)")
    add("--slices", type=int, default=1, help="groups of processes that are lost together (%(default)s)")
    add(
        "--lose",
        type=_lost_slice,
        metavar="SLICE@CALL",
        help="kill a slice at the n-th call of a function, to rehearse it",
    )
    add("-m", "--module", action="store_true", help="the script is a module, as with python -m")
    add("script", metavar="SCRIPT")
    add("arguments", nargs=argparse.REMAINDER, metavar="…", help="of the script")


def _lost_slice(text: str) -> tuple[int, int]:
    which, at, call = text.partition("@")
    if not at or not which.isdecimal() or not call.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not SLICE@CALL, as 1@100")
    return int(which), int(call)


def _launch(args: argparse.Namespace) -> int:
    if not args.module and not Path(args.script).is_file():
        raise TargetError(f"there is no file {args.script}", fixes=["-m starts a module"])
    command = (sys.executable, *(["-m"] if args.module else []), args.script, *args.arguments)
    return launch(
        Job(command, args.processes, args.devices, args.restarts, args.least, args.slices, args.lose, args.timeout,
            args.stuck, args.grace, args.logs)
    )  # fmt: skip
