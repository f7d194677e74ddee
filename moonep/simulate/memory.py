"""Bytes a rank needs for the expert part of a model, under a policy."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from moonep.simulate.cost import PAYLOAD_BYTES, LayerShape


@dataclass(frozen=True)
class ExpertMemory:
    """Bytes of one rank. `reserved`: rows set aside for static shapes; `peak`: rows the fullest rank really
    used."""

    weights: float
    gradients: float
    optimizer: float
    pools: float
    shard_reserved: float
    shard_peak: float
    saved_reserved: float
    saved_peak: float

    @property
    def fixed(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.pools

    @property
    def reserved(self) -> float:
        """Bytes needed when every shape is known at construction (no host synchronisation, CUDA graphs)."""
        return self.fixed + self.shard_reserved + self.saved_reserved

    @property
    def peak(self) -> float:
        """Bytes needed when buffers are allocated after the counts are known."""
        return self.fixed + self.shard_peak + self.saved_peak

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "reserved": self.reserved, "peak": self.peak}


def reserved_rows(
    *,
    num_ranks: int,
    num_experts: int,
    capacity: int,
    top_k: int,
    tau: float | None,
    slots: int | None,
    padding: int,
) -> tuple[int, int]:
    """(rows of a shard that can never overflow, slots for copies): the runtime's own sizes
    (`planning.Geometry`), which are ceil(tau S K) rows with a balance target and R S K without one."""
    from moonep.planning import Geometry

    policy = "static" if tau is None else "bounded"
    loose = tau is not None and slots is not None
    sizes = Geometry.build(
        num_ranks,
        num_experts,
        top_k,
        capacity,
        policy=policy,
        tau=tau or 1.0,
        slots=slots,
        token_padding=padding,
        max_imbalance=float(num_ranks) if loose else None,
    )
    return sizes.shard_rows, sizes.slots


def expert_memory(
    shape: LayerShape,
    *,
    epn: int,
    layers: int,
    copies_held: int,
    rows_reserved: int,
    rows_peak: int,
    optimizer_bytes: float = 12.0,
    resident_copies: bool = False,
    saved_bytes_per_row: float | None = None,
) -> ExpertMemory:
    """Memory of `layers` layers on one rank.

    Args:
        copies_held: slots for copied experts; shared by all layers unless `resident_copies` (placements that
        stay). optimizer_bytes: a parameter (fp32 master, two moments; divided by the data-parallel size under
        ZeRO by the
            caller).
        saved_bytes_per_row: activations a layer keeps for backward of each row; default the row itself and,
        without
            recomputation, gate and up.
    """
    width = PAYLOAD_BYTES[shape.precision]
    parameters = epn * layers * shape.expert_parameters
    pool_layers = layers if resident_copies else 1
    copy_bytes = shape.expert_parameters * (PAYLOAD_BYTES[shape.copy_payload] + shape.grad_bytes)
    if saved_bytes_per_row is None:
        kept = shape.hidden if shape.recompute else shape.hidden + 2 * shape.ffn_hidden
        saved_bytes_per_row = kept * width
    # A shard holds the dispatched rows and, in the same place, the results; gate, up and their product pass
    # beside it.
    working = (2 * shape.hidden + 3 * shape.ffn_hidden) * width
    return ExpertMemory(
        weights=parameters * width,
        gradients=parameters * shape.grad_bytes,
        optimizer=parameters * optimizer_bytes,
        pools=copies_held * pool_layers * copy_bytes,
        shard_reserved=rows_reserved * working,
        shard_peak=rows_peak * working,
        saved_reserved=rows_reserved * saved_bytes_per_row * layers,
        saved_peak=rows_peak * saved_bytes_per_row * layers,
    )
