"""Router and histogram: ties, cutoffs, edges of the bins, masks, and the quantile they exist for."""

from __future__ import annotations

import pytest
import torch

from kernels.moe import naive_quantile_histogram, naive_router_topk, quantile_histogram, router_topk


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("experts, top_k", [(2, 1), (7, 6), (16, 4), (64, 8)])
def test_choice_equals_a_stable_sort_with_many_ties(dtype, experts, top_k):
    torch.manual_seed(experts)
    scores = torch.randint(0, 4, (200, experts)).to(dtype) / 4
    bias = torch.randint(-2, 2, (experts,)).to(dtype) / 4  # sums of both signs, and both zeros
    ids, cutoff = router_topk(scores, bias, top_k)
    want_ids, want_cutoff = naive_router_topk(scores, bias, top_k)
    assert ids.dtype == torch.int32 and torch.equal(ids, want_ids)
    assert torch.equal(cutoff, want_cutoff)


def test_signed_zeros_tie():
    ids, cutoff = router_topk(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), torch.full((4,), -0.0), 2)
    assert ids.tolist() == [[0, 1]] and cutoff.item() == 0


def test_no_tokens_and_no_gradient():
    ids, cutoff = router_topk(torch.zeros(0, 5), torch.zeros(5), 2)
    assert ids.shape == (0, 2) and cutoff.shape == (0,)
    scores = torch.rand(3, 5, requires_grad=True)
    assert not router_topk(scores, torch.zeros(5), 2)[1].requires_grad


@pytest.mark.parametrize("top_k", [0, 5, 6])
def test_top_k_out_of_range_is_named(top_k):
    with pytest.raises(ValueError, match=f"top_k={top_k}"):
        router_topk(torch.zeros(3, 5), torch.zeros(5), top_k)


@pytest.mark.parametrize("masked", [False, True])
def test_histogram_equals_counting_one_by_one(masked):
    torch.manual_seed(0)
    scores, cutoff = torch.rand(40, 6), torch.rand(40)
    mask = torch.rand(40) < 0.5 if masked else None
    arguments = (scores, cutoff, -0.5, 0.11, 10, mask)  # narrower than the values: both ends clamp
    counts = quantile_histogram(*arguments)
    assert counts.dtype == torch.int32
    assert torch.equal(counts, naive_quantile_histogram(*arguments))
    assert (counts.sum(1) == (40 if mask is None else mask.sum())).all()


def test_histogram_takes_tensors_for_edges_and_no_tokens():
    scores, cutoff = torch.rand(9, 4), torch.rand(9)
    low, width = torch.tensor(-1.0), torch.tensor(0.01)
    assert torch.equal(
        quantile_histogram(scores, cutoff, low, width, 300), quantile_histogram(scores, cutoff, -1.0,
        0.01, 300)
    )
    assert not quantile_histogram(scores[:0], cutoff[:0], low, width, 300).any()
    assert not quantile_histogram(scores, cutoff, low, width, 300, torch.zeros(9, dtype=torch.bool)).any()


def test_interpolated_quantile_is_within_a_bin_of_the_exact_one():
    """What the histogram is for (k3.md 6.5, claim 6): the k/n quantile of required biases to within one
    bin.
    """
    torch.manual_seed(3)
    tokens, experts, top_k, bins = 4096, 16, 4, 1000
    scores = torch.sigmoid(torch.randn(tokens, experts) + torch.linspace(-1, 1, experts))
    _, cutoff = router_topk(scores, torch.zeros(experts), top_k)
    low, width = -1.0, 2.0 / bins
    counts = quantile_histogram(scores, cutoff, low, width, bins)
    q = tokens * top_k / experts
    cumulative = counts.cumsum(1)
    bin_E = (cumulative < q).sum(1)
    rows = torch.arange(experts)
    before = cumulative[rows, bin_E] - counts[rows, bin_E]
    estimate = low + (bin_E + (q - before) / counts[rows, bin_E]) * width
    exact = (cutoff.unsqueeze(1) - scores).sort(0).values[int(q) - 1]
    assert (estimate - exact).abs().max() <= width


def test_scores_of_a_diverged_model_are_counted_not_refused():
    """The loss is what tells of divergence: the forward pass has to reach it."""
    scores, cutoff = torch.rand(6, 4), torch.rand(6)
    scores[1], cutoff[2], cutoff[3] = torch.nan, torch.inf, -torch.inf
    counts = quantile_histogram(scores, cutoff, -1.0, 0.01, 300)
    assert counts.sum(1).tolist() == [6] * 4 and counts.min() >= 0
    assert torch.equal(counts[:, 0], torch.tensor([2] * 4, dtype=torch.int32))
    assert torch.equal(counts[:, -1], torch.tensor([1] * 4, dtype=torch.int32))
