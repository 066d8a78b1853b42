"""What the demo found: judged, as a table, as a sentence and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

import memopt
from memopt.demo.rounding import STRETCH
from memopt.demo.train import Measured, Options, Trained

#: What each network must reach on the held-out digits.
ACCURACY = 0.95


#: What is compared as stock over memopt.
RATIOS = ("saved", "saved_by_convs", "saved_beyond", "peak", "seconds")


# -- Judging ---------------------------------------------------------------------------------------


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of two loss curves."""
    return (torch.tensor(one) - torch.tensor(other)).abs().max().item()


def faults(result: Trained) -> list[str]:
    """What is wrong with a network, in words; nothing if it passes."""
    name, found = result.recipe.name, []
    for layers, build in (("stock", result.stock), ("memopt", result.memopt)):
        if not build.accuracy >= ACCURACY:
            found.append(
                f"{name}: of {layers} layers it reads {percent(build.accuracy)} of the held-out "
                f"digits, needs {percent(ACCURACY)}"
            )
    drift = result.drift
    if drift is not None and not drift.explained:
        found.append(
            f"{name}: the losses of memopt's layers leave the stock ones by {drift.typical:.1e} "
            f"within {STRETCH} steps, rounding explains {drift.allowed:.1e}"
        )
    return found


def verdict(results: Sequence[Trained]) -> list[str]:
    """The outcome in sentences."""
    found = [fault for result in results for fault in faults(result)]
    if found:
        return [f"FAILED  {fault}" for fault in found]
    worst = min(build.accuracy for r in results for build in (r.stock, r.memopt))
    conv = [r.stock.saved_by_convs / r.memopt.saved_by_convs for r in results]
    beyond = [r.stock.saved_beyond / r.memopt.saved_beyond for r in results]
    same = (
        "the losses of memopt's layers leave the stock ones by no more than rounding explains"
        if all(r.drift is not None for r in results)
        else "the stored inputs are compressed, so the losses are not compared"
    )
    count = f"{len(results)} networks" if len(results) > 1 else "1 network"
    return [
        f"PASSED  {count}: {percent(worst)} or more of the held-out digits are read right; {same}. "
        f"For backward, convolution, ReLU and pooling keep {_range(conv)} times less "
        f"({_range(beyond)} times less beyond their input and weights)."
    ]


# -- The table -------------------------------------------------------------------------------------

HEADER = (
    ("", "", "held-out", "saved for", "conv+ReLU+pool", "beyond", "peak of", "time per"),
    ("network", "layers", "accuracy", "backward", "saved", "x and W", "a step", "step"),
)


def table(results: Sequence[Trained]) -> str:
    """Three rows for each network: stock, memopt, and how they compare."""
    rows: list[tuple[str, ...]] = [*HEADER]
    notes = {}
    for result in results:
        stock, ours = result.stock, result.memopt
        name = result.recipe.name
        rows += [(), (name, "stock", *_cells(stock)), ("", "memopt", *_cells(ours))]
        points = 100 * (ours.accuracy - stock.accuracy)
        rows.append(("", "", f"{points:+.1f} points", *_ratios(stock, ours)))
        notes[len(rows)] = _loss_note(result)
    widths = [max(len(row[i]) for row in rows if row) for i in range(len(HEADER[0]))]
    lines = []
    for number, row in enumerate(rows, start=1):
        texts, figures = row[:2], row[2:]
        cells = [text.ljust(width) for text, width in zip(texts, widths, strict=False)]
        cells += [text.rjust(width) for text, width in zip(figures, widths[2:], strict=False)]
        lines.append("  ".join(cells).rstrip())
        lines += [" " * (widths[0] + 2) + note for note in notes.get(number, ())]
    return "\n".join(lines)


def _cells(build: Measured) -> tuple[str, ...]:
    sizes = (build.saved, build.saved_by_convs, build.saved_beyond, build.peak)
    return (
        percent(build.accuracy),
        *(human_bytes(size) for size in sizes),
        f"{1e3 * build.seconds:.1f} ms",
    )


def _ratios(stock: Measured, ours: Measured) -> tuple[str, ...]:
    return tuple(_compared(getattr(stock, name), getattr(ours, name)) for name in RATIOS)


def _compared(stock: float, ours: float) -> str:
    if (text := ratio(stock, ours)) == "1.0":
        return "the same"
    return f"{text}x less" if stock > ours else f"{ratio(ours, stock)}x more"


def _loss_note(result: Trained) -> list[str]:
    whole = apart(result.stock.losses, result.memopt.losses)
    rounding = apart(result.stock.losses, result.precise_losses)
    lines = [f"loss curves apart: {whole:.2g} at most (stock in higher precision: {rounding:.2g})"]
    if (drift := result.drift) is not None:
        lines.append(
            f"within {STRETCH} steps from the same weights: {drift.typical:.1e} "
            f"(rounding explains {drift.allowed:.1e})"
        )
    return lines


def human_bytes(count: float) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def ratio(stock: float, ours: float) -> str:
    value = stock / ours
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _range(ratios: Sequence[float]) -> str:
    low, high = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
    return low if low == high else f"{low} to {high}"


# -- JSON ------------------------------------------------------------------------------------------


def as_json(results: Sequence[Trained], options: Options) -> dict[str, Any]:
    """Everything that was measured, the loss curves included."""
    return {
        "memopt": memopt.__version__,
        "torch": torch.__version__,
        "device": str(options.device),
        "threads": torch.get_num_threads(),
        "amp": str(options.amp).removeprefix("torch.") if options.amp else None,
        "storage": options.storage,
        "seed": options.seed,
        "passed": not any(faults(result) for result in results),
        "networks": {result.recipe.name: _network_json(result) for result in results},
    }


def _network_json(result: Trained) -> dict[str, Any]:
    drift = result.drift
    return {
        "faults": faults(result),
        "stock": asdict(result.stock),
        "memopt": asdict(result.memopt),
        "ratios": {
            name: getattr(result.stock, name) / getattr(result.memopt, name) for name in RATIOS
        },
        "precise_losses": result.precise_losses,
        "losses_apart": apart(result.stock.losses, result.memopt.losses),
        "losses_apart_by_rounding": apart(result.stock.losses, result.precise_losses),
        "drift": drift
        and {
            "memopt": drift.memopt.tolist(),
            "precise": drift.precise.tolist(),
            "typical": drift.typical,
            "allowed": drift.allowed,
        },
    }
