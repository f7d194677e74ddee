"""What a plan costs in rows, copies and padding, by rank: everything the cost model needs, from counts alone.

R ranks, E experts, K choices a token. `counts[r, e]` = tokens of source rank r for expert e, `alloc[d, e]` =
tokens of e computed on d, `home[e]` = the rank whose weights of e are the original. Tokens go to replicas
local first, then in rank order, as the runtime's layout does (`moonep.planning.layout`; the tests hold the
two against each other).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Traffic:
    """One plan, by rank. `_RR` is indexed [source or owner, destination]."""

    rows_RR: np.ndarray  # choices (token x expert) that go from source to destination
    unique_RR: (
        np.ndarray
    )  # rows actually sent: one for each (token, destination) pair; expected value from counts
    copies_RR: np.ndarray  # experts whose weights go from owner to destination
    fetched_RR: np.ndarray  # of those, the ones that must be transferred in this step
    tokens_R: np.ndarray  # tokens of each source
    load_R: np.ndarray  # rows computed on each rank
    tiled_R: np.ndarray  # the same with each group rounded up to whole tiles of the grouped product
    padded_R: np.ndarray  # the same with each group rounded up to the token padding of the shard
    groups_R: np.ndarray  # non-empty groups (experts) of each rank
    fan_out_E: np.ndarray  # ranks to which each expert is copied

    @property
    def num_ranks(self) -> int:
        return self.load_R.size

    @property
    def imbalance(self) -> float:
        """max/mean of computed rows a rank."""
        total = self.load_R.sum()
        return float(self.load_R.max() * self.num_ranks / total) if total else 1.0

    @property
    def copies(self) -> int:
        return int(self.copies_RR.sum())

    @property
    def remote_rows(self) -> float:
        """Rows that cross between ranks, duplicates removed."""
        return float(self.unique_RR.sum() - np.trace(self.unique_RR))

    def sent_R(self) -> np.ndarray:
        """Rows each source sends to others (egress), duplicates removed."""
        return self.unique_RR.sum(1) - np.diag(self.unique_RR)

    def received_R(self) -> np.ndarray:
        """Rows each rank receives from others (ingress), duplicates removed."""
        return self.unique_RR.sum(0) - np.diag(self.unique_RR)


def home_ranks(num_ranks: int, num_experts: int) -> np.ndarray:
    """home[e] = e // epn, int64 [E]."""
    return np.arange(num_experts) // (num_experts // num_ranks)


def moved_tokens(alloc: np.ndarray, home: np.ndarray) -> int:
    """Tokens computed away from their expert's home."""
    return int(alloc.sum() - alloc[home, np.arange(home.size)].sum())


def copies_bound(load_before_R: np.ndarray, tau: float = 1.0, limit: int | None = None) -> int:
    """A proved lower bound on copies: every rank above its limit (ceil(tau x total / R), or `limit`) sends at
    least one expert, and at tau = 1 every rank below floor(total / R) receives at least one."""
    total, ranks = int(load_before_R.sum()), load_before_R.size
    thousandths = round(tau * 1000)
    highest = -(-total * thousandths // (1000 * ranks)) if limit is None else limit
    over = int((load_before_R > highest).sum())
    exact = limit is None and thousandths == 1000
    under = int((load_before_R < total // ranks).sum()) if exact else 0
    return max(over, under)


def analyse(
    counts: np.ndarray,
    alloc: np.ndarray,
    *,
    top_k: int,
    home: np.ndarray | None = None,
    fetched: np.ndarray | None = None,
    token_padding: int = 8,
    tile_rows: int = 64,
) -> Traffic:
    """Rows, copies and padding of one plan.

    Args:
        counts, alloc: int [R, E].
        home: int [E]; default e // epn.
        fetched: bool [R, E], copies that must be transferred (default: all of them).
    """
    counts, alloc = counts.astype(np.int64), alloc.astype(np.int64)
    ranks, experts = alloc.shape
    home = home_ranks(ranks, experts) if home is None else home
    used = alloc > 0
    away = used.copy()
    away[home, np.arange(experts)] = False
    rows, unique = _rows(counts, alloc, home, away, top_k)
    copies = _by_owner(away, home)
    return Traffic(
        rows_RR=rows,
        unique_RR=unique,
        copies_RR=copies,
        fetched_RR=copies if fetched is None else _by_owner(fetched & ~_at_home(home, ranks), home),
        tokens_R=counts.sum(1) // top_k,
        load_R=alloc.sum(1),
        tiled_R=(-(-alloc // tile_rows) * tile_rows).sum(1),
        padded_R=(-(-alloc // token_padding) * token_padding).sum(1),
        groups_R=used.sum(1),
        fan_out_E=away.sum(0),
    )


def _at_home(home: np.ndarray, ranks: int) -> np.ndarray:
    return np.arange(ranks)[:, None] == home


def _by_owner(held: np.ndarray, home: np.ndarray) -> np.ndarray:
    """[owner, destination] number of experts held away from home."""
    destination, expert = np.nonzero(held)
    out = np.zeros((held.shape[0], held.shape[0]), dtype=np.int64)
    np.add.at(out, (home[expert], destination), 1)
    return out


def replica_takes(
    counts: np.ndarray, alloc: np.ndarray, experts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How sources' tokens of `experts` spread over the ranks that compute them: local first, then in rank
    order.

    Returns:
        (destination [P], expert [P], take [R, P]): take[r, p] = tokens source r sends to that (destination,
        expert).
    """
    counts_RX, alloc_RX = counts[:, experts], alloc[:, experts]
    local = np.minimum(counts_RX, alloc_RX)
    ends_source = np.cumsum(counts_RX - local, axis=0)
    ends_target = np.cumsum(alloc_RX - local, axis=0)
    destination, column = np.nonzero(alloc_RX)
    high = ends_target[destination, column]
    low = high - (alloc_RX - local)[destination, column]
    source_high = ends_source[:, column]
    source_low = source_high - (counts_RX - local)[:, column]
    take = np.maximum(np.minimum(source_high, high) - np.maximum(source_low, low), 0)
    take[destination, np.arange(destination.size)] += local[destination, column]
    return destination, experts[column], take


class _Sums:
    """Sums over the experts of each (source, destination) from which the number of distinct rows follows."""

    def __init__(self, ranks: int):
        self.rows = np.zeros((ranks, ranks))
        self.log_none = np.zeros((ranks, ranks))
        self.deficit = np.zeros((ranks, ranks))

    def add_split(
        self, destination: np.ndarray, take_RP: np.ndarray, share: np.ndarray, chosen: np.ndarray
    ) -> None:
        """share: P(a token of r goes to that pair), chosen: P(a token of r chooses that expert); both [R,
        P]."""
        order = np.argsort(destination, kind="stable")
        present, first = np.unique(destination[order], return_index=True)
        rest = np.maximum(1 - share, 1e-12)
        for total, values in (
            (self.rows, take_RP),
            (self.log_none, np.log(rest)),
            (self.deficit, share * (1 - chosen) / rest),
        ):
            total[:, present] += np.add.reduceat(values[:, order], first, axis=1)

    def add_whole(self, counts_RX: np.ndarray, home_X: np.ndarray, chosen_RX: np.ndarray) -> None:
        """Experts computed at home alone; home_X is sorted."""
        present, first = np.unique(home_X, return_index=True)
        log_none = np.log(np.maximum(1 - chosen_RX, 1e-12))
        self.rows[:, present] += np.add.reduceat(counts_RX, first, axis=1)
        self.log_none[:, present] += np.add.reduceat(log_none, first, axis=1)
        self.deficit[:, present] += np.add.reduceat(chosen_RX, first, axis=1)


def _rows(
    counts: np.ndarray, alloc: np.ndarray, home: np.ndarray, away: np.ndarray, top_k: int
) -> tuple[np.ndarray, np.ndarray]:
    """(rows [R, R], expected distinct rows [R, R])."""
    ranks = alloc.shape[0]
    tokens = counts.sum(1) // top_k
    scale = 1 / np.maximum(tokens, 1)[:, None]
    chosen = counts * scale
    sums = _Sums(ranks)
    is_split = away.any(0)
    whole, split = np.flatnonzero(~is_split), np.flatnonzero(is_split)
    whole = whole[np.argsort(home[whole], kind="stable")]
    if whole.size:
        sums.add_whole(counts[:, whole], home[whole], chosen[:, whole])
    if split.size:
        destination, expert, take = replica_takes(counts, alloc, split)
        sums.add_split(destination, take, take * scale, chosen[:, expert])
    # A token's choices as independent draws conditioned on their number being K. Without them a destination,
    # K draws
    # must come from what has mean K - deficit; the number of draws as a Poisson scaled to their variance.
    variance = np.maximum((chosen * (1 - chosen)).sum(1), 1e-9)[:, None]
    deficit = np.minimum(sums.deficit, top_k * (1 - 1e-9))
    log_none = sums.log_none + top_k / variance * (top_k * np.log1p(-deficit / top_k) + deficit)
    unique = tokens[:, None] * -np.expm1(np.minimum(log_none, 0.0))
    rows = sums.rows.astype(np.int64)
    return rows, np.clip(unique, np.ceil(rows / top_k), np.minimum(rows, tokens[:, None]))


def unique_rows(ids: list[np.ndarray], counts: np.ndarray, alloc: np.ndarray) -> np.ndarray:
    """Distinct rows [R, R] from the choices themselves: ids[r] is int [tokens, K] of source r. Exact."""
    ranks, experts = alloc.shape
    destination, expert, take_RP = replica_takes(
        counts.astype(np.int64), alloc.astype(np.int64), np.arange(experts)
    )
    out = np.zeros((ranks, ranks), dtype=np.int64)
    for source, choices in enumerate(ids):
        to = _deal_to_destinations(choices, destination, expert, take_RP[source], source)
        sorted_to = np.sort(to, axis=1)
        first = np.ones_like(sorted_to, dtype=bool)
        first[:, 1:] = sorted_to[:, 1:] != sorted_to[:, :-1]
        out[source] = np.bincount(sorted_to[first], minlength=ranks)
    return out


def _deal_to_destinations(
    choices: np.ndarray, destination: np.ndarray, expert: np.ndarray, take_P: np.ndarray, source: int
) -> np.ndarray:
    """Destination of each choice [tokens, K]: an expert's tokens in order of position, local part first."""
    place = np.lexsort((destination, destination != source, expert))
    to_sorted = np.repeat(destination[place], take_P[place])
    order = np.argsort(choices.ravel(), kind="stable")
    flat = np.empty(choices.size, dtype=np.int64)
    flat[order] = to_sorted
    return flat.reshape(choices.shape)
