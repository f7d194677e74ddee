"""Attention Residuals: one function, plain form and two-phase form agree; gradients; zero queries average."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from kernels.attention_residuals import (
    attention_residual,
    block_phase_one,
    merge_partial,
    naive_attention_residual,
)


def case(count, shape=(2, 3, 5), dtype=torch.float64):
    torch.manual_seed(count)
    sources = [torch.randn(*shape, dtype=dtype).requires_grad_() for _ in range(count)]
    weight = torch.randn(shape[-1], dtype=dtype).requires_grad_()
    query = torch.randn(shape[-1], dtype=dtype).requires_grad_()
    return sources, weight, query


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("shape", [(2, 3, 5), (0, 5), (4,)])
def test_equals_plain_form(count, shape):
    sources, weight, query = case(count, shape)
    got = attention_residual(sources, weight, query, 1e-5)
    torch.testing.assert_close(
        got, naive_attention_residual(sources, weight, query, 1e-5), rtol=1e-13, atol=1e-13
    )


@pytest.mark.parametrize("count", [1, 3])
def test_gradients(count):
    sources, weight, query = case(count)
    assert gradcheck(lambda w, q, *s: attention_residual(s, w, q, 1e-5), (weight, query, *sources))


def test_one_tensor_twice_as_a_source_gets_both_gradients():
    (x,), weight, query = case(1)
    assert gradcheck(lambda x: attention_residual([x, x, 2 * x], weight, query, 1e-5), (x,))


def test_two_phases_equal_one():
    """Exact online softmax: only rounding differs, so 1e-13 in fp64 at scores of order 10."""
    sources, _, _ = case(4)
    weights, queries = torch.randn(3, 5, dtype=torch.float64), 5 * torch.randn(3, 5, dtype=torch.float64)
    partials = block_phase_one(sources[:3], weights, queries, 1e-5)
    for partial, weight, query in zip(partials, weights, queries, strict=True):
        first = merge_partial(partial, None, weight, query, 1e-5)
        torch.testing.assert_close(
            first, attention_residual(sources[:3], weight, query, 1e-5), rtol=1e-12, atol=1e-13
        )
        both = merge_partial(partial, sources[3], weight, query, 1e-5)
        torch.testing.assert_close(
            both, attention_residual(sources, weight, query, 1e-5), rtol=1e-12, atol=1e-13
        )
    assert gradcheck(
        lambda *s: merge_partial(
            block_phase_one(s[:2], weights[:1], queries[:1], 1e-5)[0], s[2], weights[0], queries[0], 1e-5
        ),
        tuple(sources[:3]),
    )


def test_zero_query_is_the_mean_and_scores_may_be_huge():
    sources, weight, query = case(5, dtype=torch.float32)
    mean = torch.stack(sources).mean(0)
    torch.testing.assert_close(attention_residual(sources, weight, torch.zeros(5), 1e-5), mean)
    assert attention_residual(sources, weight, 1e6 * query, 1e-5).isfinite().all()


def test_bf16_rounds_once():
    sources, weight, query = case(3, dtype=torch.float32)
    half = [s.detach().bfloat16() for s in sources]
    got = attention_residual(half, weight, query, 1e-5)
    assert torch.equal(got, attention_residual([s.float() for s in half], weight, query, 1e-5).bfloat16())


def test_bad_sources_are_named():
    sources, weight, query = case(2)
    with pytest.raises(ValueError, match="at least one source"):
        attention_residual([], weight, query, 1e-5)
    with pytest.raises(ValueError, match="source 1 is"):
        attention_residual([sources[0], sources[1][:1]], weight, query, 1e-5)
