"""Multi-token prediction: targets two ahead, weight, and where it stays out."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from model.mtp import mtp_targets
from tests.model.small import random_tokens, small_model


def test_targets_are_two_ahead_and_stay_within_a_document():
    tokens = torch.arange(10, 18).unsqueeze(0)
    targets = tokens + 1
    next_tokens, ahead = mtp_targets(tokens, targets, None, -100)
    assert next_tokens[0, :7].tolist() == list(range(11, 18))
    assert ahead[0].tolist() == [*range(12, 19), -100]
    _, packed = mtp_targets(tokens, targets, torch.tensor([0, 0, 3, 3, 8]), -100)
    assert packed[0].tolist() == [12, 13, -100, 15, 16, 17, 18, -100]


def test_loss_adds_the_weighted_sum_in_training_alone():
    model = small_model(dtype=torch.float64, num_mtp_layers=1, mtp_weight=0.25)
    tokens = random_tokens(2, 9)
    targets = tokens.roll(-1, 1)
    total, count = model(tokens, targets=targets)
    extra = model.last_mtp_loss
    model.eval()
    plain, _ = model(tokens, targets=targets)
    assert count == 18
    torch.testing.assert_close(total, plain + 0.25 * extra * 16)  # the last token of each row has no target
    assert abs(extra.item() - torch.log(torch.tensor(50.0)).item()) < 1.5


def test_mtp_loss_is_that_of_the_shared_head_on_token_t_plus_2():
    model = small_model(dtype=torch.float64, num_mtp_layers=1)
    tokens = random_tokens(1, 12)
    targets = tokens.roll(-1, 1)
    model(tokens, targets=targets)
    mtp = model.mtp
    hidden = model._backbone(tokens, None, None)
    embedded = model.embedding(tokens.roll(-1, 1))
    states = mtp(hidden, embedded, None, None, lambda f, *t: f(*t))
    logits = F.linear(states, model.head_weight)[0, :-1]
    expected = F.cross_entropy(logits[: 12 - 2], tokens[0, 2:], reduction="sum")
    expected = (expected + F.cross_entropy(logits[10:11], tokens[0, :1], reduction="sum")) / 11
    torch.testing.assert_close(model.last_mtp_loss, expected, rtol=1e-10, atol=0)


def test_mtp_is_causal():
    model = small_model(dtype=torch.float64, num_mtp_layers=1)
    tokens = random_tokens(1, 16)

    def states(tokens):
        return model.mtp(
            model._backbone(tokens, None, None),
            model.embedding(tokens.roll(-1, 1)),
            None,
            None,
            lambda f, *t: f(*t),
        )

    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 5) % 50
    before, after = states(tokens), states(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-12)
    assert (before[:, 9] - after[:, 9]).abs().max() > 1e-6  # position 9 reads token 10
