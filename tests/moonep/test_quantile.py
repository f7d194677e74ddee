"""Quantile Balancing against the definition, its provable properties (K3 report, appendix D), its peers."""

from __future__ import annotations

import pytest
import torch

from kernels.moe import router_topk
from moonep.errors import ContractError
from moonep.quantile import NoBalancer, QuantileBalancer, SignBalancer, update_all


def random_scores(tokens, experts, seed=0, skew=1.0):
    generator = torch.Generator().manual_seed(seed)
    tilt = skew * torch.randn(experts, generator=torch.Generator().manual_seed(99))
    return torch.sigmoid(torch.randn(tokens, experts, generator=generator) + tilt)


def observe(balancer, scores, mask=None):
    ids, cutoff = router_topk(scores, balancer.bias, balancer.top_k)
    balancer.observe(scores, cutoff, mask)
    return ids, cutoff


def maxvio(ids, experts):
    load = torch.bincount(ids.flatten().long(), minlength=experts).double()
    return float(load.max() / load.mean() - 1)


def exact_bias(scores, cutoff, top_k):
    """The definition: sorted required biases, the value that exactly q = m k / n of them stay below."""
    required = (cutoff.double().unsqueeze(1) - scores.double()).sort(dim=0).values
    quantile = required[round(len(scores) * top_k / scores.shape[1]) - 1]
    return quantile - quantile.mean()


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1024, 16, 2), (4096, 64, 6), (256, 8, 1)])
def test_bias_is_the_quantile_within_one_bin(tokens, experts, top_k):
    balancer = QuantileBalancer(experts, top_k, bins=1000)
    for step in range(3):
        scores = random_scores(tokens, experts, step)
        width = (balancer.bias.max() - balancer.bias.min() + 2) / 1000
        _, cutoff = observe(balancer, scores)
        expected = exact_bias(scores, cutoff, top_k)
        balancer.update()
        # one bin for the quantile, one for the mean of all quantiles that is taken off
        assert (balancer.bias.double() - expected).abs().max() <= 2 * width
        assert abs(float(balancer.bias.mean())) < 1e-6
        # required biases spread less than scores do, whatever the old bias was
        assert balancer.bias.max() - balancer.bias.min() < 1 + 2 * width


def test_first_bin_and_interpolation_by_hand():
    """Two experts, k = 1, four bins over [-1, 1]: q = 2 of 4 tokens; the arithmetic fits on paper."""
    balancer = QuantileBalancer(2, 1, bins=4)
    scores = torch.tensor([[0.9, 0.1], [0.8, 0.3], [0.7, 0.6], [0.6, 0.05]])
    cutoff = torch.tensor([0.1, 0.3, 0.6, 0.05])
    balancer.observe(scores, cutoff)
    # required: expert 0: -0.8 -0.5 -0.1 -0.55 -> bins 0 1 1 0; expert 1: 0 0 0 0 -> bin 2
    assert balancer.counts.tolist() == [[2, 2, 0, 0], [0, 0, 4, 0]]
    balancer.update()
    # expert 0: bin 0, share 2/2 -> -1 + 1 * 0.5; expert 1: bin 2, share 2/4 -> -1 + 2.5 * 0.5; mean -0.125
    assert torch.allclose(balancer.bias, torch.tensor([-0.375, 0.375]))


def test_at_fixed_cutoffs_every_expert_gets_its_share_within_one_bin():
    experts, top_k, tokens = 32, 4, 4096
    balancer = QuantileBalancer(experts, top_k)
    scores = random_scores(tokens, experts)
    _, cutoff = observe(balancer, scores)
    in_bin = balancer.counts.max(dim=1).values
    before = balancer.bias.clone()
    low, width = float(before.min()) - 1, float(before.max() - before.min() + 2) / balancer.bins
    counts = balancer.counts.clone()
    balancer.update()
    # undo the centring by the quantile of expert 0
    target = tokens * top_k / experts
    cumulative = counts[0].cumsum(0)
    first = int(torch.searchsorted(cumulative, int(target)))
    share = (target - int(cumulative[first] - counts[0, first])) / int(counts[0, first])
    shift = low + (first + share) * width - float(balancer.bias[0])
    passing = (scores + balancer.bias + shift >= cutoff.unsqueeze(1)).sum(dim=0)
    assert ((passing - target).abs() <= in_bin + 1).all()


def test_balances_in_one_step_where_the_sign_rule_needs_hundreds():
    experts, top_k, tokens = 64, 6, 8192
    scores = random_scores(tokens, experts)
    quantile, sign = QuantileBalancer(experts, top_k), SignBalancer(experts, top_k, rate=1e-2)
    start = maxvio(observe(quantile, scores)[0], experts)
    quantile.update()
    after_one = maxvio(observe(quantile, scores)[0], experts)
    for _ in range(5):
        observe(sign, scores)
        sign.update()
    after_sign = maxvio(observe(sign, scores)[0], experts)
    assert start > 2.0 and after_one < 0.5 and after_sign > 2 * after_one
    for _ in range(5):
        quantile.update()
        last = maxvio(observe(quantile, scores)[0], experts)
    assert last < 0.05


def test_micro_batches_and_ranks_add_up_exactly():
    whole, parts = QuantileBalancer(16, 2), QuantileBalancer(16, 2)
    scores = random_scores(1000, 16)
    observe(whole, scores)
    for part in scores.split(137):
        observe(parts, part)
    assert torch.equal(whole.counts, parts.counts)
    whole.update()
    parts.update()
    assert torch.equal(whole.bias, parts.bias) and not parts.counts.any()


def test_padding_eval_and_recompute_are_not_counted():
    balancer = QuantileBalancer(8, 2)
    scores = random_scores(64, 8)
    mask = torch.arange(64) % 3 != 0
    observe(balancer, scores, mask)
    assert (balancer.counts.sum(dim=1) == int(mask.sum())).all()
    balancer.eval()
    observe(balancer, scores)
    assert (balancer.counts.sum(dim=1) == int(mask.sum())).all()
    balancer.train()
    balancer.counts.zero_()
    x = torch.randn(64, 8, requires_grad=True)

    def layer(x):
        out = torch.sigmoid(x)
        observe(balancer, out.detach())
        return out.sum()

    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).backward()
    assert (balancer.counts.sum(dim=1) == 64).all()


def test_takes_effect_only_at_update_and_empty_steps_change_nothing():
    balancer = QuantileBalancer(8, 2)
    scores = random_scores(256, 8)
    observe(balancer, scores)
    assert not balancer.bias.any()
    balancer.update()
    bias = balancer.bias.clone()
    assert bias.any()
    balancer.update()
    assert torch.equal(balancer.bias, bias)


@pytest.mark.parametrize("make", [QuantileBalancer, SignBalancer, NoBalancer])
def test_bias_is_no_parameter_and_survives_casts(make):
    balancer = make(8, 2)
    balancer.bias.copy_(torch.linspace(-1e-3, 1e-3, 8))
    kept = balancer.bias.clone()
    torch.nn.Sequential(balancer).bfloat16()
    assert balancer.bias.dtype == torch.float32 and torch.equal(balancer.bias, kept)
    assert balancer.counts.dtype == torch.int32
    assert not list(balancer.parameters()) and list(balancer.state_dict()) == ["bias"]


def test_sign_rule_moves_towards_the_mean_and_rests_there():
    balancer = SignBalancer(4, 1, rate=0.1)
    scores = torch.tensor([[0.9, 0.1, 0.2, 0.3]] * 3 + [[0.1, 0.9, 0.2, 0.3]])
    observe(balancer, scores)
    assert balancer.counts.tolist() == [3, 1, 0, 0]
    balancer.update()
    assert torch.allclose(balancer.bias, torch.tensor([-0.1, 0.0, 0.1, 0.1]))


def test_update_all_matches_layer_by_layer():
    layers = [QuantileBalancer(8, 2), SignBalancer(8, 2), NoBalancer(8, 2), QuantileBalancer(16, 4)]
    alone = [QuantileBalancer(8, 2), SignBalancer(8, 2), NoBalancer(8, 2), QuantileBalancer(16, 4)]
    for group in (layers, alone):
        for index, balancer in enumerate(group):
            observe(balancer, random_scores(100, balancer.num_experts, index))
    update_all(layers)
    for balancer in alone:
        balancer.update()
    for one, other in zip(layers, alone, strict=True):
        assert torch.equal(one.bias, other.bias)


def test_update_map_never_stretches_distances():
    """The map from old to new bias is 1-Lipschitz in the largest component, up to bins and centring."""
    scores = random_scores(2048, 16)
    results = []
    for seed in range(4):
        balancer = QuantileBalancer(16, 3)
        balancer.bias.copy_(0.2 * torch.randn(16, generator=torch.Generator().manual_seed(seed)))
        old = balancer.bias.clone()
        observe(balancer, scores)
        balancer.update()
        results.append((old, balancer.bias.clone()))
    for old_a, new_a in results:
        for old_b, new_b in results:
            # centring removes a translation: compare up to a shift, half the spread of differences
            def distance(a, b):
                return float((a - b).max() - (a - b).min()) / 2

            assert distance(new_a, new_b) <= distance(old_a, old_b) + 4 * 3 / 1000


@pytest.mark.parametrize(("experts", "top_k"), [(4, 4), (4, 5), (4, 0)])
@pytest.mark.parametrize("make", [QuantileBalancer, SignBalancer, NoBalancer])
def test_refuses_top_k_without_a_cutoff(make, experts, top_k):
    with pytest.raises(ContractError, match=f"top_k={top_k}.*num_experts={experts}"):
        make(experts, top_k)


def test_refuses_wrong_shapes():
    balancer = QuantileBalancer(8, 2)
    with pytest.raises(ContractError, match=r"scores.*\[T, 8\]"):
        balancer.observe(torch.rand(4, 7), torch.rand(4))
    with pytest.raises(ContractError, match="cutoff"):
        balancer.observe(torch.rand(4, 8), torch.rand(3))
    with pytest.raises(ContractError, match="mask"):
        balancer.observe(torch.rand(4, 8), torch.rand(4), torch.ones(3, dtype=torch.bool))
    with pytest.raises(ContractError, match="bins=0"):
        QuantileBalancer(8, 2, bins=0)
