"""Traces: our recording round trip, Megatron-style JSONL, bare arrays, replay, and damage with its line
number."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moonep.errors import DataError
from moonep.simulate import make_workload
from moonep.simulate.sampling import stream
from moonep.simulate.traces import Trace, TraceReplay, TraceWriter, deal, load_trace, make_trace, save_trace


def record(steps=3, layers=2, ranks=2, experts=8, top_k=2, tokens=5):
    bound = make_workload("lognormal").bind(ranks, experts, top_k, seed=0)
    ids = np.array(
        [
            [[bound.token_choices(s, m, r, tokens) for r in range(ranks)] for m in range(layers)]
            for s in range(steps)
        ]
    )
    counts = np.apply_along_axis(np.bincount, -1, ids.reshape(steps, layers, ranks, -1), minlength=experts)
    return counts, ids


def jsonl(path, ids, *, top_k=2):
    lines = []
    for step, layer, rank in np.ndindex(ids.shape[:3]):
        record_ = {"step": step, "layer": layer, "rank": rank, "topk": top_k}
        lines.append(json.dumps({**record_, "top_indices": ids[step, layer, rank].tolist()}))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_writer_and_reader_round_trip(tmp_path):
    counts, ids = record()
    writer = TraceWriter(tmp_path / "trace", top_k=2, capacity=5, layer=[1, 3], every=2)
    for step in range(3):
        writer.add(10 + step, counts[step], ids[step])
    writer.close()
    assert len(list((tmp_path / "trace").iterdir())) == 2
    trace = load_trace(tmp_path / "trace")
    assert np.array_equal(trace.tokens_per_expert, counts) and (trace.ids == ids).all()
    assert trace.step.tolist() == [10, 11, 12] and trace.layer.tolist() == [1, 3]
    assert (trace.top_k, trace.capacity, trace.num_ranks, trace.num_experts) == (2, 5, 2, 8)


def test_jsonl_agrees_with_our_recording(tmp_path):
    counts, ids = record()
    trace = load_trace(jsonl(tmp_path / "router.jsonl", ids), num_experts=8)
    assert np.array_equal(trace.tokens_per_expert, counts) and (trace.ids == ids).all()
    assert trace.top_k == 2 and trace.capacity == 5


def test_bare_arrays_of_counts(tmp_path):
    counts, _ = record()
    np.savez(tmp_path / "counts.npz", counts)
    np.save(tmp_path / "counts.npy", counts)
    for name in ("counts.npz", "counts.npy"):
        trace = load_trace(tmp_path / name, top_k=2)
        assert np.array_equal(trace.tokens_per_expert, counts) and trace.top_k == 2 and trace.capacity == 5


def test_replay_repeats_recorded_choices():
    counts, ids = record()
    replay = TraceReplay(make_trace(counts, top_k=2, ids=ids, source="t"))
    assert np.array_equal(replay.token_choices(1, 0, 1, 5), ids[1, 0, 1])
    assert np.array_equal(replay.token_choices(4, 0, 1, 3), ids[1, 0, 1][:3])  # steps wrap, tokens are cut
    assert replay.token_choices(0, 0, 0, 12).shape == (12, 2)


def test_replay_from_counts_alone_keeps_the_counts():
    counts, _ = record(tokens=50)
    replay = TraceReplay(make_trace(counts, top_k=2, source="t"))
    ids = replay.token_choices(2, 1, 0, 50)
    assert np.array_equal(np.bincount(ids.ravel(), minlength=8), counts[2, 1, 0])
    assert (ids[:, 0] != ids[:, 1]).all()


@pytest.mark.parametrize("counts", [[6, 6, 6, 6], [12, 5, 4, 3], [12, 12, 0, 0], [0, 0, 0, 0]])
def test_deal_never_repeats_an_expert_in_a_token(counts):
    ids = deal(np.array(counts), 2, stream(0, "tokens", 1))
    assert ids.shape == (sum(counts) // 2, 2)
    assert np.array_equal(np.bincount(ids.ravel(), minlength=4), counts)
    assert (ids[:, 0] != ids[:, 1]).all()


def damage(path, line, text):
    lines = path.read_text().splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines) + "\n")


GOOD = {"step": 0, "layer": 0, "rank": 0, "topk": 2, "top_indices": [[0, 1]]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1, "layer": 0, "rank"', "line 3: not complete JSON"),
        ("[1, 2]", "line 3: expected an object"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "topk"}), "line 3: no 'topk'"),
        (json.dumps({**GOOD, "rank": -1}), "line 3: rank=-1"),
        (
            json.dumps({**GOOD, "topk": 3, "top_indices": [[0, 1, 2]]}),
            "line 3: topk=3, but earlier lines have topk=2",
        ),
        (json.dumps({**GOOD, "top_indices": [[0, 1, 2]]}), "line 3: top_indices has shape"),
        (json.dumps({**GOOD, "top_indices": [[0], [1, 2]]}), "line 3: top_indices must be"),
        (json.dumps(GOOD), "line 3: step 0, layer 0, rank 0 already came in line 1"),
        (json.dumps({**GOOD, "step": 7, "top_indices": [[0, 9]]}), "line 3: expert 9 is not below"),
    ],
)
def test_damaged_jsonl_names_its_line(tmp_path, text, message):
    _, ids = record()
    path = jsonl(tmp_path / "router.jsonl", ids)
    damage(path, 3, text)
    with pytest.raises(DataError) as error:
        load_trace(path, num_experts=8)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_truncated_jsonl_says_what_is_missing(tmp_path):
    _, ids = record()
    path = jsonl(tmp_path / "router.jsonl", ids)
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(DataError, match="step 2, layer 1 lacks rank 1"):
        load_trace(path)


def test_truncated_npz_and_missing_files(tmp_path):
    counts, _ = record()
    whole = save_trace(tmp_path / "part.npz", make_trace(counts, top_k=2, source="t"))
    whole.write_bytes(whole.read_bytes()[:300])
    with pytest.raises(DataError, match=r"part\.npz"):
        load_trace(whole)
    with pytest.raises(DataError, match="no such file"):
        load_trace(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"routing\.record=true"):
        load_trace(tmp_path / "empty")


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (np.zeros((2, 3), int), "expected [steps, layers, ranks, experts]"),
        (np.full((1, 1, 2, 4), -1), "negative count -1"),
        (np.full((1, 1, 2, 5), 2), "multiple of the ranks"),
        (np.full((1, 1, 2, 4), 0.5), "fractions"),
        (np.ones((1, 1, 1, 3), int), "not a multiple of top_k=2"),
        (np.zeros((0, 1, 2, 4), int), "nothing was recorded"),
    ],
)
def test_bad_counts_are_refused(counts, message):
    with pytest.raises(DataError) as error:
        make_trace(counts, top_k=2, source="counts.npz")
    assert message in str(error.value) and "counts.npz" in str(error.value)


def test_another_geometry_names_the_key():
    counts, _ = record()
    trace: Trace = make_trace(counts, top_k=2, source="t")
    with pytest.raises(DataError, match=r"geometry\.R=4; set geometry\.R=2"):
        trace.require(num_ranks=4)
    with pytest.raises(DataError, match=r"set geometry\.E=8"):
        trace.require(num_experts=16)
