"""The expert initialisation does not depend on how experts are spread over ranks."""

from __future__ import annotations

import torch

from kernels.moe.init import draw_expert_seed, expert_init, expert_seed

E, H, HI = 8, 16, 24


def _weights(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inward, outward = (count, HI, H), (count, H, HI)
    return torch.full(inward, torch.nan), torch.full(inward, torch.nan), torch.full(outward, torch.nan)


def test_any_number_of_ranks_gives_the_same_experts():
    whole = _weights(E)
    expert_init(*whole, layer_seed=123)
    for ranks in (2, 4, 8):
        local = E // ranks
        for rank in range(ranks):
            part = _weights(local)
            expert_init(*part, layer_seed=123, first_expert=rank * local)
            for mine, all_of_them in zip(part, whole, strict=True):
                assert torch.equal(mine, all_of_them[rank * local : (rank + 1) * local])


def test_experts_and_layers_differ_and_are_scaled_by_fan_in():
    first, second = _weights(E), _weights(E)
    expert_init(*first, layer_seed=1)
    expert_init(*second, layer_seed=2)
    assert len({float(w.flatten()[0]) for w in (*first[0], *first[1], *second[0])}) == 3 * E
    # 3072 draws: the sample deviation is within 5 % of sigma with overwhelming odds (sigma of it is 1.3 %)
    assert abs(float(first[0].std()) * H**0.5 - 1) < 0.05
    assert abs(float(first[2].std()) * HI**0.5 - 1) < 0.05


def test_one_draw_from_the_default_generator():
    torch.manual_seed(7)
    seed = draw_expert_seed()
    after = torch.rand(3)
    torch.manual_seed(7)
    assert int(torch.randint(0, 2**62, ())) == seed
    expert_init(*_weights(2), layer_seed=seed)
    assert torch.equal(torch.rand(3), after)


def test_seeds_fill_32_bits_without_neighbours_clashing():
    seeds = {expert_seed(layer, expert) for layer in range(50) for expert in range(100)}
    assert len(seeds) == 5000
    assert max(seeds) > 2**31


def test_dtype_is_a_cast_of_the_same_draws_and_meta_is_left_alone():
    single, double = _weights(2), tuple(w.double() for w in _weights(2))
    expert_init(*single, layer_seed=5)
    expert_init(*double, layer_seed=5)
    assert torch.equal(single[1].double(), double[1])
    expert_init(*(torch.empty(s, device="meta") for s in ((2, HI, H), (2, HI, H), (2, H, HI))), layer_seed=5)
