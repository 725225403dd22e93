import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.cli import lightning_cli, main
from tests.command import ROOT, TINY, environment, in_another_process, in_this_process

CONFIGS = ROOT / "configs"


@pytest.fixture(autouse=True)
def _tiny(monkeypatch, model_path, tmp_path):
    for name, value in environment(model_path, tmp_path).items():
        monkeypatch.setenv(name, value)


def printed(capsys, *arguments, command="fit"):
    """The configuration that the arguments come to."""
    with pytest.raises(SystemExit) as ended:
        main([command, *map(str, arguments), "--print_config"])
    assert ended.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def refused(capsys, *arguments):
    """What the command line says to arguments that it refuses."""
    with pytest.raises(SystemExit) as ended:
        main(["fit", "-c", str(TINY), *map(str, arguments)])
    assert ended.value.code not in (0, None)
    said = capsys.readouterr().err + (ended.value.code if isinstance(ended.value.code, str) else "")
    assert len(said.splitlines()) <= 6, said
    return said


def test_an_import_path_that_leads_nowhere_is_refused_in_words(capsys):
    said = refused(capsys, "--data.priority=mein.Surprise")
    assert "data.priority=" in said
    assert "mein.Surprise" in said
    assert "import" in said


def written(folder, content) -> Path:
    path = folder / "more.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_later_files_win_over_earlier_and_the_command_line_over_all(capsys, tmp_path):
    more = written(tmp_path, {"rollout": {"groups": 6}, "model": {"algorithm": {"init_args": {"dual_clip": 3.0}}}})
    config = printed(capsys, "-c", TINY, "-c", more, "--model.algorithm.clip=0.1", "--rollout.group_size=2")
    assert config["rollout"]["groups"] == 6
    assert config["rollout"]["group_size"] == 2
    settings = config["model"]["algorithm"]["init_args"]
    assert (settings["clip"], settings["dual_clip"]) == (0.1, 3.0)


def test_adapters_are_keys_of_the_model(capsys):
    config = printed(capsys, "-c", TINY, "--model.lora.r=4", "--model.lora.target_modules=[q_proj, v_proj]")
    assert config["model"]["lora"] == {"r": 4, "alpha": 32.0, "target_modules": ["q_proj", "v_proj"], "dropout": 0.0}
    assert printed(capsys, "-c", TINY)["model"]["lora"] is None
    assert "lora.dropout must be 0" in refused(capsys, "--model.lora.dropout=0.1")


def test_short_class_names_stand_for_the_classes(capsys):
    config = printed(
        capsys, "-c", TINY, "--model.algorithm=Reinforce", "--data.priority=AbsoluteReward", "--data.decay=NoDecay"
    )
    assert config["model"]["algorithm"]["class_path"].endswith(".Reinforce")
    assert config["data"]["init_args"]["priority"]["class_path"].endswith(".AbsoluteReward")
    assert config["data"]["init_args"]["decay"]["class_path"].endswith(".NoDecay")


def test_environment_variables_set_what_files_leave_open_and_fill_in_files(capsys, monkeypatch, model_path):
    monkeypatch.setenv("FRESHPER_FIT__TRAINER__MAX_EPOCHS", "17")
    monkeypatch.setenv("FRESHPER_FIT__TRAINER__GRADIENT_CLIP_ALGORITHM", "value")
    config = printed(capsys, "-c", TINY)
    assert config["trainer"]["gradient_clip_algorithm"] == "value"
    assert config["trainer"]["max_epochs"] == 3, "a file wins over the environment"
    assert config["model"]["path"] == str(model_path)


def test_a_variable_that_a_file_asks_for_and_that_is_not_set_is_named(capsys, monkeypatch):
    monkeypatch.delenv("TINY_MODEL")
    said = refused(capsys)
    assert "'TINY_MODEL' not found" in said
    assert "model.path" in said


def test_a_key_may_refer_to_another_of_its_file(capsys, tmp_path):
    path = written(tmp_path, {"rollout": {"groups": 4, "group_size": "${rollout.groups}"}})
    assert printed(capsys, "-c", TINY, "-c", path)["rollout"]["group_size"] == 4


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("--model.algoritm=GRPO", ["no key model.algoritm", "did you mean model.algorithm"]),
        ("--trainer.max_epoch=3", ["no key trainer.max_epoch", "trainer.max_epochs"]),
        ("--rollout.group=3", ["no key rollout.group", "rollout.groups", "rollout.group_size"]),
        ("--model.algorithm.clipp=1", ["model.algorithm.clipp", "GRPO", "allowed: clip, ", "clip_high"]),
        ("--data.batchsize=3", ["data.batchsize", "ReplayDataModule", "allowed: batch_size"]),
        ("--data.priority.epss=3", ["data.priority.epss", "allowed: eps"]),
        ("--model.optimizer.lrr=3", ["model.optimizer.lrr", "AdamW", "allowed: lr, betas"]),
    ],
)
def test_a_wrong_key_is_refused_and_the_right_one_named(capsys, argument, parts):
    said = refused(capsys, "--data.priority=AbsoluteReward", argument)
    for part in parts:
        assert part in said
    assert "--help" in said


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("--rollout.engine.name=hf", ["rollout.engine.name=hf", "one of auto, transformers, vllm"]),
        ("--rollout.groups=many", ["rollout.groups=many", "must be int"]),
        ("--data.decay.tau=long", ["data.decay.tau=long must be float\n"]),
        ("--model.optimizer.lr=high", ["model.optimizer.lr=high must be float\n"]),
        ("--model.optimizer.weight_decay=high", ["model.optimizer.weight_decay=high must be float\n"]),
        ("--data.clock=seconds", ["data.clock=seconds", "one of updates, iterations, lr_path, drift, drift_length"]),
        ("--evaluation.modes=[fast]", ["evaluation.modes=fast", "one of sampled, greedy"]),
        ("--trainer.max_epochs=many", ["trainer.max_epochs=many", "must be int"]),
        ("--model.algorithm=GRPOO", ["model.algorithm=GRPOO", "allowed: ", "DecoupledGRPO", " GRPO,", "SFT"]),
        ("--data.priority=Foo", ["data.priority=Foo", "AbsoluteAdvantage, AbsoluteReward"]),
        ("--data=ReplayModule", ["data=ReplayModule", "DemonstrationsDataModule", " ReplayDataModule"]),
        ("--model.optimizer=Adamm", ["model.optimizer=Adamm", "AdamW"]),
        ("--config=nowhere.yaml", ["config", "does not exist", "nowhere.yaml"]),
        ("--data.draw=uniform", ["data.draw=uniform", "stratified, gumbel, groups, newest, oldest, GumbelTopK"]),
        ("--data.eviction=lifo", ["data.eviction=lifo", "fifo, lowest, Fifo, HardAge, Lowest"]),
        ("--data.weights=mean", ["data.weights=mean", "one of max, sum"]),
        ("--data.log_prob_dtype=int8", ["data.log_prob_dtype=int8", "one of float32, float16"]),
    ],
)
def test_a_wrong_value_is_refused_and_what_is_allowed_named(capsys, argument, parts):
    said = refused(capsys, "--data.decay=ExponentialDecay", argument)
    for part in parts:
        assert part in said


def test_a_wrong_key_of_a_file_is_refused_like_one_of_the_command_line(capsys, tmp_path):
    said = refused(capsys, "-c", written(tmp_path, {"trainer": {"max_epoch": 3}}))
    assert "no key trainer.max_epoch" in said
    assert "trainer.max_epochs" in said
    said = refused(capsys, "-c", written(tmp_path, {"rollot": {"groups": 3}}))
    assert "no key rollot.groups" in said
    assert "rollout.groups" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"rollout: {groups: 3", ["is not a YAML file: ", "line 1"]),
        (b"trainer:\n  max_epochs: \xff\n", ["is not a YAML file: ", "utf-8"]),
        (b"- rollout\n", ["must hold keys and their values, not ['rollout']"]),
        (b"# nothing yet\n", ["must hold keys and their values, not None"]),
    ],
)
def test_a_file_of_a_stack_that_holds_no_keys_is_refused_by_its_name(capsys, tmp_path, content, said):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    message = refused(capsys, "-c", str(path), "-c", written(tmp_path, {"rollout": {"groups": 3}}))
    for part in [str(path), *said]:
        assert part in message


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("--model.algorithm.clip=2", ["clip must be above 0 and at most 1, not 2.0"]),
        ("--rollout.group_size=1", ["rollout.group_size=1", "at least 2", "'mean_std'"]),
        ("--rollout.engine.max_model_len=1", ["max_model_len must be at least 3, not 1"]),
        ("--rollout.environment.id=FrozenLake-v9", ["FrozenLake-v9"]),
        ("--data.batch_size=5", ["data.batch_size=5 must divide rollout.groups x rollout.group_size = 8"]),
        ("--data.alpha=2", ["alpha must be in [0, 1], not 2.0"]),
        ("--data.capacity=2", ["data.capacity=2 must be at least one iteration (8)"]),
        ("--data.max_bytes=10", ["data.max_bytes=10 must be at least", "rollout.engine.max_model_len"]),
        ("--data.clock=drift", ["data.decay.tau=50", "data.clock=drift", "docs/method.md"]),
        ("--data.priority=TDError", ["data.priority=TDError", "AbsoluteAdvantage"]),
        ("--data.seed=-9", ["data.seed must be at least 0, not -9"]),
        ("--data.memory_map=nowhere", ["data.memory_map", "an existing folder", "'nowhere'"]),
        (
            '--data.priority={"class_path": "CustomPriority", "init_args": {"path": "no.such"}}',
            ["path must", "'no.such'"],
        ),
        (
            ["--data.draw=groups", "--data.batch_size=2"],
            ["data.batch_size=2", "multiple of rollout.group_size=4", "data.draw"],
        ),
        ("--model.optimizer.lr=-1", ["model.optimizer: Invalid learning rate: -1.0", "finite and at least 0"]),
        ("--model.optimizer.lr=.nan", ["model.optimizer: Invalid learning rate: nan"]),
        ("--model.path=nowhere", ["model.path='nowhere'", "config.json"]),
        ("--model.algorithm=SFT", ["data=ReplayDataModule", "model.algorithm=SFT", "demonstrations"]),
        ("--rollout.sampling.top_p=0.9", ["top_p=0.9", "top_p=1.0", "allow_mismatch"]),
    ],
)
def test_what_cannot_work_stops_before_a_model_is_loaded(capsys, monkeypatch, argument, parts):
    def never(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("freshper_lightning.policy.net.AutoModelForCausalLM.from_pretrained", never)
    said = refused(capsys, *([argument] if isinstance(argument, str) else argument))
    for part in parts:
        assert part in said


def test_fit_then_validate_and_test_play_the_same_evaluation(capsys, monkeypatch, model_path, tmp_path):
    in_this_process(monkeypatch, model_path, tmp_path, "--trainer.max_epochs=1", "--data.replay_updates=0")
    scalars = read_scalars(tmp_path / "run")
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["rollout"]["groups"] == 2
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    for command in ("validate", "test"):
        folder = tmp_path / command
        arguments = [f"--ckpt_path={last}", "--seed_everything=99", "--trainer.max_epochs=1"]
        in_this_process(monkeypatch, model_path, folder, *arguments, command=command)
        again = read_scalars(folder / "run")
        tags = [tag for tag in scalars if tag.startswith("evaluation/")]
        assert len(tags) == 12
        for tag in tags:
            assert again[tag] == scalars[tag][-1:], tag


def test_a_run_s_configuration_stays_what_it_was_when_the_run_is_tested_and_resumed_in_its_own_folder(
    capsys, monkeypatch, model_path, tmp_path
):
    in_this_process(monkeypatch, model_path, tmp_path, "--trainer.max_epochs=1", "--data.replay_updates=0")
    saved = tmp_path / "run" / "config.yaml"
    first, last = saved.read_text(), tmp_path / "run" / "checkpoints" / "last.ckpt"
    main(["test", "-c", str(saved), f"--ckpt_path={last}"])
    main(["validate", "-c", str(saved)])
    assert saved.read_text() == first
    assert yaml.safe_load((saved.parent / "test.yaml").read_text())["ckpt_path"] == str(last)
    assert yaml.safe_load((saved.parent / "validate.yaml").read_text())["ckpt_path"] is None
    main(["fit", "-c", str(saved), f"--ckpt_path={last}"])
    assert sorted(path.name for path in saved.parent.glob("*.yaml")) == [
        "config.yaml", "hparams.yaml", "test.yaml", "validate.yaml"
    ]  # fmt: skip
    assert saved.read_text() == first
    with pytest.raises(SystemExit, match="optimizer=SGD must be AdamW"):
        main(["fit", "-c", str(saved), f"--ckpt_path={last}", "--model.optimizer=torch.optim.SGD"])
    assert saved.read_text() == first
    main(["fit", "-c", str(saved), f"--ckpt_path={last}", "--trainer.max_epochs=2"])
    assert yaml.safe_load(saved.read_text())["trainer"]["max_epochs"] == 2
    assert (saved.parent / "config.1.yaml").read_text() == first


def test_a_run_without_logs_leaves_a_configuration_of_that_name_alone(monkeypatch, model_path, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("trainer: {logger: false}\n")
    options = ["--config=config.yaml", "--trainer.max_epochs=1", "--data.replay_updates=0"]
    in_this_process(monkeypatch, model_path, tmp_path, *options)
    assert (tmp_path / "config.yaml").read_text() == "trainer: {logger: false}\n"


def test_without_a_checkpoint_the_policy_that_a_run_starts_from_is_played_and_the_result_printed(
    capsys, monkeypatch, model_path, tmp_path
):
    in_this_process(monkeypatch, model_path, tmp_path, "--trainer.max_epochs=1")
    first = read_scalars(tmp_path / "run")["evaluation/sampled/return"][0][1]
    capsys.readouterr()
    in_this_process(monkeypatch, model_path, tmp_path / "test", "--report.enabled=true", command="test")
    assert read_scalars(tmp_path / "test" / "run")["evaluation/sampled/return"] == [(0, first)]
    said = capsys.readouterr().out
    assert re.search(r"^success, sampled +\d+\.\d % \[", said, re.MULTILINE)
    assert f"{first:.3f}" in said


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "freshper_lightning", "fit", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--rollout.groups" in done.stdout


@pytest.mark.parametrize("words", [["--model.algorithm.help", "GRPO"], ["--model.algorithm.help=GRPO"]])
def test_the_help_of_a_class_says_what_each_of_its_keys_means(capsys, words):
    with pytest.raises(SystemExit):
        main(["fit", *words])
    said = " ".join(capsys.readouterr().out.split())
    assert "--model.algorithm.advantage_clip ADVANTAGE_CLIP Largest absolute advantage, applied last." in said
    assert "Weight of the entropy bonus." in said


def test_a_refused_command_says_so_in_its_exit_code(model_path, tmp_path):
    done = in_another_process(model_path, tmp_path, "--rollout.groups=none")
    assert done.returncode == 2
    assert done.stderr.startswith("freshper: error: rollout.groups=none must be int\n")


MORE = {
    "PositiveReward": {"priority": {"class_path": "PositiveReward"}, "draw": "gumbel", "weights": "sum"},
    "GroupSpread": {
        "priority": {"class_path": "GroupSpread", "init_args": {"eps": 0.01}},
        "draw": {"class_path": "WholeGroups", "init_args": {"mass": "max"}},
    },
    "Learnability": {
        "priority": {"class_path": "Learnability"},
        "eviction": {"class_path": "HardAge", "init_args": {"max_age": 30}},
        "decay": {"class_path": "InverseDecay"},
    },
    "CustomPriority": {
        "priority": {
            "class_path": "CustomPriority",
            "init_args": {"path": "tests.replay.test_priority.number_of_turns"},
        },
        "draw": "oldest",
        "eviction": "lowest",
        "log_prob_dtype": "float16",
    },
}


@pytest.mark.parametrize("name", MORE)
def test_every_priority_can_be_named_in_a_file_and_trains(monkeypatch, model_path, tmp_path, name):
    path = written(tmp_path, {"data": {"class_path": "ReplayDataModule", "init_args": MORE[name]}})
    short = ["--trainer.max_epochs=1", "--evaluation.at_start=false", "--evaluation.every_n_iterations=9"]
    in_this_process(monkeypatch, model_path, tmp_path, "-c", str(path), "--data.memory_map", str(tmp_path), *short)
    scalars = read_scalars(tmp_path / "run")
    assert [value for _, value in scalars["replay/skipped"]] == [0.0]
    assert [value for _, value in scalars["replay/pinned"]] == [8.0]
    assert [value for _, value in scalars["replay/evicted"]] == [0.0]
    state = torch.load(next((tmp_path / "run" / "checkpoints").glob("*.buffer")), weights_only=True)
    assert state["priority"].startswith(f"{name}(")


def test_a_seed_of_the_data_beside_that_of_the_run_is_kept(capsys, monkeypatch, model_path, tmp_path):
    short = ["--trainer.max_epochs=1", "--data.replay_updates=0", "--evaluation.at_start=false"]
    in_this_process(monkeypatch, model_path, tmp_path, "--data.seed=0", *short)
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (saved["seed_everything"], saved["data"]["init_args"]["seed"]) == (3, 0)
    capsys.readouterr()
    assert printed(capsys, "-c", TINY)["data"]["init_args"]["seed"] is None


def test_under_slurm_lightning_saves_nothing_in_the_middle_of_an_update(monkeypatch, model_path, tmp_path):
    for name, value in environment(model_path, tmp_path).items():
        monkeypatch.setenv(name, value)
    slurm = {"NTASKS": "1", "JOB_NAME": "train", "JOB_ID": "7", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    trainer = lightning_cli(["-c", str(TINY)], run=False).trainer
    cluster = trainer._accelerator_connector.cluster_environment
    assert isinstance(cluster, SLURMEnvironment)
    assert not cluster.auto_requeue
