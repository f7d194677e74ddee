"""Workloads: exact sums, reproducible streams, the right distribution, solved parameters, bad input."""

from __future__ import annotations

import numpy as np
import pytest

from moonep.errors import ConfigError, ContractError
from moonep.simulate import WORKLOADS, make_workload
from moonep.simulate.sampling import draw_tokens, inclusion_probabilities, popularity_for, stream

NAMES = sorted(WORKLOADS)


@pytest.mark.parametrize("name", NAMES)
def test_counts_are_whole_tokens(name):
    bound = make_workload(name).bind(num_ranks=4, num_experts=32, top_k=4, seed=3)
    counts = bound.counts(steps=3, layers=2, tokens=200)
    assert counts.shape == (3, 2, 4, 32)
    tokens = np.stack([bound.workload.tokens_of_rank(bound.shape, step, 200) for step in range(3)])
    assert (counts.sum(-1) == 4 * tokens[:, None]).all()
    assert counts.min() >= 0 and (counts.max(-1) <= tokens[:, None]).all()  # an expert at most once a token


@pytest.mark.parametrize("name", NAMES)
def test_tokens_choose_different_experts(name):
    bound = make_workload(name).bind(num_ranks=4, num_experts=32, top_k=4, seed=3)
    ids = bound.token_choices(step=1, layer=1, rank=2, num_tokens=300)
    assert ids.shape == (300, 4) and ids.dtype == np.int32
    assert ids.min() >= 0 and ids.max() < 32
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert np.array_equal(ids, bound.token_choices(step=1, layer=1, rank=2, num_tokens=300))


def test_numbers_are_the_same_on_any_machine():
    """Pinned draws: Philox streams keyed by (seed, purpose, step, layer, rank)."""
    bound = make_workload("lognormal", sigma=1.0).bind(2, 8, 2, seed=5)
    assert bound.step_counts(0, 0, 16).tolist() == PINNED_COUNTS
    assert bound.token_choices(3, 1, 1, 4).tolist() == PINNED_TOKENS


PINNED_COUNTS = [[6, 3, 7, 0, 0, 9, 3, 4], [2, 3, 1, 0, 4, 15, 3, 4]]
PINNED_TOKENS = [[3, 2], [2, 0], [2, 7], [3, 0]]


def test_order_of_calls_does_not_matter():
    for name in ("drift", "burst", "rotating_hotspot", "source_skewed"):
        bound = make_workload(name).bind(4, 32, 4, seed=1)
        late = bound.step_counts(5, 1, 64)
        early = bound.step_counts(2, 1, 64)
        again = make_workload(name).bind(4, 32, 4, seed=1)
        assert np.array_equal(again.step_counts(2, 1, 64), early)
        assert np.array_equal(again.counts(1, 2, 64, first_step=5)[0, 1], late)


@pytest.mark.parametrize("sigma", [0.0, 0.5, 2.0])
def test_inclusion_probabilities_match_sampling(sigma):
    """Against 40,000 sampled tokens: 5 standard errors plus 0.8 % of absolute error of the normal
    approximation."""
    logs = sigma * stream(0, "popularity", 9).standard_normal(64)
    expected = inclusion_probabilities(logs, 6)
    assert abs(expected.sum() - 6) < 1e-4
    ids = draw_tokens(stream(1, "tokens"), logs, 40_000, 6)
    seen = np.bincount(ids.ravel(), minlength=64) / 40_000
    error = 5 * np.sqrt(expected * (1 - expected) / 40_000) + 0.008
    assert (np.abs(seen - expected) < error).all()


def test_sampling_without_replacement_is_plackett_luce():
    """Two of three experts: P(first = i, second = j) = p_i p_j / (1 - p_i), to 5 standard errors."""
    p = np.array([0.7, 0.2, 0.1])
    ids = draw_tokens(stream(2, "tokens"), np.log(p), 60_000, 2)
    for first in range(3):
        for second in set(range(3)) - {first}:
            expected = p[first] * p[second] / (1 - p[first])
            seen = ((ids[:, 0] == first) & (ids[:, 1] == second)).mean()
            assert abs(seen - expected) < 5 * np.sqrt(expected * (1 - expected) / 60_000)


def test_strong_skew_still_fills_every_token():
    """Nearly all popularity on two experts: most rows must be continued past repeats."""
    logs = np.zeros(40)
    logs[:2] = 12.0
    ids = draw_tokens(stream(0, "tokens"), logs, 500, 6)
    assert (np.sort(ids, 1)[:, :2] == [0, 1]).all()
    others = np.bincount(ids.ravel(), minlength=40)[2:]
    assert others.sum() == 500 * 4 and others.min() > 0


def test_popularity_for_inverts_inclusion():
    target = np.array([0.95, 0.6, 0.25, 0.1, 0.05, 0.05])
    reached = inclusion_probabilities(popularity_for(target, 2), 2)
    assert np.abs(reached - target).max() < 1e-3


@pytest.mark.parametrize("maxvio", [0.2, 1.0, 10.0])
def test_lognormal_solves_maxvio(maxvio):
    """Expected maxvio is met by the sampled one to the sampling noise of 8 x 8192 tokens."""
    bound = make_workload("lognormal", maxvio=maxvio).bind(8, 256, 8, seed=0)
    total = bound.step_counts(0, 0, 8192).sum(0)
    measured = total.max() / total.mean() - 1
    assert measured == pytest.approx(maxvio, rel=0.05, abs=0.06)


@pytest.mark.parametrize("imbalance", [1.2, 1.9])
def test_zipf_solves_rank_imbalance(imbalance):
    bound = make_workload("zipf", imbalance=imbalance).bind(8, 64, 4, seed=1)
    loads = bound.step_counts(0, 0, 8192).sum(0).reshape(8, 8).sum(1)
    assert loads.max() / loads.mean() == pytest.approx(imbalance, rel=0.02)


def test_unreachable_imbalance_says_what_is_possible():
    with pytest.raises(ConfigError, match=r"at most .* in layer 0"):
        make_workload("zipf", imbalance=7.9).bind(8, 64, 4, seed=1)


def test_hot_experts_and_hot_rank_hit_their_share():
    hot = make_workload("hot_experts", count=3, share=0.4).bind(4, 32, 4).step_counts(0, 0, 4096).sum(0)
    assert np.sort(hot)[-3:].sum() / hot.sum() == pytest.approx(0.4, abs=0.01)
    rank = make_workload("hot_rank", ratio=3.0, rank=2).bind(4, 32, 4).step_counts(0, 0, 4096).sum(0)
    loads = rank.reshape(4, 8).sum(1)
    assert loads.argmax() == 2 and loads[2] / loads.mean() == pytest.approx(3.0, rel=0.02)


def test_drift_keeps_its_variance_and_its_correlation():
    bound = make_workload("drift", sigma=1.0, rho=0.8).bind(2, 4000, 2, seed=0)
    first, second, far = (bound.log_popularity(step, 0, 0) for step in (0, 1, 30))
    assert np.corrcoef(first, second)[0, 1] == pytest.approx(0.8, abs=0.05)
    assert abs(np.corrcoef(first, far)[0, 1]) < 0.08
    assert far.std() == pytest.approx(1.0, abs=0.06)


def test_source_skew_differs_by_rank_and_repeats_by_domain():
    bound = make_workload("source_skewed", domains=2).bind(4, 32, 2)
    assert not np.allclose(bound.log_popularity(0, 0, 0), bound.log_popularity(0, 0, 1))
    assert np.allclose(bound.log_popularity(0, 0, 0), bound.log_popularity(0, 0, 2))


def test_empty_rank_gets_nothing_and_balanced_is_exact():
    counts = make_workload("empty_rank", rank=1).bind(4, 32, 4).step_counts(0, 0, 500).sum(0)
    assert counts[8:16].sum() == 0 and counts.sum() == 4 * 4 * 500
    even = make_workload("balanced").bind(4, 32, 4).step_counts(0, 0, 64).sum(0)
    assert even.tolist() == [32] * 32


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("lognormall", {}, "did you mean 'lognormal'"),
        ("lognormal", {"alpha": 1.0}, "no such key; its keys: sigma, maxvio"),
        ("lognormal", {"maxvio": 100.0}, "at most E/K - 1 = 7"),
        ("hot_experts", {"share": 0.9, "count": 2}, "at most 0.5"),
        ("hot_rank", {"ratio": 9.0}, "ratio=9.0 must lie in"),
        ("hot_rank", {"rank": 4}, "must lie in 0..3"),
        ("drift", {"rho": 1.5}, "must lie in [0, 1]"),
    ],
)
def test_bad_workloads_name_the_key(name, parameters, message):
    with pytest.raises(ConfigError) as error:
        make_workload(name, **parameters).bind(4, 32, 4)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_bad_geometry_is_refused():
    with pytest.raises(ContractError, match=r"multiple of geometry\.R=3"):
        make_workload("uniform").bind(3, 32, 4)
    with pytest.raises(ContractError, match=r"geometry\.K=40"):
        make_workload("uniform").bind(4, 32, 40)
