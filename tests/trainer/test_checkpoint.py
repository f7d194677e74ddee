"""Checkpoints: round trips across expert-parallel sizes, atomic writing, and every kind of damage.

A fake engine keeps its state in plain tensors; the real engine and real processes are in
test_checkpoint_resume.py.
"""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest
import torch

from moonep.errors import CheckpointError
from moonep.trainer import checkpoint_files
from moonep.trainer.checkpoint import (
    TrainingState,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)

EXPERTS, WIDTH = 8, 6
MODEL = {"hidden_size": 6, "num_layers": 2, "pattern": (1, 2)}


class FakeEngine:
    """Two dense parameters and one stack of experts, `EXPERTS / ep_size` of them here; AdamW's two moments.
    """

    rank, world_size = 0, 1

    def __init__(self, seed: int, ep_rank: int = 0, ep_size: int = 1, width: int = WIDTH):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(*shape, generator=generator)

        self.ep_rank, self.ep_size, self.optimizer_steps = ep_rank, ep_size, seed
        mine = slice(EXPERTS // ep_size * ep_rank, EXPERTS // ep_size * (ep_rank + 1))
        shapes = {"embed": (10, width), "experts.up": (EXPERTS, 4, width), "norm": (width,)}
        keys = ("param", "exp_avg", "exp_avg_sq")
        self.state = {
            name: {key: draw(*shape)[mine if name == "experts.up" else slice(None)] for key in keys}
            for name, shape in shapes.items()
        }

    def parameter_shapes(self):
        return {n: (tuple(s["param"].shape), n.startswith("experts")) for n, s in self.state.items()}

    def parameter_states(self):
        for name, state in self.state.items():
            yield name, state, name.startswith("experts")

    def load_parameter_states(self, lookup):
        self.state = {
            name: {key: value.clone() for key, value in lookup(name).items()} for name in self.state
        }


class FakeGroup:
    """Ranks of one save, called one after the other: gathers what they bring, phase by phase."""

    def __init__(self, monkeypatch, engines):
        import threading

        self.barrier, self.slots = threading.Barrier(len(engines), timeout=20), [None] * len(engines)
        self.local = threading.local()
        monkeypatch.setattr("moonep.trainer.checkpoint.dist.all_gather_object", self.gather)
        for rank, engine in enumerate(engines):
            engine.rank, engine.world_size = rank, len(engines)
        self.engines = engines

    def gather(self, values, value):
        self.slots[self.local.rank] = value
        self.barrier.wait()
        values[:] = list(self.slots)
        self.barrier.wait()

    def run(self, work):
        """`work(engine)` on a thread a rank; results or exceptions by rank."""
        import threading

        outcomes: list = [None] * len(self.engines)

        def body(rank):
            self.local.rank = rank
            try:
                outcomes[rank] = work(self.engines[rank])
            except CheckpointError as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(self.engines))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert not any(thread.is_alive() for thread in threads)
        return outcomes


def training_state(step: int = 7, **changes) -> TrainingState:
    values = {
        "tokens": 700,
        "model": MODEL,
        "config": {"seed": 1, "train": {"steps": 9}},
        "data": {"next_sequence": 12},
        "tokenizer": {"kind": "bytes"},
        "balancer": {1: torch.linspace(-1, 1, EXPERTS), 11: torch.full((EXPERTS,), 1 / 3)},
        "extra": {"wandb_id": None},
    }
    return TrainingState(step, **{**values, **changes})


def same(first: FakeEngine, second: FakeEngine) -> bool:
    keys = ("param", "exp_avg", "exp_avg_sq")
    return all(torch.equal(first.state[n][k], second.state[n][k]) for n in first.state for k in keys)


def test_round_trip_restores_everything(tmp_path):
    engine, other = FakeEngine(1), FakeEngine(2)
    path = save_checkpoint(engine, tmp_path / "checkpoints", training_state())
    assert path == tmp_path / "checkpoints" / "step_7"
    state = load_checkpoint(other, path, model=MODEL)
    assert same(engine, other) and other.optimizer_steps == 1
    assert (state.step, state.tokens, state.data) == (7, 700, {"next_sequence": 12})
    assert state.config["train"] == {"steps": 9} and state.tokenizer == {"kind": "bytes"}
    assert list(state.balancer) == [1, 11]
    assert torch.equal(state.balancer[11], torch.full((EXPERTS,), 1 / 3))


def test_random_states_continue(tmp_path):
    def draws():
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random(), random.gauss(0, 1)]

    torch.manual_seed(3)
    np.random.seed(4)
    random.seed(5)
    draws()
    path = save_checkpoint(FakeEngine(1), tmp_path, training_state())
    expected = draws()
    torch.manual_seed(0)
    load_checkpoint(FakeEngine(2), path)
    assert draws() == expected


@pytest.mark.parametrize("ep_from", [1, 2, 4])
@pytest.mark.parametrize("ep_to", [1, 2, 8])
def test_experts_load_at_another_expert_parallel_size(tmp_path, monkeypatch, ep_from, ep_to):
    writers = [FakeEngine(1, rank, ep_from) for rank in range(ep_from)]
    paths = FakeGroup(monkeypatch, writers).run(lambda e: save_checkpoint(e, tmp_path, training_state()))
    assert set(paths) == {tmp_path / "step_7"}
    readers = [FakeEngine(2, rank, ep_to) for rank in range(ep_to)]
    FakeGroup(monkeypatch, readers).run(lambda e: load_checkpoint(e, paths[0], model=MODEL))
    for rank, reader in enumerate(readers):
        assert same(reader, FakeEngine(1, rank, ep_to))


def test_replicas_of_experts_are_written_once(tmp_path, monkeypatch):
    engines = [FakeEngine(1, rank % 2, 2) for rank in range(4)]
    FakeGroup(monkeypatch, engines).run(lambda e: save_checkpoint(e, tmp_path, training_state()))
    names = {path.name[:12] for path in (tmp_path / "step_7").glob("weights_*")}
    assert names == {"weights_0000", "weights_0001"}
    assert len(list((tmp_path / "step_7").glob("rng_*.json"))) == 4


def test_large_tensors_go_into_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "SHARD_BYTES", 300)
    engine, other = FakeEngine(1), FakeEngine(2)
    path = save_checkpoint(engine, tmp_path, training_state())
    assert len(list(path.glob("weights_0000_*"))) == 3 and len(list(path.glob("optimizer_0000_*"))) >= 3
    load_checkpoint(other, path)
    assert same(engine, other)


def test_keep_last_removes_the_oldest_and_leaves_no_litter(tmp_path):
    for step in (1, 2, 10, 9):
        save_checkpoint(FakeEngine(1), tmp_path, training_state(step), keep_last=2)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [9, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_9"]
    assert newest_checkpoint(tmp_path) == tmp_path / "step_10"


def test_the_checkpoint_just_written_is_never_removed(tmp_path):
    for step in (30, 40, 5):
        path = save_checkpoint(FakeEngine(1), tmp_path, training_state(step), keep_last=2)
    assert path.is_dir()


def test_writing_a_step_again_replaces_it(tmp_path):
    save_checkpoint(FakeEngine(1), tmp_path, training_state())
    path = save_checkpoint(FakeEngine(2), tmp_path, training_state())
    other = FakeEngine(3)
    load_checkpoint(other, path)
    assert same(other, FakeEngine(2)) and [p.name for p in tmp_path.iterdir()] == ["step_7"]


def test_what_a_killed_run_left_is_no_checkpoint_and_is_cleaned(tmp_path):
    (tmp_path / ".step_7.partial").mkdir()
    (tmp_path / ".step_7.partial" / "weights_0099_00000.safetensors").write_bytes(b"half")
    assert newest_checkpoint(tmp_path) is None
    path = save_checkpoint(FakeEngine(1), tmp_path, training_state())
    assert not (path / "weights_0099_00000.safetensors").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["step_7"]


def test_a_full_disk_on_one_rank_stops_every_rank_and_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    def engines():
        return [FakeEngine(1, rank, 2) for rank in range(2)]

    FakeGroup(monkeypatch, engines()).run(lambda e: save_checkpoint(e, tmp_path, training_state(1)))
    real = checkpoint_files.write_synced

    def full(path, content):
        if path.name.startswith("weights_0001"):
            raise OSError(28, "No space left on device")
        return real(path, content)

    monkeypatch.setattr(checkpoint_files, "write_synced", full)
    outcomes = FakeGroup(monkeypatch, engines()).run(
        lambda e: save_checkpoint(e, tmp_path, training_state(2))
    )
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointError)
        assert "No space left on device" in str(outcome) and "(rank 1)" in str(outcome)
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]
    load_checkpoint(FakeEngine(3), tmp_path / "step_1")


def damaged(path, kind: str):
    weights = path / "weights_0000_00000.safetensors"
    manifest = path / "manifest.json"
    match kind:
        case "truncated weights":
            weights.write_bytes(weights.read_bytes()[:-5])
            return weights
        case "altered weights":
            content = bytearray(weights.read_bytes())
            content[-3] ^= 1
            weights.write_bytes(content)
            return weights
        case "missing weights":
            weights.unlink()
            return weights
        case "altered random state":
            target = path / "rng_0000.json"
            target.write_text(target.read_text().replace("1", "2", 1))
            return target
        case "truncated manifest":
            manifest.write_bytes(manifest.read_bytes()[:200])
        case "altered manifest":
            manifest.write_text(manifest.read_text().replace('"step": 7', '"step": 8'))
        case "no manifest":
            manifest.unlink()
        case "other format":
            values = json.loads(manifest.read_text())
            manifest.write_text(json.dumps({**values, "format": "elsewhere-9"}))
    return manifest


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("truncated weights", "truncated: "),
        ("altered weights", "was altered: sha256"),
        ("missing weights", "is missing"),
        ("altered random state", "was altered"),
        ("truncated manifest", "truncated or altered"),
        ("altered manifest", "was altered"),
        ("no manifest", "is missing"),
        ("other format", "elsewhere-9"),
    ],
)
def test_damage_is_one_line_naming_the_file_and_changes_nothing(tmp_path, kind, words):
    path = save_checkpoint(FakeEngine(1), tmp_path, training_state())
    file = damaged(path, kind)
    engine = FakeEngine(2)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(engine, path, model=MODEL)
    message = str(raised.value)
    assert str(file) in message and words in message and "\n" not in message
    assert same(engine, FakeEngine(2)) and engine.optimizer_steps == 2


def test_damage_seen_by_one_rank_stops_all(tmp_path, monkeypatch):
    path = save_checkpoint(FakeEngine(1), tmp_path, training_state())
    file = damaged(path, "altered weights")
    engines = [FakeEngine(2, rank, 4) for rank in range(4)]
    outcomes = FakeGroup(monkeypatch, engines).run(lambda e: load_checkpoint(e, path))
    assert all(isinstance(outcome, CheckpointError) and str(file) in str(outcome) for outcome in outcomes)


def test_another_model_is_refused_by_what_differs(tmp_path):
    path = save_checkpoint(FakeEngine(1), tmp_path, training_state())
    with pytest.raises(CheckpointError, match="of another model: hidden_size 6 there, 8 here"):
        load_checkpoint(FakeEngine(2), path, model={**MODEL, "hidden_size": 8})
    with pytest.raises(CheckpointError, match=r"parameter embed is \[10, 6\] there, \[10, 4\] here"):
        load_checkpoint(FakeEngine(2, width=4), path)
    smaller = FakeEngine(2)
    del smaller.state["norm"]
    with pytest.raises(CheckpointError, match="parameter norm is only in the checkpoint"):
        load_checkpoint(smaller, path)


def test_find_checkpoint(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    assert find_checkpoint(True, folder) is None and find_checkpoint(False, folder) is None
    for step in (9, 10):
        save_checkpoint(FakeEngine(1), folder, training_state(step))
    assert find_checkpoint(False, folder) is None
    assert find_checkpoint(True, folder) == folder / "step_10"
    for given in (folder, tmp_path / "run", folder / "step_10", str(folder / "step_10")):
        assert find_checkpoint(given, tmp_path / "elsewhere") == folder / "step_10"
    with pytest.raises(CheckpointError, match="does not exist"):
        find_checkpoint(str(tmp_path / "nowhere"), folder)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_checkpoint(tmp_path / "run", folder)
