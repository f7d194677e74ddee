"""Cost model: anchors measured on H200, limits, monotony; profiles; calibration recovers a known machine."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moonep.errors import ConfigError
from moonep.simulate.calibration import fit_products, one_rank_traffic, predict_products
from moonep.simulate.cost import LayerShape, layer_time, link_seconds, products_seconds
from moonep.simulate.hardware import Hardware, load_profile, profile_names
from moonep.simulate.microbenchmarks import ProductPoint
from moonep.simulate.splits import balanced_traffic

H200 = load_profile("h200")


def test_grouped_product_anchor():
    """Measured on H200: 16 groups [32768, 7168] x [7168, 4096] in bf16 take 2.67 ms."""
    flops = 2 * 32768 * 7168 * 4096
    seconds = flops / (H200.bf16_tflops * 1e12 * H200.depth_factor(7168))
    assert seconds == pytest.approx(2.67e-3, rel=0.03)


def test_expert_ffn_anchor():
    """Floors for [32768, 3584 -> 2 x 3072 -> 3584] on H200: 3.0 ms at 720, 3.4 ms at 640 TFLOP/s, 56
    groups."""
    traffic = one_rank_traffic(56, 32768 // 56, H200.tile_rows)
    seconds = products_seconds(traffic, LayerShape(3584, 3072), H200, backward=False)[0]
    assert 3.0e-3 < seconds < 3.9e-3


def test_exchange_anchor():
    """Floors on two H200, S=4096, H=7168, bf16, E=256, K=8, duplicates removed: dispatch 0.23, combine 0.26
    ms."""
    two = dataclasses.replace(H200, domain_size=2)
    traffic = balanced_traffic(2, 256, 8, 4096, 64, 8)
    time = layer_time(traffic, LayerShape(7168, 2048), two)
    assert time.dispatch == pytest.approx(230, rel=0.2)
    assert time.combine == pytest.approx(265, rel=0.2)


def test_expert_copy_anchor():
    """An 88 MB expert (7168 x 2048) takes 0.25 ms over the link."""
    copies = np.zeros((2, 2))
    copies[0, 1] = 1
    seconds = link_seconds(copies, 3 * 7168 * 2048 * 2, H200)
    assert seconds.max() == pytest.approx(0.25e-3, rel=0.05)


def test_between_nodes_the_network_counts():
    hardware = dataclasses.replace(H200, domain_size=2)
    amount = np.zeros((4, 4))
    amount[0, 1], amount[0, 2] = 10, 10
    near, far = (
        link_seconds(amount * [[1, 1, 0, 0]], 1e6, hardware),
        link_seconds(amount * [[0, 0, 1, 1]], 1e6, hardware),
    )
    assert near.max() == pytest.approx(10e6 / (H200.link_gb_s * 1e9))
    assert far.max() == pytest.approx(10e6 / (H200.network_gb_s * 1e9))
    # Both ways run side by side: the slower one decides.
    assert link_seconds(amount, 1e6, hardware).max() == far.max()


def test_virtual_ranks_take_turns():
    shape = LayerShape(1024, 512)
    traffic = balanced_traffic(4, 16, 2, 512, 64, 8)
    alone = layer_time(traffic, shape, dataclasses.replace(H200, launch_us=0.0, barrier_us=0.0))
    shared = layer_time(
        traffic, shape, dataclasses.replace(H200, launch_us=0.0, barrier_us=0.0, ranks_per_device=4)
    )
    assert shared.products == pytest.approx(4 * alone.products)


def test_overlap_hides_copies_and_never_more_than_there_is():
    traffic = balanced_traffic(2, 8, 2, 4096, 64, 8)
    copies = np.array([[0, 2], [0, 0]])
    traffic = dataclasses.replace(traffic, copies_RR=copies, fetched_RR=copies)
    plain = layer_time(traffic, LayerShape(2048, 1024), H200)
    hidden = layer_time(traffic, LayerShape(2048, 1024, overlap=True), H200)
    saved = plain.total - hidden.total
    assert 0 < saved <= plain.copies + plain.copies_backward + plain.gradient_return + 1e-9
    assert hidden.forward <= plain.forward


def test_phases_add_up():
    time = layer_time(balanced_traffic(4, 16, 2, 512, 64, 8), LayerShape(512, 256), H200)
    values = time.to_dict()
    phases = [v for k, v in values.items() if k not in ("hidden", "forward", "total")]
    assert values["total"] == pytest.approx(sum(phases))
    assert values["forward"] == pytest.approx(
        time.plan + time.dispatch + time.copies + time.products + time.combine
    )


def test_narrower_payloads_are_faster():
    traffic = balanced_traffic(8, 64, 8, 8192, 64, 8)
    wide = layer_time(traffic, LayerShape(7168, 2048), H200)
    narrow = layer_time(traffic, LayerShape(7168, 2048, payload="fp8"), H200)
    assert narrow.dispatch < 0.6 * wide.dispatch and narrow.combine == wide.combine


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_is_complete_and_sourced(name):
    hardware = load_profile(name)
    assert hardware.name == name
    for figure, value, origin, source in hardware.source_table():
        assert value is not None and origin in ("measured", "assumed") and source, figure
    assert hardware.tflops("mxfp4") >= hardware.tflops("fp8") >= hardware.tflops("bf16") > 0


def test_unknown_profile_lists_the_known_ones():
    with pytest.raises(ConfigError) as error:
        load_profile("h20O")
    assert "gb200_nvl72" in str(error.value) and "did you mean" in str(error.value)


def test_impossible_figures_name_the_field():
    with pytest.raises(ConfigError, match=r"cluster\.link_gb_s=0"):
        Hardware(link_gb_s=0.0).validate()


def test_calibration_recovers_a_known_machine():
    """Points made by a hidden profile with 3 % of noise: predictions of the fitted one, also at sizes it has
    not seen, lie within 15 %."""
    random = np.random.default_rng(2)
    hidden = dataclasses.replace(
        load_profile("cpu"),
        bf16_tflops=0.11,
        group_us=9.0,
        weight_passes=2.5,
        elementwise_passes=6.0,
        elementwise_backward=1.5,
        half_depth=60.0,
    )

    def point(groups, rows, h, f, noise):
        empty = ProductPoint(groups, rows, h, f, 0.0, 0.0)
        forward, backward = predict_products(empty, hidden, "fp32")
        a, b = 1 + noise * random.standard_normal(2)
        return dataclasses.replace(empty, forward_s=forward * a, backward_s=backward * b)

    sweep = [
        point(g, r, h, f, 0.03) for h, f in ((64, 128), (256, 512)) for g in (4, 16) for r in (8, 64, 256)
    ]
    fitted = fit_products(load_profile("cpu"), sweep, "fp32")
    for unseen in (point(8, 128, 128, 256, 0.0), point(32, 32, 256, 512, 0.0), point(2, 512, 64, 128, 0.0)):
        forward, backward = predict_products(unseen, fitted, "fp32")
        assert forward == pytest.approx(unseen.forward_s, rel=0.15)
        assert backward == pytest.approx(unseen.backward_s, rel=0.15)
