"""Learning-rate schedules against their definitions."""

from __future__ import annotations

import itertools
import math

import pytest

from moonep.trainer.config import ScheduleConfig
from moonep.trainer.schedule import rate


def _rates(steps, **kw):
    return [rate(ScheduleConfig(**kw), i, steps) for i in range(steps)]


def test_cosine():
    rates = _rates(100, name="cosine", warmup_fraction=0.1, final_fraction=0.1)
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    middle = 10 + (99 - 10) / 2
    assert 0.5 * (rates[math.floor(middle)] + rates[math.ceil(middle)]) == pytest.approx(0.55, abs=1e-4)
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))


def test_wsd_is_flat_then_linear():
    rates = _rates(100, name="wsd", warmup_fraction=0.05, decay_fraction=0.2, final_fraction=0.0)
    assert rates[4:80] == [1.0] * 76
    falls = [a - b for a, b in itertools.pairwise(rates[79:])]
    assert falls == pytest.approx([1 / 20] * 20)
    assert rates[-1] == pytest.approx(0.0)


def test_constant_and_past_the_end():
    assert _rates(10, name="constant", warmup_fraction=0.0) == [1.0] * 10
    schedule = ScheduleConfig(name="cosine", final_fraction=0.25)
    assert rate(schedule, 500, 100) == pytest.approx(0.25)


def test_one_step_run():
    for name in ("cosine", "wsd", "constant"):
        assert 0 < rate(ScheduleConfig(name=name), 0, 1) <= 1
