"""Short convolution against its plain form: values, gradients, caches, packed sequences."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.autograd import gradcheck

from kernels.conv import naive_short_convolution, short_convolution

BOUNDS = [0, 0, 1, 3, 8, 8, 19, 20]  # empty, shorter than the taps, longer


def case(batch, tokens, channels=5, taps=4, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, tokens, channels, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(channels, taps, generator=generator, dtype=dtype).requires_grad_()
    return x, weight


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("tokens", [0, 1, 2, 7])
@pytest.mark.parametrize("activation", ["silu", None])
def test_equals_plain_form_with_and_without_cache(taps, tokens, activation):
    x, weight = case(3, tokens, taps=taps)
    history = torch.randn(3, 5, taps - 1, dtype=torch.float64)
    for state in (None, history):
        got = short_convolution(
            x, weight, activation=activation, initial_state=state, output_final_state=True
        )
        want = naive_short_convolution(
            x, weight, activation=activation, initial_state=state, output_final_state=True
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_gradients_match_finite_differences_everywhere():
    x, weight = case(2, 6)
    state = torch.randn(2, 5, 3, dtype=torch.float64).requires_grad_()
    assert gradcheck(lambda x, w: short_convolution(x, w)[0], (x, weight))
    assert gradcheck(
        lambda *a: short_convolution(a[0], a[1], initial_state=a[2], output_final_state=True), (x,
        weight, state)
    )
    x, weight = case(1, BOUNDS[-1])
    state = torch.randn(len(BOUNDS) - 1, 5, 3, dtype=torch.float64).requires_grad_()
    cu = torch.tensor(BOUNDS)
    assert gradcheck(
        lambda *a: short_convolution(
            a[0], a[1], cu_seqlens=cu, initial_state=a[2], output_final_state=True, activation=None
        ),
        (x, weight, state),
    )


def test_packed_equals_sequence_by_sequence():
    """The same four terms in the same order; vector and scalar units round a multiply-add differently:
    1e-6.
    """
    x, weight = case(1, BOUNDS[-1], dtype=torch.float32)
    state = torch.randn(len(BOUNDS) - 1, 5, 3)
    packed, final = short_convolution(
        x, weight, cu_seqlens=torch.tensor(BOUNDS), initial_state=state, output_final_state=True
    )
    for i, (start, end) in enumerate(itertools.pairwise(BOUNDS)):
        alone, last = short_convolution(
            x[:, start:end], weight, initial_state=state[i : i + 1], output_final_state=True
        )
        torch.testing.assert_close(packed[:, start:end], alone, rtol=1e-6, atol=1e-6)
        assert torch.equal(final[i : i + 1], last)


def test_a_sequence_never_reads_another():
    x, weight = case(1, BOUNDS[-1], dtype=torch.float32)
    cu = torch.tensor(BOUNDS)
    poisoned = x.detach().clone()
    poisoned[:, 3:8] = torch.nan
    y, _ = short_convolution(poisoned, weight, cu_seqlens=cu)
    clean, _ = short_convolution(x, weight, cu_seqlens=cu)
    keep = torch.ones(20, dtype=torch.bool)
    keep[3:8] = False
    assert torch.equal(y[:, keep], clean[:, keep])
    leaf = x.detach().requires_grad_()
    short_convolution(leaf, weight, cu_seqlens=cu)[0][:, 8:].sum().backward()
    assert torch.equal(leaf.grad[:, :8], torch.zeros(1, 8, 5))


def test_token_by_token_equals_all_at_once_and_bf16_keeps_dtype():
    x, weight = case(2, 9)
    whole, last = short_convolution(x, weight, output_final_state=True)
    state, pieces = None, []
    for t in range(9):
        y, state = short_convolution(x[:, t : t + 1], weight, initial_state=state, output_final_state=True)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(state, last, rtol=0, atol=0)
    half, _ = short_convolution(x.bfloat16(), weight.bfloat16())
    assert half.dtype == torch.bfloat16


def test_strided_input():
    buffer = torch.randn(2, 9, 14, dtype=torch.float64)
    weight = torch.randn(5, 4, dtype=torch.float64)
    view = buffer[:, :, 3:8]
    got, _ = short_convolution(view, weight)
    torch.testing.assert_close(got, short_convolution(view.contiguous(), weight)[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"activation": "gelu"}, "activation='gelu'"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens"),
        ({"initial_state": torch.zeros(2, 5, 4)}, "initial_state"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    x, weight = case(2, 4)
    with pytest.raises(ValueError, match=words):
        short_convolution(x, weight, **arguments)


def test_bad_boundaries_are_named():
    x, weight = case(1, 4)
    for bounds in ([0, 5], [1, 4], [0, 3, 2, 4], [0, 3]):
        with pytest.raises(ValueError, match="cu_seqlens must rise"):
            short_convolution(x, weight, cu_seqlens=torch.tensor(bounds))
