"""Convolution, activation and average-pooling as one op that saves one bit per convolved element.

    c = conv(x, w) + b          y = mean over window of act(c)

    dL/dc = act'(c) * sum of dL/dy / divisor over the windows that hold it
    dL/dx, dL/dw, dL/db = the convolution's gradients for dL/dc

The bit says on which of two branches the activation was: a derivative of 0, or leaky_relu's
negative side, against 1; identity needs none. Stock layers keep c and the activation's result.

In two or three dimensions, by the lengths of the lists. `conv_relu_pool1d`, 2d and 3d call it for
pool="avg".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt._registry import Op, cast_floating, under_transform
from memopt.ops import _activations, _bits
from memopt.ops._conv_pool import not_differentiable, product
from memopt.ops._conv_pool_arguments import parse, widens
from memopt.ops._conv_pool_windows import Windows, check, memory_format

__all__: list[str] = []  # reached by conv_relu_pool1d, 2d and 3d

_NAME = "conv_relu_avg_pool"
_WINDOWS = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, "
    "SymInt[] pool_kernel_size, SymInt[] pool_stride, SymInt[] pool_padding, bool ceil_mode, "
    "bool count_include_pad, SymInt? divisor_override, str activation, float alpha, float beta"
)


class Average(NamedTuple):
    """The raw ops' parameters."""

    p: Windows
    count_include_pad: bool
    divisor_override: int | None

    @classmethod
    def of(cls, args: Sequence[Any]) -> Average:
        *sizes, ceil_mode, count_include_pad, divisor_override = args[:10]
        windows = (*sizes, [1] * len(sizes[0]), ceil_mode, *args[10:])
        return cls(Windows._make(windows), count_include_pad, divisor_override)

    def arguments(self) -> tuple[Any, ...]:
        """The inverse of `of`."""
        divisor = (self.p.ceil_mode, self.count_include_pad, self.divisor_override)
        return (*self.p[:7], *divisor, *self.p[9:])

    def pool(self, input: Tensor) -> Tensor:
        pool = F.avg_pool2d if len(self.p.stride) == 2 else F.avg_pool3d
        return pool(input, *self._pool())

    def spread(self, grad: Tensor, sizes: Sequence[int]) -> Tensor:
        """The pool's gradient, for an input of `sizes` (H, W) or (D, H, W)."""
        aten = torch.ops.aten
        two = len(self.p.stride) == 2
        backward = aten.avg_pool2d_backward if two else aten.avg_pool3d_backward
        return backward(grad, grad.new_empty((*grad.shape[:2], *sizes)), *self._pool())

    def _pool(self) -> tuple[Any, ...]:
        p = self.p
        windows = (list(p.pool_kernel_size), list(p.pool_stride), list(p.pool_padding))
        return (*windows, p.ceil_mode, self.count_include_pad, self.divisor_override)

    def check(self, op: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        dims = 3 if len(self.p.stride) == 3 else 2
        check(op, dims, input, weight, bias, self.p)
        if self.divisor_override == 0:
            raise RuntimeError(f"{op}: divisor_override is 0, needs another integer")

    def sizes(self, input: Tensor, weight: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As `Windows.sizes`; the stock avg_pool3d takes no window that exceeds its input."""
        convolved, pooled = self.p.sizes(input, weight)
        for size, kernel in zip(convolved, self.p.pool_kernel_size, strict=True):
            if len(convolved) == 3 and size < kernel:
                raise RuntimeError(
                    f"{_NAME}: pool_kernel_size is {tuple(self.p.pool_kernel_size)}, needs at most "
                    f"the convolution's output, {convolved}"
                )
        return convolved, pooled

    def mask_bytes(self, sizes: Sequence[int]) -> int:
        """Of one plane of the mask, for a convolution's output of `sizes`."""
        if self.p.activation == "identity":
            return 0
        return _bits.bytes_for(product(sizes))

    def format(self, input: Tensor, weight: Tensor) -> torch.memory_format:
        # The stock avg_pool3d's result is contiguous whatever its input is.
        return memory_format(input, weight) if weight.dim() == 4 else torch.contiguous_format


# -- forward ----------------------------------------------------------------------------------


def _reference(
    input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    a, save_mask = Average.of(rest[:-1]), rest[-1]
    a.check(_NAME, input, weight, bias)
    a.sizes(input, weight)
    convolved = a.p.convolve(input, weight, bias)
    activated = a.p.activate(convolved)
    accumulate = torch.float64 if input.dtype == torch.float64 else torch.float32
    # The stock pool rounds once too; in three dimensions it takes no short dtypes on a CPU.
    pooled = a.pool(activated.to(accumulate)).to(input.dtype)
    pooled = pooled.contiguous(memory_format=a.format(input, weight))
    if not save_mask or a.p.activation == "identity":
        return pooled, pooled.new_empty((*pooled.shape[:2], 0), dtype=torch.uint8)
    mask = _activations.mask(convolved, a.p.activation, a.p.alpha, a.p.beta)
    return pooled, _bits.pack_planes(mask.contiguous().flatten(2))


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    a, save_mask = Average.of(rest[:-1]), rest[-1]
    a.check(_NAME, input, weight, bias)
    convolved_size, pooled_size = a.sizes(input, weight)
    planes = (input.shape[0], weight.shape[0])
    output = input.new_empty((*planes, *pooled_size)).to(memory_format=a.format(input, weight))
    bytes_ = a.mask_bytes(convolved_size) if save_mask else 0
    return output, input.new_empty((*planes, bytes_), dtype=torch.uint8)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, weight, _, *ctx.arguments, _ = inputs
    _, mask = output
    ctx.save_for_backward(input, weight, mask)
    ctx.mark_non_differentiable(mask)


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    wanted = tuple(ctx.needs_input_grad[1:4])
    # Differentiable where the graph is being recorded.
    run = _gradients if torch.is_grad_enabled() else _backward_op.on(ctx.namespace)
    grads = run(grad, *ctx.saved_tensors, *ctx.arguments, *wanted)
    return tuple(g if want else None for g, want in zip(grads, wanted, strict=True))


# -- backward ---------------------------------------------------------------------------------


def _gradients(
    grad: Tensor, input: Tensor, weight: Tensor, mask: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients from stock ops: the definition, and differentiable to any order."""
    a, wanted = Average.of(rest[:-3]), rest[-3:]
    convolved_size, _ = a.sizes(input, weight)
    accumulate = torch.float64 if grad.dtype == torch.float64 else torch.float32
    dc = a.spread(grad.to(accumulate), convolved_size)
    if a.p.activation != "identity":
        bits = _bits.unpack_planes(mask, product(convolved_size)).view(dc.shape)
        dc = torch.where(bits, dc, dc * a.p.alpha if a.p.activation == "leaky_relu" else 0)
    absent = grad.new_empty((0,))
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dc.to(grad.dtype).contiguous(memory_format=memory_format(input, weight)),
        input,
        weight,
        None,
        a.p.stride,
        a.p.padding,
        a.p.dilation,
        False,
        [0] * len(a.p.stride),
        a.p.groups,
        [wanted[0], wanted[1], False],
    )
    db = dc.sum((0, *range(2, dc.dim()))).to(grad.dtype) if wanted[2] else absent
    return dx if wanted[0] else absent, dw if wanted[1] else absent, db


def _check_saved(grad: Tensor, input: Tensor, weight: Tensor, mask: Tensor, a: Average) -> None:
    op = f"{_NAME}_backward"
    a.check(op, input, weight, None)
    convolved_size, pooled_size = a.sizes(input, weight)
    planes = (input.shape[0], weight.shape[0])
    for name, tensor, dtype, shape in (
        ("grad", grad, input.dtype, (*planes, *pooled_size)),
        ("mask", mask, torch.uint8, (*planes, a.mask_bytes(convolved_size))),
    ):
        if tensor.dtype != dtype or tensor.shape != shape:
            raise RuntimeError(
                f"{op}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, needs {dtype} of "
                f"shape {shape}; the forward pass makes a mask with save_mask=True"
            )
        if tensor.device != input.device:
            raise RuntimeError(f"{op}: {name} is on {tensor.device}, needs input's {input.device}")


def _backward_reference(*args: Any) -> tuple[Tensor, ...]:
    grad, input, weight, mask, *rest = args
    _check_saved(grad, input, weight, mask, Average.of(rest[:-3]))
    dx, dw, db = _gradients(*args)
    dx = dx.contiguous(memory_format=memory_format(input, weight)) if rest[-3] else dx
    return dx, torch.empty_like(weight).copy_(dw) if rest[-2] else dw, db


def _backward_fake(
    grad: Tensor, input: Tensor, weight: Tensor, mask: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    _check_saved(grad, input, weight, mask, Average.of(rest[:-3]))
    dx = input.new_empty(input.shape).to(memory_format=memory_format(input, weight))
    grads = (dx, torch.empty_like(weight), grad.new_empty(weight.shape[:1]))
    return tuple(
        g if want else grad.new_empty((0,)) for g, want in zip(grads, rest[-3:], strict=True)
    )


_op = Op(
    _NAME,
    f"(Tensor input, Tensor weight, Tensor? bias, {_WINDOWS}, bool save_mask) "
    "-> (Tensor output, Tensor mask)",
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    autocast=cast_floating,
)

_backward_op = Op(
    f"{_NAME}_backward",
    f"(Tensor grad, Tensor input, Tensor weight, Tensor mask, {_WINDOWS}, bool input_grad, "
    "bool weight_grad, bool bias_grad) -> (Tensor, Tensor, Tensor)",
    reference=_backward_reference,
    fake=_backward_fake,
    not_differentiable=not_differentiable("conv_relu_pool2d"),
)


# -- for the public functions ------------------------------------------------------------------


def average(
    name: str,
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *arguments: Any,
    count_include_pad: bool | None,
    divisor_override: int | None,
) -> Tensor:
    """avg_pool(act(conv(input, weight, bias))), batched or not; `arguments` as `parse` takes."""
    input, windows = parse(name, dims, input, weight, *arguments)
    a = Average(windows, count_include_pad is not False, divisor_override)
    if widens(dims, input) or under_transform(input, weight, bias):
        return a.pool(windows.activate(windows.convolve(input, weight, bias)))
    save_mask = torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    batch = input if input.dim() == dims + 2 else input.unsqueeze(0)
    output, _ = _op(batch, weight, bias, *a.arguments(), save_mask)
    return output if input.dim() == dims + 2 else output.squeeze(0)
