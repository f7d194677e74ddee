"""Predicted time of one expert-parallel layer, phase by phase, from a plan's traffic and a hardware profile.

A phase lasts as long as its slowest device. With `ranks_per_device` > 1 the ranks of a device take turns (the
one-GPU laboratory) and their exchange is a copy in its own memory. Formulas, per rank d, in rows of H values:

    link      max(rows sent, rows received) x row bytes / link, intra- and inter-domain apart, plus latency
    dispatch  max(link, local rows written) + arrived rows replicated in HBM
    products  max(6 rows_tiled H Hi / FLOP rate, weights of non-empty groups + rows in and out / HBM) + groups
    x group_us combine   rows read and pre-summed in HBM + link + final sum in HBM
    copies    experts in or out x expert bytes / link
    backward  both exchanges again, products twice (input and weight gradients, fp32 weight gradients through
    HBM),
              copies fetched again (shared pools), gradients of copies returned in fp32
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np

from moonep.simulate.hardware import Hardware
from moonep.simulate.traffic import Traffic

PAYLOAD_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0 + 4 / 128, "mxfp4": 0.53125}


@dataclass(frozen=True)
class LayerShape:
    """The layer being exchanged. Payload and copies may be narrower than the products."""

    hidden: int  # H, the dispatched (latent) width
    ffn_hidden: int  # Hi
    precision: str = "bf16"  # of the products and of weights
    payload: str = "bf16"  # of dispatched rows
    combine_payload: str = "bf16"  # of returned rows
    copy_payload: str = "bf16"  # of copied expert weights
    grad_bytes: float = 4.0  # of one returned weight gradient
    recompute: bool = (
        True  # as the runtime does: nothing of a row is kept, backward sends rows and computes again
    )
    overlap: bool = False  # copies and gradient return hidden behind the products where they fit
    in_graph: bool = True  # launches from a CUDA graph

    @property
    def expert_parameters(self) -> int:
        return 3 * self.hidden * self.ffn_hidden

    @property
    def weight_bytes(self) -> float:
        return PAYLOAD_BYTES[self.precision]


@dataclass(frozen=True)
class LayerTime:
    """Microseconds of each phase of one layer, forward and backward."""

    plan: float = 0.0
    dispatch: float = 0.0
    copies: float = 0.0
    products: float = 0.0
    combine: float = 0.0
    dispatch_backward: float = 0.0
    copies_backward: float = 0.0
    products_backward: float = 0.0
    combine_backward: float = 0.0
    gradient_return: float = 0.0
    hidden: float = 0.0  # time of copies and gradient return that overlaps the products

    @property
    def forward(self) -> float:
        exposed = max(self.copies - self.products, 0.0) if self.hidden else self.copies
        return self.plan + self.dispatch + exposed + self.products + self.combine

    @property
    def total(self) -> float:
        """Forward and backward."""
        phases = sum(getattr(self, f.name) for f in fields(self) if f.name != "hidden")
        return phases - self.hidden

    def to_dict(self) -> dict[str, float]:
        return {
            **{k: float(v) for k, v in asdict(self).items()},
            "forward": self.forward,
            "total": self.total,
        }


def _slowest(values_R: np.ndarray, hardware: Hardware) -> float:
    """Seconds of the slowest device when the ranks of a device take turns."""
    share = hardware.ranks_per_device
    padded = np.pad(values_R, (0, -values_R.size % share))
    return float(padded.reshape(-1, share).sum(1).max())


def _launch(hardware: Hardware, shape: LayerShape, kernels: int) -> float:
    each = hardware.launch_us if shape.in_graph else hardware.eager_launch_us
    return kernels * each * 1e-6 * hardware.ranks_per_device


def link_seconds(amount_RR: np.ndarray, unit_bytes: float, hardware: Hardware) -> np.ndarray:
    """Seconds [R] each rank needs to send and receive amount[source, destination] x unit_bytes; the diagonal
    is free.

    Three ways: within a device (a copy in its memory), within a domain (link), between domains (network). The
    ways run side by side; each direction of a way has its own bandwidth.
    """
    ranks = amount_RR.shape[0]
    device = np.arange(ranks) // hardware.ranks_per_device
    domain = device // hardware.domain_size
    moved = amount_RR * unit_bytes
    np.fill_diagonal(moved := moved.astype(np.float64), 0.0)
    same_device = device[:, None] == device
    same_domain = (domain[:, None] == domain) & ~same_device
    out = np.zeros(ranks)
    for mask, rate in (
        (same_device, hardware.hbm_gb_s / 2),
        (same_domain, hardware.link_gb_s),
        (~same_device & ~same_domain, hardware.network_gb_s),
    ):
        part = np.where(mask, moved, 0.0)
        # Inside a device only the receiver counts: a copy is one read and one write (hence half the HBM
        # rate).
        sent = 0.0 if rate == hardware.hbm_gb_s / 2 else part.sum(1)
        out = np.maximum(out, np.maximum(sent, part.sum(0)) / (rate * 1e9))
    return out


def _sync(ranks: int, hardware: Hardware) -> float:
    """Seconds of one exchange's synchronisation."""
    if ranks == 1:
        return 0.0
    spans = ranks > hardware.domain_size * hardware.ranks_per_device
    host = hardware.exchange_us * hardware.ranks_per_device
    return (hardware.barrier_us + host + (hardware.network_latency_us if spans else 0.0)) * 1e-6


def _dispatch(traffic: Traffic, shape: LayerShape, hardware: Hardware, payload: str) -> float:
    row = shape.hidden * PAYLOAD_BYTES[payload]
    hbm = hardware.hbm_gb_s * 1e9
    link = link_seconds(traffic.unique_RR, row, hardware)
    local = np.diag(traffic.rows_RR) * row / hbm
    replicate = (traffic.load_R - np.diag(traffic.rows_RR)) * row / hbm
    phases = np.maximum(link, local) + replicate
    return _slowest(phases, hardware) + _sync(traffic.num_ranks, hardware) + _launch(hardware, shape, 4)


def _combine(traffic: Traffic, shape: LayerShape, hardware: Hardware, payload: str) -> float:
    row = shape.hidden * PAYLOAD_BYTES[payload]
    hbm = hardware.hbm_gb_s * 1e9
    local = np.diag(traffic.rows_RR)
    presum = (traffic.load_R - local) * row / hbm
    link = link_seconds(traffic.unique_RR.T, row, hardware)
    received = traffic.unique_RR.sum(1) - np.diag(traffic.unique_RR)
    final = (local + received + traffic.tokens_R) * row / hbm
    phases = np.maximum(link, presum) + final
    return _slowest(phases, hardware) + _sync(traffic.num_ranks, hardware) + _launch(hardware, shape, 3)


def products_seconds(traffic: Traffic, shape: LayerShape, hardware: Hardware, backward: bool) -> np.ndarray:
    """Seconds [R] of the grouped FFN: two products wide (gate, up), one narrow (down), and the activation
    between."""
    rate, hbm = hardware.tflops(shape.precision) * 1e12, hardware.hbm_gb_s * 1e9
    # Gate and up (inner dimension H) are two thirds of the FLOPs, down (inner Hi) one third.
    slowdown = 2 / 3 / hardware.depth_factor(shape.hidden) + 1 / 3 / hardware.depth_factor(shape.ffn_hidden)
    flops = 6.0 * traffic.tiled_R * shape.hidden * shape.ffn_hidden
    weights = traffic.groups_R * shape.expert_parameters * shape.weight_bytes * hardware.weight_passes
    row_values = 2 * shape.hidden + 3 * shape.ffn_hidden
    rows = traffic.load_R * row_values * shape.weight_bytes
    activation = 3 * traffic.load_R * shape.ffn_hidden * shape.weight_bytes / hbm
    overhead = traffic.groups_R * hardware.group_us * 1e-6
    forward = np.maximum(flops * slowdown / rate, (weights + rows) / hbm)
    if not backward:
        return forward + activation * hardware.elementwise_passes + overhead
    again = 2 / 3 if shape.recompute else 0.0
    # Weight gradients: the inner dimension is the rows of a group; fp32 sums of each group are read and
    # written.
    group_rows = float((traffic.load_R / np.maximum(traffic.groups_R, 1)).mean())
    gradient_flops = flops / rate / hardware.depth_factor(max(group_rows, 1.0))
    gradient_memory = (traffic.groups_R * shape.expert_parameters * 8.0 + rows) / hbm
    products = (1 + again) * forward + np.maximum(gradient_flops, gradient_memory)
    pointwise = activation * (hardware.elementwise_backward + (hardware.elementwise_passes if again else 0.0))
    return products + pointwise + (2 + again) * overhead


def layer_time(
    traffic: Traffic, shape: LayerShape, hardware: Hardware, *, plan_us: float | None = None
) -> LayerTime:
    """Predicted phases of one layer. `plan_us` replaces the profile's planner time (0 for policies without a
    plan)."""
    expert = shape.expert_parameters
    copy_bytes = expert * PAYLOAD_BYTES[shape.copy_payload]
    wanted, fetched = traffic.copies_RR, traffic.fetched_RR
    sync = _sync(traffic.num_ranks, hardware)

    def weights_move(amount: np.ndarray, unit: float) -> float:
        if not amount.any():
            return 0.0
        return _slowest(link_seconds(amount, unit, hardware), hardware) + sync + _launch(hardware, shape, 1)

    copies = weights_move(fetched, copy_bytes)
    returned = weights_move(wanted.T, expert * shape.grad_bytes)
    forward = _slowest(products_seconds(traffic, shape, hardware, False), hardware) + _launch(
        hardware, shape, 3
    )
    backward = _slowest(products_seconds(traffic, shape, hardware, True), hardware) + _launch(
        hardware, shape, 7
    )
    hidden = min(copies, forward) + min(copies + returned, backward) if shape.overlap else 0.0
    seconds = LayerTime(
        plan=(hardware.plan_us if plan_us is None else plan_us) * 1e-6,
        dispatch=_dispatch(traffic, shape, hardware, shape.payload),
        copies=copies,
        products=forward,
        combine=_combine(traffic, shape, hardware, shape.combine_payload),
        # The gradient of combine travels as dispatch does, and the other way round.
        dispatch_backward=_dispatch(traffic, shape, hardware, shape.combine_payload)
        + (_dispatch(traffic, shape, hardware, shape.payload) if shape.recompute else 0.0),
        copies_backward=copies,
        products_backward=backward,
        combine_backward=_combine(traffic, shape, hardware, shape.combine_payload),
        gradient_return=returned,
        hidden=hidden,
    )
    return LayerTime(**{k: v * 1e6 for k, v in asdict(seconds).items()})
