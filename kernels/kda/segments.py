"""Segment-parallel scans: where one long sequence has too few heads to fill the GPU, its segments run side
by side.

Over a segment the state map is affine, S_out = M S_in + B. B is the segment's scan from a zero state, M its
scan from the identity with v = 0; a short chain over segments gives every S_in, and the last pass runs all
segments at once from the right states. The reverse scan is the same with M transposed: dS_in = M^T dS_out +
D. Exact up to rounding, forward and backward, and the same kernels throughout: a segment is a packed
sequence to them.

Legend: G segments, HV value heads, K key and V value channels.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from kernels.kda import launch
from kernels.kda.launch import CHUNK, Problem, Saved, Workspace

MIN_CHUNKS = 16  # of a segment: below, the extra passes cost more than they save
MIN_SEGMENTS = 4  # three passes instead of one
PROGRAMS = 132  # multiprocessors of an H100 or H200


def split(problem: Problem, device: torch.device) -> tuple[Problem, torch.Tensor] | None:
    """The problem as segments of its one sequence, with their device cu_seqlens; None where that does not
    pay."""
    if problem.varlen or problem.B != 1:
        return None
    chunks = triton.cdiv(problem.T, CHUNK)
    heads = problem.HV * triton.cdiv(problem.V, 64)
    count = min(PROGRAMS // heads, chunks // MIN_CHUNKS)
    if count < MIN_SEGMENTS:
        return None
    tokens = triton.cdiv(chunks, count) * CHUNK
    count = triton.cdiv(problem.T, tokens)
    boundaries = (torch.arange(count + 1, device=device) * tokens).clamp(max=problem.T)
    return replace(problem, N=count, varlen=True, covered=True), boundaries


def states_before(
    problem: Problem,
    work: Workspace,
    v: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """State before every segment, in the layout of `initial_state`, and the transitions M [G, HV, K, K];
    fp32."""
    zero_start = torch.empty(problem.state_shape, dtype=torch.float32, device=v.device)
    launch.scan(problem, work, v, None, zero_start, None, cu_seqlens, want_output=False)
    unit = replace(problem, V=problem.K, v_first=False)
    transition = torch.empty(unit.state_shape, dtype=torch.float32, device=v.device)
    identity = torch.eye(problem.K, device=v.device).expand(unit.state_shape).contiguous()
    nothing = v.new_zeros(problem.K).expand(1, problem.T, problem.HV, problem.K)
    launch.scan(unit, work, nothing, identity, transition, None, cu_seqlens, want_output=False)
    states = torch.zeros_like(zero_start)
    if initial_state is not None:
        states[0] = initial_state[0]
    for i in range(problem.N - 1):
        states[i + 1] = _apply(transition[i], states[i], problem.v_first) + zero_start[i]
    return states, transition


def gradients_after(
    problem: Problem,
    work: Workspace,
    do: torch.Tensor,
    transition: torch.Tensor,
    d_final_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the state after every segment, in the layout of the states; fp32."""
    zero_end = torch.empty(problem.state_shape, dtype=torch.float32, device=do.device)
    launch.reverse_scan(problem, work, do, None, zero_end, cu_seqlens)
    gradients = torch.zeros_like(zero_end)
    if d_final_state is not None:
        gradients[-1] = d_final_state[0]
    for i in range(problem.N - 1, 0, -1):
        backward = transition[i].transpose(-1, -2)
        gradients[i - 1] = _apply(backward, gradients[i], problem.v_first) + zero_end[i]
    return gradients


def _apply(transition: torch.Tensor, state: torch.Tensor, v_first: bool) -> torch.Tensor:
    return state @ transition.transpose(-1, -2) if v_first else transition @ state


def scan(
    problem: Problem,
    work: Workspace,
    v: torch.Tensor,
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor | None,
    saved: Saved | None,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`launch.scan` over segments: o and the transitions; `final_state` [1, ...] and `saved` filled where
    given."""
    states, transition = states_before(problem, work, v, initial_state, cu_seqlens)
    finals = torch.empty_like(states) if final_state is not None else None
    o = launch.scan(problem, work, v, states, finals, saved, cu_seqlens)
    if final_state is not None and finals is not None:
        final_state.copy_(finals[-1:])
    return o, transition


def reverse_scan(
    problem: Problem,
    work: Workspace,
    do: torch.Tensor,
    transition: torch.Tensor,
    d_final_state: torch.Tensor | None,
    d_initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
) -> Saved:
    """`launch.reverse_scan` over segments."""
    gradients = gradients_after(problem, work, do, transition, d_final_state, cu_seqlens)
    starts = torch.empty_like(gradients) if d_initial_state is not None else None
    out = launch.reverse_scan(problem, work, do, gradients, starts, cu_seqlens)
    if d_initial_state is not None and starts is not None:
        d_initial_state.copy_(starts[:1])
    return out
