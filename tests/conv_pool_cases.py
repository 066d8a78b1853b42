"""Compares convolution-and-pool layers with the stock ops, on cases drawn from seeds.

    python tests/conv_pool_cases.py --cases 20000 --seed 0    # seeds 0 to 19999
    python tests/conv_pool_cases.py --seed 4711               # one of them again

Where arithmetic is exact (small integers), values, winners and gradients are eager's bit for bit.
On real numbers two sums in another order may give a window another winner. So each winner must be
its window's greatest value up to the rounding of a convolution, and the gradients are compared with
those that the stock ops give to memopt's own winners, read from its codes: no tolerance is widened
for a winner that differs. Results obey the accuracy rule (`support.assert_accurate`) or, where the
stock op was lucky in a small case, lie within the rounding noise of their sums; over a whole run
the errors of the two obey the rule alone.

What eager leaves open is not compared: 0 * inf in a convolution's padding, and sums that overflow,
depend on its algorithm. A result is open where eager itself gives NaN or infinity in one memory
format, precision or library but not in another.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import memopt
from conv_pool_drawing import EXACT, Case, convolve, draw, gradient, lay_out, tensors
from memopt import _backends
from memopt.ops import _pool_codes
from support import (
    assert_accurate,
    assert_same_bits,
    assert_same_for_threads,
    saved_tensors,
    unchanged,
)

#: The results, and how many times the stock op's error each may have.
FACTORS = {
    "output": 2.0,
    "input's gradient": 3.0,
    "weight's gradient": 3.0,
    "bias's gradient": 3.0,
}


def layer(case: Case, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    function = getattr(memopt.nn.functional, f"conv_relu_pool{case.dims}d")
    return function(x, w, b, *case.convolution(), **case.keywords())


def pool(case: Case, values: Tensor) -> tuple[Tensor, Tensor]:
    return getattr(F, f"max_pool{case.dims}d")(values, **case.pool(), return_indices=True)


def steps(tensor: Tensor) -> list[int]:
    """The strides that mean something."""
    return [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]


def stock(case: Case, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return pool(case, F.relu(convolve(case, x, w, b)))[0]


# -- Sums, and what they may be off by -------------------------------------------------------------


class Sum:
    """A result that is a sum of products."""

    def __init__(self, exact: Tensor, magnitude: Tensor, squares: Tensor, terms: int) -> None:
        self.exact = exact  # in float64
        self.magnitude = magnitude  # of the absolute terms
        # The root of the sum of their squares, or no less where those overflow.
        self.deviation = torch.where(squares.isfinite(), squares.sqrt(), magnitude)
        self.terms = terms

    def noise(self, dtype: torch.dtype) -> Tensor:
        """Four standard deviations of rounding every term and the running sum, and one rounding."""
        info = torch.finfo(dtype)
        wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
        each = info.eps + wide.eps * math.sqrt(self.terms)
        return 2 * each * self.deviation + info.eps * self.exact.abs() + info.tiny

    def overflows(self, dtype: torch.dtype) -> Tensor:
        return self.magnitude >= torch.finfo(dtype).max / 2


def sums(
    function: Callable[..., Sequence[Tensor]], terms: Sequence[int], *inputs: Any
) -> list[Sum]:
    """Of the results of `function`, which is linear in each of its inputs."""
    wide = [None if t is None else t.detach().double() for t in inputs]
    kept = [None if t is None else t.nan_to_num(0, 0, 0) for t in wide]
    exact = function(*wide)
    magnitude = function(*(None if t is None else t.abs() for t in kept))
    squares = function(*(None if t is None else t.square() for t in kept))
    return [Sum(*results) for results in zip(exact, magnitude, squares, terms, strict=True)]


def undecided(
    function: Callable[..., Sequence[Tensor]], results: Sequence[Tensor], *inputs: Any
) -> list[Tensor]:
    """Where eager's own `results` of `function` are not finite in some of its ways only."""
    given = [t for t in inputs if t is not None]
    masks = [torch.zeros_like(t, dtype=torch.bool) for t in results]
    if all(bool(t.isfinite().all()) for t in given):
        return masks
    others = [
        function(*(None if t is None else lay_out(t, layout) for t in inputs))
        for layout in ("contiguous", "channels_last")
    ]
    others.append(function(*(None if t is None else t.double() for t in inputs)))
    with torch.backends.mkldnn.flags(enabled=False):
        others.append(function(*inputs))
    for other in others:
        for mask, a, b in zip(masks, results, other, strict=True):
            mask |= (a.isnan() != b.isnan()) | ((a.isinf() | b.isinf()) & (a != b) & ~a.isnan())
    return masks


class Errors:
    """The squared relative errors of a run, memopt's and the stock ops', by dtype and result."""

    def __init__(self) -> None:
        self.of: dict[tuple[torch.dtype, str], list[float]] = {}

    def check(
        self, name: str, ours: Tensor, theirs: Tensor, exact: Tensor, noise: Tensor, settled: Tensor
    ) -> None:
        """The accuracy rule where `settled`."""
        ours, theirs, exact, noise = (t[settled] for t in (ours, theirs, exact, noise))
        known = exact.isfinite() & theirs.isfinite() & ours.isfinite()
        scale = exact[known].norm().item()
        if scale > torch.finfo(ours.dtype).tiny:
            squares = self.of.setdefault((ours.dtype, name), [0.0, 0.0])
            for k, t in enumerate((ours, theirs)):
                squares[k] += ((t[known].double() - exact[known]).norm().item() / scale) ** 2
        try:
            assert_accurate(ours, theirs, exact, factor=FACTORS[name])
        except AssertionError:
            assert_same_bits(ours[~known], theirs[~known])
            if bool(((ours.double() - exact).abs() > noise)[known].any()):
                raise

    def ratios(self) -> dict[tuple[torch.dtype, str], float]:
        """Memopt's error over the stock ops', over all cases; not of float64, which is exact's."""
        return {
            key: math.sqrt(ours / theirs)
            for key, (ours, theirs) in self.of.items()
            if key[0] != torch.float64 and theirs
        }

    def check_ratios(self) -> None:
        for (dtype, name), ratio in self.ratios().items():
            assert ratio <= FACTORS[name], f"{dtype} {name}: the error is {ratio:.2f} times stock's"


# -- Winners ---------------------------------------------------------------------------------------


def winners(case: Case, codes: Tensor, output: Tensor, convolved: Tensor) -> tuple[Tensor, Tensor]:
    """From the codes: each winner's index into a plane of `convolved`, and whether it lives."""
    positions = math.prod(case.pool_kernel_size)
    sizes, inner = output.shape[-case.dims :], convolved.shape[-case.dims :]
    code = _pool_codes.unpack_codes(codes, math.prod(sizes), positions).view(output.shape)
    live = code < positions
    rest, index, below = torch.where(live, code, 0), torch.zeros_like(code), 1
    stride = case.pool_stride or case.pool_kernel_size
    for d in reversed(range(case.dims)):
        corner = torch.arange(sizes[d], device=code.device) * stride[d] - case.pool_padding[d]
        corner = corner.view(-1, *(1,) * (case.dims - 1 - d))
        at = corner + rest % case.pool_kernel_size[d] * case.pool_dilation[d]
        assert bool(((at >= 0) & (at < inner[d]) | ~live).all()), "a winner outside the input"
        index += at * below
        rest, below = rest // case.pool_kernel_size[d], below * inner[d]
    return torch.where(live, index, 0), live


def scatter(index: Tensor, values: Tensor, like: Tensor, dims: int) -> Tensor:
    """The pool's gradient: `values` at `index`, in the shape and strides of `like`."""
    flat = values.new_zeros((*like.shape[:-dims], math.prod(like.shape[-dims:])))
    flat.scatter_add_(-1, index.flatten(-dims), values.flatten(-dims))
    return torch.empty_like(like, dtype=values.dtype).copy_(flat.view(like.shape))


def assert_winners(
    case: Case, index: Tensor, live: Tensor, output: Tensor, total: Sum, settled: Tensor
) -> None:
    """Each winner is its window's greatest up to the noise, and lives if that is positive."""
    value = total.exact.flatten(-case.dims).gather(-1, index.flatten(-case.dims)).view(index.shape)
    best, _ = pool(case, total.exact)
    noise = 2 * pool(case, total.noise(output.dtype))[0]
    greatest = (value >= best - noise) | (value == best) | (value.isnan() & best.isnan())
    assert bool((greatest | ~live)[settled].all()), "a winner is not its window's greatest"
    assert bool(((value > -noise) | value.isnan() | ~live)[settled].all()), "a cut winner lives"
    assert bool(((best <= noise) | live)[settled].all()), "a winner that passes ReLU is dead"


# -- One case --------------------------------------------------------------------------------------


def check(case: Case, device: torch.device, errors: Errors) -> None:
    """Raise where memopt differs from stock on `case`."""
    x, w, b = tensors(case, device)
    wanted = [n and t is not None for n, t in zip(case.wanted, (x, w, b), strict=True)]
    convolved = convolve(case, x, w, b)
    expected, expected_index = pool(case, F.relu(convolved))
    terms = math.prod(w.shape[1:]) + 1
    (total,) = sums(lambda *t: [convolve(case, *t)], [terms], x, w, b)
    (open_,) = undecided(lambda *t: [convolve(case, *t)], [convolved], x, w, b)
    settled = ~(pool(case, (open_ | total.overflows(case.dtype)).float())[0] > 0)

    def run() -> list[Tensor]:
        leaves = [
            None if t is None else t.detach().requires_grad_(n)
            for t, n in zip((x, w, b), wanted, strict=True)
        ]
        output = layer(case, *leaves)
        used = [t for t, n in zip(leaves, wanted, strict=True) if n]
        return [output.detach(), *(torch.autograd.grad(output, used, grad) if used else ())]

    plain = torch.inference_mode if case.without_grad == "inference_mode" else torch.no_grad
    with plain(), unchanged(*(t for t in (x, w, b) if t is not None)):
        output = layer(case, x, w, b).clone()
    assert steps(output) == steps(expected), f"strides {steps(output)}, stock {steps(expected)}"
    if case.exact:
        assert_same_bits(output[settled], expected[settled])
    else:
        exact, noise = (pool(case, t)[0] for t in (F.relu(total.exact), total.noise(case.dtype)))
        errors.check("output", output, expected, exact, noise, settled)
    if case.without_grad or not any(wanted):
        return

    leaf = [None if t is None else t.detach().requires_grad_() for t in (x, w, b)]
    codes = [t for t in saved_tensors(lambda: layer(case, *leaf)) if t.dtype == torch.uint8]
    index, live = winners(case, codes[0], output, convolved)
    if case.exact:
        assert_same_bits(live[settled], ~(expected <= 0)[settled])
        assert_same_bits(index[settled & live], expected_index[settled & live])
    else:
        assert_winners(case, index, live, output, total, settled)

    def gradients(x: Tensor, w: Tensor, dc: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, w, w.new_zeros(w.shape[0]))]
        return list(torch.autograd.grad(convolve(case, *leaves), leaves, dc))

    outputs = (case.batch or 1) * math.prod(convolved.shape[-case.dims :])
    terms = [math.prod(w.shape) // case.channels * case.groups, outputs, outputs]
    for thinned in range(40):
        grad = gradient(case, output, thinned=thinned)
        kept = torch.where(live, grad, 0)
        right = sums(gradients, terms, x, w, scatter(index, kept.double(), convolved, case.dims))
        if not case.exact or max(_most(r.magnitude) for r in right) <= EXACT[case.dtype]:
            break
    # Windows that share a winner may cancel, each by itself being too large for the dtype.
    gross = gradients(
        *(t.double().nan_to_num(0, 0, 0).abs() for t in (x, w)),
        scatter(index, kept.double().nan_to_num(0, 0, 0).abs(), convolved, case.dims),
    )
    dc = scatter(index, kept, convolved, case.dims)
    theirs = gradients(x, w, dc)
    doubtful = undecided(gradients, theirs, x, w, dc)
    with unchanged(grad, *(t for t in (x, w, b) if t is not None)):
        ours = run()
    # The stock convolution, which the reference is made of, rounds differently.
    if case.seed % 8 == 0 and _backends.selected() != "reference":
        assert_same_for_threads(run)
    assert_same_bits(ours[0], output)  # with codes and without
    results = iter(ours[1:])
    for k, (name, want) in enumerate(zip(tuple(FACTORS)[1:], wanted, strict=True)):
        if not want:
            continue
        got, certain = next(results), ~doubtful[k] & ~right[k].overflows(case.dtype)
        certain &= gross[k] <= torch.finfo(case.dtype).max
        assert got.dtype == case.dtype, f"{name} is {got.dtype}"
        assert got.shape == theirs[k].shape, f"{name} has shape {got.shape}"
        if case.exact:
            assert_same_bits(got[certain], theirs[k][certain])
        else:
            noise = right[k].noise(case.dtype)
            errors.check(name, got, theirs[k], right[k].exact, noise, certain)
    # A dilated window may hold no element at all: eager's index then lies outside its input.
    clear = not bool(expected.isneginf().any()) and not any(bool(d.any()) for d in doubtful)
    if case.exact and clear and bool(settled.all()):
        assert_same_bits(ours, whole(case, (x, w, b), wanted, grad))


def whole(case: Case, inputs: Sequence[Tensor | None], wanted: Sequence[bool], grad: Tensor) -> Any:
    """Eager's output and gradients, end to end."""
    leaves = [
        None if t is None else t.detach().requires_grad_(n)
        for t, n in zip(inputs, wanted, strict=True)
    ]
    output = stock(case, *leaves)
    return [
        output.detach(),
        *torch.autograd.grad(output, [t for t, n in zip(leaves, wanted, strict=True) if n], grad),
    ]


def _most(tensor: Tensor) -> float:
    return tensor.max().item() if tensor.numel() else 0.0


def run(seed: int, device: torch.device, errors: Errors) -> None:
    """Check the case of one seed; a failure says how to repeat it."""
    case = draw(seed)
    try:
        check(case, device, errors)
    except Exception as error:
        error.add_note(f"{case}\nto repeat: python tests/conv_pool_cases.py --seed {seed}")
        raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--cases", type=int, default=1)
    parser.add_argument("--backend", help="as memopt.backend takes it; default: memopt's choice")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True

    errors, failed, start = Errors(), [], time.perf_counter()
    backend = memopt.backend(options.backend) if options.backend else contextlib.nullcontext()
    with backend:
        for done, seed in enumerate(range(options.seed, options.seed + options.cases), start=1):
            try:
                run(seed, torch.device(options.device), errors)
            except Exception:
                failed.append(seed)
                if len(failed) <= 20:
                    traceback.print_exc()
            if done % 500 == 0 or done == options.cases:
                took = time.perf_counter() - start
                print(
                    f"{done} cases to seed {seed}, {len(failed)} failed, {took:.0f} s", flush=True
                )
    for (dtype, name), ratio in sorted(errors.ratios().items(), key=str):
        print(f"{dtype!s:15} {name:18} {ratio:5.2f} x stock's error, allowed {FACTORS[name]:.0f}")
    if failed:
        print("failed seeds:", *failed)
        return 1
    if options.cases >= 500:
        errors.check_ratios()
    return 0


if __name__ == "__main__":
    sys.exit(main())
