"""Router and experts: choice, weights, hooks, counts, the balancer's view."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model.latent_moe import LatentMoE, LocalExperts
from model.router import FrozenBias, Router
from tests.model.small import awake, random_tokens, small_config, small_model


def _plain(function, *tensors):
    return function(*tensors)


class Recorder(nn.Module):
    """A balancer that keeps what it is shown."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        self.register_buffer("bias", torch.zeros(config.num_experts))
        self.seen = []

    def observe(self, scores_TE, cutoff_T, mask_T=None):
        self.seen.append((scores_TE, cutoff_T, mask_T))


def _router(**changes) -> Router:
    torch.manual_seed(0)
    config = small_config(**changes)
    return Router(config, 4, Recorder(config, 4))


def test_bias_chooses_and_raw_scores_weigh():
    router = _router()
    x = torch.randn(64, 32)
    router.balancer.bias.copy_(torch.tensor([0.0, 0.0, 10.0, 0.0, 0.0, -10.0]))
    ids, weights = router(x)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.all((ids == 2).any(dim=1)) and not torch.any(ids == 5)
    scores = torch.sigmoid(x @ router.score_proj.weight.T)
    raw = scores.gather(1, ids.long())
    torch.testing.assert_close(weights, raw / raw.sum(1, keepdim=True), rtol=1e-6, atol=0)


def test_scaling_and_raw_weights():
    router = _router(renormalize=False, routed_scaling_factor=2.5)
    x = torch.randn(8, 32)
    ids, weights = router(x)
    scores = torch.sigmoid(x @ router.score_proj.weight.T)
    torch.testing.assert_close(weights, 2.5 * scores.gather(1, ids.long()))


def test_router_is_fp32_for_bf16_and_fp64_for_fp64():
    router = _router()
    assert router(torch.randn(4, 32))[1].dtype == torch.float32
    router.bfloat16()
    x = torch.randn(4, 32).bfloat16()
    _, weights = router(x)
    assert weights.dtype == torch.float32
    scores = torch.sigmoid(F.linear(x.float(), router.score_proj.weight.float()))
    ids = scores.topk(2).indices
    raw = scores.gather(1, ids)
    torch.testing.assert_close(weights, raw / raw.sum(1, keepdim=True), rtol=1e-6, atol=0)
    assert router.double()(x.double())[1].dtype == torch.float64


def test_balancer_sees_raw_scores_cutoffs_and_the_mask():
    router = _router()
    router.balancer.bias.copy_(torch.linspace(-0.2, 0.2, 6))
    x, mask = torch.randn(16, 32), torch.arange(16) < 11
    router(x, mask)
    ((scores, cutoff, seen_mask),) = router.balancer.seen
    torch.testing.assert_close(scores, torch.sigmoid(x @ router.score_proj.weight.T))
    torch.testing.assert_close(cutoff, (scores + router.balancer.bias).sort(1, descending=True).values[:, 2])
    assert seen_mask is mask and not scores.requires_grad
    assert router.last_counts_E.sum() == 11 * 2
    router(x, mask)
    assert router.last_counts_E.sum() == 2 * 11 * 2
    router.clear_counts()
    assert router.last_counts_E.sum() == 0


def test_nothing_is_counted_in_eval_or_without_gradients():
    router = _router()
    x = torch.randn(16, 32)
    with torch.no_grad():
        router(x)
    router.eval()
    router(x)
    assert router.balancer.seen == [] and router.last_counts_E.sum() == 0


def test_hook_replaces_the_choice_and_weights_follow():
    router = _router()
    x = torch.randn(10, 32)
    forced = torch.stack([torch.arange(10) % 6, (torch.arange(10) + 3) % 6], dim=1)
    calls = []

    def hook(layer, scores, ids):
        calls.append((layer, scores.shape, ids.clone()))
        return forced

    natural, _ = router(x)
    router.clear_counts()
    router.route_hook = hook
    ids, weights = router(x)
    assert torch.equal(ids, forced.int()) and calls[0][:2] == (4, (10, 6))
    assert torch.equal(calls[0][2], natural)
    raw = torch.sigmoid(x @ router.score_proj.weight.T).gather(1, forced)
    torch.testing.assert_close(weights, raw / raw.sum(1, keepdim=True))
    assert torch.equal(router.last_counts_E, torch.bincount(forced.flatten(), minlength=6))
    router.route_hook = lambda layer, scores, ids: None
    assert torch.equal(router(x)[0], natural)
    router.route_hook = lambda layer, scores, ids: ids[:, :1]
    with pytest.raises(ValueError, match="route_hook of layer 4"):
        router(x)


def test_experts_equal_a_dense_sum_and_take_no_tokens_too():
    config = small_config()
    torch.manual_seed(0)
    experts = LocalExperts(config, 1).double()
    x = torch.randn(13, 16, dtype=torch.float64)
    ids = torch.stack([torch.full((13,), 4), torch.arange(13) % 4], dim=1).int()
    ids[3] = 4  # one token sends both of its places to one expert; expert 5 gets nothing
    weights = torch.rand(13, 2, dtype=torch.float64)
    expected = torch.zeros_like(x)
    for t in range(13):
        for k in range(2):
            e = ids[t, k]
            gate, up = experts.gate_weight[e] @ x[t], experts.up_weight[e] @ x[t]
            hidden = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
            expected[t] += weights[t, k] * (experts.down_weight[e] @ hidden)
    torch.testing.assert_close(experts(x, ids, weights), expected, rtol=1e-12, atol=1e-14)
    assert experts(x[:0], ids[:0], weights[:0]).shape == (0, 16)


def test_routed_branch_ignores_a_common_scale_of_the_weights():
    """The norm stands between aggregation and up-projection: scaling all route weights changes eps alone."""
    torch.manual_seed(0)
    one = awake(LatentMoE(small_config(), 1)).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    base = one(x, None, _plain)
    one.router.scaling = 1000.0
    torch.testing.assert_close(one(x, None, _plain), base, rtol=0, atol=1e-3)
    one.router.scaling = 1.0
    shared = one.shared_experts(x)
    latent = one.latent_up_proj(
        one.latent_norm(one.experts(one.latent_down_proj(x.flatten(0, 1)), *one.router(x.flatten(0, 1))))
    )
    torch.testing.assert_close(base, latent.view_as(x) + shared, rtol=0, atol=1e-12)


def test_without_shared_experts():
    moe = LatentMoE(small_config(num_shared_experts=0), 1)
    assert moe.shared_experts is None
    assert moe(torch.randn(1, 5, 32), None, _plain).shape == (1, 5, 32)


def test_frozen_bias_survives_every_cast():
    bias = FrozenBias(4)
    bias.bias.copy_(torch.tensor([1e-4, 0.5, 0.50001, -1.0]))
    kept = bias.bias.clone()
    for cast in (lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.double(), lambda m: m.to("cpu")):
        cast(bias)
        assert torch.equal(bias.bias, kept) and bias.bias.dtype == torch.float32
    assert bias.to("meta").bias.dtype == torch.float32
    assert list(bias.state_dict()) == ["bias"]


def test_mask_reaches_every_router_of_the_model():
    model = small_model(num_mtp_layers=1)
    tokens, mask = random_tokens(2, 8), torch.ones(2, 8, dtype=torch.bool)
    mask[1, 3:] = False
    model(tokens, targets=tokens, token_mask=mask)[0].backward()
    layers = [moe.layer for moe in model.moe_layers()]
    assert layers == list(model.config.moe_layers) == [1, 2, 3, 4, 5]
    for moe in model.moe_layers():
        assert moe.router.last_counts_E.sum() == 11 * 2
