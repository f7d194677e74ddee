"""The interpreter's repairs: each row of what it gets wrong as shipped, against torch.

Rounding must agree bit for bit; products to fp32 accumulation order (N = 64 terms: 1e-6).
"""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from kernels.backend import triton_interprets  # noqa: E402
from tests.kernels import sample_kernels as sample  # noqa: E402

pytestmark = pytest.mark.skipif(not triton_interprets(), reason="TRITON_INTERPRET=1 only")
N = 64


@pytest.fixture
def pair():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(N, N, generator=generator) for _ in range(2)]


def error(actual, reference):
    return ((actual.double() - reference).norm() / reference.norm()).item()


def dot(a, b, precision="ieee"):
    c = torch.full((N, N), float("nan"))
    sample.dot_kernel[(1,)](a, b, c, N=N, PRECISION=precision)
    return c


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_dot_is_exact_up_to_accumulation(pair, dtype):
    a, b = (x.to(dtype) for x in pair)
    assert error(dot(a, b), a.double() @ b.double()) < 1e-6


@pytest.mark.parametrize(
    ("precision", "low", "high"),
    [
        ("ieee", 0, 5e-7),
        ("tf32", 2e-4, 2e-3),
        ("tf32x3", 0, 1e-6),
        ("bf16x3", 1e-6, 3e-5),
        ("bf16x6", 0, 1e-6),
    ],
)
def test_fp32_dot_has_the_error_of_its_precision(pair, precision, low, high):
    a, b = pair
    assert low <= error(dot(a, b, precision), a.double() @ b.double()) < high


def test_tf32_truncates_as_wgmma_does(pair):
    a, b = (x.abs() for x in pair)
    assert (dot(a, b, "tf32").double() - a.double() @ b.double()).max() < 0


def test_bfloat16_arithmetic_rounds_to_nearest_even(pair):
    a, b = (x.flatten()[:256].to(torch.bfloat16) for x in pair)
    total, prefix = torch.zeros(1, dtype=a.dtype), torch.zeros_like(a)
    outputs = [torch.zeros_like(a), torch.zeros_like(a), torch.zeros(256, dtype=torch.int8), total, prefix]
    sample.elementwise_kernel[(1,)](a, b, *outputs, N=256)
    assert torch.equal(outputs[0], a + b)
    assert torch.equal(outputs[1], (a.float() * b.float() + a.float()).to(a.dtype))
    assert torch.equal(outputs[2].bool(), (a < b) & (b > 0))
    assert abs(total.item() - a.double().sum().item()) <= 2**-8 * abs(a.double().sum().item())
    torch.testing.assert_close(prefix.double(), a.double().cumsum(0), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_round_to_nearest_even(pair, target):
    x = pair[0].flatten()[:1024] * torch.logspace(-6, 2, 1024)
    x[:4] = torch.tensor([0.0, -0.0, 1 + 2.0**-9, 1 + 3 * 2.0**-9])
    limit = torch.finfo(target).max
    y = torch.empty(1024, dtype=target)
    sample.cast_kernel[(1,)](x, y, N=1024)
    assert torch.equal(y.float(), x.clamp(-limit, limit).to(target).float())


def test_special_values_survive_a_cast():
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 3e38])
    y = torch.empty(4, dtype=torch.bfloat16)
    sample.cast_kernel[(1,)](x, y, N=4)
    assert y[0] == float("inf") and y[1] == float("-inf") and y[2].isnan() and y[3] == x[3].to(torch.bfloat16)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_widening_is_exact(pair, source):
    x = pair[0].flatten()[:256].to(source)
    y = torch.empty(256)
    sample.cast_kernel[(1,)](x, y, N=256)
    assert torch.equal(y, x.float())


def test_loops_over_a_loaded_bound():
    out = torch.zeros(1, dtype=torch.int32)
    sample.loop_kernel[(1,)](torch.tensor([5], dtype=torch.int32), out)
    assert out.item() == 20


def test_int32_overflow_raises():
    out = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(Exception, match="overflow"):
        sample.square_kernel[(1,)](torch.tensor([2**20], dtype=torch.int32), out)


@pytest.mark.parametrize("other", [torch.int32, torch.bool, torch.float16, torch.float64])
def test_casts_between_bfloat16_and_other_types_keep_the_number(other):
    x = (torch.arange(256) % 2 if other is torch.bool else torch.arange(256) - 128).to(other)
    y = torch.empty(256, dtype=torch.bfloat16)
    sample.cast_kernel[(1,)](x, y, N=256)
    assert torch.equal(y, x.to(torch.bfloat16))
    if other is not torch.bool:
        back = torch.empty(256, dtype=other)
        sample.cast_kernel[(1,)](y, back, N=256)
        assert torch.equal(back, x)
