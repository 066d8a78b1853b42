"""Linear layer and log-softmax in one, without the logits.

    z = x Wᵀ + b        y = z - max z - log Σ exp(z - max z)        dz = dy - exp(y) Σ dy

The logits z lie in the memory of the result y. Backward reads x, W and y, all of which live anyway,
and forms dz in chunks of rows. Stock PyTorch keeps the same for backward but holds z beside y, and
all of dz at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt._registry import Op, cast_floating, under_transform
from memopt.ops import _linear

__all__ = ["linear_log_softmax"]


def _reference(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    chunk_rows: int,
) -> Tensor:
    output = _fake(input, weight, bias, out_dtype, chunk_rows)
    for rows in _linear.chunks(input.shape[0], chunk_rows):
        logits = F.linear(input[rows], weight, bias)
        output[rows] = F.log_softmax(logits.to(_linear.accumulator(input.dtype)), dim=-1)
    return output


def _fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    chunk_rows: int,
) -> Tensor:
    _linear.check_linear("linear_log_softmax", input, weight, bias, chunk_rows)
    result = out_dtype or input.dtype
    _check_result("linear_log_softmax", input.dtype, result)
    return input.new_empty((input.shape[0], weight.shape[0]), dtype=result)


def _check_result(op: str, dtype: torch.dtype, result: torch.dtype) -> None:
    if result not in (dtype, _linear.accumulator(dtype)):
        raise RuntimeError(f"{op}: the result has dtype {result}, needs {dtype} or a wider float32")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, _, _, ctx.chunk_rows = inputs
    ctx.save_for_backward(output, input, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    output, input, weight = ctx.saved_tensors
    wanted = ctx.needs_input_grad[1:4]
    if torch.is_grad_enabled():
        dz = grad - output.exp() * grad.sum(-1, keepdim=True)
        return _linear.linear_backward(dz.to(input.dtype), input, weight, wanted)
    gradients = _linear_log_softmax_backward.on(ctx.namespace)(
        grad, output, input, weight, *wanted, ctx.chunk_rows
    )
    return _linear.only_wanted(gradients, wanted)


def _backward_reference(
    grad: Tensor,
    output: Tensor,
    input: Tensor,
    weight: Tensor,
    want_input: bool,
    want_weight: bool,
    want_bias: bool,
    chunk_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_backward(grad, output, input, weight, chunk_rows)
    gradients = _linear.Gradients(input, weight, (want_input, want_weight, want_bias))
    sums = _linear.accumulator(input.dtype)
    for rows in _linear.chunks(input.shape[0], chunk_rows):
        dy = grad[rows].to(sums)
        dz = dy - output[rows].to(sums).exp() * dy.sum(-1, keepdim=True)
        gradients.add(rows, dz.to(input.dtype))
    return gradients.finish()


def _backward_fake(
    grad: Tensor,
    output: Tensor,
    input: Tensor,
    weight: Tensor,
    want_input: bool,
    want_weight: bool,
    want_bias: bool,
    chunk_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_backward(grad, output, input, weight, chunk_rows)
    wanted = (want_input, want_weight, want_bias)
    return _linear.fake_gradients(input, weight, wanted, input.dtype)


def _check_backward(
    grad: Tensor, output: Tensor, input: Tensor, weight: Tensor, chunk_rows: int
) -> None:
    op = "linear_log_softmax_backward"
    _linear.check_linear(op, input, weight, None, chunk_rows)
    _check_result(op, input.dtype, output.dtype)
    needed = (input.shape[0], weight.shape[0])
    for name, tensor in (("grad", grad), ("output", output)):
        if tuple(tensor.shape) != needed or tensor.dtype != output.dtype:
            raise RuntimeError(
                f"{op}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, needs "
                f"{output.dtype} of shape {needed}"
            )
        if tensor.device != input.device:
            raise RuntimeError(
                f"{op}: {name} is on {tensor.device}, needs to be on {input.device} as input is"
            )


def _autocast(args: Sequence[Any], dtype: torch.dtype) -> Sequence[Any]:
    # As eager: the linear layer in `dtype`; log_softmax in float32 on the devices where autocast
    # widens it, which the CPU is not.
    input, weight, bias, out_dtype, chunk_rows = args
    input, weight, bias = cast_floating((input, weight, bias), dtype)
    if out_dtype is None and _autocast_widens_log_softmax(input.device.type):
        out_dtype = _linear.accumulator(input.dtype)
    return input, weight, bias, out_dtype, chunk_rows


@functools.cache
def _autocast_widens_log_softmax(device: str) -> bool:
    key = f"Autocast{device.upper()}"
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::log_softmax.int", key)


_linear_log_softmax = Op(
    "linear_log_softmax",
    "(Tensor input, Tensor weight, Tensor? bias, ScalarType? out_dtype, SymInt chunk_rows) "
    "-> Tensor",
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    autocast=_autocast,
)

_linear_log_softmax_backward = Op(
    "linear_log_softmax_backward",
    "(Tensor grad, Tensor output, Tensor input, Tensor weight, bool want_input, bool want_weight, "
    "bool want_bias, SymInt chunk_rows) -> (Tensor, Tensor, Tensor)",
    reference=_backward_reference,
    fake=_backward_fake,
    not_differentiable="differentiate linear_log_softmax itself, with create_graph=True",
)


def linear_log_softmax(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``log_softmax(linear(input, weight, bias), dim=-1)`` without memory for the logits.

    Saves for backward its result, `input` and `weight`. Autocast and dtypes are those of the two
    stock functions, in an autocast region too.

    Args:
        input: (..., H), floating point.
        weight: (V, H).
        bias: (V,).

    Returns:
        Log-probabilities, (..., V).

    Raises:
        TypeError: the arguments have different dtypes.
        RuntimeError: their shapes do not fit.

    Example:
        >>> import torch, memopt
        >>> x, weight = torch.zeros(2, 3), torch.ones(4, 3)
        >>> memopt.nn.functional.linear_log_softmax(x, weight).exp()
        tensor([[0.2500, 0.2500, 0.2500, 0.2500],
                [0.2500, 0.2500, 0.2500, 0.2500]])
    """
    _linear.check_call("linear_log_softmax", input, weight=weight, bias=bias)
    if under_transform(input, weight, bias):
        return F.log_softmax(F.linear(input, weight, bias), dim=-1)
    chunk_rows = _linear.rows_per_chunk(weight.shape[0], input.dtype)
    output = _linear_log_softmax(_linear.as_rows(input), weight, bias, None, chunk_rows)
    return output if input.dim() == 2 else output.view(*input.shape[:-1], weight.shape[0])
