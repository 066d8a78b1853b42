"""How an op is declared to PyTorch: schema, reference, fake, autograd and autocast in one call.

A declared op lives in two namespaces (see `memopt._backends`):

    torch.ops.memopt.<op>            the dispatcher's choice: C++ or CUDA kernel, else the reference
    torch.ops.memopt_reference.<op>  the reference, on any device

torch.library.register_autograd is not used: ops registered with it return a silent zero tangent
under forward-mode AD. The autograd kernel here refuses instead, and costs no more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import _C, Tensor

from memopt import _backends

_log = logging.getLogger("memopt")

NAMESPACES = ("memopt", "memopt_reference")
_AUTOCAST_DEVICES = ("CPU", "CUDA", "XPU", "MPS")

_torch_libraries = {ns: torch.library.Library(ns, "DEF") for ns in NAMESPACES}


def _constant_in_graphs(function: Callable[..., str]) -> Callable[..., str]:
    """`torch.compiler.assume_constant_result`, which would import torch._dynamo, by its mark.

    The function asks the dispatcher, which cannot be traced.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


#: Every declared op by name, in order of declaration.
OPS: dict[str, Op] = {}


class Op:
    """One op and everything PyTorch must know of it.

    Args:
        name: the op's name in `torch.ops.memopt`.
        schema: its arguments and results, e.g. ``"(Tensor input) -> (Tensor, Tensor)"``; the first
            argument is a tensor whose device chooses the kernel.
        reference: the definition of right, in plain PyTorch.
        fake: results with the right shape, stride, dtype and device, but no data.
        setup_context, backward: the autograd formula, as `torch.autograd.Function` takes them;
            ``ctx.namespace`` says where the forward pass ran, for `Op.on`.
        not_differentiable: what to say when autograd reaches an op that has no formula. The
            empty string means that the results simply carry no gradient.
        autocast: ``(args, dtype) -> args`` inside a `torch.autocast` region; None casts nothing.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        *,
        reference: Callable[..., Any],
        fake: Callable[..., Any],
        setup_context: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
        not_differentiable: str | None = None,
        autocast: Callable[[Sequence[Any], torch.dtype], Sequence[Any]] | None = None,
    ) -> None:
        if (backward is None) == (not_differentiable is None):
            raise TypeError(f"{name}: give either a backward formula or not_differentiable")
        self.name = name
        self.reference = reference
        self.fake = fake
        self.setup_context = setup_context
        self.backward = backward
        self.not_differentiable = not_differentiable
        self.autocast = autocast
        self._overloads: dict[str, Any] = {}
        self._fell_back: set[str] = set()
        OPS[name] = self
        for namespace in NAMESPACES:
            self._declare(namespace, schema)

    def __call__(self, *args: Any) -> Any:
        """Run the op on the backend that `memopt.backend` or `MEMOPT_BACKEND` chose."""
        name = _backends.selected()
        if name is None:
            return self._overloads["memopt"](*args)
        return self._overloads[self._explicit_namespace(name, args[0].device.type)](*args)

    def on(self, namespace: str) -> Any:
        """The op in one namespace: a backward pass runs where its forward pass ran."""
        return self._overloads[namespace]

    def has_kernel(self, dispatch_key: str) -> bool:
        """Whether a compiled kernel is registered, e.g. for "CPU" or "CUDA"."""
        return _C._dispatch_has_kernel_for_dispatch_key(f"memopt::{self.name}", dispatch_key)

    def backend_on(self, device_type: str) -> str:
        """The backend that a tensor on `device_type` gets, e.g. "cpu"; for reports."""
        chosen = _backends.selected()
        if chosen is not None:
            self._explicit_namespace(chosen, device_type)
            return chosen
        return device_type if self.has_kernel(device_type.upper()) else "reference"

    @_constant_in_graphs
    def _explicit_namespace(self, backend: str, device_type: str) -> str:
        _backends.require(backend)
        if backend == "reference":
            return "memopt_reference"
        needed = _backends.DEVICE_OF_BACKEND[backend]
        if device_type != needed:
            raise RuntimeError(
                f"{self.name}: backend {backend!r} was asked for and runs on {needed} tensors, "
                f"but the input is on {device_type}"
            )
        if not self.has_kernel(backend.upper()):
            raise RuntimeError(
                f"{self.name}: backend {backend!r} was asked for, but this op has no kernel there; "
                "leave the choice to memopt, or ask for 'reference'"
            )
        return "memopt"

    # -- registration ---------------------------------------------------------------------------

    def _declare(self, namespace: str, schema: str) -> None:
        library = _torch_libraries[namespace]
        library.define(self.name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        overload = getattr(getattr(torch.ops, namespace), self.name).default
        self._overloads[namespace] = overload

        default = self.reference if namespace == "memopt_reference" else self._fallback
        library.impl(self.name, default, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{self.name}", self.fake, lib=library)
        library.impl(
            self.name, self._autograd_kernel(namespace, overload), "Autograd", with_keyset=True
        )
        for device in _AUTOCAST_DEVICES:
            kernel = self._autocast_kernel(overload, device)
            library.impl(self.name, kernel, f"Autocast{device}")

    def _fallback(self, *args: Any) -> Any:
        device = args[0].device.type
        if device not in self._fell_back:
            self._fell_back.add(device)
            _log.warning(
                "%s has no compiled kernel for %s here and runs on the reference backend; "
                "`python -m memopt info` says why",
                self.name,
                device,
            )
        return self.reference(*args)

    def _autograd_kernel(self, namespace: str, overload: Any) -> Callable[..., Any]:
        op = self

        def below_autograd(keyset: Any, args: Sequence[Any]) -> Any:
            with _C._AutoDispatchBelowAutograd():
                return overload.redispatch(keyset & _C._after_autograd_keyset, *args)

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
                output = below_autograd(keyset, args)
                ctx.namespace = namespace
                ctx.set_materialize_grads(False)
                # The dispatcher drops arguments that equal their defaults: put them back.
                args = args + tuple(
                    a.default_value for a in overload._schema.arguments[len(args) :]
                )
                if op.setup_context is not None:
                    op.setup_context(ctx, args, output)
                return output

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                if op.backward is None:
                    raise RuntimeError(f"{op.name}: {op.not_differentiable}")
                if all(g is None for g in grads):
                    return (None,) * len(ctx.needs_input_grad)
                result = op.backward(ctx, *grads)
                result = result if isinstance(result, tuple) else (result,)
                return (None, *result, *(None,) * (len(ctx.needs_input_grad) - 1 - len(result)))

        Function.__name__ = Function.__qualname__ = f"{op.name}_autograd"

        def kernel(keyset: Any, *args: Any) -> Any:
            tensors = [a for a in args if isinstance(a, Tensor)]
            wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
            if op.not_differentiable != "":
                _refuse_transforms(op.name, tensors, wants_grad)
                if wants_grad:
                    return Function.apply(keyset, *args)
            return below_autograd(keyset, args)

        return kernel

    def _autocast_kernel(self, overload: Any, device: str) -> Callable[..., Any]:
        keyset = _C.DispatchKeySet(getattr(_C.DispatchKey, f"Autocast{device}"))

        def kernel(*args: Any) -> Any:
            with _C._ExcludeDispatchKeyGuard(keyset):
                if self.autocast is not None:
                    args = tuple(self.autocast(args, torch.get_autocast_dtype(device.lower())))
                return overload(*args)

        return kernel


def _refuse_transforms(name: str, tensors: Sequence[Tensor], wants_grad: bool) -> None:
    """A raw op has no forward-mode or torch.func formula: say so rather than return zeros."""
    if wants_grad and _C._are_functorch_transforms_active():
        raise RuntimeError(
            f"torch.ops.memopt.{name} has no torch.func gradient; call the function of that name "
            "in memopt.nn.functional, which computes it with the stock ops"
        )
    if has_tangent(tensors):
        raise RuntimeError(
            f"torch.ops.memopt.{name} has no forward-mode formula; call the function of that name "
            "in memopt.nn.functional, which computes it with the stock ops"
        )


def has_tangent(tensors: Sequence[Tensor]) -> bool:
    """Whether forward-mode AD is active and one of `tensors` carries a tangent."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def under_transform(*tensors: Tensor | None) -> bool:
    """Whether a torch.func transform or forward-mode AD wants a formula made of stock ops.

    The public functions then compute the stock formula: right under every transform and to any
    order, at stock memory.
    """
    if _C._are_functorch_transforms_active():
        return True
    return has_tangent([t for t in tensors if t is not None])


def cast_floating(args: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """autocast's cast: floating tensors but float64, which eager leaves alone, become `dtype`."""
    return [
        a.to(dtype)
        if isinstance(a, Tensor) and a.is_floating_point() and a.dtype != torch.float64
        else a
        for a in args
    ]
