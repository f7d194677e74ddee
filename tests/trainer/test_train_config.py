"""Bad input gets one clear line: unknown and mistyped keys, wrong values, contradictions between fields."""

from __future__ import annotations

import pytest

from model.config import K3Config
from moonep.errors import ConfigError
from moonep.trainer import loop
from moonep.trainer.compose import compose
from moonep.trainer.config import Config
from moonep.trainer.derived import check_values, derive, expert_parallel_size


def _config(*words):
    config, _ = compose("train", Config, words)
    return config


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("trian.steps=3", "unknown key 'trian.steps'; did you mean 'train.steps'?"),
        ("train.step=3", "unknown key 'train.step'; did you mean 'train.steps'?"),
        ("steps=3", "unknown key 'steps'; did you mean 'train.steps'?"),
        ("routing.tua=2", "unknown key 'routing.tua'; did you mean 'routing.tau'?"),
        ("model.num_layer=2", "unknown key 'model.num_layer'; did you mean 'model.num_layers'?"),
        ("model=nanoo", "model=nanoo: no such choice; did you mean 'nano'?"),
        ("experiment=quickstrat", "experiment=quickstrat: no such choice; did you mean 'quickstart'?"),
        ("train.steps=abc", "train.steps=abc: must be an integer"),
        ("train.steps=1.5", "train.steps=1.5: must be an integer"),
        ("optimizer.lr=fast", "optimizer.lr=fast: must be a number"),
        ("deterministic=maybe", "deterministic=maybe: must be true or false"),
        ("train.steps=null", "train.steps=null: must not be null"),
        ("train=5", "train=5: is a group of keys"),
        ("quickstart", "cannot read 'quickstart': write key=value; did you mean experiment=quickstart?"),
        ("dry_run", "cannot read 'dry_run': write key=value, for instance dry_run=true"),
        ("--dry_run", "--dry_run: options are written key=value; did you mean dry_run=true?"),
        ("--train.steps=4", "did you mean train.steps=4?"),
        ("seed=1,2", "asks for several runs"),
        ("hydra.run.dir=x", "run.dir=PATH names the run's folder"),
        ("~train.steps", "keys cannot be deleted"),
        ("model=null", "model=null: choose one of"),
        ("-m", "one run at a time"),
        ("--config-dir=/nonexistent", "no such folder"),
    ],
)
def test_one_line_names_the_key_and_the_fix(word, says):
    with pytest.raises(ConfigError) as caught:
        _config(word)
    message = str(caught.value)
    assert says in message
    assert "\n" not in message
    assert "+" not in message.replace(word, ""), "Hydra's advice to append with + must not reach the user"


def test_a_run_folder_that_cannot_be_made_names_its_key(monkeypatch):
    monkeypatch.setattr(loop.dist, "broadcast_object_list", lambda answer, src: None)
    with pytest.raises(ConfigError, match=r"^run\.dir=/dev/null/x cannot be made"):
        loop._agree_on_folder(_config("run.dir=/dev/null/x"), None, rank=0)


def test_plus_before_a_known_key_and_free_arguments():
    config = _config("+train.steps=7", "routing.force=lognormal", "routing.force_args.sigma=2")
    assert config.train.steps == 7
    assert config.routing.force_args == {"sigma": 2}


def test_values_keep_their_types():
    config = _config("optimizer.lr=1e-3", "checkpoint.resume=true", "parallel.ep=2", "model=nano")
    assert config.optimizer.lr == 1e-3
    assert config.checkpoint.resume is True
    assert _config("checkpoint.resume=runs/a/checkpoints/step_5").checkpoint.resume.endswith("step_5")
    assert config.parallel.ep == 2
    assert config.model.preset == "nano"
    assert config.model_overrides() == {}
    assert _config("model.num_layers=2").model_overrides() == {"num_layers": 2}


def test_errors_inside_an_experiment_file_are_one_line(tmp_path):
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "typo.yaml").write_text("# @package _global_\ntrain:\n  stepps: 3\n")
    (folder / "wrong.yaml").write_text("# @package _global_\ntrain:\n  steps: many\n")
    (folder / "good.yaml").write_text("# @package _global_\ntrain:\n  steps: 11\n")
    with pytest.raises(ConfigError, match=r"unknown key 'train\.stepps'; did you mean 'train\.steps'\?$"):
        _config("--config-dir", str(tmp_path), "experiment=typo")
    with pytest.raises(ConfigError, match=r"experiment/wrong: train\.steps: must be an integer$"):
        _config("--config-dir", str(tmp_path), "experiment=wrong")
    (folder / "broken.yaml").write_text("# @package _global_\ntrain: [\n")
    with pytest.raises(ConfigError, match=r"^[^\n]*broken\.yaml[^\n]*$"):
        _config("--config-dir", str(tmp_path), "experiment=broken")
    (folder / "choice.yaml").write_text("# @package _global_\ndefaults:\n  - override /model: nanox\n")
    with pytest.raises(ConfigError, match=r"model=nanox: no such choice; did you mean 'nano'"):
        _config("--config-dir", str(tmp_path), "experiment=choice")
    assert _config("--config-dir", str(tmp_path), "experiment=good").train.steps == 11


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("routing.policy=bounder", "did you mean 'bounded'"),
        ("routing.balancer=quantil", "did you mean 'quantile'"),
        ("routing.tau=0.9", "routing.tau=0.9 must be at least 1"),
        ("train.steps=0", "train.steps=0 must be at least 1"),
        ("optimizer.lr=-1", "optimizer.lr=-1.0 must be positive"),
        ("optimizer.lr=inf", "optimizer.lr=inf must be finite"),
        ("optimizer.clip=nan", "optimizer.clip=nan must be finite"),
        ("optimizer.weight_decay=inf", "optimizer.weight_decay=inf must be finite"),
        ("seed=-1", "seed=-1 must lie in [0, 2**63)"),
        ("data.path=", "data.path= is empty"),
        ("checkpoint.resume=", "checkpoint.resume= is empty"),
        ("run.dir=", "run.dir= is empty"),
        ("parallel.zero=3", "parallel.zero=3 (ZeRO-3) is not supported"),
        ("parallel.zero=7", "allowed: 0, 1, 2"),
        ("parallel.tensor=2", "parallel.tensor=2 (tensor parallelism) is not supported"),
        ("parallel.pipeline=2", "parallel.pipeline=2"),
        ("schedule.warmup_fraction=2", "must lie in [0, 1]"),
        ("logging.wandb.mode=onlin", "did you mean 'online'"),
        ("optimizer.name=muon", "allowed: adamw"),
    ],
)
def test_values_out_of_range(word, says):
    with pytest.raises(ConfigError) as caught:
        check_values(_config(word))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bf16_needs_a_partitioned_optimizer():
    with pytest.raises(ConfigError, match=r"parallel\.zero=0 cannot accumulate bf16 .* use parallel\.zero=1"):
        check_values(_config("precision=bf16", "parallel.zero=0"))


def test_contradictions_between_fields():
    model = K3Config.preset("tiny")
    with pytest.raises(ConfigError, match=r"parallel\.ep=3 does not divide the 4 ranks"):
        expert_parallel_size(_config("parallel.ep=3"), model, 4)
    with pytest.raises(ConfigError, match=r"num_experts=16; with 6 ranks use one of \[1, 2\]"):
        expert_parallel_size(_config("parallel.ep=3"), model, 6)
    with pytest.raises(ConfigError, match=r"tokens_per_step=1000 .* 4 x context 256 x ranks 2 = 2048.* 2048"):
        derive(_config("train.tokens_per_step=1000"), model, 2)
    with pytest.raises(ConfigError, match=r"train\.context=4096 exceeds 1024"):
        derive(_config("train.context=4096", "train.tokens_per_step=16384"), model, 1)


def test_derived_numbers():
    """Against the definitions: at tau = 1 a shard has S K rows plus padding; `static` needs R S K."""
    model = K3Config.preset("tiny")
    words = ("train.tokens_per_step=8192", "train.micro_batch=4", "train.context=256", "parallel.ep=2")
    derived = derive(_config(*words), model, 4)
    assert (derived.accumulation, derived.capacity, derived.ep) == (2, 1024, 2)
    assert derived.slots == 4  # ceil(16 * 1 / 4)
    assert derived.shard_rows == 2136  # 1024 * 2 + (8 + 4) * 7, rounded up to 8
    static = derive(_config(*words, "routing.policy=static"), model, 4)
    assert (static.shard_rows, static.slots) == (4152, 0)  # 2 * 1024 * 2 + 8 * 7
    total, _ = model.num_parameters()
    experts = 3 * 16 * model.parameter_sizes()["expert"]
    assert derived.rank_parameters == total - experts // 2


def test_largest_fitting_expert_parallel_size_by_default():
    model = K3Config.preset("tiny")
    assert [expert_parallel_size(_config(), model, n) for n in (1, 2, 3, 4, 6, 8)] == [1, 2, 1, 4, 2, 8]


def test_digest_tells_configurations_apart():
    assert _config("seed=1").digest() == _config("seed=1").digest() != _config("seed=2").digest()
