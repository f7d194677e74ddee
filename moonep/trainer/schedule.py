"""Learning-rate schedules: pure functions of the step, so that resuming needs no state."""

from __future__ import annotations

import math

from moonep.trainer.config import ScheduleConfig

SCHEDULES = ("cosine", "wsd", "constant")


def warmup_steps(schedule: ScheduleConfig, steps: int) -> int:
    """Steps of linear warm-up; at least one when the fraction is positive."""
    return math.ceil(schedule.warmup_fraction * steps)


def rate(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Multiple of the peak learning rate at optimizer step `step` (0-based) of a run of `steps`.

    Every schedule rises linearly over its first `warmup_fraction`, reaching 1 at the end of it. `cosine` then
    falls to `final_fraction` at the last step; `wsd` stays at 1 and falls linearly over the last
    `decay_fraction`; `constant` stays at 1. Past the end the final value holds.
    """
    warm = warmup_steps(schedule, steps)
    if step < warm:
        return (step + 1) / warm
    last = max(steps - 1, 1)
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "wsd":
        start = max(warm, steps - math.ceil(schedule.decay_fraction * steps))
        progress = _progress(step, start - 1, last)
        return 1.0 - (1.0 - schedule.final_fraction) * progress
    progress = _progress(step, warm, last)
    return schedule.final_fraction + (1.0 - schedule.final_fraction) * 0.5 * (
        1.0 + math.cos(math.pi * progress)
    )


def _progress(step: int, start: int, last: int) -> float:
    return min(1.0, max(0.0, (step - start) / max(last - start, 1)))
