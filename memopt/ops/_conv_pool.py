"""What conv_relu_pool2d and conv_relu_pool3d share: all but their names.

    c = conv(x, w) + b          y = max over window of act(c)

    dL/dc = dL/dy * act'(c) at the position that won its window; else 0
    dL/dx, dL/dw, dL/db = the convolution's gradients for dL/dc

Stock layers keep c (as the activation's result and the pool's input) and an int64 index per pooled
element; these ops keep x, w and 4 bits per pooled element for windows of up to 15 positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memopt._registry import Op, under_transform
from memopt.ops import _activations, _conv_pool_arguments, _pool_codes
from memopt.ops._conv_pool_windows import Windows, check, memory_format

_WINDOWS = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, "
    "SymInt[] pool_kernel_size, SymInt[] pool_stride, SymInt[] pool_padding, "
    "SymInt[] pool_dilation, bool ceil_mode, str activation, float alpha, float beta"
)
SCHEMA = (
    f"(Tensor input, Tensor weight, Tensor? bias, {_WINDOWS}, bool save_codes) "
    "-> (Tensor output, Tensor codes)"
)
BACKWARD_SCHEMA = (
    f"(Tensor grad, Tensor input, Tensor weight, Tensor codes, {_WINDOWS}, "
    "bool input_grad, bool weight_grad, bool bias_grad) -> (Tensor, Tensor, Tensor)"
)


def not_differentiable(name: str) -> str:
    return (
        f"the raw backward op has no derivative; differentiate {name} with create_graph=True "
        "instead"
    )


# -- forward ----------------------------------------------------------------------------------


def reference(
    dims: int, input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    p, save_codes = Windows(*rest[:-1]), rest[-1]
    check(f"conv_relu_pool{dims}d", dims, input, weight, bias, p)
    convolved_size, _ = p.sizes(input, weight)
    convolved = p.convolve(input, weight, bias)
    pooled, index = p.pool(p.activate(convolved))
    if not save_codes:
        return pooled, pooled.new_empty((*pooled.shape[:2], 0), dtype=torch.uint8)
    # The stock pool gives windows that lie in the padding an index of its own choice.
    filled = p.not_empty(pooled, convolved_size)
    index = torch.where(filled, index, 0)
    values = convolved.flatten(2).gather(2, index.flatten(2)).view_as(index)
    codes = _activations.codes_at(
        values, p.winners(index, convolved_size), p.positions, p.activation, p.alpha, p.beta
    )
    codes = torch.where(filled, codes, -1)
    return pooled, _pool_codes.pack_codes(codes.contiguous().flatten(2), p.states)


def fake(
    dims: int, input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    p, save_codes = Windows(*rest[:-1]), rest[-1]
    check(f"conv_relu_pool{dims}d", dims, input, weight, bias, p)
    _, pooled_size = p.sizes(input, weight)
    planes = (input.shape[0], weight.shape[0])
    bytes_ = _pool_codes.plane_bytes(product(pooled_size), p.states) if save_codes else 0
    output = torch.empty(
        (*planes, *pooled_size),
        dtype=input.dtype,
        device=input.device,
        memory_format=memory_format(input, weight),
    )
    return output, input.new_empty((*planes, bytes_), dtype=torch.uint8)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, weight, _, *ctx.windows, _ = inputs
    _, codes = output
    ctx.save_for_backward(input, weight, codes)
    ctx.mark_non_differentiable(codes)


def backward(ctx: Any, grad: Tensor, backward_op: Op) -> tuple[Tensor | None, ...]:
    input, weight, codes = ctx.saved_tensors
    wanted = tuple(ctx.needs_input_grad[1:4])
    # Differentiable where the graph is being recorded.
    run = gradients if torch.is_grad_enabled() else backward_op.on(ctx.namespace)
    grads = run(grad, input, weight, codes, *ctx.windows, *wanted)
    return tuple(g if want else None for g, want in zip(grads, wanted, strict=True))


# -- backward ---------------------------------------------------------------------------------


def gradients(
    grad: Tensor, input: Tensor, weight: Tensor, codes: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients from stock ops: the definition, and differentiable to any order."""
    p, wanted = Windows(*rest[:-3]), rest[-3:]
    convolved_size, pooled_size = p.sizes(input, weight)
    outputs = product(pooled_size)
    unpacked = _pool_codes.unpack_codes(codes, outputs, p.states).unflatten(2, pooled_size)
    index, live, branch = p.indices(unpacked, convolved_size)

    planes = grad.shape[:2]
    accumulate = torch.float64 if grad.dtype == torch.float64 else torch.float32
    kept = torch.where(live, grad, 0).to(accumulate)
    if p.activation == "leaky_relu":
        kept = torch.where(live & (branch == 1), kept * p.alpha, kept)
    flat = torch.zeros(
        (*planes, product(convolved_size)), dtype=accumulate, device=grad.device
    ).scatter_add(2, index.flatten(2), kept.flatten(2))
    dc = flat.unflatten(2, convolved_size).to(grad.dtype)

    absent = grad.new_empty((0,))
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dc.contiguous(memory_format=memory_format(input, weight)),
        input,
        weight,
        None,
        p.stride,
        p.padding,
        p.dilation,
        False,
        [0] * len(p.stride),
        p.groups,
        [wanted[0], wanted[1], False],
    )
    batch_and_places = (0, *range(2, grad.dim()))
    db = kept.sum(batch_and_places).to(grad.dtype) if wanted[2] else absent
    return dx if wanted[0] else absent, dw if wanted[1] else absent, db


def backward_reference(dims: int, *args: Any) -> tuple[Tensor, ...]:
    grad, input, weight, codes = args[:4]
    check_saved(dims, grad, input, weight, codes, Windows(*args[4:-3]))
    dx, dw, db = gradients(*args)
    dx = dx.contiguous(memory_format=memory_format(input, weight)) if args[-3] else dx
    return dx, torch.empty_like(weight).copy_(dw) if args[-2] else dw, db


def backward_fake(
    dims: int, grad: Tensor, input: Tensor, weight: Tensor, codes: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    p, wanted = Windows(*rest[:-3]), rest[-3:]
    check_saved(dims, grad, input, weight, codes, p)
    format_ = memory_format(input, weight)
    absent = grad.new_empty((0,))
    dx = torch.empty(input.shape, dtype=input.dtype, device=input.device, memory_format=format_)
    return (
        dx if wanted[0] else absent,
        torch.empty_like(weight) if wanted[1] else grad.new_empty((0,)),
        grad.new_empty((weight.shape[0],)) if wanted[2] else grad.new_empty((0,)),
    )


def check_saved(
    dims: int, grad: Tensor, input: Tensor, weight: Tensor, codes: Tensor, p: Windows
) -> None:
    op = f"conv_relu_pool{dims}d_backward"
    check(op, dims, input, weight, None, p)
    _, pooled_size = p.sizes(input, weight)
    planes = (input.shape[0], weight.shape[0])
    if grad.dtype != input.dtype or grad.shape != (*planes, *pooled_size):
        raise RuntimeError(
            f"{op}: grad is {grad.dtype} of shape {tuple(grad.shape)}, needs {input.dtype} of "
            f"shape {(*planes, *pooled_size)}"
        )
    for name, tensor in (("grad", grad), ("codes", codes)):
        if tensor.device != input.device:
            raise RuntimeError(f"{op}: {name} is on {tensor.device}, needs input's {input.device}")
    bytes_ = _pool_codes.plane_bytes(product(pooled_size), p.states)
    if codes.dtype != torch.uint8 or codes.shape != (*planes, bytes_):
        raise RuntimeError(
            f"{op}: codes is {codes.dtype} of shape {tuple(codes.shape)}, needs torch.uint8 of "
            f"shape {(*planes, bytes_)}; the forward pass makes them with save_codes=True"
        )


def product(sizes: Sequence[int]) -> int:
    # math.prod is not traceable with symbolic sizes.
    total = 1
    for size in sizes:
        total = total * size
    return total


# -- public -----------------------------------------------------------------------------------


def call(
    dims: int,
    op: Callable[..., tuple[Tensor, Tensor]],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
    groups: int,
    pool_kernel_size: int | Sequence[int],
    pool_stride: int | Sequence[int] | None,
    pool_padding: int | Sequence[int],
    pool_dilation: int | Sequence[int],
    ceil_mode: bool,
    activation: tuple[str, float, float],
) -> Tensor:
    """The public functions: stock arguments to the raw op, batched or not."""
    name = f"conv_relu_pool{dims}d"
    input, windows = _conv_pool_arguments.parse(
        name,
        dims,
        input,
        weight,
        stride,
        padding,
        dilation,
        groups,
        pool_kernel_size,
        pool_stride,
        pool_padding,
        pool_dilation,
        ceil_mode,
        activation,
    )
    widens = _conv_pool_arguments.widens(dims, input)
    if widens or under_transform(input, weight, bias):
        activated = windows.activate(windows.convolve(input, weight, bias))
        if widens and activated.dtype != torch.float64:
            activated = activated.float()
        return windows.pool(activated)[0]
    save_codes = torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    batch = input if input.dim() == dims + 2 else input.unsqueeze(0)
    output, _ = op(batch, weight, bias, *windows, save_codes)
    # One image is contiguous, as the stock pool makes it.
    return output if input.dim() == dims + 2 else output.squeeze(0).contiguous()
