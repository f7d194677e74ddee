"""The model on a GPU: packed attention through the variable-length kernel, precision, generation."""

from __future__ import annotations

import pytest
import torch

from model.mla import causal_attention
from tests.model.small import random_tokens, small_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("value", [64, 128])
def test_packed_attention_equals_documents_alone(dtype, tolerance, value):
    """bf16: outputs of order 1 with 8 bits of mantissa."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k = (torch.randn(1, 300, 2, 128, generator=generator, device="cuda").to(dtype) for _ in range(2))
    v = torch.randn(1, 300, 2, value, generator=generator, device="cuda").to(dtype)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    cu_seqlens = torch.tensor([0, 1, 130, 130, 300], device="cuda")
    packed = causal_attention(q, k, v, 0.1, cu_seqlens)
    alone = torch.cat(
        [causal_attention(q[:, a:b], k[:, a:b], v[:, a:b], 0.1) for a, b in ((0, 1), (1, 130), (130, 300))],
        dim=1,
    )
    torch.testing.assert_close(packed, alone, rtol=0, atol=tolerance)
    weights = torch.randn_like(packed)
    for a, b in zip(
        torch.autograd.grad((packed * weights).sum(), (q, k, v)),
        torch.autograd.grad((alone * weights).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=5 * tolerance)


@pytest.mark.parametrize("packed", [False, True])
def test_gpu_equals_cpu(packed):
    """1e-3 of logits of order 1: fp32 with TF32 off; kernels sum in another order."""
    tokens = random_tokens(1, 70)
    cu_seqlens = torch.tensor([0, 20, 21, 70]) if packed else None
    reference = small_model(dtype=torch.float64)
    expected, _ = reference(tokens, cu_seqlens, tokens)
    expected.backward()
    model = small_model().cuda()
    loss, _ = model(tokens.cuda(), None if cu_seqlens is None else cu_seqlens.cuda(), tokens.cuda())
    loss.backward()
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-4, atol=0)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        scale = theirs.grad.abs().max().item() + 1e-6
        error = (ours.grad.cpu().double() - theirs.grad).abs().max().item()
        assert error < 2e-2 * scale, f"{name}: {error} of {scale}"


def test_bfloat16_step_on_packed_documents_is_finite():
    model = small_model().cuda().bfloat16()
    tokens = random_tokens(1, 64).cuda()
    cu_seqlens = torch.tensor([0, 20, 64], device="cuda", dtype=torch.int32)
    loss, _ = model(tokens, cu_seqlens, tokens)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_decoding_equals_the_full_forward():
    model = small_model().cuda().eval()
    tokens = random_tokens(2, 20).cuda()
    with torch.no_grad():
        cache = model.make_cache(2, 20)
        stepped = torch.cat([model.step(piece, cache) for piece in tokens.split((7, 1, 4, 8), dim=1)], dim=1)
        torch.testing.assert_close(stepped, model(tokens), rtol=0, atol=1e-3)
