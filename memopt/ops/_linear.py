"""What the ops over a linear layer share: checks, chunks of rows, and gradients by chunks.

N rows, H features in, V out (classes); z = x Wᵀ + b with x (N, H), W (V, H), b (V,), z (N, V).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

#: What a chunk of rows of z may take, and the fewest rows worth a matrix product of their own: each
#: chunk reads and writes all of dW.
CHUNK_BYTES = 64 << 20
MIN_CHUNK_ROWS = 256


def rows_per_chunk(classes: int, dtype: torch.dtype) -> int:
    """Rows of z for one chunk. In low precision the gradient has a float32 copy beside it."""
    bytes_per_row = classes * (dtype.itemsize if dtype.itemsize >= 4 else dtype.itemsize + 4)
    return max(MIN_CHUNK_ROWS, CHUNK_BYTES // max(1, bytes_per_row))


def loss_rows_per_chunk(
    rows: int, weight: Tensor, max_chunk_bytes: int | None = None
) -> int | torch.SymInt:
    """Rows for one chunk of a loss, whose gradients are formed beside the chunk's logits.

    By default the chunk takes about an eighth of the memory of the gradients of x and W: a product
    with that many rows runs at full speed for the usual H. Never fewer than 64 rows, and no more
    than a cache holds.
    """
    classes, features = max(1, weight.shape[0]), weight.shape[1]
    if max_chunk_bytes is not None:
        return max(1, max_chunk_bytes // (classes * accumulator(weight.dtype).itemsize))
    # n rows take n (V + 3 H) beside the gradients' H (N + V); to the nearest multiple of 16
    share = 14 * features * (rows + classes) // (103 * classes + 300 * features + 1)
    share = (share + 8) // 16 * 16
    return torch.sym_min(192, torch.sym_max(64, share))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums over `dtype` are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_rows(input: Tensor) -> Tensor:
    """(..., H) as (N, H)."""
    if input.dim() == 2:
        return input
    return input.unsqueeze(0) if input.dim() == 1 else input.flatten(0, -2)


def chunks(rows: int, chunk_rows: int) -> Iterator[slice]:
    for begin in range(0, rows, chunk_rows):
        yield slice(begin, min(rows, begin + chunk_rows))


# -- Checks ----------------------------------------------------------------------------------------


def check_call(op: str, input: Tensor, **others: Tensor | None) -> None:
    """What the public functions check of `input`, the weight and the bias, given by their names.

    Raises:
        TypeError: dtypes differ and no autocast region will make them one, or a DTensor.
        RuntimeError: devices differ, or there is no last dimension.
    """
    optional = ("bias", "linear_bias")
    given: dict[str, Any] = {"input": input}
    given |= {name: t for name, t in others.items() if t is not None or name not in optional}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} is a {type(tensor).__name__}, needs to be a Tensor")
        if type(tensor).__name__ == "DTensor":
            raise TypeError(f"{op}: {name} is a DTensor, needs a plain tensor; see its to_local()")
        if tensor.device != input.device:
            raise RuntimeError(
                f"{op}: {name} is on {tensor.device}, needs to be on {input.device} as input is"
            )
        if tensor.dtype != input.dtype and not torch.is_autocast_enabled(input.device.type):
            raise TypeError(
                f"{op}: {name} has dtype {tensor.dtype}, needs {input.dtype}, the dtype of input"
            )
        if tensor.dim() == 0:
            raise RuntimeError(f"{op}: {name} has no dimensions, needs at least 1")


def check_linear(
    op: str, input: Tensor, weight: Tensor, bias: Tensor | None, chunk_rows: int
) -> None:
    """What every op checks: input (N, H), weight (V, H) and bias (V,) of one floating dtype."""
    if input.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise RuntimeError(
            f"{op}: input has dtype {input.dtype}, needs float32, float64, bfloat16 or float16"
        )
    if input.dim() != 2:
        raise RuntimeError(f"{op}: input has shape {tuple(input.shape)}, needs (N, H)")
    if weight.dim() != 2 or weight.shape[1] != input.shape[1]:
        raise RuntimeError(
            f"{op}: the linear weight has shape {tuple(weight.shape)}, needs "
            f"(V, {input.shape[1]}): input has {input.shape[1]} features"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise RuntimeError(
            f"{op}: the bias has shape {tuple(bias.shape)}, needs ({weight.shape[0]},)"
        )
    for name, tensor in (("linear weight", weight), ("bias", bias)):
        if tensor is not None and (tensor.dtype, tensor.device) != (input.dtype, input.device):
            raise RuntimeError(
                f"{op}: the {name} is {tensor.dtype} on {tensor.device}, needs {input.dtype} on "
                f"{input.device} as input"
            )
    if chunk_rows < 1:
        raise RuntimeError(f"{op}: chunk_rows is {chunk_rows}, needs to be at least 1")


def check_tensor(
    op: str,
    name: str,
    tensor: Tensor | None,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    if tensor is None:
        return
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or tensor.device != device:
        raise RuntimeError(
            f"{op}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}, "
            f"needs {dtypes[0]} of shape {shape} on {device}"
        )


def check_bounds(op: str, name: str, target: Tensor, classes: int, ignore_index: int) -> None:
    """Raise IndexError, as eager, for a target that is no class. Kernels check for themselves too.

    Reading values is cheap on the CPU only, and possible only where there are any.
    """
    if target.device.type != "cpu" or type(target) is not Tensor or not target.numel():
        return
    if torch.compiler.is_compiling() or target.is_floating_point():
        return
    low, high = (bound.item() for bound in target.aminmax())
    if low >= 0 and high < classes:
        return
    wrong = target[((target < 0) | (target >= classes)) & (target != ignore_index)]
    if wrong.numel():
        raise IndexError(
            f"{op}: {name} {wrong[0].item()} is out of bounds, needs to be in "
            f"[0, {classes}) or ignore_index {ignore_index}"
        )


# -- Gradients -------------------------------------------------------------------------------------


class Gradients:
    """dX = dz W, dW = dzᵀ x and db = Σ dz, given dz a chunk of rows at a time.

    dW and db add up in float32 (float64 for float64) and are rounded once, at the end.
    """

    def __init__(self, input: Tensor, weight: Tensor, wanted: Sequence[bool]) -> None:
        self.input, self.weight, self.wanted = input, weight, wanted
        self.dtype, self.sums = input.dtype, accumulator(input.dtype)
        classes = weight.shape[0]
        self.dx = torch.zeros_like(input[:, :] if wanted[0] else input[:0, :0])
        self.dx = self.dx.contiguous()
        self.dw = input.new_zeros(weight.shape if wanted[1] else (0, 0), dtype=self.sums)
        self.db = input.new_zeros(classes if wanted[2] else 0, dtype=self.sums)

    def add(self, rows: slice, dz: Tensor) -> None:
        """dz: the gradient of z[rows]."""
        if self.wanted[0]:
            self.dx[rows] = dz @ self.weight
        if self.wanted[1]:
            self.dw.addmm_(dz.t().to(self.sums), self.input[rows].to(self.sums))
        if self.wanted[2]:
            self.db += dz.sum(0, dtype=self.sums)

    def finish(self, *, rounded: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """(dX, dW, db), with no elements where one was not wanted."""
        if not rounded:
            return self.dx, self.dw, self.db
        return self.dx, self.dw.to(self.dtype), self.db.to(self.dtype)


def fake_gradients(
    input: Tensor, weight: Tensor, wanted: Sequence[bool], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `Gradients.finish` without their data; dW and db in `dtype`."""
    return (
        input.new_empty(input.shape if wanted[0] else (0, 0)),
        input.new_empty(weight.shape if wanted[1] else (0, 0), dtype=dtype),
        input.new_empty((weight.shape[0] if wanted[2] else 0,), dtype=dtype),
    )


def linear_backward(
    dz: Tensor, input: Tensor, weight: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients by stock ops: differentiable, for a z that may exist as a whole."""
    return (
        dz @ weight if wanted[0] else None,
        dz.t() @ input if wanted[1] else None,
        dz.sum(0) if wanted[2] else None,
    )


def only_wanted(gradients: tuple[Tensor, ...], wanted: Sequence[bool]) -> tuple[Any, ...]:
    """The tensors without elements that stand for gradients nobody wants, as None."""
    return tuple(g if want else None for g, want in zip(gradients, wanted, strict=True))


def is_plain(tensor: Tensor) -> bool:
    """Neither being traced nor a batch of gradients (is_grads_batched): usable in place."""
    functorch = torch._C._functorch
    batched = functorch.is_legacy_batchedtensor(tensor) or functorch.is_batchedtensor(tensor)
    return type(tensor) is Tensor and not batched


def graph_is_retained() -> bool:
    """Whether the backward pass now running may run again (retain_graph=True)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype, in_place: bool) -> Tensor:
    """A gradient that the forward pass formed, times the one that backward brings."""
    if not is_plain(factor) or factor.device.type != "cpu":
        # In the factor's dtype: float16 may not hold a factor such as a loss scale.
        return (gradient.to(factor.dtype) * factor).to(dtype)
    number = factor.item()  # by which kernels multiply in float32
    if number != 1:
        gradient = gradient.mul_(number) if in_place else gradient * number
    elif not in_place:
        gradient = gradient.clone()
    return gradient.to(dtype)


def differentiable_gradients(
    function: Callable[..., Sequence[Tensor]],
    tensors: Sequence[Tensor | None],
    places: Sequence[int],
    wanted: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of ``function(*tensors)``, made of stock ops, with a graph of their own.

    Args:
        tensors: what backward has saved.
        places: of the tensors that may have a gradient.
        wanted: which of these gradients are, for the others are None.
        grads: those in the function's results, or None; of a shape that can be expanded to theirs.
    """
    with torch.enable_grad():
        # Views: one of the tensors may depend on another, which is not meant here.
        tensors = [t if t is None else t.view_as(t) for t in tensors]
        given = [(o, g) for o, g in zip(function(*tensors), grads, strict=True) if g is not None]
        arguments = [
            t
            for k, want in zip(places, wanted, strict=True)
            if want and (t := tensors[k]) is not None
        ]
        results = torch.autograd.grad(
            [o for o, _ in given],
            arguments,
            [g.expand_as(o) for o, g in given],
            create_graph=True,
        )
    found = iter(results)
    return [next(found) if want else None for want in wanted]
