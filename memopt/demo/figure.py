"""The demo's picture: loss curves, bytes kept for backward, and the rest in figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from memopt.demo.report import human_bytes, percent, ratio
from memopt.demo.train import Trained

STOCK, MEMOPT, INK, FAINT = "#b9c2cc", "#1c5fa8", "#1f2933", "#7b8794"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so the picture is the same everywhere
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": STOCK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}
DPI = 150
COLUMN_WIDTH, HEIGHT = 3.6, 6.4

BARS = {
    "saved": "whole step",
    "saved_by_convs": "conv + ReLU + pool",
    "saved_beyond": "… beyond x and W",
}


def draw(results: Sequence[Trained], path: Path, subtitle: str) -> None:
    """Write the picture as a PNG: the same results give the same bytes."""
    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE, "backend": "agg"}):
        width = COLUMN_WIDTH * max(len(results), 2)
        figure = Figure(figsize=(width, HEIGHT), dpi=DPI, facecolor="white")
        FigureCanvasAgg(figure)
        margin = 0.25 / width
        figure.text(
            margin, 0.955, "Same training, less memory for backward", size=15, weight="bold"
        )
        figure.text(margin, 0.92, f"1,797 handwritten digits; {subtitle}", color=FAINT)
        _legend(figure, width)
        grid = figure.add_gridspec(
            2,
            len(results),
            height_ratios=(2.2, 3.2),
            left=0.62 / width,
            right=1 - 0.3 / width,
            top=0.845,
            bottom=0.03,
            hspace=0.24,
            wspace=0.26,
        )
        for column, result in enumerate(results):
            _curves(figure.add_subplot(grid[0, column]), result, first=column == 0)
            below = grid[1, column].subgridspec(2, 1, height_ratios=(2.4, 0.8), hspace=0.1)
            _bars(figure.add_subplot(below[0]), result)
            _figures(figure.add_subplot(below[1]), result)
        figure.savefig(path, format="png", metadata={"Software": None})


def _legend(figure: Figure, width: float) -> None:
    right = 1 - 0.3 / width
    figure.text(right, 0.957, "memopt layers", color=MEMOPT, weight="bold", ha="right")
    figure.text(right, 0.92, "stock layers", color=FAINT, weight="bold", ha="right")


def _curves(axes: Any, result: Trained, first: bool) -> None:
    """Both loss curves, memopt dashed on stock."""
    stock, ours = smooth(result.stock.losses), smooth(result.memopt.losses)
    axes.plot(stock, color=STOCK, linewidth=4.0, solid_capstyle="round")
    axes.plot(ours, color=MEMOPT, linewidth=1.4, linestyle=(0, (3, 1.6)))
    axes.set_title(result.recipe.name, loc="left", size=12, weight="bold", color=INK)
    axes.set_xlim(0, len(stock) - 1 or 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step", loc="right", labelpad=1)
    if first:
        axes.set_ylabel("loss (mean of 20 steps)")


def smooth(losses: Sequence[float], steps: int = 20) -> list[float]:
    """The mean of each loss and those before it: single batches scatter too much to be seen."""
    windows = (losses[max(0, i + 1 - steps) : i + 1] for i in range(len(losses)))
    return [sum(window) / len(window) for window in windows]


def _bars(axes: Any, result: Trained) -> None:
    """Bytes kept for backward: a pair of bars, and their ratio at the end."""
    longest = max(getattr(result.stock, name) for name in BARS)
    pad = 0.02 * longest
    for row, (name, label) in enumerate(BARS.items()):
        stock, ours = getattr(result.stock, name), getattr(result.memopt, name)
        above, below = row + 0.04, row + 0.34
        axes.barh(above, stock, height=0.29, color=STOCK)
        axes.barh(below, ours, height=0.29, color=MEMOPT)
        text = {"size": 8.5, "va": "center_baseline"}
        axes.text(0, row - 0.16, label, size=9.5)
        axes.text(stock - pad, above, human_bytes(stock), ha="right", color=INK, **text)
        axes.text(ours + pad, below, human_bytes(ours), color=MEMOPT, **text)
        axes.text(
            1.32 * longest,
            row + 0.19,
            ratio(stock, ours) + "×",
            va="center_baseline",
            ha="right",
            size=14,
            weight="bold",
            color=MEMOPT,
        )
    axes.set_xlim(0, 1.32 * longest)
    axes.set_ylim(len(BARS) - 0.45, -0.5)
    axes.set_title("kept for backward", loc="left", size=10, color=FAINT)
    axes.axis("off")


def _figures(axes: Any, result: Trained) -> None:
    """Accuracy, peak and time: a small table in text."""
    stock, ours = result.stock, result.memopt
    rows = (
        ("held-out accuracy", percent(stock.accuracy), percent(ours.accuracy)),
        ("peak of a step", human_bytes(stock.peak), human_bytes(ours.peak)),
        ("time per step", f"{1e3 * stock.seconds:.1f} ms", f"{1e3 * ours.seconds:.1f} ms"),
    )
    for row, (label, left, right) in enumerate(rows):
        axes.text(0, row, label, color=INK, va="center", size=9.5)
        axes.text(0.73, row, left, color=FAINT, va="center", ha="right", size=9.5)
        axes.text(1, row, right, color=MEMOPT, va="center", ha="right", size=9.5, weight="bold")
    axes.set_xlim(0, 1)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.axis("off")
