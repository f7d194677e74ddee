"""Random routing: reproducible streams, top-k sampling without replacement, and its inclusion probabilities.

R ranks, E experts, K choices a token, s tokens. A token's K experts are the K largest of log popularity plus
Gumbel noise, which is the same as drawing experts one after another with probability proportional to
popularity and passing over those already drawn (Plackett-Luce).
"""

from __future__ import annotations

import numpy as np

_PURPOSES = {"popularity": 1, "counts": 2, "tokens": 3, "schedule": 4, "lengths": 5}


def stream(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """A generator of its own for (seed, purpose, key): no draw depends on which others were made before
    it."""
    words = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, _PURPOSES[purpose], *[int(k) for k in key]]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))


def _normal_below(x: np.ndarray) -> np.ndarray:
    """Standard normal distribution function, to 1e-7 (Abramowitz and Stegun 26.2.17)."""
    t = 1 / (1 + 0.2316419 * np.abs(x))
    series = 0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429)))
    tail = np.exp(-0.5 * np.minimum(x * x, 1400.0)) * 0.3989422804014327 * t * series
    return np.where(x > 0, 1 - tail, tail)


def _crossing(rates_E: np.ndarray, top_k: int, deviations: float) -> float:
    """log t at which the mean number that rang exceeds top_k - 1/2 by so many standard deviations
    (bisection)."""
    low, high = -60.0, 260.0
    for _ in range(48):
        middle = 0.5 * (low + high)
        rang_E = -np.expm1(-rates_E * np.exp(middle))
        deviation = np.sqrt(max(float((rang_E * (1 - rang_E)).sum()), 1e-12))
        low, high = (middle, high) if rang_E.sum() - top_k + 0.5 < deviations * deviation else (low, middle)
    return high


def inclusion_probabilities(log_popularity_E: np.ndarray, top_k: int) -> np.ndarray:
    """P(expert is among a token's top-k) under Plackett-Luce sampling; float64 [E], each <= 1, sum = top_k.

    Each expert rings at an exponential time of rate popularity, and the token takes the first K that ring.
    Expert e is taken if fewer than K of the others rang before it: the integral over its time of P(fewer than
    K others), whose number is taken as normal. Agrees with direct sampling to about 1 % (tests).
    """
    logs = np.asarray(log_popularity_E, dtype=np.float64)
    if top_k >= logs.size:
        return np.ones(logs.size)
    rates = np.exp(np.clip(logs - logs.max(), -200.0, 0.0))
    times_G = np.exp(np.linspace(_crossing(rates, top_k, -6.0), _crossing(rates, top_k, 6.0), 96))
    alive_GE = np.exp(-rates * times_G[:, None])
    rang_GE = 1 - alive_GE
    spread_GE = rang_GE * alive_GE
    others_GE = rang_GE.sum(1, keepdims=True) - rang_GE
    deviation_GE = np.sqrt(np.maximum(spread_GE.sum(1, keepdims=True) - spread_GE, 1e-12))
    room_GE = _normal_below((top_k - 0.5 - others_GE) / deviation_GE)
    taken_E = 1 - alive_GE[0]
    taken_E += (0.5 * (room_GE[1:] + room_GE[:-1]) * (alive_GE[:-1] - alive_GE[1:])).sum(0)
    return _with_sum(np.clip(taken_E, 1e-300, 1 - 1e-15), top_k)


def _with_sum(taken_E: np.ndarray, top_k: int) -> np.ndarray:
    """1 - (1 - p)^c with the c that makes the sum exact."""
    log_left = np.log1p(-taken_E)
    low, high = -3.0, 3.0
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if -np.expm1(log_left * np.exp(middle)).sum() < top_k else (low, middle)
    exact_E = -np.expm1(log_left * np.exp(0.5 * (low + high)))
    # Rounded to 2^-32: a last-place difference between two machines' exp() must not reach the sampler.
    return np.rint(np.minimum(exact_E, 1.0) * 2.0**32) / 2.0**32


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
