"""The grouped FFN against one expert after another: both sets of weights, empty groups, unread tails,
gradients.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from kernels.moe import (
    grouped_ffn,
    grouped_ffn_backward,
    grouped_ffn_forward,
    naive_grouped_ffn,
    naive_situ_glu,
    situ_glu,
)

OFFSETS = torch.tensor([3, 3, 7, 9, 9, 12], dtype=torch.int32)  # 4 home experts, 2 copies; 2 groups are empty


def weights(experts, width=4, inner=6, dtype=torch.float64):
    return tuple(
        torch.randn(experts, *shape, dtype=dtype).requires_grad_()
        for shape in ((inner, width), (inner, width), (width, inner))
    )


def case(width=4, inner=6, dtype=torch.float64, rows=15):
    torch.manual_seed(0)
    x = torch.randn(rows, width, dtype=dtype).requires_grad_()
    return x, weights(4, width, inner, dtype), weights(2, width, inner, dtype)


def grads(out, tensors):
    torch.manual_seed(5)
    return torch.autograd.grad((out * torch.randn(out.shape, dtype=out.dtype)).sum(), tensors)


# Multiples of 16 bytes take torch's grouped_mm in fp32; others, and fp64, the loop.
@pytest.mark.parametrize(
    "width, inner, dtype, tolerance",
    [(4, 6, torch.float64, 1e-13), (8, 12, torch.float32, 1e-5), (5, 3, torch.float32, 1e-5)],
)
def test_equals_one_expert_after_another(width, inner, dtype, tolerance):
    x, home, copies = case(width, inner, dtype)
    got, want = (f(x, OFFSETS, home, copies) for f in (grouped_ffn, naive_grouped_ffn))
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    everything = (x, *home, *copies)
    for a, b in zip(grads(got, everything), grads(want, everything), strict=True):
        torch.testing.assert_close(a, b, rtol=10 * tolerance, atol=10 * tolerance)


def test_gradients_match_finite_differences():
    x, home, copies = case()
    assert gradcheck(lambda x, *w: grouped_ffn(x, OFFSETS, w[:3], w[3:]), (x, *home, *copies))
    assert gradcheck(lambda x, *w: grouped_ffn(x, OFFSETS[:4], w), (x, *home))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_after_the_last_group_are_never_read(dtype):
    x, home, copies = case(8, 12, dtype)
    clean = grouped_ffn(x, OFFSETS, home, copies)
    poisoned = x.detach().clone()
    poisoned[12:] = torch.nan
    poisoned.requires_grad_()
    out = grouped_ffn(poisoned, OFFSETS, home, copies)
    assert torch.equal(out, clean) and not out[12:].any()
    d_out = torch.ones_like(out)
    d_out[12:] = torch.nan
    for gradient in torch.autograd.grad(out, (poisoned, *home, *copies), d_out):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("saves", [True, False])
def test_explicit_backward_equals_autograd(saves):
    x, home, copies = case()
    out = grouped_ffn(x, OFFSETS, home, copies)
    d_out = torch.randn_like(out)
    want = torch.autograd.grad(out, (x, *home, *copies), d_out)
    again, saved = grouped_ffn_forward(x, OFFSETS, home, copies)
    assert torch.equal(again, out)
    d_rows, d_home, d_copies, _ = grouped_ffn_backward(
        d_out, x, OFFSETS, home, copies, saved=saved if saves else None
    )
    for a, b in zip((d_rows, *d_home, *d_copies), want, strict=True):
        assert torch.equal(a, b)


def test_weight_gradients_of_bf16_in_fp32_and_unused_experts_get_zero():
    x, home, copies = (
        [t.detach().bfloat16() for t in group] if isinstance(group, tuple) else group.detach().bfloat16()
        for group in case(8, 16, torch.float32)
    )
    d_out = torch.ones_like(x)
    _, d_home, d_copies, _ = grouped_ffn_backward(d_out, x, OFFSETS, home, copies, grad_dtype=torch.float32)
    assert {g.dtype for g in (*d_home, *d_copies)} == {torch.float32}
    assert not d_home[0][1].any() and not d_copies[2][0].any() and d_home[0][0].any()
    _, d_home, d_copies, _ = grouped_ffn_backward(d_out, x, OFFSETS[:4], home, copies)
    assert not any(g.any() for g in d_copies)


@pytest.mark.parametrize("offsets", [[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 5, 15], [15, 15, 15, 15]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_empty_sets(offsets, dtype):
    x, home, copies = case(8, 12, dtype)
    ends = torch.tensor(offsets, dtype=torch.int32)
    got, want = (f(x, ends, home, copies) for f in (grouped_ffn, naive_grouped_ffn))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert grouped_ffn(x[:0], torch.zeros(6, dtype=torch.int32), home, copies).shape == (0, 8)


def test_situ_glu_values_gradients_and_bound():
    torch.manual_seed(1)
    gate, up = (10 * torch.randn(3, 7, dtype=torch.float64)).requires_grad_(), torch.randn(3, 7).double()
    up.requires_grad_()
    torch.testing.assert_close(situ_glu(gate, up), naive_situ_glu(gate, up), rtol=1e-12, atol=1e-14)
    assert gradcheck(situ_glu, (gate, up))
    assert gradcheck(lambda g, u: situ_glu(g, u, 2.0, 3.0), (gate, up))
    extreme = torch.tensor([-1e4, -50.0, 0.0, 50.0, 1e4])
    table = situ_glu(*torch.meshgrid(extreme, extreme, indexing="ij"))
    assert table.isfinite().all() and table.abs().max() <= 100
    single = torch.linspace(-30, 30, 2001)
    exact = naive_situ_glu(single.double(), single.double())
    # 2 sigmoid(2x) - 1 is off by 1e-7 in tanh(g/4); times 4 and an up factor of at most 25.
    torch.testing.assert_close(situ_glu(single, single).double(), exact, rtol=1e-5, atol=2e-5)


def test_bad_arguments_are_named():
    x, home, copies = case()
    with pytest.raises(ValueError, match="activation='relu'"):
        grouped_ffn(x, OFFSETS, home, copies, activation="relu")
    with pytest.raises(ValueError, match="6 groups"):
        grouped_ffn(x, OFFSETS, home)
    with pytest.raises(ValueError, match="copies must be"):
        grouped_ffn(x, OFFSETS, home, (copies[0], copies[1], copies[2].mT))
    with pytest.raises(ValueError, match="one shape"):
        situ_glu(x, x[1:])


@pytest.mark.parametrize("saves", [True, False])
def test_row_weights_scale_rows_and_get_their_gradient(saves):
    """Folded into the down projection, they are the same function in another order: 1e-12 in fp64."""
    x, home, copies = case()
    weights = torch.rand(len(x), dtype=x.dtype, requires_grad=True)
    want = grouped_ffn(x, OFFSETS, home, copies) * weights.unsqueeze(1)
    d_out = torch.randn_like(want)
    gradients = torch.autograd.grad(want, (x, weights, *home, *copies), d_out)
    out, saved = grouped_ffn_forward(x, OFFSETS, home, copies, row_weights_N=weights, save=saves)
    assert (saved is None) != saves
    got = grouped_ffn_backward(d_out, x, OFFSETS, home, copies, saved=saved, row_weights_N=weights)
    pairs = zip((out, got.rows, got.row_weights, *got.home, *got.copies), (want, *gradients), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_results_may_overwrite_the_rows():
    x, home, copies = case()
    want = grouped_ffn(x, OFFSETS, home, copies)
    rows = x.detach().clone()
    rows[OFFSETS[-1] :] = 5
    grouped_ffn_forward(rows, OFFSETS, home, copies, out=rows)
    assert torch.equal(rows[: OFFSETS[-1]], want[: OFFSETS[-1]]) and bool((rows[OFFSETS[-1] :] == 5).all())
