"""What a computation holds: bytes saved for backward, and the peak of tensor memory.

The tests, the benches and the demo all measure with these.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

_CPU = torch._C._autograd.DeviceType.CPU


def saved_tensors(fn: Callable[[], Any]) -> list[Tensor]:
    """The tensors that the graph built by ``fn()`` saves for backward, in order of saving.

    They stay alive as long as the list does. What a `torch.autograd.Function` keeps without
    ``save_for_backward`` is not seen.
    """
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return saved


def saved_bytes(fn: Callable[[], Any], ignore: Iterable[Tensor] = ()) -> int:
    """Bytes of the distinct storages that the graph built by ``fn()`` saves for backward.

    Args:
        fn: runs a forward pass.
        ignore: tensors whose storages do not count, such as parameters, which live anyway.
    """
    ignored = [t.untyped_storage() for t in ignore]
    seen = {storage._cdata for storage in ignored}
    total = 0
    saved = saved_tensors(fn)  # alive while their storages are told apart by address
    for tensor in saved:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total


def peak_bytes(fn: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """The most tensor memory on `device` that ``fn()`` holds at once, beyond what was held before.

    On the CPU every allocation counts, also the buffers inside kernels: the profiler records what
    passes through torch's allocator. On CUDA it is the caching allocator's own maximum.
    """
    device = torch.device(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        fn()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        raise ValueError(f"peak_bytes: device is {device.type}, needs cpu or cuda")
    activities = [torch.profiler.ProfilerActivity.CPU]
    profile = torch.profiler.profile(activities=activities, profile_memory=True)
    with _silent_stderr():
        profile.start()
    try:
        fn()
    finally:
        with _silent_stderr():
            profile.stop()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events: list[Any] = profile.profiler.kineto_results.events()
    allocations = [e for e in events if e.name() == "[memory]" and e.device_type() == _CPU]
    held = peak = 0
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Starting and stopping the profiler prints two lines of its tracing to file descriptor 2."""
    with contextlib.ExitStack() as stack:
        kept = os.dup(2)
        stack.callback(os.close, kept)
        stack.callback(os.dup2, kept, 2)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        stack.callback(os.close, nowhere)
        os.dup2(nowhere, 2)
        yield
