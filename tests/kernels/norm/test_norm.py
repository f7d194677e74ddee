"""Norms: values against the plain forms, gradients against finite differences, dtypes, strides, zero rows."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from kernels.norm import gated_rms_norm, l2_norm, naive_gated_rms_norm, naive_l2_norm, rms_norm


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4, 9), (0, 5)])
def test_values_equal_the_plain_form(shape):
    torch.manual_seed(0)
    x, gate, weight = double(*shape), double(*shape), double(shape[-1])
    torch.testing.assert_close(l2_norm(x), naive_l2_norm(x), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5), naive_gated_rms_norm(x, None, weight, 1e-5), rtol=1e-14, atol=1e-14
    )
    torch.testing.assert_close(
        gated_rms_norm(x, gate, weight, 1e-5),
        naive_gated_rms_norm(x, gate, weight, 1e-5),
        rtol=1e-14,
        atol=1e-14,
    )


@pytest.mark.parametrize("shape", [(4,), (2, 3, 5)])
def test_gradients(shape):
    torch.manual_seed(1)
    x, gate, weight = double(*shape), double(*shape), double(shape[-1])
    assert gradcheck(l2_norm, (x,))
    assert gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, weight))
    assert gradcheck(lambda *a: gated_rms_norm(*a, 1e-5), (x, gate, weight))


def test_zero_rows_have_finite_gradients():
    x = torch.zeros(2, 4, requires_grad=True)
    weight = torch.ones(4)
    (l2_norm(x).sum() + rms_norm(x, weight, 1e-5).sum()).backward()
    assert x.grad.isfinite().all()


def test_bf16_computes_in_fp32_and_strides_do_not_matter():
    torch.manual_seed(2)
    wide = torch.randn(4, 6, 10)
    x = wide[:, ::2, 1:9]
    torch.testing.assert_close(l2_norm(x), l2_norm(x.contiguous()), rtol=0, atol=0)
    half = x.bfloat16()
    # One rounding to bf16 (2^-9 relative) of the fp32 result: nothing else may be rounded on the way.
    assert torch.equal(l2_norm(half), l2_norm(half.float()).bfloat16())
    weight, gate = torch.randn(8).bfloat16(), torch.randn(4, 3, 8).bfloat16()
    got = gated_rms_norm(half, gate, weight, 1e-5)
    assert torch.equal(got, gated_rms_norm(half.float(), gate.float(), weight.float(), 1e-5).bfloat16())


def test_bad_shapes_are_named():
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="weight must be"):
        rms_norm(x, torch.ones(3), 1e-5)
    with pytest.raises(ValueError, match="gate must have"):
        gated_rms_norm(x, torch.ones(2, 3), torch.ones(4), 1e-5)
