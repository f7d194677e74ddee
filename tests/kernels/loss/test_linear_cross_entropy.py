"""The chunked cross-entropy against the plain one: values, gradients, ignored tokens, memory."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

import kernels.loss.reference as reference
from kernels.loss import linear_cross_entropy, naive_linear_cross_entropy


def case(tokens=11, width=4, vocabulary=7, dtype=torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, dtype=dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    targets[::4] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("at_once", [1, 21, 1 << 20])  # one token a piece, three, all
def test_value_count_and_gradients_equal_the_plain_form(monkeypatch, at_once):
    monkeypatch.setattr(reference, "LOGITS_AT_ONCE", at_once)
    hidden, weight, targets = case()
    got, count = linear_cross_entropy(hidden, weight, targets)
    want, want_count = naive_linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    assert count == want_count == (targets != -100).sum()
    got_grads = torch.autograd.grad(3 * got, (hidden, weight))
    want_grads = torch.autograd.grad(3 * want, (hidden, weight))
    for a, b in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    assert gradcheck(lambda h, w: linear_cross_entropy(h, w, targets)[0], (hidden, weight))


def test_ignored_tokens_are_never_looked_at():
    hidden, weight, targets = case(dtype=torch.float32)
    poisoned = hidden.detach().clone()
    poisoned[::4] = torch.nan
    poisoned.requires_grad_()
    loss, _ = linear_cross_entropy(poisoned, weight, targets)
    torch.testing.assert_close(loss, linear_cross_entropy(hidden, weight, targets)[0])
    loss.backward()
    assert torch.equal(poisoned.grad[::4], torch.zeros(3, 4))


def test_nothing_to_count():
    hidden, weight, targets = case()
    loss, count = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    loss.backward()
    assert loss == 0 and count == 0 and not weight.grad.any()
    loss, count = linear_cross_entropy(hidden[:0], weight, targets[:0])
    assert loss == 0 and count == 0


def test_large_logits_do_not_overflow():
    hidden, weight, targets = case(dtype=torch.float32)
    loss, _ = linear_cross_entropy(hidden * 1e4, weight, targets)
    assert loss.isfinite()


def test_logits_of_all_tokens_are_never_held(monkeypatch):
    """Every matrix product of the forward pass stays within the limit."""
    monkeypatch.setattr(reference, "LOGITS_AT_ONCE", 64)
    hidden, weight, targets = case(tokens=100, width=2, vocabulary=32)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == 32:
                sizes.append(out.numel())
            return out

    with Watch():
        linear_cross_entropy(hidden, weight, targets)[0].backward()
    assert sizes and max(sizes) <= 64


def test_without_gradients_none_are_formed(monkeypatch):
    hidden, weight, targets = case()
    with torch.no_grad():
        loss, _ = linear_cross_entropy(hidden, weight, targets)
    assert not loss.requires_grad
    loss, _ = linear_cross_entropy(hidden.detach(), weight, targets)
    (d_weight,) = torch.autograd.grad(loss, weight)
    assert d_weight.shape == weight.shape


def test_bad_shapes_are_named():
    hidden, weight, targets = case()
    with pytest.raises(ValueError, match="targets must be"):
        linear_cross_entropy(hidden, weight, targets[1:])
    with pytest.raises(ValueError, match="hidden must be"):
        linear_cross_entropy(hidden, weight[:, 1:], targets)
