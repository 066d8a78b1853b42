"""Measures an op against stock PyTorch: time, bytes saved for backward, peak memory.

A bench file holds the sizes and the two formulas; everything else is here:

    from harness import Case, main

    def cases(quick: bool, device: torch.device) -> list[Case]:
        shape = (2, 3) if quick else (64, 1024)
        return [
            Case(
                name="x".join(map(str, shape)),
                inputs=lambda: (torch.randn(shape, device=device, requires_grad=True),),
                stock=torch.relu,
                memopt=memopt.nn.functional.relu,
            )
        ]

    if __name__ == "__main__":
        main("relu", cases)

and is run by

    python benches/bench_relu.py [--json FILE] [--quick] [--threads 1 2] [--only TEXT] [--device D]

For every case there is a row for stock eager, stock eager on channels_last inputs (where one is
4-D), stock under torch.compile, and memopt; each for the forward pass alone (no gradient wanted)
and for forward and backward together. The variants take turns within each round, so that a machine
that slows down slows all of them; shown are the median and the 20 % and 80 % quantiles over the
rounds. `ratio` is the median over that of the fastest stock row: below 1, memopt is faster. Before
it is timed, memopt's result is compared with the stock one.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import memopt
from memopt._measure import peak_bytes, saved_bytes

Function = Callable[..., Tensor]
STOCK = ("eager", "channels_last", "compile")


@dataclass(frozen=True)
class Case:
    """One size of one op.

    Args:
        name: says the sizes, e.g. "64x1024 bfloat16".
        inputs: makes the arguments of all variants; those that require a gradient get one in the
            backward pass.
        stock, memopt: functions of these arguments that return one tensor.
        others: more functions to compare, by name, such as a peer's or memopt's with other storage.
        exact: memopt computes what stock does, which is then checked.
    """

    name: str
    inputs: Callable[[], tuple[Any, ...]]
    stock: Function
    memopt: Function
    others: dict[str, Function] = field(default_factory=dict)
    exact: bool = True


@dataclass(frozen=True)
class Variant:
    """A function and the arguments it is measured on."""

    function: Function
    args: tuple[Any, ...]

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.function(*self.args)

    def forward_backward(self) -> list[Tensor]:
        output = self.function(*self.args)
        wanted = [a for a in self.args if isinstance(a, Tensor) and a.requires_grad]
        return [output.detach(), *torch.autograd.grad(output, wanted, torch.ones_like(output))]

    def saved(self) -> tuple[int, int]:
        """Bytes saved for backward, and those of them that are not an argument's."""
        tensors = [a for a in self.args if isinstance(a, Tensor)]
        total = saved_bytes(lambda: self.function(*self.args))
        return total, saved_bytes(lambda: self.function(*self.args), ignore=tensors)


# -- Measuring -------------------------------------------------------------------------------------


def variants(case: Case, compiler: str) -> dict[str, Variant]:
    args = case.inputs()
    found = {"eager": Variant(case.stock, args)}
    if any(isinstance(a, Tensor) and a.dim() == 4 for a in args):
        found["channels_last"] = Variant(case.stock, tuple(map(_channels_last, args)))
    found["compile"] = Variant(torch.compile(case.stock, backend=compiler), args)
    found["memopt"] = Variant(case.memopt, args)
    return found | {name: Variant(function, args) for name, function in case.others.items()}


def _channels_last(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dim() != 4:
        return value
    moved = value.detach().contiguous(memory_format=torch.channels_last)
    return moved.requires_grad_(value.requires_grad)


def check(case: Case, stock: Variant, ours: Variant) -> None:
    """Raise when memopt does not compute what it is compared with."""
    for actual, expected in zip(ours.forward_backward(), stock.forward_backward(), strict=True):
        tolerance = max(1e-3, 4 * torch.finfo(expected.dtype).eps)
        scale = expected.abs().max().item() if expected.numel() else 0.0
        torch.testing.assert_close(
            actual,
            expected,
            rtol=tolerance,
            atol=tolerance * scale,
            equal_nan=True,
            msg=lambda text: f"{case.name}: memopt differs from stock. {text}",
        )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(
    functions: dict[str, Callable[[], Any]],
    device: torch.device,
    rounds: int,
    sample_seconds: float,
    progress: Callable[[float], None],
) -> dict[str, list[float]]:
    """Seconds a call, `rounds` samples for each function, taken in turns."""

    def sample(function: Callable[[], Any], calls: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize(device)
        return (time.perf_counter() - start) / calls

    calls = {}
    for name, function in functions.items():
        function()  # warms caches and compiles
        calls[name] = max(1, int(sample_seconds / max(sample(function, 1), 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds):
        order = list(functions)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            samples[name].append(sample(functions[name], calls[name]))
        progress((turn + 1) / rounds)
    return samples


def measure(
    case: Case, device: torch.device, options: argparse.Namespace, label: str
) -> Iterator[dict[str, Any]]:
    """The rows of one case."""
    torch._dynamo.reset()  # compiled code keeps the number of threads it was compiled for
    torch.manual_seed(0)
    found = variants(case, "aot_eager" if options.quick else "inductor")
    if case.exact:
        check(case, found["eager"], found["memopt"])
    for direction in ("forward", "forward_backward"):
        functions = {name: getattr(v, direction) for name, v in found.items()}
        samples = interleaved(
            functions,
            device,
            rounds=options.rounds,
            sample_seconds=0.0 if options.quick else 0.02,
            progress=lambda done: show_progress(f"{label} {direction}", done),  # noqa: B023
        )
        median = {name: statistics.median(s) for name, s in samples.items()}
        best_stock = min(median[name] for name in STOCK if name in median)
        for name, variant in found.items():
            q20, *_, q80 = statistics.quantiles(samples[name], n=5, method="inclusive")
            saved = variant.saved() if direction == "forward_backward" else (0, 0)
            yield {
                "case": case.name,
                "pass": direction,
                "variant": name,
                "median_s": median[name],
                "q20_s": q20,
                "q80_s": q80,
                "ratio_to_best_stock": median[name] / best_stock,
                "saved_bytes": saved[0],
                "saved_bytes_beyond_inputs": saved[1],
                "peak_bytes": peak_bytes(functions[name], device),
            }


# -- Reporting -------------------------------------------------------------------------------------


def machine(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "memopt": memopt.__version__,
    }


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def show_progress(label: str, done: float) -> None:
    """One line on stderr: rewritten on a terminal, else printed when a measurement is complete."""
    if sys.stderr.isatty():
        width = 24
        bar = "#" * round(done * width)
        end = "\n" if done >= 1 else ""
        print(f"\r[{bar:<{width}}] {label}\x1b[K", end=end, file=sys.stderr, flush=True)
    elif done >= 1:
        print(label, file=sys.stderr, flush=True)


def human_bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def human_seconds(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "case": lambda row: row["case"],
    "threads": lambda row: str(row["threads"]),
    "pass": lambda row: row["pass"].replace("_", "+"),
    "variant": lambda row: row["variant"],
    "median": lambda row: human_seconds(row["median_s"]),
    "20 %": lambda row: human_seconds(row["q20_s"]),
    "80 %": lambda row: human_seconds(row["q80_s"]),
    "ratio": lambda row: f"{row['ratio_to_best_stock']:.2f}",
    "saved": lambda row: human_bytes(row["saved_bytes"]),
    "less inputs": lambda row: human_bytes(row["saved_bytes_beyond_inputs"]),
    "peak": lambda row: human_bytes(row["peak_bytes"]),
}
TEXT_COLUMNS = ("case", "pass", "variant")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Aligned columns; a blank line between the groups that are compared with each other."""
    lines = [list(COLUMNS), *([cell(row) for cell in COLUMNS.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text, group = [], None
    for line, row in zip(lines, [None, *rows], strict=True):
        this_group = row and (row["case"], row["threads"], row["pass"])
        if this_group != group:
            text.append("")
            group = this_group
        cells = (
            f"{cell:<{width}}" if name in TEXT_COLUMNS else f"{cell:>{width}}"
            for cell, width, name in zip(line, widths, COLUMNS, strict=True)
        )
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def main(
    op: str,
    cases: Callable[[bool, torch.device], list[Case]],
    argv: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Measure `cases` as the command line asks, print the table, and return its rows."""
    parser = argparse.ArgumentParser(description=f"{op} against stock PyTorch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes, no code generation: only shows that it runs",
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose name holds TEXT")
    parser.add_argument("--rounds", type=int, help="samples for each row (default: 21)")
    options = parser.parse_args(argv)
    options.rounds = options.rounds or (3 if options.quick else 21)
    device = torch.device(options.device)
    wanted = [c for c in cases(options.quick, device) if options.only in c.name]
    if not wanted:
        parser.error(f"--only {options.only}: no case has that in its name")

    rows: list[dict[str, Any]] = []
    threads_before = torch.get_num_threads()
    for threads in options.threads:
        torch.set_num_threads(threads)
        for number, case in enumerate(wanted, start=1):
            label = f"{op} {number}/{len(wanted)} {case.name}, threads {threads}:"
            for row in measure(case, device, options, label):
                rows.append({"op": op, **row, "threads": threads, **machine(device)})
    torch.set_num_threads(threads_before)

    about = machine(device)
    print(f"{op} on {about['device']}, torch {about['torch']}, memopt {about['memopt']}")
    print(table(rows))
    if options.json:
        options.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    return rows
