"""Which ranks share experts: expert-parallel groups inside a node, expert-data-parallel groups across.

With ranks numbered node by node (torchrun's order), an expert-parallel group is `ep` consecutive ranks, and
the ranks that hold the same experts in different groups form an expert-data-parallel group.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from moonep.errors import ContractError


@dataclass(frozen=True)
class Topology:
    """Where this process stands.

    Attributes:
        rank, world_size: of the job.
        node, num_nodes: host number, from torchrun's environment. Network namespaces of one host share its
            name, so names are not asked.
        local_rank, ranks_per_node: within the host.
    """

    rank: int
    world_size: int
    node: int
    num_nodes: int
    local_rank: int
    ranks_per_node: int

    @staticmethod
    def detect(environment: dict[str, str] | None = None) -> Topology:
        """Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK (torchrun); one process without
        them."""
        env = os.environ if environment is None else environment
        rank, world = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
        per_node = int(env.get("LOCAL_WORLD_SIZE", world))
        node = int(env.get("GROUP_RANK", rank // per_node))
        return Topology(
            rank, world, node, -(-world // per_node), int(env.get("LOCAL_RANK", rank % per_node)), per_node
        )

    def one_node(self, ranks: list[int]) -> bool:
        """Whether all these ranks are processes of one host."""
        return len({rank // self.ranks_per_node for rank in ranks}) <= 1


def expert_parallel_ranks(world_size: int, ep: int) -> list[list[int]]:
    """Consecutive ranks that split one set of experts.

    Raises:
        ContractError: ep does not divide the world.
    """
    _check(world_size, ep)
    return [list(range(first, first + ep)) for first in range(0, world_size, ep)]


def expert_data_parallel_ranks(world_size: int, ep: int) -> list[list[int]]:
    """Ranks that hold the same experts; their gradients are summed.

    Raises:
        ContractError: ep does not divide the world.
    """
    _check(world_size, ep)
    return [list(range(place, world_size, ep)) for place in range(ep)]


def _check(world_size: int, ep: int) -> None:
    if ep < 1 or world_size % ep:
        raise ContractError(
            f"ep={ep} does not divide the {world_size} ranks; choose a divisor of {world_size}"
        )
