"""Decoding equals the full forward; pieces, capacity and idle calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from model import K3Model
from model.generate import next_token
from model.latent_moe import LocalExperts
from tests.model.small import awake, random_tokens, small_config, small_model


@pytest.mark.parametrize("pieces", [(20,), (1,) * 20, (7, 1, 4, 1, 7)])
def test_prefill_and_decode_equal_the_full_forward(pieces):
    """1e-4 in fp32 is asked; the chunked and the recurrent form differ by rounding alone."""
    model = small_model().eval()
    tokens = random_tokens(2, 20)
    with torch.no_grad():
        full = model(tokens)
        cache = model.make_cache(2, 20)
        stepped = torch.cat([model.step(piece, cache) for piece in tokens.split(pieces, dim=1)], dim=1)
    torch.testing.assert_close(stepped, full, rtol=0, atol=1e-4)


def test_decode_is_exact_in_fp64():
    model = small_model(dtype=torch.float64).eval()
    tokens = random_tokens(1, 15)
    with torch.no_grad():
        cache = model.make_cache(1, 15)
        stepped = torch.cat([model.step(piece, cache) for piece in tokens.split((9, 1, 1, 4), dim=1)], dim=1)
        torch.testing.assert_close(stepped, model(tokens), rtol=0, atol=1e-11)


def test_cache_keeps_the_compressed_latent():
    config = small_config()
    cache = small_model().make_cache(2, 11)
    latents = [mixer.latent for mixer in cache.mixers if hasattr(mixer, "latent")]
    assert [tuple(latent.shape) for latent in latents] == [
        (2, 11, config.kv_lora_rank + config.qk_rope_head_dim)
    ] * 3


def test_cache_overflow_is_refused():
    model = small_model().eval()
    with pytest.raises(ValueError, match="holds 4 tokens; 5 were given"), torch.no_grad():
        model.step(random_tokens(1, 5), model.make_cache(1, 4))


def test_greedy_generation_is_the_argmax_of_the_full_forward():
    model = small_model()
    model.train()
    prompt = random_tokens(2, 6)
    result = model.generate(prompt, 5, temperature=0)
    assert model.training
    model.eval()
    tokens = prompt
    for _ in range(5):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(result, tokens)


def test_seed_fixes_the_sample_and_one_dimension_stays_one():
    model = small_model()
    prompt = random_tokens(5)
    first, again = (model.generate(prompt, 12, temperature=1.0, seed=7) for _ in range(2))
    other = model.generate(prompt, 12, temperature=1.0, seed=8)
    assert first.shape == (17,) and torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(model.generate(prompt, 0), prompt)


def test_top_k_samples_only_the_likeliest():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    allowed = set(logits.topk(3).indices[0].tolist())
    drawn = {int(next_token(logits, 2.0, 3, torch.Generator().manual_seed(i))) for i in range(60)}
    assert drawn == allowed


def test_stop_token_ends_the_text():
    model = small_model()
    prompt = random_tokens(1, 6)
    free = model.generate(prompt, 10, temperature=0)
    stop = int(free[0, 8])
    stopped = model.generate(prompt, 10, temperature=0, stop_token=stop)
    first = 6 + free[0, 6:].tolist().index(stop)
    assert torch.equal(stopped, free[:, : first + 1])


class LimitedExperts(nn.Module):
    """Local experts that insist on a capacity and record the tokens of each call."""

    def __init__(self, config, layer):
        super().__init__()
        self.inner = LocalExperts(config, layer)
        self.capacity = 6
        self.calls = []

    def forward(self, x_TH, ids_TK, weights_TK):
        assert x_TH.shape[0] <= self.capacity
        self.calls.append(x_TH.shape[0])
        return self.inner(x_TH, ids_TK, weights_TK)


def test_generation_keeps_to_the_capacity_and_makes_as_many_calls_as_others():
    torch.manual_seed(0)
    limited = K3Model(small_config(), experts=LimitedExperts)
    awake(limited)
    prompt = random_tokens(2, 10)
    asked = []

    def agree(calls: int) -> int:
        asked.append(calls)
        return calls + 3

    result = limited.generate(prompt, 4, temperature=0, agree=agree)
    assert torch.equal(result, small_model().generate(prompt, 4, temperature=0))
    assert asked == [4 + 3]  # the prompt in pieces of 3 x 2 tokens, then 3 single steps
    for moe in limited.moe_layers():
        assert moe.experts.calls == [6, 6, 6, 2, 2, 2, 2, 0, 0, 0]


def test_bad_arguments_are_named():
    model = small_model()
    for arguments, words in (
        ((torch.zeros(0, dtype=torch.int64), 3), "prompt is empty"),
        ((random_tokens(3), -1), "max_new_tokens=-1"),
    ):
        with pytest.raises(ValueError, match=words):
            model.generate(*arguments)
    with pytest.raises(ValueError, match="temperature=-1"):
        model.generate(random_tokens(3), 1, temperature=-1)
    with pytest.raises(ValueError, match="top_k=0"):
        model.generate(random_tokens(3), 1, top_k=0)
