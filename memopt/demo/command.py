"""`memopt demo`: the command line of the demo."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from memopt.demo.networks import RECIPES, Recipe

if TYPE_CHECKING:
    from memopt.demo.data import Digits
    from memopt.demo.train import Options, Trained

SUMMARY = "train three small networks on real digits: stock layers against memopt layers"
DESCRIPTION = """\
Trains three small networks on 1,797 real handwritten digits (scikit-learn's load_digits),
each of stock layers and of memopt layers, from the same weights and on the same batches.
Shows what both learn, what they keep for backward and how fast they are, and draws it.

  simple         conv, ReLU, pool, twice; linear; log-softmax and NLL; SGD
  cross-entropy  conv, ReLU, pool, twice; linear; cross-entropy on logits; SGD
  pool-first     conv, pool, ReLU, twice; linear; log-softmax, then cross-entropy; Adam

The exit status is 1 when a network reads less than 95 % of the held-out digits, or when
memopt's loss curve leaves the stock one by more than rounding explains.

Needs the extra packages of: pip install 'memopt[demo]'"""

#: Import name and name on PyPI of what the extra `demo` brings.
EXTRAS = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "tqdm": "tqdm"}

AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}

WRONG_USAGE = 2
WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("memopt_demo.png"),
        metavar="FILE",
        help="the picture (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures as JSON")
    parser.add_argument(
        "--networks",
        type=_networks,
        default=list(RECIPES.values()),
        metavar="NAMES",
        help=f"some of {','.join(RECIPES)} (default: all)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--amp", choices=tuple(AMP), help="train under autocast; fp16 with a GradScaler"
    )
    parser.add_argument(
        "--storage",
        choices=("keep", "int8", "int4", "int2"),
        default="keep",
        help="how memopt.nn.Linear keeps its input for backward; all but keep are inexact, and "
        "then only the accuracy is checked (default: %(default)s)",
    )
    parser.add_argument(
        "--epochs",
        type=_positive,
        metavar="N",
        help="passes over the data (default: enough for each network)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="of the weights and of the order of the images (default: %(default)s)",
    )


def _networks(names: str) -> list[Recipe]:
    wanted = [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in RECIPES]:
        raise argparse.ArgumentTypeError(
            f"unknown network {unknown[0]!r}, needs some of {','.join(RECIPES)}"
        )
    return [RECIPES[name] for name in dict.fromkeys(wanted)]


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, needs a whole number from 1 on")
    return int(text)


def obstacle(arguments: argparse.Namespace) -> str | None:
    """Why the demo cannot start; better said now than after the training."""
    missing = [
        package for name, package in EXTRAS.items() if importlib.util.find_spec(name) is None
    ]
    if missing:
        return f"{' and '.join(missing)} not installed; run: pip install 'memopt[demo]'"
    if arguments.device == "cuda" and not torch.cuda.is_available():
        return f"--device cuda: torch {torch.__version__} finds no CUDA device"
    for file in filter(None, (arguments.out, arguments.json)):
        if file.is_dir() or not file.resolve().parent.is_dir():
            return f"{file}: is a folder, or its folder does not exist"
    if arguments.out.suffix.lower() != ".png":
        return f"--out: got {arguments.out}, needs a name that ends in .png"
    return None


def run(arguments: argparse.Namespace) -> int:
    if why := obstacle(arguments):
        print(f"memopt demo: {why}", file=sys.stderr)
        return WRONG_USAGE
    # Imported here because they need the extra packages.
    from memopt.demo import figure, report
    from memopt.demo.data import load_digits
    from memopt.demo.train import Options

    start = time.perf_counter()
    options = Options(
        device=torch.device(arguments.device),
        amp=AMP[arguments.amp] if arguments.amp else None,
        storage=arguments.storage,
        seed=arguments.seed,
        epochs=arguments.epochs,
    )
    digits = load_digits().to(options.device)
    print(
        f"{len(digits.train_labels):,} handwritten digits to learn from and "
        f"{len(digits.test_labels)} held out; {describe(options)}"
    )
    results = [train_with_bar(recipe, digits, options) for recipe in arguments.networks]
    print(f"\n{report.table(results)}\n")
    for sentence in report.verdict(results):
        print(textwrap.fill(sentence, WIDTH, subsequent_indent=" " * len("PASSED  ")))
    figure.draw(results, arguments.out, describe(options))
    written = [arguments.out]
    if arguments.json:
        text = json.dumps(report.as_json(results, options), indent=2)
        arguments.json.write_text(text + "\n")
        written.append(arguments.json)
    seconds = time.perf_counter() - start
    print(f"Wrote {' and '.join(map(str, written))} after {seconds:.0f} seconds.")
    return 1 if any(report.faults(result) for result in results) else 0


def describe(options: Options) -> str:
    device = options.device.type
    if device == "cpu":
        threads = torch.get_num_threads()
        device += f" with {threads} thread{'s' if threads != 1 else ''}"
    precision = "float32"
    if options.amp is not None:
        precision = f"autocast to {str(options.amp).removeprefix('torch.')}"
    storage = "" if options.exact else f", linear inputs stored in {options.storage}"
    return f"{device}, {precision}{storage}, seed {options.seed}"


def train_with_bar(recipe: Recipe, digits: Digits, options: Options) -> Trained:
    """`train` with a progress bar on stderr; in a file, such as a CI log, it moves rarely."""
    from tqdm import tqdm

    from memopt.demo.train import epochs_of, train

    terminal = sys.stderr.isatty()
    with tqdm(
        desc=f"{recipe.name:<{max(map(len, RECIPES))}}",
        total=epochs_of(recipe, options) * len(digits.batches(options.seed)),
        unit="step",
        file=sys.stderr,
        mininterval=0.1 if terminal else 15.0,
        dynamic_ncols=terminal,
    ) as bar:

        def progress(stock: float, ours: float) -> None:
            bar.set_postfix_str(f"loss {stock:.3f}, memopt {ours:.3f}", refresh=False)
            bar.update()

        return train(recipe, digits, options, progress)
