"""The commands of the command line about processes and checkpoints: ``launch``, ``manifest``, ``checkpoint``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from ...errors import CheckpointError, TargetError
from ..keywords_and_flags import add_flags
from ..units import format_bytes, mesh_text
from .checkpoint import bytes_of, facts_of, steps_of, verify
from .cluster_job_manifest import Manifest, job_name, manifest
from .foreign import to_safetensors
from .launch import Job, launch

_Kind = TypeVar("_Kind", Job, Manifest)
LAUNCH = """\
Start a script in several processes on this machine, each with its part of the devices, and watch them.

The script calls mp.distributed() first; it is the same that runs as one process, and on a pod. What process 0 writes is shown;
every process has a log. When one fails, the others are ended, and the first cause is said last.

  meshpar launch -n 4 --devices 8 train.py --steps 500
  meshpar launch -n 4 --restarts 3 --min 2 train.py --checkpoint runs/a
"""
CHECKPOINT = """\
List, show, verify and convert the checkpoints that mp.Checkpoints wrote.

  meshpar checkpoint ls runs/a
  meshpar checkpoint show runs/a --step 500
  meshpar checkpoint verify runs/a
  meshpar checkpoint convert runs/a weights.safetensors --only "params/*"
"""
MANIFEST = """\
Write the manifest of a job on a cluster: a JobSet for TPU slices on GKE, or a script for Slurm with GPU nodes.

The script calls mp.distributed() first, as for meshpar launch. Hosts, chips and node labels follow from the topology.

  meshpar manifest --topology "2x v5e:16x16" --to jobset train.py --steps 500 > jobset.yaml && kubectl apply -f jobset.yaml
  meshpar manifest --topology "4x h100:8" --to slurm train.py --steps 500 > job.sh && sbatch job.sh
"""
CHECKPOINT_EXIT = "exit status: 0: success; 1: damaged; 2: bad input: no such checkpoint."
LAUNCH_EXIT = """\
exit status: 0: success; 75: a process was lost, and no restarts are left (or the job received SIGTERM); 1, or another
status of the script: the script failed;
2: bad input: its arguments, mesh or layout."""


def add_commands(commands: Any) -> None:
    """Add the parsers of these commands."""
    _add_checkpoint(commands)
    about = "start a script in several processes of this machine"
    sub = commands.add_parser("launch", help=about, description=LAUNCH, epilog=LAUNCH_EXIT)
    add = sub.add_argument
    add("-n", "--processes", type=int, required=True, help="how many processes")
    _add_script(sub, _launch, Job)

    sub = commands.add_parser("manifest", help="write the manifest of a job for GKE or Slurm", description=MANIFEST)
    add = sub.add_argument
    add("--topology", required=True, help='the devices: "v5p:8x8x8", "2x v5e:16x16", "4x h100:8"')
    add("--to", choices=("jobset", "slurm"), help="the scheduler (default: jobset for TPUs, slurm for GPUs)")
    add("--name", help="of the job (default: the name of the script)")
    _add_script(sub, _manifest, Manifest)


def _add_script(parser: argparse.ArgumentParser, run: Any, kind: type[Job | Manifest]) -> None:
    """Add the arguments that name a script, and the arguments of the script, which are all that follow.

    ``run`` is the command, and ``kind`` has its other options.
    """
    add = parser.add_argument
    add_flags(add, kind)
    add("-m", "--module", action="store_true", help="the script is a module, as with python -m")
    add("script", metavar="SCRIPT")
    add("arguments", nargs=argparse.REMAINDER, metavar="…", help="of the script")
    parser.set_defaults(run=run, debug=False)


def _job(kind: type[_Kind], args: argparse.Namespace, *interpreter: str) -> _Kind:
    """The job that the arguments describe; its command is ``-m`` of a module, the script, and the script's arguments.

    Raises:
      TargetError: there is no such file.
    """
    if not args.module and not Path(args.script).is_file():
        raise TargetError(f"there is no file {args.script}", fixes=["the path of a Python file", "-m starts a module"])
    command: Any = (*interpreter, *(["-m"] if args.module else []), args.script, *args.arguments)
    return kind(**{f.name: getattr(args, f.name, command) for f in fields(kind)})


def _add_checkpoint(commands: Any) -> None:
    """Add ``checkpoint`` with its actions ``ls``, ``show``, ``verify`` and ``convert`` to the subparsers of
    ``meshpar``."""
    about = "list, show, verify and convert checkpoints"
    sub = commands.add_parser("checkpoint", help=about, description=CHECKPOINT, epilog=CHECKPOINT_EXIT)
    actions = sub.add_subparsers(metavar="ls|show|verify|convert", required=True)

    def action(name: str, run: Any, about: str) -> Any:
        """Add the parser of an action, which calls ``run``; returns its ``add_argument``."""
        made = actions.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        made.set_defaults(run=run, debug=False)
        made.add_argument("path", metavar="PATH", help="the folder of a run")
        return made.add_argument

    add = action("ls", _ls, "the complete checkpoints of a run")
    add("--json", action="store_true", help="print JSON")
    add = action("show", _show_one, "the contents of a checkpoint: every leaf with its dims, and its metadata")
    add("--step", type=int, help="which one (default: the newest)")
    add("--json", action="store_true", help="print JSON")
    add = action("verify", _verify, "read everything, and compare it with the digests that were saved")
    add("--step", type=int, help="which one (default: all)")
    add = action("convert", _convert, "write the leaves of a checkpoint as a safetensors file")
    add("--step", type=int, help="which one (default: the newest)")
    add("--only", metavar="PATTERN", default="*", help='leaves whose paths match: "params/*" (%(default)s)')
    rules = "names and dims of the tensors, as for from_safetensors, instead of --only"
    add("--rules", metavar="FILE.json", help=rules)
    add("target", metavar="FILE.safetensors")


def _one(args: argparse.Namespace) -> int:
    """The step of the checkpoint that ``--step`` names; without it the newest.

    Raises:
      TargetError: the run has no such checkpoint.
    """
    steps = steps_of(args.path)
    if not steps or (args.step is not None and args.step not in steps):
        what = "no complete checkpoint" if args.step is None else f"no checkpoint {args.step}"
        raise TargetError(f"{args.path} has {what}", fixes=[f"it has {', '.join(map(str, steps))}"] if steps else [])
    return steps[-1] if args.step is None else args.step


def _ls(args: argparse.Namespace) -> int:
    """``meshpar checkpoint ls``: print one line for each complete checkpoint; exit status 1 if the metadata of one is
    unreadable."""
    rows, lines = [], []
    for step in steps_of(args.path):
        row: dict[str, Any] = {"step": step}
        try:
            facts = facts_of(args.path, step)
            size, mesh = sum(map(bytes_of, facts["leaves"].values())), mesh_text(facts.get("mesh", {}))
            row |= {"time": facts["time"], "bytes": size, "processes": facts["processes"], "mesh": mesh}
            row["layout"] = facts.get("layout", "")
            text = f"{row['time']}  {format_bytes(size):>9}  {mesh}  {row['layout']}"
        except CheckpointError as error:
            row["error"] = text = error.headline
        rows.append(row)
        lines.append(f"{step:>10}  {text}")
    shown = "\n".join(lines) or f"no complete checkpoint in {args.path}"
    print(json.dumps(rows, indent=2) if args.json else shown)
    return int(any("error" in row for row in rows))


def _show_one(args: argparse.Namespace) -> int:
    """``meshpar checkpoint show``: print the metadata of a checkpoint and a line for each leaf; exit status 0."""
    facts = facts_of(args.path, _one(args))
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    for name, value in facts.items():
        if name not in ("leaves", "check", "format") and value:
            print(f"{name:<10} {value if isinstance(value, str | int) else json.dumps(value)}")
    print()
    width = max(map(len, facts["leaves"]), default=0)
    for path, leaf in facts["leaves"].items():
        shape = f"{leaf['dtype']}[{', '.join(map(str, leaf['shape']))}]"
        value = leaf.get("digest", leaf.get("value", ""))
        print(f"{path:<{width}}  {shape:<28} {value}  {leaf.get('dims', '')}".rstrip())
    return 0


def _verify(args: argparse.Namespace) -> int:
    """``meshpar checkpoint verify``: print ``ok`` or ``DAMAGED`` with the errors for each checkpoint; exit status 1 if
    one is damaged."""
    steps = steps_of(args.path) if args.step is None else [_one(args)]
    if not steps:
        fix = "the folder of a run, which holds one folder for each step"
        raise TargetError(f"{args.path} has no complete checkpoint", fixes=[fix])
    bad = 0
    for step in steps:
        wrong = verify(args.path, step)
        bad += bool(wrong)
        print(f"{step:>10}  {'DAMAGED' if wrong else 'ok'}")
        for text in wrong:
            print(f"            {text}")
    return 1 if bad else 0


def _convert(args: argparse.Namespace) -> int:
    step = _one(args)
    rules = None if args.rules is None else json.loads(Path(args.rules).read_text())
    count = to_safetensors(args.path, step, args.target, args.only, rules)
    print(f"{count} arrays of checkpoint {step} in {args.target}")
    return 0


def _launch(args: argparse.Namespace) -> int:
    """``meshpar launch``: run the job of the command line; returns the exit status of :func:`launch`."""
    return launch(_job(Job, args, sys.executable))


def _manifest(args: argparse.Namespace) -> int:
    """``meshpar manifest``: print the manifest of the command line's job; exit status 0."""
    args.name = args.name or job_name(args.script)
    print(manifest(_job(Manifest, args), args.to), end="")
    return 0
