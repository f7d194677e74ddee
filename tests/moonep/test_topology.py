from __future__ import annotations

import pytest

from moonep.errors import ContractError
from moonep.topology import Topology, expert_data_parallel_ranks, expert_parallel_ranks


def test_groups_cover_every_rank_once_and_cross_in_one_rank():
    parallel, replicas = expert_parallel_ranks(8, 4), expert_data_parallel_ranks(8, 4)
    assert parallel == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert replicas == [[0, 4], [1, 5], [2, 6], [3, 7]]
    for group in parallel:
        for other in replicas:
            assert len(set(group) & set(other)) == 1


def test_refuses_a_size_that_does_not_divide():
    with pytest.raises(ContractError, match="ep=3 does not divide the 8 ranks"):
        expert_parallel_ranks(8, 3)


def test_nodes_come_from_the_launcher_not_from_host_names():
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    place = Topology.detect(env)
    assert (place.node, place.num_nodes, place.local_rank) == (1, 2, 1)
    assert place.one_node([4, 5, 6, 7]) and not place.one_node([3, 4])
    assert Topology.detect({}).world_size == 1
