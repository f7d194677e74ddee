"""Causal attention over packed documents, and the absorbed form of decoding."""

from __future__ import annotations

import pytest
import torch

from model.mla import GatedMLA, causal_attention, equal_length_runs
from tests.model.small import small_config


@pytest.mark.parametrize(
    ("boundaries", "runs"),
    [
        ([0, 4, 8, 12], [(0, 3, 4)]),
        ([0, 4, 8, 9, 9, 10, 14], [(0, 2, 4), (8, 2, 1), (10, 1, 4)]),
        ([0, 0, 5], [(0, 1, 5)]),
        ([0, 0], []),
    ],
)
def test_runs_of_equal_length(boundaries, runs):
    assert equal_length_runs(boundaries) == runs


@pytest.mark.parametrize("value", [8, 12])
@pytest.mark.parametrize("boundaries", [None, [0, 3, 6, 20], [0, 20]])
def test_attention_equals_the_masked_softmax(boundaries, value):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 20, 3, 12, generator=generator, dtype=torch.float64) for _ in range(2))
    v = torch.randn(1, 20, 3, value, generator=generator, dtype=torch.float64)
    cu_seqlens = None if boundaries is None else torch.tensor(boundaries)
    positions = torch.arange(20)
    document = torch.bucketize(positions, torch.tensor((boundaries or [0, 20])[1:]), right=True)
    mask = (document.unsqueeze(1) == document) & (positions.unsqueeze(1) >= positions)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * 0.3
    expected = torch.einsum("bhts,bshv->bthv", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)
    torch.testing.assert_close(causal_attention(q, k, v, 0.3, cu_seqlens), expected, rtol=0, atol=1e-13)


def test_absorbed_decoding_equals_expanded_attention():
    torch.manual_seed(0)
    mla = GatedMLA(small_config()).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    cache = mla.make_cache(2, 9, x)
    mla(x[:, :8], cache=cache)
    last = mla(x[:, 8:], cache=cache)
    torch.testing.assert_close(last, mla(x)[:, 8:], rtol=0, atol=1e-13)
