"""Fits a hardware profile to measurements: micro-benchmarks first, then whole expert layers of the runtime.

What a micro-benchmark measures directly (copy rate, launch, barrier, exchange rate) is taken as it is. The
products' figures are fitted to a sweep of grouped FFNs; with several ranks the exchange's figures are then
fitted to layers run by the runtime. The fit minimises the logarithms of predicted over measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from moonep.errors import CapabilityError
from moonep.simulate.cost import LayerShape, layer_time, products_seconds
from moonep.simulate.hardware import Hardware
from moonep.simulate.microbenchmarks import ProductPoint
from moonep.simulate.traffic import Traffic

PRODUCT_FIGURES = (
    "bf16_tflops",
    "group_us",
    "weight_passes",
    "elementwise_passes",
    "elementwise_backward",
    "half_depth",
)


@dataclass(frozen=True)
class LayerPoint:
    """One measured expert layer of the runtime: what it was, its traffic, seconds forward and forward +
    backward."""

    name: str
    traffic: Traffic
    shape: LayerShape
    forward_s: float
    total_s: float


@dataclass(frozen=True)
class Comparison:
    """A row of the table of predicted against measured, microseconds."""

    name: str
    predicted_us: float
    measured_us: float

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_us / self.measured_us - 1


@lru_cache(maxsize=4096)
def one_rank_traffic(groups: int, rows: int, tile_rows: int) -> Traffic:
    """A rank that computes `groups` experts of `rows` rows each and exchanges nothing."""
    total = np.array([groups * rows])
    tiled = np.array([groups * (-(-rows // tile_rows) * tile_rows)])
    one, none = total[:, None], np.zeros((1, 1), dtype=np.int64)
    return Traffic(one, one, none, none, total, total, tiled, total, np.array([groups]), np.zeros(groups))


def predict_products(point: ProductPoint, hardware: Hardware, precision: str) -> tuple[float, float]:
    """(forward, backward) seconds the model gives for a measured grouped FFN, launched by Python."""
    shape = LayerShape(point.hidden, point.ffn_hidden, precision=precision, recompute=False)
    traffic = one_rank_traffic(point.groups, point.rows, hardware.tile_rows)
    forward, backward = (float(products_seconds(traffic, shape, hardware, b)[0]) for b in (False, True))
    launch = hardware.eager_launch_us * 1e-6
    return forward + 3 * launch, backward + 7 * launch


Pairs = Sequence[tuple[float, float]]


def fit(hardware: Hardware, names: Sequence[str], predict: Callable[[Hardware], Pairs]) -> Hardware:
    """Least squares of log(predicted / measured) over the logarithms of the named fields, from three starts.

    Residuals above 10 % count linearly (an outlier, a disturbed sample, counts once); no figure moves beyond
    a factor of 50 from where it starts.

    Raises:
        CapabilityError: scipy is missing.
    """
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise CapabilityError("calibrate needs scipy to fit: pip install 'moonep[sim]'") from None
    start = np.log([max(float(getattr(hardware, name)), 1e-3) for name in names])

    def moved(x: np.ndarray) -> Hardware:
        return dataclasses.replace(hardware, **dict(zip(names, np.exp(x).tolist(), strict=True)))

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.array([math.log(max(p, 1e-12) / max(m, 1e-12)) for p, m in predict(moved(x))])

    span = math.log(50.0)
    found = [
        least_squares(
            residuals,
            start + shift,
            bounds=(start - span, start + span),
            loss="soft_l1",
            f_scale=0.1,
            diff_step=1e-3,
            max_nfev=200,
        )
        for shift in (0.0, 1.0, -1.0)
    ]
    return moved(min(found, key=lambda result: result.cost).x)


def fit_products(hardware: Hardware, points: Sequence[ProductPoint], precision: str) -> Hardware:
    """Rate, inner-dimension loss, time a group and activation traffic from a sweep of grouped FFNs."""

    def predict(trial: Hardware) -> Pairs:
        pairs = []
        for point in points:
            forward, backward = predict_products(point, trial, precision)
            pairs += [(forward, point.forward_s), (backward, point.backward_s)]
        return pairs

    # Half depth starts large enough to move.
    start = dataclasses.replace(hardware, half_depth=max(hardware.half_depth, 16.0))
    return fit(start, PRODUCT_FIGURES, predict)


def fit_layers(hardware: Hardware, points: Sequence[LayerPoint], names: Sequence[str]) -> Hardware:
    """The exchange's figures from whole layers."""

    def predict(trial: Hardware) -> Pairs:
        pairs = []
        for point in points:
            time = layer_time(point.traffic, point.shape, trial)
            pairs += [(time.forward * 1e-6, point.forward_s), (time.total * 1e-6, point.total_s)]
        return pairs

    return fit(hardware, names, predict)


def compare_products(hardware: Hardware, points: Sequence[ProductPoint], precision: str) -> list[Comparison]:
    out = []
    for p in points:
        forward, backward = predict_products(p, hardware, precision)
        name = f"products, {p.groups} x {p.rows} rows, H={p.hidden}, Hi={p.ffn_hidden}"
        out.append(Comparison(f"{name}, forward", forward * 1e6, p.forward_s * 1e6))
        out.append(Comparison(f"{name}, backward", backward * 1e6, p.backward_s * 1e6))
    return out


def compare_layers(hardware: Hardware, points: Sequence[LayerPoint]) -> list[Comparison]:
    out = []
    for point in points:
        time = layer_time(point.traffic, point.shape, hardware)
        out.append(Comparison(f"{point.name}, forward", time.forward, point.forward_s * 1e6))
        out.append(Comparison(f"{point.name}, forward + backward", time.total, point.total_s * 1e6))
    return out


def profile_yaml(hardware: Hardware, comment: str) -> str:
    """The file configs/cluster/NAME.yaml."""
    from moonep.command import to_yaml

    values: dict[str, Any] = dataclasses.asdict(hardware)
    for key, value in values.items():
        if isinstance(value, float):
            values[key] = float(f"{value:.5g}")
    return f"# {comment}\n{to_yaml(values)}\n"
