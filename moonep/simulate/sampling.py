"""Random routing: reproducible streams, top-k sampling without replacement, and its inclusion probabilities.

R ranks, E experts, K choices a token, s tokens. A token's K experts are the K largest of log popularity plus
Gumbel noise, which is the same as drawing experts one after another with probability proportional to
popularity and passing over those already drawn (Plackett-Luce).
"""

from __future__ import annotations

import numpy as np

_PURPOSES = {"popularity": 1, "counts": 2, "tokens": 3, "schedule": 4, "lengths": 5}
# Nodes and weights of a 7-point Gauss-Hermite rule for the standard normal.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(7)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


def stream(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """A generator of its own for (seed, purpose, key): no draw depends on which others were made before
    it."""
    words = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, _PURPOSES[purpose], *[int(k) for k in key]]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))


def _solve_times(rates_E: np.ndarray, targets_J: np.ndarray, spread_J: np.ndarray) -> np.ndarray:
    """t_J with mean(t) - spread sqrt(var(t)) = target, for N(t) = experts that rang by time t. Bisection in
    log t."""
    low = np.full(targets_J.shape, -60.0)
    high = np.full(targets_J.shape, 60.0)
    for _ in range(70):
        middle = 0.5 * (low + high)
        rang_JE = -np.expm1(-rates_E * np.exp(middle)[:, None])
        mean = rang_JE.sum(1)
        deviation = np.sqrt((rang_JE * (1 - rang_JE)).sum(1))
        below = mean - spread_J * deviation < targets_J
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return np.exp(0.5 * (low + high))


def inclusion_probabilities(log_popularity_E: np.ndarray, top_k: int) -> np.ndarray:
    """P(expert is among a token's top-k) under Plackett-Luce sampling; float64 [E], each <= 1, sum = top_k.

    Each expert rings at an exponential time of rate popularity; the token takes the first K that ring, so an
    expert is taken if it rings before the K-th. The K-th time is spread as the normal approximation of the
    number that rang (7-point quadrature); the last bisection makes the sum exact. Checked against direct
    sampling in the tests.
    """
    logs = np.asarray(log_popularity_E, dtype=np.float64)
    num_experts = logs.size
    if top_k >= num_experts:
        return np.ones(num_experts)
    rates = np.exp(np.clip(logs - logs.max(), -200.0, 0.0))
    times = _solve_times(rates, np.full(7, top_k - 0.5), _NODES)
    low, high = -3.0, 3.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        taken_E = _WEIGHTS @ -np.expm1(-rates * (times * np.exp(middle))[:, None])
        low, high = (middle, high) if taken_E.sum() < top_k else (low, middle)
    # Rounded to 2^-32: a last-place difference between two machines' exp() must not reach the sampler.
    return np.rint(np.minimum(taken_E, 1.0) * 2.0**32) / 2.0**32


def popularity_for(inclusion_E: np.ndarray, top_k: int) -> np.ndarray:
    """log popularity [E] whose inclusion probabilities are the given ones (within about 1e-3); sum must be
    top_k."""
    target = np.clip(np.asarray(inclusion_E, dtype=np.float64), 1e-12, 1 - 1e-6)
    logs = np.log(-np.log1p(-target))
    for _ in range(25):
        reached = np.clip(inclusion_probabilities(logs, top_k), 1e-12, 1 - 1e-6)
        if np.abs(reached - target).max() < 1e-5:
            break
        logs = logs + np.log(np.log1p(-target) / np.log1p(-reached))
    return logs


def draw_counts(
    generator: np.random.Generator, inclusion_RE: np.ndarray, tokens_R: np.ndarray, top_k: int
) -> np.ndarray:
    """Tokens of each (source rank, expert), int64 [R, E]: binomial, row sums exactly tokens x top_k, each <=
    tokens."""
    tokens = np.asarray(tokens_R, dtype=np.int64)[:, None]
    counts = generator.binomial(tokens, inclusion_RE)
    weight_RE = inclusion_RE * (1 - inclusion_RE) + 1e-9
    share_RE = np.cumsum(weight_RE / weight_RE.sum(1, keepdims=True), axis=1)
    share_RE[:, -1] = 1.0
    target = tokens[:, 0] * top_k
    for _ in range(16):
        missing = target - counts.sum(1)
        if not missing.any():
            return counts
        # Spread what is missing in proportion to the variance, by rounding its running sum.
        steps = np.diff(np.rint(share_RE * missing[:, None]).astype(np.int64), axis=1, prepend=0)
        counts = np.clip(counts + steps, 0, tokens)
    return _settle_greedily(counts, target, tokens)


def _settle_greedily(counts: np.ndarray, target_R: np.ndarray, tokens_R1: np.ndarray) -> np.ndarray:
    """The last corrections where clipping kept eating them (a nearly saturated row)."""
    for row, (want, limit) in enumerate(zip(target_R, tokens_R1[:, 0], strict=True)):
        for expert in range(counts.shape[1]):
            missing = want - counts[row].sum()
            counts[row, expert] = np.clip(counts[row, expert] + missing, 0, limit)
    return counts


def draw_tokens(
    generator: np.random.Generator, log_popularity_E: np.ndarray, num_tokens: int, top_k: int
) -> np.ndarray:
    """K different experts for each token, in the order drawn: int32 [s, K].

    Draws with replacement and passes over repeats (exactly Plackett-Luce). The few tokens of a strongly
    skewed popularity that still lack experts are continued over the experts they lack with Gumbel noise.
    """
    logs = np.asarray(log_popularity_E, dtype=np.float64)
    weights = np.exp(np.clip(logs - logs.max(), -200.0, 0.0))
    cumulative = np.cumsum(weights / weights.sum())
    uniform_TW = generator.random((num_tokens, 2 * top_k + 4))
    drawn_TW = np.searchsorted(cumulative, uniform_TW, side="right").astype(np.int32)
    ids_TK, found_T = _first_distinct(np.minimum(drawn_TW, logs.size - 1), top_k)
    unfinished = np.flatnonzero(found_T < top_k)
    for start in range(0, unfinished.size, 4096):
        rows = unfinished[start : start + 4096]
        ids_TK[rows] = _continue_draw(generator, logs, ids_TK[rows], found_T[rows])
    return ids_TK


def _continue_draw(
    generator: np.random.Generator, logs_E: np.ndarray, ids_TK: np.ndarray, found_T: np.ndarray
) -> np.ndarray:
    """Completes rows of which the first `found` ids are drawn, without repeating them."""
    tokens, top_k = ids_TK.shape
    score = logs_E - np.log(-np.log(generator.random((tokens, logs_E.size))))
    rows, columns = np.nonzero(np.arange(top_k) < found_T[:, None])
    # Those already drawn come first, in their order.
    score[rows, ids_TK[rows, columns]] = 1e6 - columns
    part = np.argpartition(-score, top_k - 1, axis=1)[:, :top_k]
    order = np.argsort(-np.take_along_axis(score, part, 1), axis=1, kind="stable")
    return np.take_along_axis(part, order, 1).astype(np.int32)


def _first_distinct(drawn_TW: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The first top_k different values of each row, int32 [T, K], and how many of them the row had, [T]."""
    tokens, width = drawn_TW.shape
    order = np.argsort(drawn_TW, axis=1, kind="stable")
    ranked = np.take_along_axis(drawn_TW, order, 1)
    fresh_sorted = np.ones((tokens, width), dtype=bool)
    fresh_sorted[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    fresh = np.zeros_like(fresh_sorted)
    np.put_along_axis(fresh, order, fresh_sorted, 1)
    place = np.cumsum(fresh, axis=1)
    chosen = fresh & (place <= top_k)
    ids = np.zeros((tokens, top_k), dtype=np.int32)
    rows, columns = np.nonzero(chosen)
    ids[rows, place[rows, columns] - 1] = drawn_TW[rows, columns]
    return ids, np.minimum(place[:, -1], top_k)
