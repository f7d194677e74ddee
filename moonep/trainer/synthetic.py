"""A source whose entropy is known exactly: a stationary Markov chain with random transition probabilities.

The loss that any model can reach on average is the chain's entropy rate (Shannon 1948, theorem 5)
    H = - sum_s pi(s) sum_j P(j | s) ln P(j | s)       nats per symbol,
with `s` the last `order` symbols and `pi` their stationary distribution.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from moonep.errors import DataError

MAX_TABLE = 1 << 24


class MarkovChain:
    """Transition probabilities drawn once from a symmetric Dirichlet distribution.

    Args:
        vocab_size: V, number of symbols.
        order: symbols of context that decide the next one, 1 or 2.
        concentration: of the Dirichlet; small values give peaked rows and low entropy.
        seed: of the transition table.

    Attributes:
        transitions_SV: `[V**order, V]` float64, rows sum to one. Row index: older symbol first.
        stationary_S: `[V**order]` float64.
        entropy: nats per symbol, exact to rounding.

    Raises:
        DataError: an argument out of range.
    """

    def __init__(self, vocab_size: int, order: int = 1, concentration: float = 0.2, seed: int = 0):
        if order not in (1, 2):
            raise DataError(f"data.markov_order={order}; allowed: 1 or 2")
        if vocab_size < 2 or vocab_size ** (order + 1) > MAX_TABLE:
            largest = int(MAX_TABLE ** (1 / (order + 1)))
            raise DataError(f"data.markov_states={vocab_size} at order {order}; allowed: 2 to {largest}")
        if not concentration > 0:
            raise DataError(f"data.markov_concentration={concentration} must be above 0")
        self.vocab_size, self.order = vocab_size, order
        rng = np.random.Generator(np.random.PCG64(seed))
        rows = rng.dirichlet(np.full(vocab_size, concentration), size=vocab_size**order)
        # A floor keeps every transition possible: one stationary distribution, and no log of zero.
        rows = rows * (1 - 1e-3) + 1e-3 / vocab_size
        self.transitions_SV = rows / rows.sum(axis=1, keepdims=True)
        self.stationary_S = self._stationary()
        row_entropy_S = -(self.transitions_SV * np.log(self.transitions_SV)).sum(axis=1)
        self.entropy = float(self.stationary_S @ row_entropy_S)

    def _stationary(self) -> NDArray[np.float64]:
        """Power iteration; the floor on transitions makes it a contraction."""
        pi_S = np.full(self.vocab_size**self.order, self.vocab_size**-self.order, dtype=np.float64)
        for _ in range(100_000):
            flow_SV = pi_S[:, None] * self.transitions_SV
            after_S = flow_SV.reshape(self.vocab_size, -1).sum(axis=0)
            if np.abs(after_S - pi_S).sum() < 1e-15 * len(pi_S) + 1e-14:
                break
            pi_S = after_S / after_S.sum()
        return pi_S

    def sample(self, length: int, seed: int) -> NDArray[np.int64]:
        """`[length]` symbols of one stationary path."""
        rng = np.random.Generator(np.random.PCG64(seed))
        cumulative = [list(accumulate(row)) for row in self.transitions_SV.tolist()]
        state = int(np.searchsorted(np.cumsum(self.stationary_S), rng.random()))
        state = min(state, len(self.stationary_S) - 1)
        last, states = self.vocab_size - 1, self.vocab_size**self.order
        symbols = []
        for u in rng.random(length).tolist():
            symbol = min(bisect_right(cumulative[state], u), last)  # rounding may leave the last sum below 1
            symbols.append(symbol)
            state = (state * self.vocab_size + symbol) % states
        return np.array(symbols, dtype=np.int64)

    def cross_entropy(self, symbols: NDArray[np.integer]) -> float:
        """Mean nats of the symbols after the first `order` under the chain: the floor on this sample."""
        ids = np.asarray(symbols, dtype=np.int64)
        state = ids[: -self.order].copy() if self.order == 1 else ids[:-2] * self.vocab_size + ids[1:-1]
        return float(-np.log(self.transitions_SV[state, ids[self.order :]]).mean())
