"""Validation loss: every target once, however the split is dealt to ranks and calls."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from moonep.errors import DataError
from moonep.trainer import evaluate as module
from moonep.trainer.batches import IGNORE
from moonep.trainer.data import make_split
from moonep.trainer.evaluate import evaluate, window_starts
from moonep.trainer.tokens import ByteTokenizer, SymbolTokenizer


class Unigram(nn.Module):
    """Loss of a target is a fixed number of its id, whatever the context; counts its calls."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.cost = torch.rand(vocab_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.calls: list[tuple[int, bool]] = []

    def forward(self, tokens, cu_seqlens=None, targets=None):
        assert tokens.shape == targets.shape and not torch.is_grad_enabled()
        self.calls.append((tokens.numel(), self.training))
        valid = targets[targets != IGNORE]
        return self.cost[valid].sum(), torch.tensor(valid.numel())


def symbols(length: int):
    ids = np.random.default_rng(1).integers(0, 50, length)
    return make_split("val", [ids], SymbolTokenizer(50)), ids


@pytest.mark.parametrize(
    ("length", "context", "capacity"), [(997, 16, 64), (20, 64, 64), (130, 64, 40), (2, 8, 8)]
)
def test_every_target_counts_once(length, context, capacity):
    split, ids = symbols(length)
    model = Unigram(50).train()
    values = evaluate(model, split, context=context, capacity=capacity)
    assert values["val_tokens"] == length - 1
    assert values["val_loss"] == pytest.approx(float(model.cost[ids[1:]].mean()), abs=1e-12)
    assert all(size <= capacity and not training for size, training in model.calls)
    assert model.training


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_make_equally_many_calls_and_agree(world_size, monkeypatch):
    split, ids = symbols(700)
    model = Unigram(50)
    sums, calls = torch.zeros(3, dtype=torch.float64), set()
    monkeypatch.setattr(module.dist, "all_reduce", sums.add_)
    for rank in range(world_size):
        model.calls.clear()
        try:
            evaluate(model, split, context=16, capacity=32, rank=rank, world_size=world_size)
        except DataError:
            assert world_size == 8  # this stand-in for all_reduce leaves an idle rank with its own sums
        calls.add(len(model.calls))
    assert len(calls) == 1
    assert sums[1] == len(ids) - 1
    assert sums[0] == pytest.approx(float(model.cost[ids[1:]].sum()), abs=1e-9)


def test_bits_per_byte_counts_bytes_of_text_not_tokens():
    split = make_split("val", [np.full(99, 65), np.full(49, 66)], ByteTokenizer())
    values = evaluate(Unigram(257), split, context=16, capacity=64)
    # Every text byte is a target exactly once: the separator before it, or its neighbour, predicts it.
    assert values["val_tokens"] == split.text_bytes == 148
    assert values["val_bits_per_byte"] == pytest.approx(values["val_loss"] / math.log(2))


def test_a_limit_spreads_windows_over_the_split():
    split, _ = symbols(1000)
    starts = window_starts(split, 10, 100)
    assert starts.tolist() == list(range(0, 1000, 100))
    assert len(window_starts(split, 10, 5)) == 1
    assert len(window_starts(split, 10, 10_000)) == 100


def test_nothing_to_predict_is_an_error():
    with pytest.raises(DataError, match="no token to predict"):
        evaluate(Unigram(50), symbols(1)[0], context=8, capacity=8)
