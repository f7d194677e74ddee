"""Numbers of plans, and the sources of forced routing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model.config import K3Config
from moonep.errors import ConfigError, DataError
from moonep.planning import plan_allocation
from moonep.planning.statistics import PlanStatistics, plan_statistics
from moonep.simulate.traces import make_trace, save_trace
from moonep.trainer.compose import compose
from moonep.trainer.config import Config
from moonep.trainer.derived import derive
from moonep.trainer.routing import STATISTICS, forced_routing, plan_numbers


def _force(*words, ranks=2):
    given = ["parallel.ep=2", "train.tokens_per_step=2048", *words]
    config, _ = compose("train", Config, given)
    model = K3Config.preset("tiny")
    return forced_routing(config, model, derive(config, model, ranks))


def test_plan_numbers_are_those_of_the_planner():
    counts = torch.tensor([[50, 3, 7, 4], [10, 0, 1, 21]])
    for policy in ("static", "moonep", "bounded"):
        statistics = plan_statistics(counts, plan_allocation(counts, policy=policy))
        named = PlanStatistics.unpack(statistics)
        numbers = dict(zip(STATISTICS, plan_numbers(statistics, 2).tolist(), strict=True))
        before, after = named.imbalance(2)
        assert numbers["rank_imbalance_before"] == pytest.approx(before)
        assert numbers["rank_imbalance_after"] == pytest.approx(after)
        assert (numbers["moved_tokens"], numbers["copies"]) == (named.moved_tokens, named.copies)
    assert plan_numbers(torch.zeros(10, dtype=torch.int64), 2).tolist() == [1.0, 1.0, 0.0, 0.0]


def test_workload_draws_differ_by_instance_and_keep_their_skew():
    source = _force("routing.force=zipf", "routing.force_args.alpha=1.5")
    draws = [source.token_choices(step, 1, 0, 512) for step in (0, 1)]
    assert draws[0].shape == (512, 2)
    assert not np.array_equal(draws[0], draws[1])
    counts = np.bincount(draws[0].ravel(), minlength=16)
    assert counts.max() / counts.mean() > 2


def test_wrong_sources_name_the_key():
    with pytest.raises(ConfigError, match=r"routing\.force=ziff.*did you mean 'zipf'"):
        _force("routing.force=ziff")
    with pytest.raises(ConfigError, match=r"routing\.force_args\.sigmo: workload lognormal has no such key"):
        _force("routing.force=lognormal", "routing.force_args.sigmo=2")
    with pytest.raises(ConfigError, match=r"routing\.force=runs/none/trace: no such trace"):
        _force("routing.force=runs/none/trace")
    with pytest.raises(ConfigError, match=r"without routing\.force"):
        _force("routing.force_args.sigma=2")
    assert _force() is None


def test_a_trace_replays_its_own_counts(tmp_path):
    counts = np.random.default_rng(0).multinomial(256, np.ones(16) / 16, size=(3, 2, 2)).astype(np.int64)
    path = save_trace(tmp_path / "part_0.npz", make_trace(counts, top_k=2))
    source = _force(f"routing.force={path}")
    for instance in range(3):
        for layer in range(2):
            ids = source.token_choices(instance, layer, 1, 128)
            assert np.array_equal(np.bincount(ids.ravel(), minlength=16), counts[instance, layer, 1])
    other = save_trace(tmp_path / "part_1.npz", make_trace(np.ones((1, 2, 4, 16), dtype=np.int64), top_k=2))
    with pytest.raises(DataError, match="4"):
        _force(f"routing.force={other}")
