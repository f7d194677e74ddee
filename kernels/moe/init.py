"""How to initialise routed experts: for a model's local experts and for the expert-parallel layer.

Shapes: E experts held here, H width dispatched to the experts, Hi their FFN width.

Draw order: constructing a layer draws ONE int64 from torch's default CPU generator (`draw_expert_seed`), on
every rank, whatever the rank holds. Everything else comes from generators of its own, seeded by (that number,
global expert id): the same seed gives the same model at any number of ranks, and the default generator stays
in step.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1


def draw_expert_seed() -> int:
    """One `torch.randint` draw from the default CPU generator: the seed of one layer's experts."""
    return int(torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu"))


def expert_seed(layer_seed: int, expert: int) -> int:
    """Seed of one expert's generator: splitmix64 of the layer's seed and the global expert id.

    torch's CPU generator keeps the low 32 bits of a seed alone, so the two must be mixed, not added.
    """
    z = (layer_seed + (expert + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) & 0xFFFFFFFF


@torch.no_grad()
def expert_init(
    gate_weight_EHiH: torch.Tensor,
    up_weight_EHiH: torch.Tensor,
    down_weight_EHHi: torch.Tensor,
    layer_seed: int,
    first_expert: int = 0,
) -> None:
    """Fill the weights of experts `first_expert, first_expert + 1, ...` in place.

    Each expert draws gate, up, down in this order, in fp32 on the CPU, from N(0, 1 / fan_in); the values are
    then cast and copied to wherever the weights live. Meta tensors are left alone.

    Args:
        gate_weight_EHiH, up_weight_EHiH: [E, Hi, H], any float dtype and device.
        down_weight_EHHi: [E, H, Hi].
        layer_seed: what `draw_expert_seed` returned when the layer was constructed.
        first_expert: global id of row 0.
    """
    if gate_weight_EHiH.is_meta:
        return
    generator = torch.Generator(device="cpu")
    for row in range(gate_weight_EHiH.shape[0]):
        generator.manual_seed(expert_seed(layer_seed, first_expert + row))
        for weight in (gate_weight_EHiH[row], up_weight_EHiH[row], down_weight_EHHi[row]):
            draw = torch.randn(weight.shape, generator=generator, dtype=torch.float32, device="cpu")
            weight.copy_(draw.mul_(weight.shape[-1] ** -0.5))
