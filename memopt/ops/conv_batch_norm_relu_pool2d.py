"""y = max_pool2d(relu(batch_norm(conv2d(x, w, b)))) that keeps the convolution's output once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt._registry import Op, cast_floating, under_transform
from memopt.ops import _batch_norm, _pool_codes
from memopt.ops._conv_pool_arguments import parse
from memopt.ops._conv_pool_windows import memory_format
from memopt.ops.conv_relu_pool2d import conv_relu_pool2d

__all__ = ["conv_batch_norm_relu_pool2d"]

_NAME = _batch_norm.OP
_WINDOWS = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, "
    "SymInt[] pool_kernel_size, SymInt[] pool_stride, SymInt[] pool_padding, "
    "SymInt[] pool_dilation, bool ceil_mode"
)
# -- forward ----------------------------------------------------------------------------------


def _reference(*args: Any) -> tuple[Tensor, ...]:
    a = _batch_norm.Arguments.checked(args)
    convolved_size, _ = a.p.sizes(a.input, a.weight)
    convolved = a.p.convolve(a.input, a.weight, a.bias)
    mean, invstd, variance = _batch_norm.statistics(convolved, a.eps)
    normalized = _batch_norm.normalize(convolved, mean, invstd, a.bn_weight, a.bn_bias)
    pooled, index = a.p.pool(F.relu(normalized))
    pooled = pooled.contiguous(memory_format=memory_format(a.input, a.weight))
    if not a.save_codes:
        codes = pooled.new_empty((*pooled.shape[:2], 0), dtype=torch.uint8)
        return pooled, codes, pooled.new_empty((0,)), mean, invstd, variance
    # `<=` is false for NaN: it passes ReLU, and its gradient does.
    winners = torch.where(pooled <= 0, -1, a.p.winners(index, convolved_size))
    codes = _pool_codes.pack_codes(winners.contiguous().flatten(2), a.p.positions)
    return (
        pooled,
        codes,
        convolved.contiguous(memory_format=_batch_norm.KEPT),
        mean,
        invstd,
        variance,
    )


def _fake(*args: Any) -> tuple[Tensor, ...]:
    a = _batch_norm.Arguments.checked(args)
    convolved_size, (height, width) = a.p.sizes(a.input, a.weight)
    planes = (a.input.shape[0], a.weight.shape[0])
    format_ = memory_format(a.input, a.weight)
    output = a.input.new_empty((*planes, height, width)).to(memory_format=format_)
    bytes_ = _pool_codes.plane_bytes(height * width, a.p.positions) if a.save_codes else 0
    codes = a.input.new_empty((*planes, bytes_), dtype=torch.uint8)
    convolved = a.input.new_empty((*planes, *convolved_size)).to(memory_format=_batch_norm.KEPT)
    if not a.save_codes:
        convolved = a.input.new_empty((0,))
    dtype = _batch_norm.accumulate_dtype(a.input.dtype)
    statistics = (a.input.new_empty(planes[1:], dtype=dtype) for _ in range(3))
    return output, codes, convolved, *statistics


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, weight, bias, bn_weight, bn_bias, *ctx.windows, ctx.eps, _ = inputs
    _, codes, convolved, mean, invstd, variance = output
    ctx.bn_dtypes = [None if t is None else t.dtype for t in (bn_weight, bn_bias)]
    ctx.save_for_backward(input, weight, bias, bn_weight, convolved, codes, mean, invstd)
    ctx.mark_non_differentiable(codes, convolved, mean, invstd, variance)


def _backward(ctx: Any, grad: Tensor, *unused: None) -> tuple[Tensor | None, ...]:
    input, weight, bias, bn_weight, convolved, codes, mean, invstd = ctx.saved_tensors
    wanted = tuple(ctx.needs_input_grad[1:6])
    run = _backward_op.on(ctx.namespace)
    if torch.is_grad_enabled():
        # The graph is recorded: all that backward reads has to be a function of the inputs.
        convolved = _batch_norm.windows(ctx.windows).convolve(input, weight, bias)
        mean, invstd, _ = _batch_norm.statistics(convolved, ctx.eps)
        run = _gradients
    saved = (input, weight, bn_weight, convolved, codes, mean, invstd)
    grads = run(grad, *saved, *ctx.windows, *wanted)
    dtypes = (input.dtype, input.dtype, input.dtype, *ctx.bn_dtypes)
    return tuple(
        g.to(dtype) if want else None for g, dtype, want in zip(grads, dtypes, wanted, strict=True)
    )


# -- backward ---------------------------------------------------------------------------------


def _gradients(*args: Any) -> tuple[Tensor, ...]:
    """The gradients from stock ops: the definition, and differentiable to any order."""
    s = _batch_norm.Saved.checked(args)
    convolved_size, pooled_size = s.p.sizes(s.input, s.weight)
    unpacked = _pool_codes.unpack_codes(
        s.codes, pooled_size[0] * pooled_size[1], s.p.positions
    ).unflatten(2, pooled_size)
    index, live, _ = s.p.indices(unpacked, convolved_size)
    kept = torch.where(live, s.grad, 0).to(s.mean.dtype)
    dz = s.mean.new_zeros((*s.grad.shape[:2], convolved_size[0] * convolved_size[1]))
    dz = dz.scatter_add(2, index.flatten(2), kept.flatten(2)).unflatten(2, convolved_size)
    dc, bn_weight_grad, bn_bias_grad = _batch_norm.input_gradient(
        dz, s.convolved.to(s.mean.dtype), s.mean, s.invstd, s.bn_weight
    )
    # Batch norm takes the mean away, and the bias with it; what is not finite stays.
    db = (dc.sum((0, 2, 3)) * 0).to(s.grad.dtype)
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dc.to(s.grad.dtype).contiguous(memory_format=_batch_norm.KEPT),
        s.input,
        s.weight,
        None,
        s.p.stride,
        s.p.padding,
        s.p.dilation,
        False,
        [0, 0],
        s.p.groups,
        [s.wanted[0], s.wanted[1], False],
    )
    return s.only_wanted(dx, dw, db, bn_weight_grad, bn_bias_grad)


def _backward_reference(*args: Any) -> tuple[Tensor, ...]:
    input, weight = args[1], args[2]
    dx, dw, *others = _gradients(*args)
    dx = dx.contiguous(memory_format=memory_format(input, weight)) if dx.dim() == 4 else dx
    return dx, torch.empty_like(weight).copy_(dw) if dw.dim() == 4 else dw, *others


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    s = _batch_norm.Saved.checked(args)
    dx = s.input.new_empty(s.input.shape)
    return s.only_wanted(
        dx.to(memory_format=memory_format(s.input, s.weight)),
        torch.empty_like(s.weight),
        s.grad.new_empty(s.weight.shape[:1]),
        s.mean.new_empty(s.mean.shape),
        s.mean.new_empty(s.mean.shape),
    )


_op = Op(
    _NAME,
    "(Tensor input, Tensor weight, Tensor? bias, Tensor? bn_weight, Tensor? bn_bias, "
    f"{_WINDOWS}, float eps, bool save_codes) -> (Tensor output, Tensor codes, Tensor convolved, "
    "Tensor mean, Tensor invstd, Tensor variance)",
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    # The convolution's arguments alone: the stock batch norm's are left as they are.
    autocast=lambda args, dtype: [*cast_floating(args[:3], dtype), *args[3:]],
)

_backward_op = Op(
    f"{_NAME}_backward",
    "(Tensor grad, Tensor input, Tensor weight, Tensor? bn_weight, Tensor convolved, "
    f"Tensor codes, Tensor mean, Tensor invstd, {_WINDOWS}, bool input_grad, bool weight_grad, "
    "bool bias_grad, bool bn_weight_grad, bool bn_bias_grad) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_backward_reference,
    fake=_backward_fake,
    not_differentiable="the raw backward op has no derivative; differentiate "
    f"{_NAME} with create_graph=True instead",
)


# -- public -----------------------------------------------------------------------------------


def conv_batch_norm_relu_pool2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    bn_weight: Tensor | None = None,
    bn_bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    pool_kernel_size: int | Sequence[int] = 2,
    pool_stride: int | Sequence[int] | None = None,
    pool_padding: int | Sequence[int] = 0,
    pool_dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """`max_pool2d(relu(batch_norm(conv2d(input, weight, bias))))`, the stem of a ResNet.

    In training the convolution's output is kept once, where the stock layers keep it, the batch
    norm's result and the pool's int64 indices; and one code per pooled element (see
    `conv_relu_pool2d`). Without `training` the batch norm is folded into the convolution, and
    `conv_relu_pool2d` does the work; but one of bfloat16 or float16 would lose digits by that,
    and takes the stock layers.

    Args:
        input, weight, bias, stride, padding, dilation, groups: as in `conv2d`; input is
            (N, C, H, W), any strides.
        running_mean, running_var, training, momentum, eps: as in `batch_norm`; in training the
            running estimates, if given, are updated in place.
        bn_weight, bn_bias: `batch_norm`'s weight and bias, (K,) or None. All channel tensors have
            the input's dtype, or float32 beside a shorter one.
        pool_kernel_size, pool_stride, pool_padding, pool_dilation, ceil_mode: as in `max_pool2d`;
            pool_stride defaults to pool_kernel_size.

    Returns:
        (N, K, OH, OW), in the memory format of the stock ops.

    Raises:
        ValueError: one value per channel in training, an eps that is not positive, an unbatched
            input, or an unknown `padding` string.
        RuntimeError: shapes, dtypes or parameters that the stock ops refuse.

    Example:
        >>> import torch, memopt
        >>> x, w = torch.randn(8, 3, 32, 32), torch.randn(16, 3, 7, 7)
        >>> mean, var = torch.zeros(16), torch.ones(16)
        >>> memopt.nn.functional.conv_batch_norm_relu_pool2d(
        ...     x, w, None, mean, var, stride=2, padding=3, training=True
        ... ).shape
        torch.Size([8, 16, 8, 8])
    """
    input, p = parse(
        _NAME,
        2,
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
        ("relu", 0.0, 0.0),
    )
    if input.dim() != 4:
        raise ValueError(f"{_NAME}: input has {input.dim()} dimensions, needs (N, C, H, W)")
    channel = (running_mean, running_var, bn_weight, bn_bias)
    _batch_norm.check_call(input, weight, p, *channel, training, eps)
    tensors = (input, weight, bias, bn_weight, bn_bias)
    short = _batch_norm.convolved_dtype(input) in (torch.bfloat16, torch.float16)
    folds = not training and not short
    if not (training or folds) or not input.shape[0] or under_transform(*tensors):
        convolved = p.convolve(input, weight, bias)
        normalized = F.batch_norm(convolved, *channel, training, momentum, eps)
        return p.pool(F.relu(normalized))[0]
    if folds:
        weight, bias = _batch_norm.fold(weight, bias, *channel, eps, weight.dtype)
        names = ("pool_kernel_size", "pool_stride", "pool_padding", "pool_dilation", "ceil_mode")
        pool = {name: getattr(p, name) for name in names}
        return conv_relu_pool2d(input, weight, bias, *p[:4], **pool)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    output, _, _, mean, _, variance = _op(*tensors, *p[:9], eps, keep)
    if running_mean is not None and running_var is not None:
        _batch_norm.update_running(running_mean, running_var, mean, variance, momentum)
    return output
