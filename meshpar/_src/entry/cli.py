"""The command line: ``meshpar plan|run-plan|lab|compile|search|tune-options|calibrate|prove|check|diff TARGET``, and ``launch``,
``manifest``, ``checkpoint``, ``tune-kernels``, ``doctor``."""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import inspect
import itertools
import json
import math
import os
import re
import shlex
import signal
import sys
import textwrap
import time
import warnings
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, get_args

import jax
from rich.console import Group
from rich.text import Text

import meshpar as mp

from ...errors import CheckError, CompilerError, JoinWarning, MeshparError, TargetError
from ..compat import lazy_nnx as nnx
from ..console import columns
from ..cost.caching import with_shared_results
from ..dims import did_you_mean, near
from ..hardware.calibration import read_calibrations
from ..hardware.topology import parse_topology
from ..keywords_and_flags import add_flags, flag_of, given_flags
from ..layout import (
    BETWEEN_SLICES,
    OTHER_AXES,
    USUAL_AXES,
    characteristic_dims,
    scheme_name,
    scheme_text,
    similar_schemes,
)
from ..layouts import PRESETS
from ..passes.advice import fix_of_slices, slice_traffic
from ..plan_api import Plan
from ..pods.cli import add_commands
from ..program.names_as_path_patterns import patterns_of
from ..progress import Counted, Progress, progress_line
from ..report.document import shown_text
from ..report.facts import fits
from ..report.hints import topology_for_state
from ..report.inferred_names_table import names_table, unnamed_table
from ..report.plan_terminal_text import plan_renderable
from ..report.tables import hanging
from ..runs import RunOptions, run_plan_of
from ..search import SearchOptions
from ..search.result import quiet
from ..units import format_memory, format_seconds, mesh_text, parse_duration
from ..verify.tuned_options import Tuning, tune
from . import startup_message as starting
from .api import named_program
from .api import plan as plan_of
from .cli_target import Target, concrete, failing_as_target, has_drawn_integers, load_target, parse_options
from .doctor import add_command as add_doctor
from .options import Lowering, StepOptions
from .tune_kernels import add_command as add_tuning

LIKELY_MISSPELLED = 0.75
"""Likeness, of 1, from which on the name of an axis is a misspelling of a usual one."""
OTHER_SIZE = 4
"""Devices along each axis of a default mesh other than that of the batch."""
WORTH_TRYING = 0.95
"""Fraction of the planned step below which the step of a known scheme is named by `meshpar plan`."""
DESCRIPTION = """\
See, compile and check the layouts of a JAX program, without the machine that they are for.

TARGET is `file.py:function` or `package.module:function`. The function returns (step, arguments) or (step, arguments, dims): the
train step, its arguments as jax.ShapeDtypeStruct (nothing is allocated), and tree-path patterns -> dims. Without dims, and without
names in the arguments, names are inferred: `meshpar names` shows them.

  meshpar plan    examples/llama.py:llama3_8b --topology v5p:4x4x8
  meshpar lab     examples/llama.py:llama3_8b --topology v5e:16x16 --set "batch=32"
  meshpar compile examples/llama.py:llama3_8b --topology v5p:4x4x8
  meshpar diff    examples/llama.py:llama3_8b --topology v5p:4x4x8 --layout fsdp --layout fsdp_tensor
  meshpar search  examples/llama.py:llama3_8b --topology v5e:16x16 --set "batch=32"
  meshpar calibrate examples/llama.py:tiny --layout fsdp --layout "batch: data" --calibration here.json
  meshpar prove   examples/llama.py:llama3_8b --topology v5p:4x4x8 --layout fsdp
  meshpar check   examples/llama.py:tiny --layout fsdp --layout "batch: data; mlp: model"
"""
START = """\
meshpar shards JAX programs. To start, in a clone:

  meshpar plan   examples/llama.py:llama3_8b --topology v5p:4x4x8    memory, communication and time of a layout
  meshpar search examples/llama.py:llama3_8b --topology v5e:16x16    a good mesh and layout
  meshpar lab    examples/llama.py:llama3_8b --topology v5e:16x16    a page to edit both
  meshpar plan   examples/llama.py:llama3_8b --topology "4x h100:8" --set attention=gathered    on GPUs

`meshpar --help` lists all commands."""
EXIT = """\
exit status: 0: success; 1: the answer is no (a layout changes a result, the compiler refuses the program, or it does not fit);
2: bad input (the message says what to write instead)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    starting.clear()
    parser = command_parser()
    given = sys.argv[1:] if argv is None else list(argv)
    if not given:
        print(_start(columns(sys.stdout)))
        return 0
    args, unknown = parser.parse_known_args(given)
    if unknown:
        _refuse(parser, given[0], unknown)
    if not os.environ.get("JAX_PLATFORMS") and not getattr(args, "accelerator", False):
        jax.config.update("jax_platforms", "cpu")  # nothing else needs the accelerators, which others may be using
    warnings.simplefilter("ignore", JoinWarning)  # plans list their joins
    shown, warnings.showwarning = warnings.showwarning, _show_warning
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # what reads it has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MeshparError as e:
        if args.debug:
            raise
        _show_error(e)
        return 1 if isinstance(e, CheckError | CompilerError) else 2
    finally:
        warnings.showwarning = shown


def _start(width: int) -> str:
    """:data:`START` in lines of ``width`` columns; where one would be longer, descriptions are below their commands."""
    wide = max(map(len, START.splitlines())) <= width
    narrow = re.sub(r"(?m)^(  meshpar \w+ +\S.*?) {4}(?=\w)", r"\1\n      ", START)
    return _Help("meshpar")._fill_text(START if wide else narrow, width, "")


def _show_error(error: MeshparError) -> None:
    """Print an error to stderr."""
    _show_message(type(error).__name__, "bold red", str(error))


def _show_warning(message: Warning | str, category: type[Warning], *_: Any) -> None:
    """Print a warning without the line that caused it, which is a line of this module."""
    _show_message(category.__name__, "yellow", str(message))


def _show_message(name: str, style: str, text: str) -> None:
    """Print a message to stderr: its class in a style, the fixes in green, and facts and fixes wrapped in their column."""
    head, *lines = text.split("\n")
    shown, style = list[Any]([Text.assemble((name, style), f": {head}")]), ""
    for line in lines:
        line = re.sub(r'mp\.mesh\(("[^"]*")\)', r"mesh=\1", line)
        line = re.sub(r'\b(mesh|layout)=(?=")', r"--\1 ", line)
        fact = re.match(r"  (tensor|pattern|dims|rule|at|fix|) *(?<= {2}.{7} )(?=\S)", line)
        style = "green" if fact and (fact[1] == "fix" or (style and not fact[1])) else ""
        shown.append(hanging([(Text(line[:9], "bold"), Text(line[10:], style))], gap=1) if fact else Text(line))
    print(shown_text(Group(*shown), sys.stderr), file=sys.stderr)


GROUPS = {
    "Inspect layouts": ("plan", "run-plan", "diff", "search", "lab", "names"),
    "Verify": ("prove", "check", "compile"),
    "Tune": ("tune-options", "calibrate", "tune-kernels"),
    "Run": ("launch", "manifest", "checkpoint"),
    "Environment": ("doctor",),
}
"""Group of commands → their names, in the order of the help."""
FLAG_GROUPS = {
    "output": "--json --html --open --csv --steps --write --brief --verbose --port --no-browser",
    "less common": "--lowering --overlap --schedule --gather --strict --donate --options --calibration --tokens --names --debug",
}
"""Groups of flags in the help of a command, after the flags that say what to plan."""
MORE = "`meshpar COMMAND --help` lists the options of a command; `meshpar --version` prints the version."
MISSING = "missing: TARGET, file.py:function or package.module:function, such as examples/llama.py:tiny"
PROGRESS_SECONDS = 15
"""Seconds between the lines of progress that a command writes to a file or pipe."""
INTS = 8
"""Integers of arguments are drawn below this."""
MESH = 'axes and sizes: "data=64, model=8" (default: the axes of the layout; without one `slice` over several slices, and `data`)'
LAYOUT = (
    'rules, "batch: data; embed: data", or a name: of the target\'s LAYOUTS, or fsdp, megatron, … '
    "(default: FSDP, as far as its dims exist)"
)
TOPOLOGY = 'the devices: "v5p:8x8x8", "2x v5e:16x16", "4x h100:8"'

Add = Callable[..., Any]
"""The ``add_argument`` of a command's parser."""
Run = Callable[[argparse.Namespace], int]


COMMANDS: dict[str, tuple[Run, Callable[[Add], None], str]] = {}
"""Of the commands of a target, which all have TARGET, --set, --json and --debug: name → the function that runs it and returns the
exit status, the function that adds its other arguments, and one sentence for the help text."""


def _command(add_arguments: Callable[[Add], None], about: str) -> Callable[[Run], Run]:
    """Decorates the function of a command of a target: ``_run_plan`` is ``run-plan``; see :data:`COMMANDS`."""

    def register(run: Run) -> Run:
        COMMANDS[run.__name__[1:].replace("_", "-")] = run, add_arguments, about
        return run

    return register


class _Help(argparse.HelpFormatter):
    """Wraps the paragraphs of a description at the width of the terminal; indented lines are commands."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(self._wrapped(p, width) for p in text.strip("\n").split("\n\n"))

    def _wrapped(self, paragraph: str, width: int) -> str:
        if not paragraph.startswith("  "):
            return textwrap.fill(" ".join(paragraph.split()), width)
        flags = r'--\S+ (?:"[^"\n]*"|\S+)'  # are not broken
        glued = re.sub(flags, lambda flag: flag[0].replace(" ", "\0"), paragraph)
        how: dict[str, Any] = {"subsequent_indent": " " * 6, "break_on_hyphens": False, "break_long_words": False}
        lines = (textwrap.wrap(line, width - 2, **how) if len(line) > width else [line] for line in glued.split("\n"))
        return "\n".join(" \\\n".join(parts) for parts in lines).replace("\0", " ")


def _grouped(parser: argparse.ArgumentParser) -> Add:
    """``add_argument`` of a command's parser, which sorts the flags into what to plan, output, and less common ones."""
    plan = parser.add_argument_group("what to plan")
    group_of: dict[str, Any] = {}
    for name, flags in FLAG_GROUPS.items():
        group_of |= dict.fromkeys(flags.split(), parser.add_argument_group(name))

    def add(*flags: str, **options: Any) -> Any:
        return (plan if options.get("required") else group_of.get(flags[-1], plan)).add_argument(*flags, **options)

    return add


class _Parser(argparse.ArgumentParser):
    """A parser whose help is wrapped (:class:`_Help`), and whose errors are one sentence, with the word that a misspelled one is
    similar to."""

    def __init__(self, prog: str | None = None, **options: Any):
        super().__init__(prog, **{"formatter_class": _Help, **options})

    def error(self, message: str) -> NoReturn:
        """Print ``message``, in the words of argparse, and where the flags are listed; exit with status 2."""
        wrong = re.match(r"argument (?:-\w, |-\w/)?(\S+): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if wrong:
            argument, word, choices = wrong.groups()
            what, kind = (argument, "values") if argument.startswith("-") else ("command", "commands")
            similar = did_you_mean(word, re.findall(r"[\w-]+", choices), kind)[0]
            message = f"there is no {what} `{word}`; {similar}"
        message = message.replace("the following arguments are required", "missing")
        message = message.replace("missing: TARGET", MISSING).removesuffix(", …")
        listed = (f"{self.prog} --help", "green"), " lists the options"
        print(shown_text(Text.assemble(("error", "bold red"), f": {message}\n", *listed), sys.stderr), file=sys.stderr)
        self.exit(2)


class CommandParser(_Parser):
    """The parser of all commands: its help lists them in groups.

    Attributes:
      commands: name of a command → its parser.
    """

    commands: dict[str, argparse.ArgumentParser]

    def format_help(self) -> str:
        """The text of ``meshpar --help``: usage, and the commands by group with the first sentence of each description."""
        names, width, lines = max(map(len, self.commands)), columns(sys.stdout), ["usage: meshpar COMMAND ...", ""]
        for group, commands in GROUPS.items():
            lines.append(f"{group}:")
            for name in commands:
                about = f"  {name:<{names}}  {self.about(name)}"
                lines += textwrap.wrap(about, width, subsequent_indent=" " * (names + 4))
            lines.append("")
        below = "\n\n".join((DESCRIPTION.strip("\n"), MORE, EXIT))
        return "\n".join([*lines, _Help("meshpar", width=width)._fill_text(below, width, ""), ""])

    def about(self, name: str) -> str:
        """The first sentence of the description of a command, in one line."""
        return re.split(r"(?<=\.) ", " ".join((self.commands[name].description or "").split()))[0]


def _refuse(parser: CommandParser, command: str, unknown: Sequence[str]) -> NoReturn:
    """Exit with an error for unknown words of a command line, with the flags that are similar."""
    sub = parser.commands.get(command, parser)
    flags = [flag for action in sub._actions for flag in action.option_strings if flag.startswith("--")]
    wrong = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
    if wrong is None:
        quoted = ': quote a value with spaces, --mesh "data=4, model=2"' * ("=" in unknown[0])
        sub.error(f"`{unknown[0]}` belongs to no option{quoted}")
    sub.error(f"there is no option {wrong}" + "".join(f"; did you mean {flag}?" for flag in near(wrong, flags)[:1]))


def command_parser() -> CommandParser:
    """The parser of all commands; ``run`` of the namespace that it returns is the command's function."""
    parser = CommandParser("meshpar", description=DESCRIPTION, epilog=EXIT)
    parser.add_argument("--version", action="version", version=f"meshpar {mp.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)

    for name, (run, add_arguments, about) in COMMANDS.items():
        description = f"{about[0].upper()}{about[1:]}."
        sub = commands.add_parser(name, help=about, description=description, epilog=EXIT)
        # other commands leave accelerators to other processes
        sub.set_defaults(run=run, accelerator=name == "calibrate", said=set())
        sub.add_argument("target", metavar="TARGET", help="file.py:function or package.module:function")
        add = _grouped(sub)
        add_arguments(add)
        sets = 'arguments for the target: "batch=512, seq=4096"'
        add("--set", action="append", default=[], metavar="NAME=VALUE", help=sets)
        step = "TARGET is the step itself, and this function of its module, or module:function, returns its arguments"
        add("--args", dest="arguments", metavar="FUNCTION", help=step)
        mapping = (
            "a JSON file of tree-path patterns and dims, as `meshpar names --write` makes it, in place of the target's; auto: "
            "names are inferred also where the model has some"
        )
        add("--dims", metavar="FILE", help=mapping)
        add("--json", action="store_true", help="print JSON")
        add("--debug", action="store_true", help="show tracebacks")
    add_commands(commands)
    add_tuning(commands)
    add_doctor(commands)
    parser.commands = dict(commands.choices)
    return parser


def _one_plan(add: Add, topology: str = TOPOLOGY) -> None:
    """Add the arguments of a command that plans once."""
    add("--mesh", help=MESH)
    add("--layout", help=LAYOUT)
    add("--topology", help=topology)
    add_flags(add, StepOptions)


def _plan_arguments(add: Add) -> None:
    """Add the arguments of ``meshpar plan``."""
    _one_plan(add)
    add("--html", metavar="FILE", help="write the plan as an HTML page")
    add("--open", action="store_true", help="open the page in the browser (with --html)")
    tokens = "the step generates a token of each sequence of this dim (batch): add its rates"
    add("--tokens", metavar="DIM", help=tokens)
    add("--csv", metavar="FILE", help="write the table of collectives as CSV")
    add("--brief", action="store_true", help="print only the head: memory, step, bytes sent, the costliest rule")
    add("-v", "--verbose", action="store_true", help="print also the options of the compiler")
    add("--steps", action="store_true", help="print what every device runs, one line a step, instead of tables")


def _run_plan_arguments(add: Add) -> None:
    """Add the arguments of ``meshpar run-plan``."""
    add("--tokens", type=float, required=True, metavar="N", help="tokens of the run: 15e12")
    several = 'the devices to compare, with commas between them: "v5p:8x16x16, 2x v5p:8x8x16"'
    add("--topologies", required=True, metavar="LIST", help=several)
    add("--mesh", help='axes and sizes, of which -1 fills a topology: "data=-1, model=8" (default: one axis `data`)')
    add("--layout", help=LAYOUT)
    add("--search", action="store_true", help="search the best mesh and layout of each topology")
    add_flags(add, RunOptions)
    add("--html", metavar="FILE", help="write the result as an HTML page, with a chart of days by save interval")
    add_flags(add, StepOptions)


def _lab_arguments(add: Add) -> None:
    _one_plan(add)
    add("--port", type=int, default=0, help="of the loopback address (default: any that is free)")
    add(
        "--no-browser",
        action="store_true",
        help="print the page's address (with --json its session too), and open nothing",
    )


def _compile_arguments(add: Add) -> None:
    _one_plan(add, TOPOLOGY + "; without one, for as many CPUs as the mesh has")
    add("--effort", choices=("fast", "full"), default="fast", help="of the compiler (%(default)s)")
    add("--html", metavar="FILE", help="write the comparison with the plan, and the collectives, as an HTML page")


def _tune_options_arguments(add: Add) -> None:
    """Add the arguments of ``meshpar tune-options``."""
    _one_plan(add, "the slice of TPUs: v5p:4x4x8")
    add("--budget", metavar="TIME", default="20m", type=parse_duration, help="time for compilations (%(default)s)")
    add(
        "--out",
        metavar="FILE",
        type=Path,
        help="write the options that shorten the step, for options=FILE and --options FILE",
    )


def _search_arguments(add: Add) -> None:
    """Add the arguments of ``meshpar search``."""
    add("--topology", help=TOPOLOGY)
    add("--layout", action="append", default=[], help="a layout of your own to plan as well; several may be given")
    add_flags(add, SearchOptions)
    choices = "values to choose from as well, of `overlap` or of an argument of the target: remat=full,none; several may be given"
    add("--choices", action="append", default=[], metavar="NAME=A,B", help=choices)
    add("--html", metavar="FILE", help="write the result as an HTML page, with a chart of time and memory")
    add_flags(add, StepOptions)


def _calibrate_arguments(add: Add) -> None:
    """Add the arguments of ``meshpar calibrate``."""
    add("--mesh", action="append", help='"data=2, model=4"; several may be given (default: one axis over all devices)')
    layouts = "as for plan; several may be given (default: those LAYOUTS of the target that have the mesh's axes)"
    add("--layout", action="append", help=layouts)
    add_flags(add, StepOptions, without=["calibration"])
    add("--rounds", type=int, default=9, help="number of measurements of each layout (%(default)s)")
    result = "where to save the result, for --calibration of plan and search"
    add("--calibration", dest="result", metavar="FILE", help=result)
    add("--html", metavar="FILE", help="write the result as an HTML page")
    _numbers(add)


def _check_arguments(add: Add) -> None:
    """Add the arguments of ``meshpar check``."""
    add("--mesh", action="append", help='"data=2, model=4"; several may be given (default: meshes of all shapes)')
    add("--layout", action="append", help="as for plan; several may be given")
    lowerings = (*get_args(Lowering), "both")
    add("--lowering", dest="lowerings", choices=lowerings, default="auto", help="as for plan, or both (%(default)s)")
    add_flags(add, StepOptions, without=["lowering", "donate_argnames"])
    _numbers(add)


def _names_arguments(add: Add) -> None:
    mapping = "write the mapping of tree-path patterns to dims, as JSON, to be edited and given as dims="
    add("--write", metavar="FILE", help=mapping)


def _diff_arguments(add: Add) -> None:
    """Add the arguments of ``meshpar diff``."""
    add("--mesh", action="append", help="once or twice; " + MESH)
    add("--layout", action="append", help="once or twice; " + LAYOUT)
    add("--topology", action="append", help="once or twice; " + TOPOLOGY)
    add_flags(add, StepOptions)
    add("--html", metavar="FILE", help="write the comparison as an HTML page")


def _numbers(add: Add) -> None:
    """Add the flags of the commands that run the step: devices, range of integers, tolerance."""
    add("--devices", type=int, default=8, help="number of virtual devices, where there are only CPUs (%(default)s)")
    tolerance = "allowed difference, as a fraction of a leaf's largest value (%(default)s)"
    add("--tolerance", type=float, default=1e-5, help=tolerance)
    add("--ints", type=int, help=f"integers of the arguments are drawn below this ({INTS})")


# -- the commands


@_command(_plan_arguments, "memory, communication and time of a layout, with their causes; nothing is compiled")
def _plan(args: argparse.Namespace) -> int:
    """``meshpar plan``: print or save a plan; exit status 1 if it exceeds the memory of the device."""
    if args.open and not args.html:
        raise TargetError("--open needs a page", fixes=["--html FILE writes one"])
    plan = _planned(args, _target(args), args.mesh, args.topology, args.layout)
    if args.tokens:
        plan = plan.with_tokens(args.tokens)
    if args.csv:
        _save_csv(plan, args.csv)
    text = plan.steps_text() if args.steps else shown_text(plan_renderable(plan, args.brief, args.verbose))
    _show(args, plan, text=text)
    if not args.json and not args.steps and plan.chip is not None:
        _show_next(*_next_step(args, plan))
    if args.open:
        webbrowser.open(Path(args.html).resolve().as_uri())
    return 0 if fits(plan) is not False else 1


def _next_step(args: argparse.Namespace, plan: Plan) -> tuple[str, str]:
    """(command, its purpose): the plan of the known scheme of the shortest step that fits on the plan's mesh, if the plan does not
    fit or that step is faster by :data:`WORTH_TRYING`; where the plan does not fit, FSDP on a mesh of one axis counts as well. Else
    a search, on more devices if the plan's cannot store its state. The edits that keep each layer within a slice count as a scheme.
    Schemes that lack an axis of the plan's layout do not count."""
    if where := topology_for_state(plan):
        return _command_line(args, "search", topology=str(where)), "enough devices for the state"
    found: list[tuple[float, float, dict[str, str]]] = []
    own = {OTHER_AXES.get(axis, axis): axis for axis in plan.sizes}

    def add(**changes: Any) -> None:
        """Plan with some changes, and add the result to ``found`` if it fits."""
        with quiet(), contextlib.suppress(MeshparError):
            other = plan.replan(**changes)
            if fits(other) and other.seconds is not None:
                found.append((other.seconds, other.memory.peak, changes))

    if not fits(plan) and len(plan.sizes) > 1:
        add(mesh=f"data={plan.mesh.size}", layout="fsdp")
    for name, scheme in PRESETS.items():
        layout = scheme(**{axis: own.get(axis, axis) for axis in inspect.signature(scheme).parameters})
        has_axes = set(plan.layout.axes) <= set(layout.axes) <= plan.sizes.keys()
        if has_axes and not plan.program.all_names().isdisjoint(characteristic_dims(layout)):
            add(layout=name if layout == scheme() else str(layout))
    if slice_traffic(plan)[1] and (edits := fix_of_slices(plan)[1]):
        add(**edits)
    if found:
        seconds, peak, changes = min(found, key=lambda f: f[:2])
        if not fits(plan) or seconds < WORTH_TRYING * (plan.seconds or 0.0):
            flags = {"mesh": mesh_text(plan.sizes), "layout": str(plan.requested_layout), **changes}
            text = f"{format_seconds(seconds)} a step, {format_memory(peak)} of memory"
            return _command_line(args, "plan", **flags), text
    return _command_line(args, "search"), "other meshes and layouts"


def _command_line(args: argparse.Namespace, command: str, **flags: str) -> str:
    """The line of another command for the same target, its arguments, the topology and the options of the step, with some flags."""
    words = ["meshpar", command, args.target]
    given = {"set": args.set, "args": args.arguments, "dims": args.dims, "topology": args.topology}
    options = [f for f in dataclasses.fields(StepOptions) if "flag" in f.metadata]
    given |= {flag_of(f)[2:]: value for f in options if (value := getattr(args, f.name, f.default)) != f.default}
    for name, value in {**given, **flags}.items():
        value = ",".join(f"{old}={new}" for old, new in value.items()) if isinstance(value, dict) else value
        for text in value if isinstance(value, list) else [value] * (value is not None):
            words += [f"--{name}"] if text is True else [f"--{name}", text]
    return shlex.join(words)


def _show_next(command: str, purpose: str) -> None:
    """Print what to do next: the purpose, and below it a command in one line, to copy."""
    print(f"\n{shown_text(Text.assemble(('next', 'bold green'), f'  {purpose}:'))}\n      {command}")


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """A context in which SIGTERM is an interrupt, after which a search returns the best candidate up to then."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _progress() -> Progress:
    """Progress as one line on a terminal, else as a line on stderr every :data:`PROGRESS_SECONDS`."""
    if sys.stderr.isatty():
        return "auto"
    shown = time.monotonic()

    def say(text: str) -> None:
        nonlocal shown
        if time.monotonic() - shown > PROGRESS_SECONDS:
            shown = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    return say


def _save_csv(plan: Plan, path: str) -> None:
    """Write one row for each collective of a plan: its bytes and seconds are per call and per device."""
    columns = "op axes tensor dims dtype bytes calls total_bytes seconds algorithm cause source module package_line"
    with open(path, "w", newline="", encoding="utf8") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, columns.split(), extrasaction="ignore")
        writer.writeheader()
        for c in plan.collectives:
            more = {"axes": "+".join(c.axes), "calls": c.count, "total_bytes": c.total_bytes, "cause": c.explanation}
            writer.writerow({**c.to_dict(), **more})


@_command(_run_plan_arguments, "days, cost, goodput and save interval of a training run, with failures of chips")
def _run_plan(args: argparse.Namespace) -> int:
    """``meshpar run-plan``: forecast a run on several topologies; exit status 1 if the plan of none fits in memory."""
    topologies = [text.strip() for text in args.topologies.split(",") if text.strip()] or [""]
    mesh = args.mesh or "data=-1"
    args.topology = topologies[0]
    target = _target(args)
    if args.search:
        if args.mesh or args.layout:
            raise TargetError("--search chooses mesh and layout", fixes=["without --mesh and --layout"])
        found = [_call(args, mp.search, target, topology=where, progress=_progress()) for where in topologies]
        run = run_plan_of([each.plan() for each in found], args.tokens, RunOptions(**given_flags(args, RunOptions)))
        run = replace(run, name=target.name.rpartition(":")[2])
    else:
        plan = _planned(args, target, mesh, args.topology, args.layout)
        run = plan.run_plan(args.tokens, topologies=topologies, mesh=mesh, **given_flags(args, RunOptions))
    _show(args, run)
    return 0 if run.best.fits else 1


@_command(_lab_arguments, "a page in the browser to edit layouts and meshes; the plan's numbers follow")
def _lab(args: argparse.Namespace) -> int:
    """``meshpar lab``: serve the interactive page until it is interrupted; exit status 0."""
    given = parse_options(args.set)
    target = _loaded(args, given)
    layout = None if args.layout is None else _layout(args, target, args.layout)
    mesh = _mesh(args, args.mesh, args.topology, layout or "")

    def lab(target: Target, layout: str | None) -> mp.types.Lab:
        """The lab of a target under ``layout``."""
        where = {"mesh": mesh, "topology": args.topology, "layout": layout, "layouts": target.layouts}
        return _call(args, mp.lab, target, **where)

    found = lab(target, layout)
    found.session.title = args.target
    found.session.sizes = {name: n for name, n in target.options.items() if type(n) is int}
    found.session.resized = lambda sizes: lab(_loaded(args, {**given, **sizes}), "").session
    try:
        found.serve(args.port, browser=not args.no_browser, as_json=args.json)
    except (OSError, OverflowError) as e:
        fix = "another one, or --port 0: any that is free"
        raise TargetError(f"port {args.port} cannot be used: {e}", fixes=[fix]) from None
    return 0


@_command(_compile_arguments, "memory and collectives by the real compiler, for devices that need not be attached")
def _compile(args: argparse.Namespace) -> int:
    """``meshpar compile``: compile the step for the mesh or topology, and print its memory and times; exit status 0."""
    target = _target(args)
    planned = _planned(args, target, args.mesh, args.topology, args.layout)
    mesh = mesh_text(planned.sizes)
    if args.topology is None:
        mp.virtual_devices(planned.mesh.size)
    else:
        print(f"devices  {args.topology}, as its compiler describes them", file=sys.stderr)
    where = {"mesh": mesh if args.topology else mp.mesh(mesh), "topology": args.topology}
    layout = planned.requested_layout or planned.layout
    compiled = _call(args, mp.compile, target, **where, layout=layout, effort=args.effort, progress=True)
    _show(args, compiled)
    return 0


@_command(_tune_options_arguments, "options of the TPU compiler that shorten the step, by its schedules at full effort")
def _tune_options(args: argparse.Namespace) -> int:
    """``meshpar tune-options``: compile the step with one candidate after the other; exit status 1 if none shortens it."""
    target = _target(args)
    plan = _planned(args, target, args.mesh, args.topology, args.layout)
    if plan.chip is None or not plan.chip.compiler.clock_hz:
        raise TargetError(
            "tune-options: only the TPU compiler says how long its schedules take", fixes=["--topology v5p:4x4x8"]
        )
    mesh, layout = mesh_text(plan.sizes), plan.requested_layout or plan.layout

    def compiled(values: Mapping[str, Any]) -> mp.types.Compiled:
        where = {"mesh": mesh, "topology": args.topology, "layout": layout}
        return _call(args, mp.compile, target, **where, effort="full", progress=False, compiler_options=values)

    with progress_line("compiling as planned", "auto") as tell:

        def show(found: Tuning) -> None:
            """The progress after a compilation."""
            done = len(found.tries)
            tell(Counted(f"shortest step {format_seconds(found.seconds)}", done, done + found.left))

        found = tune(compiled, args.budget, plan.options.groups, show)
    tuned = found.tuned(f"{args.target}, {mesh} on {args.topology}, {layout}", plan.chip.name)
    if args.out and found.values:
        tuned.write(args.out)
        _say(args, f"wrote {args.out}")
    _show(args, found, as_json=json.dumps(dataclasses.asdict(tuned)), text=shown_text(found))
    return 0 if found.values else 1


@_command(_search_arguments, "the layout and the mesh of the shortest step that fits, by its plan")
def _search(args: argparse.Namespace) -> int:
    """``meshpar search``: search layouts and meshes, and print the best; exit status 1 if no candidate fits in memory."""
    given = parse_options(args.set)
    vary = dict(_choices(text) for text in args.choices)
    modes = vary.pop("overlap", None)
    targets = {}
    for chosen in itertools.product(*vary.values()):
        change = dict(zip(vary, chosen, strict=True))
        targets[", ".join(f"{k}={v}" for k, v in change.items())] = _loaded(args, {**given, **change})
    target = next(iter(targets.values()))
    if len({str(jax.tree.map(jax.typeof, each.args)) for each in targets.values()}) > 1:
        raise TargetError(
            f"--choices {' '.join(args.choices)} changes the arguments of the step; only the step itself may vary",
            fixes=["--set for what changes shapes, one search for each"],
        )
    if args.topology is None:
        raise TargetError(
            "no machine is given: a search needs a chip, for its memory and for times",
            fixes=['--topology v5e:2x4 has 8 chips, --topology "4x h100:8" 32 GPUs; nothing runs on them'],
        )
    layouts = [_layout(args, target, text) for text in args.layout]
    steps = {name: each.step for name, each in targets.items()}
    with _terminated_as_interrupted():
        found = _call(
            args,
            lambda _, *values, **options: mp.search(steps, *values, **options),
            target,
            topology=args.topology,
            layouts=layouts,
            progress=_progress(),
            choices={"overlap": modes} if modes else None,
            **given_flags(args, SearchOptions),
        )
    best = found.best
    where, mesh = found.larger or (args.topology, best.mesh)
    how = {"topology": where, "mesh": mesh, "layout": best.layout, **best.stages}
    varied = dict(text.split("=", 1) for text in filter(None, best.variant.split(", ")))
    overlap = {"overlap": varied.pop("overlap")} if "overlap" in varied else {}
    args.set += [f"{name}={value}" for name, value in varied.items()]
    found.name, found.command = target.name.rpartition(":")[2], _command_line(args, "plan", **how, **overlap)
    _show(args, found)
    if not args.json and (found.fits or found.larger):
        _show_next(found.command, "the plan of ★")
    return 0 if found.fits else 1


def _choices(text: str) -> tuple[str, list[Any]]:
    """``"remat=full,none"`` → ("remat", its values, read as ``--set`` reads them)."""
    name, _, values = text.partition("=")
    chosen = [parse_options([f"{name}={v.strip()}"]) for v in values.split(",") if v.strip()]
    if not chosen or len({tuple(c) for c in chosen}) > 1:
        raise TargetError(f"--choices {text!r}: it is a name and values", fixes=["--choices remat=full,none"])
    key = next(iter(chosen[0]))
    return key, [c[key] for c in chosen]


@_command(_calibrate_arguments, "run layouts on the attached devices, and fit the chip's efficiencies to their times")
def _calibrate(args: argparse.Namespace) -> int:
    """``meshpar calibrate``: run and time the step on this machine's devices, and print or save the calibration; exit
    status 0."""
    if args.result and Path(args.result).exists():
        read_calibrations(args.result)  # before minutes are spent
    target = _concrete_target(args)
    mesh = args.mesh[0] if args.mesh else f"data={len(jax.devices())}"
    axes = set(mp.mesh(mesh).axis_names)
    own = [text for text in target.layouts.values() if axes.issuperset(mp.Layout(text).axes)]
    layouts = _layouts(args, target, args.layout or own, mesh)
    how = {"mesh": args.mesh, "rounds": args.rounds, "tolerance": args.tolerance}
    found = _call(args, mp.hardware.calibrate, target, layout=layouts, **how)
    if args.result:
        found.calibration.save(args.result)
    _show(args, found)
    return 0


@_command(_check_arguments, "run the step unsharded and sharded on virtual CPU devices, and compare every number")
def _check(args: argparse.Namespace) -> int:
    """``meshpar check``: compare sharded runs with one device; exit status 1 if a result differs."""
    target = _concrete_target(args)
    default = f"data={args.devices}"
    meshes = [default] if args.mesh is None and args.layout is None else args.mesh
    layouts = _layouts(args, target, args.layout, (meshes or [default])[0])
    if meshes is None:
        _say(
            args, f"default  mesh: all shapes of {args.devices} devices, since no --mesh is given; no rule uses `idle`"
        )
    lowerings = ("jit", "shard_map") if args.lowerings == "both" else (args.lowerings,)
    how = {"tolerance": args.tolerance, "raises": False, "progress": _progress()}
    report = _call(args, mp.check, target, layout=layouts, mesh=meshes, lowerings=lowerings, **how)
    rows = [{**dataclasses.asdict(r), "error": None if r.error is None else str(r.error)} for r in report.rows]
    text = str(report)
    if has_drawn_integers(target) and args.ints is None:
        text += f"\nIntegers were drawn below {INTS}: --ints=N draws them below N, such as the size of a vocabulary"
    _show(args, report, json.dumps({"ok": report.ok, "rows": rows, "skipped": report.skipped}), text)
    return 0 if report.ok else 1


@_command(_one_plan, "prove that the per-device program computes the step as written; nothing runs")
def _prove(args: argparse.Namespace) -> int:
    """``meshpar prove``: print the proof of the target under a layout; exit status 1 if a result is not proven."""
    target = _target(args)
    mesh, layout = _where(args, target, args.mesh, args.topology, args.layout)
    proof = _call(args, mp.prove, target, mesh=mesh, topology=args.topology, layout=layout)
    wrapped = (textwrap.fill(line, columns(sys.stdout), subsequent_indent="      ") for line in str(proof).splitlines())
    _show(args, proof, proof.to_json(), "\n".join(wrapped))
    return 0 if proof.proven else 1


@_command(_diff_arguments, "two plans next to each other: other layouts, or other meshes")
def _diff(args: argparse.Namespace) -> int:
    """``meshpar diff``: print the differences between two plans of the target; exit status 0."""
    given = [values or [None] for values in (args.mesh, args.topology, args.layout)]
    if max(map(len, given)) > 2:
        raise TargetError(
            "diff compares two plans: --mesh, --topology and --layout stand once or twice",
            fixes=["at most two values of each; `meshpar search` compares many layouts"],
        )
    target = _target(args)
    a, b = (_planned(args, target, *(values[side] for values in given)) for side in (0, -1))
    _show(args, a.diff(b))
    return 0


# -- shared by the commands


@_command(_names_arguments, "the names of the dims of a step's arguments, inferred where nobody gave one")
def _names(args: argparse.Namespace) -> int:
    """``meshpar names``: print the name of each dim, its evidence and the arrays that have it, and arrays with dims without
    names; exit status 0."""
    target = _target(args)
    program = named_program(target.step, *target.args, dims=target.dims)
    patterns, tables = patterns_of(program), {"names": names_table(program), "unnamed": unnamed_table(program)}
    if args.write:
        Path(args.write).write_text(json.dumps(patterns, indent=2) + "\n")
    if args.json:
        rows = {name: [[cell.text for cell in row] for row in table.rows] for name, table in tables.items()}
        names = [dict(zip(("dim", "size", "arrays", "certain", "evidence"), row, strict=True)) for row in rows["names"]]
        unnamed = [dict(zip(("path", "shape", "dims"), row, strict=True)) for row in rows["unnamed"]]
        print(json.dumps({"dims": patterns, "names": names, "unnamed": unnamed}, indent=2))
    else:
        print("\n\n".join(shown_text(table.terminal()) for table in tables.values() if table.rows))
        if tables["unnamed"].rows:
            print("\nNo rule shards a dim without a name. --write FILE writes a mapping to edit, --dims FILE reads it.")
    return 0


def _target(args: argparse.Namespace) -> Target:
    """The target of a command line, with the arguments of ``--set``."""
    return _loaded(args, parse_options(args.set))


def _loaded(args: argparse.Namespace, options: Mapping[str, Any]) -> Target:
    """The target of a command line with these keyword arguments, and with the dims of ``--dims``.

    Raises:
      TargetError: the target, or the file of dims, cannot be read.
    """
    with progress_line(f"importing {args.target}", "auto"):
        target = load_target(args.target, options, args.arguments)
    if args.dims is None:
        return target
    if args.dims == "auto":
        return replace(target, dims={**dict(target.dims or {}), "*": "auto"})
    try:
        return replace(target, dims=json.loads(Path(args.dims).read_text("utf8")))
    except (OSError, ValueError) as e:
        fix = "`meshpar names TARGET --write FILE` writes one"
        raise TargetError(f"--dims {args.dims}: {e}", fixes=[fix]) from None


def _concrete_target(args: argparse.Namespace) -> Target:
    """The target with numbers in its arguments, for a command that runs the step; on virtual devices if there are only CPUs."""
    mp.virtual_devices(args.devices)  # before the target, which may use a device
    target = _target(args)
    ints = INTS if args.ints is None else args.ints
    return dataclasses.replace(target, args=failing_as_target(target.name, lambda: concrete(target, ints)))


def _call(args: argparse.Namespace, api: Callable[..., Any], target: Target, **how: Any) -> Any:
    """Call a function of the Python API with the target's step, its arguments and the options of the flags.

    Errors of the traced function are raised as the target's errors.
    """
    options = {**given_flags(args, StepOptions), "dims": target.dims, "donate_argnames": _donated(args, target)}
    return failing_as_target(target.name, lambda: api(target.step, *target.args, **how, **options))


def _planned(
    args: argparse.Namespace, target: Target, mesh: str | None, topology: str | None, layout: str | None
) -> Plan:
    """The target's plan."""
    mesh, layout = _where(args, target, mesh, topology, layout)
    plan = _traced(args, target, mesh, topology, layout)
    return with_shared_results(plan, request=replace(plan.request, name=target.name.rpartition(":")[2]))


def _where(
    args: argparse.Namespace, target: Target, mesh: str | None, topology: str | None, layout: str | None
) -> tuple[str, str]:
    """The mesh and the layout; defaults of those that are left out are printed to stderr."""
    layout = None if layout is None else _layout(args, target, layout)
    mesh = _mesh(args, mesh, topology, layout)
    if layout is None:
        layout = _default_layout(args, target, mesh, topology)
        _say(args, f"default  layout: {layout}")
    return mesh, layout


def _traced(args: argparse.Namespace, target: Target, mesh: str, topology: str | None, layout: str) -> Plan:
    """The target's plan."""
    with progress_line(f"tracing and planning {args.target}", "auto"):
        return _call(args, plan_of, target, mesh=mesh, topology=topology, layout=layout)


def _mesh(args: argparse.Namespace, mesh: str | None, topology: str | None, layout: str | None) -> str:
    """The text of the mesh; without one, the axes of the layout over the topology: ``slice`` over its slices, :data:`OTHER_SIZE`
    devices along each other axis, and the remaining ones along the axis of the batch. Without a layout these are ``slice`` and
    ``data``."""
    if mesh is None:
        if topology is None:
            raise TargetError("no machine is given", fixes=["--topology v5p:4x4x8", '--mesh "data=64, model=8"'])
        where, rules = parse_topology(topology), mp.Layout(layout or "")
        batch = [a for rule in rules.rules if rule.dim == "batch" for a in rule.axes if a != BETWEEN_SLICES]
        axes = [*dict.fromkeys([*batch, *(a for a in rules.axes if a != BETWEEN_SLICES)])] or ["data"]
        several = where.slices > 1 and (layout is None or BETWEEN_SLICES in rules.axes)
        over = {BETWEEN_SLICES: where.slices} if several else {}
        left, others = where.devices // math.prod(over.values()), dict[str, int]()
        for axis in axes[1:]:
            others[axis] = math.gcd(left, OTHER_SIZE)
            left //= others[axis]
        mesh = mesh_text({**over, axes[0]: left, **others})
        what = f"the slices of {topology}, and one axis in each" if over else f"one axis over all of {topology}"
        what += ", since the layout has no rule for `slice`" * (where.slices > 1 and not several)
        what = "the axes of the layout: --mesh has other sizes, and `meshpar search` finds them" if others else what
        _say(args, f"default  mesh: {mesh}, {what}")
        for axis in set(axes) - USUAL_AXES:
            for usual in near(axis, USUAL_AXES, LIKELY_MISSPELLED)[:1]:
                _say(args, f"default  axis `{axis}` is new: did you mean `{usual}`?")
    return mesh


def _layout(args: argparse.Namespace, target: Target, text: str) -> str:
    """The text of a layout's rules.

    ``text`` with a ``:`` is returned unchanged. Otherwise it is a name: of ``LAYOUTS`` in the target's module, or of a scheme of
    :mod:`meshpar.layouts`.

    Raises:
      TargetError: there is no such name.
    """
    if ":" in text or not text.strip():
        return text
    for name in (text, scheme_name(text)):
        if name in target.layouts:
            return target.layouts[name]
    if scheme_text(text) is not None:
        return text
    if re.search(r"[=\s]", text.strip()):
        return str(mp.Layout(text))  # an error that says how rules are written
    known = ", ".join(target.layouts) or "none"
    raise TargetError(
        f"there is no layout {text!r}: it has no rule `dim: axis`, and the target's LAYOUTS are: {known}",
        fixes=[
            *(f"did you mean `{name}`?" for name in (near(text, target.layouts) or similar_schemes(text))[:1]),
            f"those for every model are {', '.join(PRESETS)}; each of them also inside of stages, `fsdp+pipeline`",
        ],
    )


def _layouts(args: argparse.Namespace, target: Target, given: Sequence[str] | None, mesh: str) -> list[str]:
    """The texts of several layouts; without any, of the default one on a mesh."""
    return [_layout(args, target, text) for text in given or ()] or [_default_layout(args, target, mesh, None)]


def _default_layout(args: argparse.Namespace, target: Target, mesh: str, topology: str | None) -> str:
    """The text of FSDP over the first axis of the mesh, with the rules whose dims exist. On a mesh whose first axis is ``slice``:
    HSDP over the first two axes or, if that does not fit the memory, FSDP over both.

    Raises:
      TargetError: the target has neither dim.
    """
    bare = _traced(args, target, mesh, topology, "")
    axis, *others = bare.sizes
    names = bare.program.all_names()
    dims = [d for d in ("batch", "embed") if d in names]
    if not dims:
        raise TargetError(
            f"{target.name} has neither a dim `batch` nor a dim `embed` for the default layout",
            fixes=[f"say one: --layout 'dim: {axis}'", f"its dims are {', '.join(sorted(names)[:12])}"],
        )
    if axis != BETWEEN_SLICES or not others:
        return "; ".join(f"{d}: {axis}" for d in dims)
    both = f"{axis}+{others[0]}"
    hsdp, fsdp = ("; ".join(f"{d}: {both if d == 'batch' else weights}" for d in dims) for weights in (others[0], both))
    if fits(bare.replan(layout=hsdp)) is not False:
        return hsdp
    _say(args, f"default  `{hsdp}` does not fit: weights are sharded over `{axis}` too")
    return fsdp


def _donated(args: argparse.Namespace, target: Target) -> list[str]:
    """The names of the arguments to donate: ``--donate``, else ``state`` and, of a step with an nnx optimizer, which updates them,
    all nnx objects."""
    if getattr(args, "donate_argnames", None):
        return args.donate_argnames
    code = getattr(target.step, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    objects = [x for x in target.args if nnx.is_graph_node(x)]
    trains = any(isinstance(x, nnx.Optimizer) for x in objects)
    given = zip(names, target.args, strict=False)
    return [name for name, x in given if name == "state" or (trains and nnx.is_graph_node(x))]


def _say(args: argparse.Namespace, text: str) -> None:
    """Print a line to stderr, once."""
    if not args.json and text not in args.said:
        args.said.add(text)
        print(text, file=sys.stderr)


def _show(args: argparse.Namespace, shown: Any, as_json: str | None = None, text: str | None = None) -> None:
    """Save a result as a page with --html, and print it: as JSON with --json, in colour on a terminal, else as plain text.

    Args:
      as_json: default: its ``to_json()``.
      text: printed in place of the result.

    Raises:
      TargetError: the folder of the page does not exist.
    """
    if path := getattr(args, "html", None):
        folder = Path(path).parent
        if not folder.resolve().is_dir():
            fix = f"create {folder} first, or give a path in an existing folder"
            raise TargetError(f"{path}: there is no folder {folder}", fixes=[fix])
        shown.save(path)
        _say(args, f"wrote {path}")
    result = shown if text is None else text
    if args.json:
        result = json.dumps(json.loads(as_json or shown.to_json()), indent=2)
    print(result, flush=True)  # before `next`, which takes seconds
