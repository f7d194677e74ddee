"""The balancing rules as plain integer programs, one plan at a time.

Written once for three readers: Python runs the functions as they stand (arrays are lists), numba compiles the
same functions (arrays are int64 vectors, see compiled.py), and the device planner mirrors their steps. Only
integers, comparisons and first-of-equals ties, so all three give the same plan bit for bit.

A rule starts from every token at its expert's home rank and appends moves `(expert, receiver, tokens)`; each
move is one expert copy. Expert e lives on rank e // epn, so a rank's experts are one contiguous stretch of
`remaining`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

STATIC, MOONEP, BOUNDED = 0, 1, 2
CANDIDATES = 5  # attempts of `bounded`
EXACT = 1000  # tau in thousandths

Vector = Any  # a list of ints, or an int64 numpy vector under numba


class State(NamedTuple):
    """What a rule changes while it moves tokens.

    load, caps [R]: tokens computed on a rank now, and the most this attempt lets it compute.
    target [R]: the most it may compute if the balance target is to hold.
    free [R]: slots of a rank that hold no copied expert yet.
    remaining [E]: tokens of an expert still computed at home.
    quota, donor [R]: tokens a receiver still takes, and from whom (the one-donor rules).
    expert, receiver, tokens [M]: the moves so far.
    """

    load: Vector
    caps: Vector
    target: Vector
    free: Vector
    remaining: Vector
    quota: Vector
    donor: Vector
    expert: Vector
    receiver: Vector
    tokens: Vector


def sum_sources(counts, batch, num_ranks, num_experts, totals):
    """`totals [batch, E]` += tokens of all source ranks in `counts [batch, R, E]` (flat); returns the least
    count.
    """
    least = counts[0]
    for index in range(batch):
        base = index * num_experts
        for rank in range(num_ranks):
            row = (index * num_ranks + rank) * num_experts
            for expert in range(num_experts):
                count = counts[row + expert]
                totals[base + expert] += count
                least = min(least, count)
    return least


def reset(state, totals, start, num_ranks, epn, slots):
    """All tokens at home; returns their number. `totals[start:start + E]` counts tokens an expert."""
    total = 0
    for rank in range(num_ranks):
        load = 0
        for expert in range(rank * epn, (rank + 1) * epn):
            count = totals[start + expert]
            state.remaining[expert] = count
            load += count
        state.load[rank] = load
        state.free[rank] = slots
        total += load
    return total


def set_uniform_caps(state, num_ranks, cap):
    for rank in range(num_ranks):
        state.caps[rank] = cap


def set_exact_caps(state, num_ranks, total, first_ranks):
    """floor(total/R) each; the remainder goes to the first ranks (upstream) or to the most loaded (fewest
    moves).
    """
    base = total // num_ranks
    extra = total - base * num_ranks
    for rank in range(num_ranks):
        state.caps[rank] = base + (1 if first_ranks and rank < extra else 0)
    if first_ranks or extra == 0:
        return
    for rank in range(num_ranks):
        ahead = 0
        for other in range(num_ranks):
            if state.load[other] > state.load[rank] or (
                state.load[other] == state.load[rank] and other < rank
            ):
                ahead += 1
        if ahead < extra:
            state.caps[rank] = base + 1


def most_overloaded(state, num_ranks):
    best = 0
    for rank in range(1, num_ranks):
        if state.load[rank] - state.caps[rank] > state.load[best] - state.caps[best]:
            best = rank
    return best


def choose_expert(remaining, first, epn, goal):
    """The donor's smallest expert that covers `goal` (keeps large ones for large gaps), else its largest."""
    best = first
    for expert in range(first + 1, first + epn):
        if remaining[best] >= goal:
            if goal <= remaining[expert] < remaining[best]:
                best = expert
        elif remaining[expert] > remaining[best]:
            best = expert
    return best


def move(state, moves, expert, donor, receiver, tokens):
    state.expert[moves] = expert
    state.receiver[moves] = receiver
    state.tokens[moves] = tokens
    state.remaining[expert] -= tokens
    state.load[donor] -= tokens
    state.load[receiver] += tokens
    state.free[receiver] -= 1
    return moves + 1


def tightest_room(state, num_ranks, amount, widest):
    """The rank with a free slot and the least room that still holds `amount`; `widest` is one that does."""
    load, caps, free = state.load, state.caps, state.free
    best = widest
    best_room = caps[widest] - load[widest]
    for rank in range(num_ranks):
        room = caps[rank] - load[rank]
        if free[rank] > 0 and amount <= room and (room < best_room or (room == best_room and rank < best)):
            best = rank
            best_room = room
    return best


def largest_fit(state, num_ranks, room, largest):
    """The rank with the largest surplus that still fits `room`, else `largest`."""
    best = -1
    best_surplus = 0
    for rank in range(num_ranks):
        surplus = state.load[rank] - state.caps[rank]
        if best_surplus < surplus <= room:
            best = rank
            best_surplus = surplus
    return best if best >= 0 else largest


def shed_surplus(state, num_ranks, epn, fitting_first):
    """Moves only what is above a cap, so the moved tokens are the least possible; stops when slots run out.

    Each step makes one copy that empties a surplus, an expert or a room: from the most overloaded rank, or
    first from those whose surplus fits a room whole (one copy each, before the rooms are broken up), to the
    tightest room. A pair (expert, receiver) cannot come twice: after a step one of the three is exhausted for
    good.
    """
    load, caps, free = state.load, state.caps, state.free
    moves = 0
    while True:
        donor = 0
        surplus = load[0] - caps[0]
        widest = -1
        widest_room = 0
        for rank in range(num_ranks):
            room = caps[rank] - load[rank]
            if -room > surplus:
                donor = rank
                surplus = -room
            if free[rank] > 0 and room > widest_room:
                widest = rank
                widest_room = room
        if surplus <= 0 or widest < 0:
            return moves
        if fitting_first and surplus > widest_room:
            donor = largest_fit(state, num_ranks, widest_room, donor)
            surplus = load[donor] - caps[donor]
        goal = min(surplus, widest_room)
        expert = choose_expert(state.remaining, donor * epn, epn, goal)
        amount = min(goal, state.remaining[expert])
        receiver = tightest_room(state, num_ranks, amount, widest)
        moves = move(state, moves, expert, donor, receiver, amount)


def fill_receivers(state, num_ranks, epn, slots):
    """Fills one receiver after another, each from a single donor: the fallback that cannot fail.

    Let B = slots. The donor is the most overloaded rank, so its surplus is at least deficit/(R-1), and it has
    received nothing. (a) Exact caps: all but the last of the n experts taken hold at most deficit-1 tokens,
    the others of the donor at least deficit/(R-1); taken largest first, that gives n-1 < epn*(R-1)/R, so B =
    ceil(epn*(R-1)/R) slots always suffice. (b) A uniform cap C: a receiver ends full or with B whole experts,
    hence with more than C*B/epn tokens; if a rank stayed above C with no receiver left, the total would
    exceed C*(1 + (R-1)*B/epn), so C >= total*epn / (epn + (R-1)*B) never fails. A receiver holds its own epn
    experts and at most B others: 2*epn groups.
    """
    moves = 0
    while True:
        donor = most_overloaded(state, num_ranks)
        receiver = -1
        deficit = 0
        for rank in range(num_ranks):
            room = state.caps[rank] - state.load[rank]
            if state.free[rank] == slots and room > deficit:
                receiver = rank
                deficit = room
        if state.load[donor] <= state.caps[donor] or receiver < 0 or slots <= 0:
            return moves
        while deficit > 0 and state.free[receiver] > 0:
            expert = choose_expert(state.remaining, donor * epn, epn, deficit)
            amount = min(deficit, state.remaining[expert])
            moves = move(state, moves, expert, donor, receiver, amount)
            deficit -= amount
        state.free[receiver] = -1


def pair_one_donor(state, num_ranks):
    """Upstream's balance phase: the largest surplus fills the largest deficit whole; ties to the smaller
    rank.
    """
    for rank in range(num_ranks):
        state.quota[rank] = 0
        state.donor[rank] = -1
    while True:
        high = most_overloaded(state, num_ranks)
        low = 0
        for rank in range(1, num_ranks):
            if state.load[rank] - state.caps[rank] < state.load[low] - state.caps[low]:
                low = rank
        deficit = state.caps[low] - state.load[low]
        if state.load[high] <= state.caps[high] or deficit <= 0:
            return
        state.quota[low] = deficit
        state.donor[low] = high
        state.load[high] -= deficit
        state.load[low] += deficit


def spend_quotas(state, num_ranks, epn):
    """Upstream's alloc phase: largest quota takes from its donor's largest expert; ties to the smaller index.

    Upstream runs it for each donor apart. Donors share nothing, so one loop over all receivers takes the same
    steps.
    """
    moves = 0
    while True:
        receiver = 0
        for rank in range(1, num_ranks):
            if state.quota[rank] > state.quota[receiver]:
                receiver = rank
        if state.quota[receiver] <= 0:
            return moves
        first = state.donor[receiver] * epn
        expert = first
        for other in range(first + 1, first + epn):
            if state.remaining[other] > state.remaining[expert]:
                expert = other
        amount = min(state.quota[receiver], state.remaining[expert])
        state.expert[moves] = expert
        state.receiver[moves] = receiver
        state.tokens[moves] = amount
        state.remaining[expert] -= amount
        state.quota[receiver] -= amount
        state.free[receiver] -= 1
        moves += 1


def return_smallest(state, moves, num_ranks, epn):
    """Sends a rank's smallest copies home until its slots suffice (upstream always has epn slots and never
    needs it).
    """
    for rank in range(num_ranks):
        while state.free[rank] < 0:
            smallest = -1
            for index in range(moves):
                if state.receiver[index] == rank and (
                    smallest < 0 or state.tokens[index] < state.tokens[smallest]
                ):
                    smallest = index
            amount = state.tokens[smallest]
            state.remaining[state.expert[smallest]] += amount
            state.load[rank] -= amount
            state.load[state.expert[smallest] // epn] += amount
            state.free[rank] += 1
            moves -= 1
            state.expert[smallest] = state.expert[moves]
            state.receiver[smallest] = state.receiver[moves]
            state.tokens[smallest] = state.tokens[moves]
    return moves


def overflow(state, num_ranks):
    """Tokens by which the fullest rank exceeds its target (0: the target holds)."""
    worst = 0
    for rank in range(num_ranks):
        worst = max(worst, state.load[rank] - state.target[rank])
    return worst


def solve_moonep(state, best, totals, start, num_ranks, epn, slots):
    total = reset(state, totals, start, num_ranks, epn, slots)
    set_exact_caps(state, num_ranks, total, True)
    pair_one_donor(state, num_ranks)
    moves = spend_quotas(state, num_ranks, epn)
    return keep(state, best, return_smallest(state, moves, num_ranks, epn))


def set_target(state, num_ranks, total, tau):
    """Caps and target: ceil(tau * total / R) each, tau in thousandths; at tau = 1 exactly floor or ceil."""
    if tau == EXACT:
        set_exact_caps(state, num_ranks, total, False)
    else:
        set_uniform_caps(state, num_ranks, -(-tau * total // (EXACT * num_ranks)))
    for rank in range(num_ranks):
        state.target[rank] = state.caps[rank]


def restore_target(state, num_ranks):
    for rank in range(num_ranks):
        state.caps[rank] = state.target[rank]


def keep(state, best, moves):
    for index in range(moves):
        best.expert[index] = state.expert[index]
        best.receiver[index] = state.receiver[index]
        best.tokens[index] = state.tokens[index]
    return moves


def attempt(state, candidate, num_ranks, epn, slots, total, tau):
    """Moves of one candidate: 0, 1 shed (tightest, widest room); 2, 3, 4 fill to the target, exactly, as
    guaranteed.
    """
    if candidate < 2:
        return shed_surplus(state, num_ranks, epn, candidate == 0)
    if candidate == 3:
        set_exact_caps(state, num_ranks, total, False)
    elif candidate == 4:
        guaranteed = -(-total * epn // (epn + (num_ranks - 1) * slots))
        set_uniform_caps(state, num_ranks, max(guaranteed, -(-tau * total // (EXACT * num_ranks))))
    return fill_receivers(state, num_ranks, epn, slots)


def solve_bounded(state, best, totals, start, num_ranks, epn, slots, tau):
    """Fewest copies of two ways to shed the surplus; where slots stop both, the fallbacks that cannot
    fail.
    """
    best_moves = 0
    best_overflow = -1
    donors = 0
    for candidate in range(CANDIDATES):
        # One copy a donor cannot be beaten, and the fallbacks are only for want of slots.
        if best_overflow == 0 and (candidate >= 2 or best_moves == donors):
            break
        total = reset(state, totals, start, num_ranks, epn, slots)
        if candidate == 0:
            set_target(state, num_ranks, total, tau)
            for rank in range(num_ranks):
                donors += 1 if state.load[rank] > state.caps[rank] else 0
        restore_target(state, num_ranks)
        moves = attempt(state, candidate, num_ranks, epn, slots, total, tau)
        missed = overflow(state, num_ranks)
        if best_overflow < 0 or missed < best_overflow or (missed == best_overflow and moves < best_moves):
            best_overflow = missed
            best_moves = keep(state, best, moves)
    return best_moves


def solve_batch(rule, totals, batch, num_ranks, epn, slots, tau, state, best, alloc):
    """Writes `alloc [batch, R, E]` (flat, zeroed by the caller) for `totals [batch, E]` (flat)."""
    num_experts = num_ranks * epn
    for index in range(batch):
        start = index * num_experts
        base = start * num_ranks
        for rank in range(num_ranks):
            for expert in range(rank * epn, (rank + 1) * epn):
                alloc[base + rank * num_experts + expert] = totals[start + expert]
        moves = 0
        if rule == MOONEP:
            moves = solve_moonep(state, best, totals, start, num_ranks, epn, slots)
        elif rule == BOUNDED:
            moves = solve_bounded(state, best, totals, start, num_ranks, epn, slots, tau)
        for move_index in range(moves):
            expert = best.expert[move_index]
            tokens = best.tokens[move_index]
            alloc[base + expert // epn * num_experts + expert] -= tokens
            alloc[base + best.receiver[move_index] * num_experts + expert] += tokens


# What solve_batch calls, for a compiler that must know its callees.
HELPERS = (
    reset,
    set_uniform_caps,
    set_exact_caps,
    set_target,
    restore_target,
    attempt,
    most_overloaded,
    choose_expert,
    tightest_room,
    largest_fit,
    move,
    keep,
    overflow,
    shed_surplus,
    fill_receivers,
    pair_one_donor,
    spend_quotas,
    return_smallest,
    solve_moonep,
    solve_bounded,
)
