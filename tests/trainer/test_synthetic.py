"""The Markov source: its entropy against independent computations."""

from __future__ import annotations

import numpy as np
import pytest

from moonep.trainer.data import DataConfig, build_corpus
from moonep.trainer.synthetic import MarkovChain


def test_entropy_of_a_chain_known_by_hand():
    chain = MarkovChain(2, 1, seed=0)
    a, b = chain.transitions_SV[0, 1], chain.transitions_SV[1, 0]
    pi = np.array([b, a]) / (a + b)  # the stationary law of a two-state chain
    binary = [-(p * np.log(p) + (1 - p) * np.log(1 - p)) for p in (a, b)]
    assert chain.entropy == pytest.approx(pi @ binary, abs=1e-12)


@pytest.mark.parametrize(("states", "order"), [(16, 1), (5, 2)])
def test_stationary_law_is_an_eigenvector(states, order):
    chain = MarkovChain(states, order, seed=3)
    size = states**order
    step = np.zeros((size, size))
    for state in range(size):
        for symbol in range(states):
            step[state, (state * states + symbol) % size] += chain.transitions_SV[state, symbol]
    values, vectors = np.linalg.eig(step.T)
    principal = np.real(vectors[:, np.argmax(np.real(values))])
    np.testing.assert_allclose(chain.stationary_S, principal / principal.sum(), atol=1e-10)


@pytest.mark.parametrize("order", [1, 2])
def test_sample_has_the_stated_entropy(order):
    chain = MarkovChain(8, order, seed=1)
    symbols = chain.sample(200_000, seed=2)
    # The mean of 2e5 log-probabilities of standard deviation ~1, weakly correlated: 5 sigma is about 0.02.
    assert chain.cross_entropy(symbols) == pytest.approx(chain.entropy, abs=0.02)


def test_sample_follows_the_transition_table():
    chain = MarkovChain(4, 2, concentration=1.0, seed=5)
    symbols = chain.sample(200_000, seed=6)
    states = symbols[:-2] * 4 + symbols[1:-1]
    counts = np.zeros((16, 4))
    np.add.at(counts, (states, symbols[2:]), 1)
    seen = counts.sum(axis=1)
    # A frequency over n draws is within 5 sigma <= 2.5 / sqrt(n).
    error = np.abs(counts / seen[:, None] - chain.transitions_SV).max(axis=1)
    assert (error < 2.5 / np.sqrt(seen)).all()


def test_corpus_reports_the_entropy_and_splits_differ():
    corpus = build_corpus(DataConfig(name="markov", markov_tokens=5000, validation_fraction=0.2))
    train, val = corpus.split("train"), corpus.split("val")
    assert (len(train), len(val)) == (5000, 1000)
    assert corpus.entropy and f"{corpus.entropy:.6f}" in corpus.describe()
    assert (train.window(0, 1000) != val.window(0, 1000)).mean() > 0.5
    assert corpus.decode([3, 1]) == "3 1" and corpus.encode("3 1").tolist() == [3, 1]
