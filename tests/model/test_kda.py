"""The KDA layer's own wiring: state and convolution stay within a document; the cache continues; A_log
padding.
"""

from __future__ import annotations

import torch

from model.kda import KDACache, KimiDeltaAttention
from tests.model.small import awake, small_config


def _layer(dtype=torch.float64) -> KimiDeltaAttention:
    torch.manual_seed(0)
    return awake(KimiDeltaAttention(small_config()).to(dtype))


def test_documents_share_neither_state_nor_convolution():
    layer = _layer()
    x = torch.randn(1, 14, 32, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 5, 14])
    before = layer(x, cu_seqlens)
    changed = x.clone()
    changed[:, :5] += 1
    after = layer(changed, cu_seqlens)
    assert torch.equal(before[:, 5:], after[:, 5:])
    # without boundaries the very next token already feels the change, through convolution and state
    assert (layer(x)[:, 5] - layer(changed)[:, 5]).abs().max() > 1e-3


def test_cache_continues_where_it_stopped():
    layer = _layer()
    x = torch.randn(2, 11, 32, dtype=torch.float64)
    cache = layer.make_cache(2, 11, x)
    assert cache == KDACache()
    parts = [layer(piece, cache=cache) for piece in x.split((1, 2, 7, 1), dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(x), rtol=0, atol=1e-12)
    assert cache.conv.shape == (2, 3 * 24, 3) and cache.state.shape == (2, 3, 8, 8)


def test_padding_of_A_log_is_unread():
    layer = _layer()
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    before = layer(x)
    with torch.no_grad():
        layer.A_log[3:] = torch.nan
    assert torch.equal(layer(x), before)
    with torch.no_grad():
        layer.A_log[2] += 1.0
    assert not torch.equal(layer(x), before)
