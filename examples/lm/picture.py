"""The loss curve as a picture."""

import math
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

INK, GREY, RULE, LINE, MARK = "#1f2933", "#66727f", "#e4e7eb", "#2563eb", "#dc2626"
CURVES = (LINE, MARK, "#059669", "#d97706")


def draw_losses(
    losses: Sequence[float],
    held_out_bits: float,
    *,
    bytes_per_step: int,
    title: str,
    subtitle: str,
    path: str,
) -> None:
    """Draw the training loss, raw and smoothed, and the held-out loss, all in bits per byte.

    losses: nats per byte, one a step.
    """
    bits = np.asarray(losses) / math.log(2)
    seen = np.arange(1, len(bits) + 1) * bytes_per_step
    smoothed = smooth(bits)

    figure = Figure(figsize=(8, 4.6), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(seen, bits, color=LINE, alpha=0.3, linewidth=0.8)
    axes.plot(seen, smoothed, color=LINE, linewidth=2.2, solid_capstyle="round")
    axes.plot(seen[-1], held_out_bits, "o", color=MARK, markersize=7, clip_on=False, zorder=3)

    text = {"textcoords": "offset points", "annotation_clip": False, "fontsize": 10}
    middle = int(np.searchsorted(seen, 0.45 * seen[-1]))
    axes.annotate(
        "training (smoothed and each step)",
        (seen[middle], bits[middle : middle + len(bits) // 3 + 1].max()),
        xytext=(0, 10),
        color=LINE,
        **text,
    )
    axes.annotate(
        f"{held_out_bits:.2f}\nheld out",
        (seen[-1], held_out_bits),
        xytext=(12, 0),
        va="center",
        color=MARK,
        fontweight="bold",
        **text,
    )
    heading = textwrap.fill(title, 70)
    below = textwrap.fill(subtitle, 105)
    axes.set_title(below, loc="left", fontsize=9, color=GREY, pad=10)
    axes.annotate(
        heading,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 10 + 13 * (below.count("\n") + 1)),
        textcoords="offset points",
        fontsize=13,
        fontweight="bold",
        color=INK,
    )
    axes.set_xlim(0, seen[-1])
    axes.set_ylim(math.floor(2 * min(smoothed.min(), held_out_bits)) / 2 - 0.25)
    axes.set_xlabel("training text seen", color=GREY)
    axes.set_ylabel("bits per byte", color=GREY)
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY, length=0, pad=6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    figure.savefig(path)


def draw_curves(losses: Mapping[str, Sequence[float]], *, bytes_per_step: int, path: str) -> None:
    """Draw smoothed training losses of several runs in bits per byte, with a legend.

    losses: label → nats per byte, one a step.
    """
    figure = Figure(figsize=(8, 4.6), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for color, (label, values) in zip(CURVES, losses.items(), strict=False):
        seen = np.arange(1, len(values) + 1) * bytes_per_step
        axes.plot(seen, smooth(np.asarray(values) / math.log(2)), color=color, linewidth=2, label=label)
    axes.legend(title="bytes sent between slices by a device", frameon=False, title_fontsize=9, fontsize=10)
    axes.set_xlim(0)
    axes.set_xlabel("training text seen", color=GREY)
    axes.set_ylabel("bits per byte", color=GREY)
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.tick_params(colors=GREY, length=0, pad=6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    figure.savefig(path)


def smooth(values: np.ndarray) -> np.ndarray:
    """A Gaussian mean whose width grows with the step, since a loss falls fastest at the start."""
    place = np.arange(len(values))
    width = np.clip(place / 12, 0.5, max(1.0, len(values) / 40))
    weight = np.exp(-0.5 * ((place[:, None] - place) / width[:, None]) ** 2)
    return weight @ values / weight.sum(axis=1)
