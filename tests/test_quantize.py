"""quantize and dequantize: the format to the bit, its bounds, and what must not break."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import memopt
from memopt import dequantize, quantize
from memopt.ops import _philox
from support import (
    DTYPES,
    OPS,
    assert_compiles,
    assert_same_bits,
    assert_same_for_threads,
    check_op,
    layouts,
    unchanged,
)

pytestmark = pytest.mark.portable

BITS = (2, 4, 8)
SIZES = (0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 3001)
SEEDS = (None, 0, -1, 0x123456789ABCDEF)
FLOAT_MAX = torch.finfo(torch.float32).max


def seed_on(device: torch.device, seed: int | None) -> Tensor | None:
    return None if seed is None else torch.tensor(seed, device=device)


def assert_like_reference(backend, x: Tensor, bits: int, group_size: int, seed: int | None) -> None:
    """Packed, scale, minimum and what they decode to, in every dtype: the reference's bits."""
    ours = OPS["quantize"](x, bits, group_size, seed_on(x.device, seed))
    reference = OPS["quantize"].on("memopt_reference")
    expected = reference(x.cpu().contiguous(), bits, group_size, seed_on(torch.device("cpu"), seed))
    assert_same_bits([t.cpu() for t in ours], list(expected))
    for dtype in DTYPES:
        args = ((x.numel(),), (1,), dtype, bits, group_size)
        decoded = OPS["dequantize"](*ours, *args)
        assert_same_bits(decoded.cpu(), OPS["dequantize"].on("memopt_reference")(*expected, *args))


def special_groups(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Groups of 8 that hold every kind of value."""
    info = torch.finfo(dtype)
    tiny, top = min(info.tiny, 1e-38), min(info.max, FLOAT_MAX)
    rows = [
        [0.0] * 8,
        [-0.0, 0.0] * 4,
        [1.0, math.nan] + [2.0] * 6,
        [1.0, math.inf] + [2.0] * 6,
        [-math.inf] + [0.0] * 7,
        [top, -top] + [0.0] * 6,
        [-top] * 8,
        [top] * 8,
        [top, top / 2] * 4,
        [tiny, 0.0, -tiny, tiny / 2, 3 * tiny, 1e-45, 0.0, 0.0],
        [1e-45, 0.0] * 4,
        [math.pi] * 8,
        [-math.pi] * 8,
        [1000.0, 1000.5, 1001.0, 999.5] * 2,
        [1e30, 1.0, -1.0, 1e-30, 0.0, 2.0, 3.0, 4.0],
        [0.0, 1.0] * 4,
    ]
    return torch.tensor(rows, dtype=torch.float64, device=device).to(dtype).view(-1)


# -- The format, to the bit ------------------------------------------------------------------------


def test_philox_gives_the_published_answers():
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    counters = torch.tensor([(0,) * 4, (0xFFFFFFFF,) * 4, pi]).t()
    keys = ((0, 0), (0xFFFFFFFF, 0xFFFFFFFF), (0xA4093822, 0x299F31D0))
    answers = (  # kat_vectors of Random123, philox4x32 10
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    )
    for k, (key, answer) in enumerate(zip(keys, answers, strict=True)):
        assert tuple(_philox.philox(counters[:, k : k + 1], torch.tensor(key)).flatten()) == answer


def test_worked_example_of_the_storage_format(backend):
    x = torch.tensor([-1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 7.0], device=backend.device)
    q = quantize(x, 2, group_size=8, stochastic=False)
    assert q.packed.tolist() == [0x50, 0xE9, 0x00]
    assert q.minimum.tolist() == [-1.0, 7.0]
    assert q.scale.tolist() == [1.0, 0.0]
    assert dequantize(q).tolist() == [-1.0, -1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 7.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_same_bits_as_the_reference(backend, dtype, bits):
    for number, (size, group_size) in enumerate(itertools.product(SIZES, (8, 24, 256, 2048))):
        x = 3 * torch.randn(size, device=backend.device).to(dtype)
        assert_like_reference(backend, x, bits, group_size, SEEDS[number % len(SEEDS)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_same_bits_as_the_reference_on_special_values(backend, dtype, bits):
    x = special_groups(dtype, backend.device)
    for group_size, seed in itertools.product((8, 16, 256), SEEDS):
        assert_like_reference(backend, x, bits, group_size, seed)
        assert_like_reference(backend, x[3:], bits, group_size, seed)


@given(
    shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from((8, 40, 256)),
    dtype=st.sampled_from(DTYPES),
    seed=st.sampled_from(SEEDS),
)
def test_any_shape_and_strides_pack_as_the_contiguous_copy(
    backend, shape, bits, group_size, dtype, seed
):
    for x in layouts(torch.randn(shape, device=backend.device).to(dtype)).values():
        assert_like_reference(backend, x, bits, group_size, seed)


def test_strided_runs_longer_than_a_task(backend):
    x = torch.randn(300, 1100, device=backend.device)
    for view in (x.t(), x[:, 1::3], x.view(100, 3, 1100).transpose(0, 2)):
        for group_size in (256, 4096):
            assert_like_reference(backend, view, 8, group_size, 5)


def test_same_bits_for_any_number_of_threads(backend):
    x = torch.randn(100_003, device=backend.device)
    seed = seed_on(backend.device, 3)
    assert_same_for_threads(lambda: OPS["quantize"](x, 4, 64, seed))
    packed = OPS["quantize"](x, 4, 64, seed)
    args = (list(x.shape), [1], torch.float32, 4, 64)
    assert_same_for_threads(lambda: OPS["dequantize"](*packed, *args))


# -- Values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("stochastic", [True, False])
def test_error_is_within_the_bound(backend, dtype, bits, stochastic):
    spread = torch.logspace(-8, 4, 64, device=backend.device).unsqueeze(1)
    x = (torch.randn(64, 256, device=backend.device) * spread + spread).to(dtype)
    q = quantize(x, bits, stochastic=stochastic)
    error = (dequantize(q).double() - x.double()).abs()
    scale, levels = q.scale.double().unsqueeze(1), 2**bits - 1
    allowed = scale * (1 if stochastic else 0.5)
    rounding = levels * scale * 2**-22 + torch.finfo(dtype).eps * (x.double().abs() + scale)
    assert (error <= allowed + rounding + torch.finfo(dtype).smallest_normal * 2**-7).all()
    # The scale is the smallest that covers, but for the rounding of scale and minimum.
    low, high = x.double().amin(1, keepdim=True), x.double().amax(1, keepdim=True)
    assert (scale * levels <= (high - low + low.abs() * 2**-7) * (1 + 2**-6)).all()


@pytest.mark.parametrize("bits", BITS)
def test_stochastic_rounding_is_unbiased(backend, bits):
    x = torch.randn(512, device=backend.device) * 3 + 1
    draws = 400
    errors = torch.zeros(512, dtype=torch.float64, device=backend.device)
    for _ in range(draws):
        q = quantize(x, bits)
        errors += dequantize(q).double() - x.double()
    step = q.scale.double().repeat_interleave(256)
    # One rounding has a standard deviation of at most step / 2.
    normalised = errors / (step / 2 * math.sqrt(draws))
    assert normalised.abs().max() < 5
    assert abs(normalised.mean().item()) * math.sqrt(512) < 5


@pytest.mark.parametrize("bits", BITS)
def test_exact_groups(backend, bits):
    for dtype in (torch.bfloat16, torch.float16):
        for value in (0.0, 1.0, -1.0, math.pi, -math.pi, 65504.0, -65504.0, 6e-8, 1e-5):
            x = torch.full((256,), value, dtype=dtype, device=backend.device)
            assert_same_bits(dequantize(quantize(x, bits)), x)
    x = torch.full((256,), -math.pi, device=backend.device)
    assert (dequantize(quantize(x, bits)) / x - 1).abs().max() <= 2**-16
    # Zeros among positive values, as behind a ReLU, are the minimum and exact.
    x = torch.randn(1024, device=backend.device).relu()
    assert (dequantize(quantize(x, bits))[x == 0] == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_that_is_not_finite_is_nan_entirely(backend, bad, dtype):
    for position in (256, 300, 511):
        x = torch.randn(768, device=backend.device).to(dtype)
        x[position] = bad
        is_nan = dequantize(quantize(x, 4)).isnan()
        assert is_nan[256:512].all()
        assert not is_nan[:256].any() and not is_nan[512:].any()


def test_a_float64_beyond_float32_is_nan(backend):
    x = torch.tensor([1e300, 0.0], dtype=torch.float64, device=backend.device)
    assert dequantize(quantize(x, 8)).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_groups_stay_finite(backend, dtype):
    top = min(torch.finfo(dtype).max, FLOAT_MAX)
    for low, high in ((-top, top), (top, top), (-top, -top), (top / 2, top), (-top, 0.0)):
        x = torch.linspace(0, 1, 256, dtype=torch.float64, device=backend.device)
        x = (x * high + (1 - x) * low).to(dtype)
        for bits in BITS:
            restored = dequantize(quantize(x, bits))
            assert restored.isfinite().all()
            step = (high / 2 - low / 2) / (2**bits - 1) * 2 * (1 + 2**-6)
            error = (restored.double() / 2 - x.double() / 2).abs().max() * 2
            assert error <= step + top * 2**-7


# -- Layout and size -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (0, 4), (4, 0, 3), (6, 10), (2, 3, 5, 7)])
def test_shape_and_strides_come_back(backend, shape):
    x = torch.randn((*shape[:-1], 1) if shape else (), device=backend.device).expand(shape)
    for name, layout in layouts(x).items():
        with unchanged(layout):
            q = quantize(layout, 8)
        restored = dequantize(q)
        assert (restored.shape, restored.stride()) == (layout.shape, layout.stride()), name
        assert (restored.dtype, restored.device) == (layout.dtype, layout.device)
        if layout.numel():
            torch.testing.assert_close(restored, layout, rtol=0.02, atol=0.02)


def test_expanded_dimensions_are_packed_once(backend):
    x = torch.randn(4, 1, 64, device=backend.device).expand(4, 1000, 64)
    q = quantize(x, 8)
    assert q.packed.numel() == 4 * 64
    restored = dequantize(q)
    assert restored.shape == x.shape and restored.stride() == x.stride()


def test_memory_that_overlaps_itself_comes_back_contiguous(backend):
    x = torch.randn(100, device=backend.device).unfold(0, 8, 2)
    restored = dequantize(quantize(x, 8))
    assert restored.is_contiguous()
    torch.testing.assert_close(restored, x, rtol=0, atol=0.03)


@pytest.mark.parametrize(("bits", "bits_an_element"), [(2, 2.125), (4, 4.125), (8, 8.125)])
def test_bytes(backend, bits, bits_an_element):
    q = quantize(torch.randn(40, 256, device=backend.device), bits)
    assert q.nbytes * 8 == 40 * 256 * bits_an_element
    assert repr(q) == (
        f"Quantized(shape=(40, 256), dtype=torch.float32, bits={bits}, group_size=256, "
        f"nbytes={q.nbytes}, device={q.packed.device})"
    )
    odd = quantize(torch.randn(257, device=backend.device), bits)
    assert odd.nbytes == -(-257 * bits // 8) + 2 * 2 * 2


# -- Seeds -----------------------------------------------------------------------------------------


def test_seeds(backend):
    x = torch.randn(1000, device=backend.device)
    torch.manual_seed(1)
    first, second = quantize(x, 4), quantize(x, 4)
    torch.manual_seed(1)
    again = quantize(x, 4)
    assert torch.equal(first.packed, again.packed)
    assert not torch.equal(first.packed, second.packed)
    generator = torch.Generator(backend.device).manual_seed(7)
    ours = quantize(x, 4, generator=generator)
    assert torch.equal(ours.packed, quantize(x, 4, generator=generator.manual_seed(7)).packed)
    state = torch.get_rng_state()
    nearest = quantize(x, 4, stochastic=False)
    assert torch.equal(nearest.packed, quantize(x, 4, stochastic=False).packed)
    assert torch.equal(state, torch.get_rng_state())


# -- PyTorch ---------------------------------------------------------------------------------------


def test_opcheck(backend):
    for x in layouts(torch.randn(2, 3, 4, 5, device=backend.device)).values():
        for seed in (None, 3):
            check_op(OPS["quantize"], x, 4, 16, seed_on(x.device, seed))
        packed = OPS["quantize"](x, 4, 16, None)
        check_op(OPS["dequantize"], *packed, list(x.shape), list(x.stride()), x.dtype, 4, 16)
    check_op(OPS["quantize"], torch.empty(0, 4, device=backend.device), 2, 8, None)


def test_no_gradient_flows(backend):
    x = torch.randn(9, requires_grad=True, device=backend.device)
    assert not dequantize(quantize(x, 8)).requires_grad


def test_compiles_without_recompiling(backend):
    def restored(x: Tensor) -> Tensor:
        return dequantize(quantize(x, 8, stochastic=False)) + 1

    calls = [(torch.randn(n, 300, device=backend.device),) for n in (4, 6, 9)]
    assert_compiles(restored, *calls)
    assert_compiles(restored, *((x[:, ::2].t(),) for (x,) in calls), backend="aot_eager")


# -- Bad inputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [0, 1, 3, 16, -4])
def test_unknown_bits(bits):
    with pytest.raises(ValueError, match=f"bits is {bits}, needs 2, 4 or 8"):
        quantize(torch.randn(4), bits)


@pytest.mark.parametrize("group_size", [0, -8, 1, 12])
def test_bad_group_size(group_size):
    with pytest.raises(ValueError, match=f"group_size is {group_size}, needs a positive multiple"):
        quantize(torch.randn(4), 8, group_size=group_size)


@pytest.mark.parametrize("x", [torch.ones(3, dtype=torch.int64), torch.ones(3) + 1j, [1.0], None])
def test_bad_dtype(x):
    with pytest.raises(TypeError, match=r"quantize: x is .*, needs float32"):
        quantize(x, 8)


def test_raw_quantize_checks_its_arguments(backend):
    x = torch.randn(16, device=backend.device)
    seed = torch.tensor(0, device=backend.device)
    raw = OPS["quantize"]
    for args in (
        (x.int(), 8, 8, None),
        (x, 3, 8, None),
        (x, 8, 0, None),
        (x, 8, 12, None),
        (x, 8, -8, None),
        (x, 8, 8, seed.view(1)),
        (x, 8, 8, seed.int()),
    ):
        with pytest.raises(RuntimeError, match=r"quantize: .*needs"):
            raw(*args)


def test_raw_dequantize_checks_its_arguments(backend):
    packed, scale, minimum = OPS["quantize"](torch.randn(16, device=backend.device), 8, 8, None)
    good = {"packed": packed, "scale": scale, "minimum": minimum, "size": [4, 4], "stride": [4, 1]}
    good |= {"dtype": torch.float32, "bits": 8, "group_size": 8}
    raw = OPS["dequantize"]
    assert raw(*good.values()).shape == (4, 4)
    for change in (
        {"packed": packed[:-1]},
        {"packed": packed.int()},
        {"packed": packed.view(4, 4)},
        {"scale": scale[:-1]},
        {"scale": scale.float()},
        {"minimum": minimum[:-1]},
        {"minimum": minimum.view(1, 2)},
        {"size": [4, 5]},
        {"size": [4]},
        {"size": [-4, -4]},
        {"stride": [4]},
        {"stride": [-4, 1]},
        {"stride": [0, 1]},
        {"size": [2**40, 2**40]},
        {"size": [2**62, 4]},
        {"dtype": torch.int32},
        {"bits": 4},
        {"bits": 5},
        {"group_size": 16},
        {"group_size": -8},
    ):
        with pytest.raises(RuntimeError):
            raw(*(good | change).values())
    with pytest.raises(RuntimeError):
        raw(*(good | {"stride": [2**62, 2**62]}).values())


def test_an_unavailable_backend_is_an_error():
    x = torch.randn(4, device="meta")
    with memopt.backend("cpu"), pytest.raises(RuntimeError, match="runs on cpu tensors"):
        quantize(x, 8)
