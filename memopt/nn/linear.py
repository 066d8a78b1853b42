"""Linear layer with a storage policy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt.ops.linear import check_storage, linear

__all__ = ["Linear"]


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` that may keep its input in 8, 4 or 2 bits an element for backward.

    Parameters, initialisation and state_dict are the stock layer's.

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`.
        storage: "keep" (the stock layer), "int8", "int4" or "int2"; see
            `memopt.nn.functional.linear`.
        group_size: elements that share a scale.

    Example:
        >>> import torch, memopt
        >>> memopt.nn.Linear(4, 2, storage="int8")
        Linear(in_features=4, out_features=2, bias=True, storage='int8')
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        storage: str = "keep",
        group_size: int = 256,
    ) -> None:
        check_storage(storage, group_size)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.storage = storage
        self.group_size = group_size

    def forward(self, input: Tensor) -> Tensor:
        return linear(
            input, self.weight, self.bias, storage=self.storage, group_size=self.group_size
        )

    def extra_repr(self) -> str:
        group = "" if self.group_size == 256 else f", group_size={self.group_size}"
        return f"{super().extra_repr()}, storage={self.storage!r}{group}"
