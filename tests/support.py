"""What the tests share: dtypes, layouts, and the assertions that say what "right" means."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

from memopt._measure import peak_bytes, saved_bytes, saved_tensors
from memopt._registry import NAMESPACES, OPS, Op

__all__ = [
    "DTYPES",
    "OPS",
    "assert_accurate",
    "assert_compiles",
    "assert_raises_same",
    "assert_same_bits",
    "assert_same_for_threads",
    "check_op",
    "checked_ops",
    "layouts",
    "peak_bytes",
    "run_python",
    "saved_bytes",
    "saved_tensors",
    "unchanged",
]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

#: Names of the ops that passed `check_op` in this process; test_ops_table reads it.
checked_ops: set[str] = set()


def check_op(op: Op, *args: Any) -> None:
    """`torch.library.opcheck` of the raw op, compiled and reference."""
    for namespace in NAMESPACES:
        torch.library.opcheck(op.on(namespace), args)
    checked_ops.add(op.name)


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Equal shapes, dtypes and values, NaN where NaN; tensors or (nested) sequences of them."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_accurate(actual: Tensor, stock: Tensor, exact: Tensor, *, factor: float = 2.0) -> None:
    """`actual` is about as near to `exact` as the stock op's result is.

    Args:
        actual: memopt's result.
        stock: the stock op's result in the same dtype.
        exact: the stock op's result in float64, from the same inputs.
        factor: the error may be so many times the stock op's, in the relative L2 and in the
            maximum norm: 2 for results, 3 for gradients. One rounding of the dtype is always
            granted; to float64, which `exact` itself is computed in, a reduction's worth.
    """
    assert actual.shape == stock.shape, f"shape {actual.shape}, stock has {stock.shape}"
    assert actual.dtype == stock.dtype, f"dtype {actual.dtype}, stock has {stock.dtype}"
    assert actual.device == stock.device, f"on {actual.device}, stock is on {stock.device}"
    got, theirs, right = (t.detach().double().cpu() for t in (actual, stock, exact))
    assert_same_bits(got.isnan(), theirs.isnan())
    assert_same_bits(
        got.isinf() * got.sign().nan_to_num(), theirs.isinf() * theirs.sign().nan_to_num()
    )
    finite = theirs.isfinite() & right.isfinite()
    got, theirs, right = got[finite], theirs[finite], right[finite]
    if not right.numel():
        return
    info = torch.finfo(actual.dtype)
    rounding = info.eps * (64 if actual.dtype == torch.float64 else 1)
    for norm in (2, torch.inf):
        error, stock_error, scale = (
            torch.linalg.vector_norm(v, norm).item() for v in (got - right, theirs - right, right)
        )
        allowed = max(factor * stock_error, rounding * scale, info.tiny)
        assert error <= allowed, (
            f"{norm}-norm error {error:.3g} (relative {error / max(scale, info.tiny):.3g}), stock "
            f"has {stock_error:.3g}, allowed is {allowed:.3g}"
        )


def assert_raises_same(stock: Callable[[], Any], ours: Callable[[], Any]) -> None:
    """Both raise, and the same type."""
    with pytest.raises(Exception) as expected:
        stock()
    with pytest.raises(expected.type) as got:
        ours()
    assert got.type is expected.type, f"raised {got.type}, stock raises {expected.type}"
    assert str(got.value), "the message is empty"


def layouts(tensor: Tensor) -> dict[str, Tensor]:
    """The values of `tensor` under every kind of strides they can have, as fresh leaves."""
    tensor = tensor.detach()
    found = {"contiguous": tensor.clone(memory_format=torch.contiguous_format)}
    if tensor.dim() == 4:
        found["channels_last"] = tensor.clone(memory_format=torch.channels_last)
    if tensor.dim() >= 2:
        reversed_dims = tuple(reversed(range(tensor.dim())))
        found["transposed"] = tensor.permute(reversed_dims).contiguous().permute(reversed_dims)
    if tensor.dim() >= 1:
        wide = tensor.new_empty((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1))
        wide[..., 1::2] = tensor
        found["sliced"] = wide[..., 1::2]  # starts inside its storage and skips elements
    for dim in range(tensor.dim()):
        first = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
        if tensor.shape[dim] > 1 and bool((tensor == first).all()):
            found["expanded"] = first.clone().expand(tensor.shape)
            break
    return found


def run_python(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run this Python in a process of its own, which finds packages in `cwd` first."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(cwd), **(env or {})},
        capture_output=True,
        text=True,
    )
    if check and result.returncode:
        raise AssertionError(f"exit status {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result


@contextlib.contextmanager
def unchanged(*tensors: Tensor) -> Iterator[None]:
    """Inside, nothing writes to `tensors`."""
    before = [(t._version, t.detach().clone()) for t in tensors]
    yield
    for tensor, (version, values) in zip(tensors, before, strict=True):
        assert tensor._version == version, "an input was written to"
        assert_same_bits(tensor.detach(), values)


def assert_same_for_threads(fn: Callable[[], Any], threads: tuple[int, ...] = (1, 2)) -> None:
    """``fn()`` gives the same bits for every number of threads, and when it is run again."""
    before = torch.get_num_threads()
    try:
        results = []
        for count in (*threads, threads[-1]):
            torch.set_num_threads(count)
            results.append(fn())
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert_same_bits(result, results[0])


def assert_compiles(
    fn: Callable[..., Tensor], *calls: tuple[Any, ...], backend: str = "inductor"
) -> None:
    """`fn` compiles in one graph, forward and backward, once for all `calls`, to eager's numbers.

    Args:
        fn: returns one tensor.
        calls: argument tuples that differ in the batch size. Gradients are compared for the
            arguments that require them; the first call's batch must not be 0 or 1.
        backend: of `torch.compile`; "aot_eager" traces the same and compiles in no time.
    """

    def run(function: Callable[..., Tensor], args: tuple[Any, ...]) -> list[Tensor]:
        output = function(*args)
        wanted = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device)
        grads = torch.autograd.grad(output, wanted, weights.view(output.shape)) if wanted else ()
        return [output.detach(), *grads]

    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, dynamic=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for args in calls:
            torch.testing.assert_close(run(compiled, args), run(fn, args), equal_nan=True)
