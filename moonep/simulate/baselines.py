"""What other systems do, written from their published descriptions: EPLB, LLEP and UltraEP.

Each function plans one layer of one step in integers. R ranks, E experts, epn = E/R. `alloc[d, e]` = tokens
of expert e computed on rank d. The runtime's own policies live in `moonep.planning`; these exist to be
compared with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moonep.errors import ConfigError


def _home_alloc(total_E: np.ndarray, num_ranks: int) -> np.ndarray:
    """alloc [R, E] with every token on its expert's home rank."""
    alloc = np.zeros((num_ranks, total_E.size), dtype=np.int64)
    alloc[np.arange(total_E.size) // (total_E.size // num_ranks), np.arange(total_E.size)] = total_E
    return alloc


# LLEP (least-loaded expert parallelism), algorithms 2 to 4 of the paper


@dataclass(frozen=True)
class LLEPSettings:
    """`alpha`: capacity of a rank over the mean; `min_chunk`: least tokens worth a weight import;
    `threshold`: at a max/mean below it plain expert parallelism is used."""

    alpha: float = 1.0
    min_chunk: int = 1024
    threshold: float = 1.3


def llep(tokens_per_expert: np.ndarray, settings: LLEPSettings = LLEPSettings()) -> np.ndarray:
    """Experts by falling load: the home rank keeps what fits under its capacity, the rest spills to the
    least-loaded ranks (assigned plus still pending) in chunks of at least `min_chunk`. int64 [R, E] from
    counts [R, E]."""
    num_ranks, num_experts = tokens_per_expert.shape
    total_E = tokens_per_expert.sum(0).astype(np.int64)
    home_E = np.arange(num_experts) // (num_experts // num_ranks)
    pending = np.bincount(home_E, weights=total_E, minlength=num_ranks).astype(np.int64)
    mean = total_E.sum() / num_ranks
    if total_E.sum() == 0 or pending.max() < settings.threshold * mean:
        return _home_alloc(total_E, num_ranks)
    capacity = int(np.ceil(settings.alpha * mean))
    alloc = np.zeros((num_ranks, num_experts), dtype=np.int64)
    assigned = np.zeros(num_ranks, dtype=np.int64)
    for expert in np.argsort(-total_E, kind="stable"):
        home, left = home_E[expert], int(total_E[expert])
        pending[home] -= left
        kept = int(np.clip(capacity - assigned[home] - pending[home], 0, left))
        alloc[home, expert] += kept
        assigned[home] += kept
        _spill(alloc, assigned, pending, int(expert), int(home), left - kept, capacity, settings.min_chunk)
    return alloc


def _spill(
    alloc: np.ndarray,
    assigned: np.ndarray,
    pending: np.ndarray,
    expert: int,
    home: int,
    left: int,
    capacity: int,
    min_chunk: int,
) -> None:
    """Gives `left` tokens of an expert to other ranks, least loaded first; what fits nowhere goes to the
    least loaded."""
    while left > 0:
        load = assigned + pending
        order = [rank for rank in np.argsort(load, kind="stable") if rank != home] or [home]
        chunk, target = 0, order[0]
        for rank in order:
            chunk = min(left, capacity - int(load[rank]))
            if chunk > 0 and (chunk >= min_chunk or chunk == left):
                target = rank
                break
        else:
            chunk = left
        alloc[target, expert] += chunk
        assigned[target] += chunk
        left -= chunk


# UltraEP: the lowest threshold that a few replicas reach


@dataclass(frozen=True)
class UltraEPSettings:
    """`replicas`: redundant slots a rank; `epsilon`: allowed excess over the mean; `min_tokens`: least tokens
    a replica takes."""

    replicas: int = 2
    epsilon: float = 0.01
    min_tokens: int = 1024


def ultraep(tokens_per_expert: np.ndarray, settings: UltraEPSettings = UltraEPSettings()) -> np.ndarray:
    """The smallest load threshold (from mean x (1 + epsilon) up, by bisection) for which every overloaded
    rank can hand its excess to replicas: donors by load, their experts by load, receivers by slack, at least
    `min_tokens` each, one token always staying with the master. int64 [R, E] from counts [R, E]."""
    num_ranks = tokens_per_expert.shape[0]
    total_E = tokens_per_expert.sum(0).astype(np.int64)
    alloc = _home_alloc(total_E, num_ranks)
    loads = alloc.sum(1)
    low = int(np.ceil(loads.sum() / num_ranks * (1 + settings.epsilon)))
    found = _fill_slack(alloc, low, settings)
    if found is not None:
        return found
    high, best = int(loads.max()), alloc
    while low + 1 < high:
        middle = (low + high) // 2
        found = _fill_slack(alloc, middle, settings)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return best


def _fill_slack(home_alloc: np.ndarray, threshold: int, settings: UltraEPSettings) -> np.ndarray | None:
    """alloc with every rank at or below `threshold`, or None if the replicas do not suffice."""
    alloc = home_alloc.copy()
    loads = alloc.sum(1)
    slots = np.full(loads.size, settings.replicas)
    epn = alloc.shape[1] // loads.size
    for donor in np.argsort(-loads, kind="stable"):
        need = int(loads[donor]) - threshold
        if need <= 0:
            break
        own = donor * epn + np.argsort(-alloc[donor, donor * epn : (donor + 1) * epn], kind="stable")
        for expert in own:
            need = _replicate(
                alloc, loads, slots, int(donor), int(expert), need, threshold, settings.min_tokens
            )
            if need <= 0:
                break
        if need > 0:
            return None
    return alloc


def _replicate(
    alloc: np.ndarray,
    loads: np.ndarray,
    slots: np.ndarray,
    donor: int,
    expert: int,
    need: int,
    threshold: int,
    min_tokens: int,
) -> int:
    """Moves tokens of one expert to new replicas, the receiver with most slack first; what the donor still
    has to give."""
    while need > 0:
        slack = np.where((slots > 0) & (alloc[:, expert] == 0), threshold - loads, 0)
        slack[donor] = 0
        receiver = int(np.argmax(slack))
        # A small rest is rounded up to a replica worth having, if the expert and the receiver allow it.
        quota = min(max(need, min_tokens), int(slack[receiver]), int(alloc[donor, expert]) - 1)
        if quota < max(min_tokens, 1):
            break
        alloc[donor, expert] -= quota
        alloc[receiver, expert] += quota
        loads[donor] -= quota
        loads[receiver] += quota
        slots[receiver] -= 1
        need -= quota
    return need


# EPLB: placement from past loads


def balanced_packing(weights: np.ndarray, packs: int) -> tuple[np.ndarray, np.ndarray]:
    """Deals items to packs of equal count, heaviest first, each to the lightest pack with room: (pack, place)
    [items]."""
    capacity = weights.size // packs
    if capacity == 1:
        return np.arange(weights.size), np.zeros(weights.size, dtype=np.int64)
    pack, place = np.full(weights.size, -1), np.full(weights.size, -1)
    load, count = np.zeros(packs), np.zeros(packs, dtype=np.int64)
    for item in np.argsort(-weights, kind="stable"):
        open_load = np.where(count < capacity, load, np.inf)
        target = int(np.argmin(open_load))
        pack[item], place[item] = target, count[target]
        load[target] += weights[item]
        count[target] += 1
    return pack, place


def replicate_experts(weights: np.ndarray, physical: int) -> tuple[np.ndarray, np.ndarray]:
    """Adds replicas one by one to the expert with the highest load a replica: (expert of each physical one,
    replicas of each expert)."""
    logical = weights.size
    expert = np.concatenate([np.arange(logical), np.zeros(physical - logical, dtype=np.int64)])
    replicas = np.ones(logical, dtype=np.int64)
    for index in range(logical, physical):
        hottest = int(np.argmax(weights / replicas))
        expert[index] = hottest
        replicas[hottest] += 1
    return expert, replicas


def eplb_placement(weights: np.ndarray, physical: int, groups: int, nodes: int, devices: int) -> np.ndarray:
    """EPLB's hierarchical placement (groups = nodes = 1: global): the expert of each physical slot, int64
    [physical], slots in device order.

    Raises:
        ConfigError: the counts do not divide.
    """
    logical = weights.size
    if logical % groups or groups % nodes or devices % nodes or physical % devices:
        raise ConfigError(
            f"eplb: {logical} experts, {physical} replicas, {groups} groups, {nodes} nodes, {devices} "
            f"devices "
            "do not divide evenly"
        )
    group_size = logical // groups
    node, place = balanced_packing(weights.reshape(groups, group_size).sum(1), nodes)
    # Experts renumbered so that a node's groups are neighbours.
    start = (node * (groups // nodes) + place) * group_size
    inner = (start[:, None] + np.arange(group_size)).ravel()
    original = np.argsort(inner, kind="stable")
    per_node, slots = logical // nodes, physical // nodes
    out = np.empty(physical, dtype=np.int64)
    for n in range(nodes):
        mine = original[n * per_node : (n + 1) * per_node]
        expert, replicas = replicate_experts(weights[mine], slots)
        load = (weights[mine] / replicas)[expert]
        device, spot = balanced_packing(load, devices // nodes)
        out[n * slots + device * (slots // (devices // nodes)) + spot] = mine[expert]
    return out


def split_evenly(total_E: np.ndarray, slots_P: np.ndarray, num_ranks: int) -> np.ndarray:
    """Each expert's tokens over its physical slots in equal parts (the first get the rest): alloc int64 [R,
    E]."""
    alloc = np.zeros((num_ranks, total_E.size), dtype=np.int64)
    ranks = np.arange(slots_P.size) // (slots_P.size // num_ranks)
    replicas = np.bincount(slots_P, minlength=total_E.size)
    order = np.argsort(slots_P, kind="stable")
    first = np.concatenate([[0], np.cumsum(replicas)[:-1]])
    index = np.empty(slots_P.size, dtype=np.int64)
    index[order] = np.arange(slots_P.size) - np.repeat(first, replicas)
    share = total_E[slots_P] // replicas[slots_P] + (index < total_E[slots_P] % replicas[slots_P])
    np.add.at(alloc, (ranks, slots_P), share)
    return alloc
