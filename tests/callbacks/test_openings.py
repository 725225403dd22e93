"""What an environment's first words may be is found out before a model is loaded."""

import os
import random

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Text
from transformers import AutoTokenizer

from datamodules.demonstrations import DemonstrationsDataModule
from freshper_lightning.algorithms import SFT
from freshper_lightning.callbacks.evaluation import EvaluationCallback
from freshper_lightning.callbacks.openings import TRIED, check_openings
from freshper_lightning.envs.protocol import ReplySpace
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.rollout.collector import EnvironmentConfig
from freshper_lightning.rollout.conversation import ChatFormat
from freshper_lightning.rollout.seeds import evaluation_instance_seed, training_instance_seed
from tests.loop import fit, policy, replay_data, rollout_callback, trainer

ROOM = 120


class Opens(gymnasium.Env):
    """Begins with as many letters as ``letters`` has for the n-th reset; after None, which raises, nothing works."""

    observation_space = Text(1 << 20)
    action_space = ReplySpace()
    resets = 0
    open = 0

    def __init__(self, letters: list, system: str | None = None, number: bool = False, closes: bool = True):
        self.letters, self.system, self.number, self.closes, self.broken = letters, system, number, closes, False
        Opens.open += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        random.random(), np.random.rand(), torch.rand(1)
        letters = self.letters[Opens.resets % len(self.letters)]
        Opens.resets += 1
        if letters is None or self.broken:
            self.broken = True
            raise OSError(f"instance {seed} is lost")
        return 7 if self.number else "a" * letters, {} if self.system is None else {"system": self.system}

    def step(self, action):
        return "", 0.0, True, False, {}

    def close(self):
        Opens.open -= 1
        if self.broken or not self.closes:
            raise OSError("the server does not stop")


gymnasium.register("tests/Opens-v0", entry_point=Opens)


@pytest.fixture(autouse=True)
def _from_the_first_instance():
    Opens.resets = Opens.open = 0
    yield
    assert Opens.open == 0


@pytest.fixture
def chat(model_path):
    return ChatFormat(AutoTokenizer.from_pretrained(model_path))


def opens(*letters, **kwargs):
    return EnvironmentConfig("tests/Opens-v0", {"letters": list(letters), **kwargs})


def check(chat, environment, room=ROOM):
    check_openings("rollout.environment", environment, range(0, 40, 2), chat, room)


def test_one_instance_that_begins_is_enough_and_no_more_are_tried(chat):
    check(chat, opens(500, None, 3, 500))
    assert Opens.resets == 3


def test_an_environment_that_does_not_close_is_refused(chat):
    with pytest.raises(ConfigurationError, match=r"rollout\.environment: OSError: the server does not stop"):
        check(chat, opens(3, closes=False))


def test_what_a_module_sets_when_it_is_imported_stays_set(tmp_path, monkeypatch, chat):
    (tmp_path / "sets_a_key.py").write_text(
        "import os, gymnasium\n"
        "from tests.callbacks.test_openings import Opens\n"
        "os.environ['KEY_OF_A_SERVER'] = '1'\n"
        "gymnasium.register('SetsAKey-v0', entry_point=Opens)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("KEY_OF_A_SERVER", "0")
    check(chat, EnvironmentConfig("sets_a_key:SetsAKey-v0", {"letters": [1]}))
    assert os.environ["KEY_OF_A_SERVER"] == "1"


def test_room_for_two_tokens_is_enough_and_the_least_that_would_do_is_named(chat):
    tokens = len(chat.prompt_ids("aaa"))
    check(chat, opens(3), room=tokens + 2)
    message = rf"rollout\.engine\.max_model_len={tokens + 1} must be at least {tokens + 2}: .*rollout\.environment"
    with pytest.raises(ConfigurationError, match=message):
        check(chat, opens(50, 3, 4, None), room=tokens + 1)
    assert Opens.resets == TRIED + 1


def test_an_environment_of_which_no_instance_can_be_played_is_refused_with_its_first_error(chat):
    message = rf"rollout\.environment=tests/Opens-v0 cannot be played: the first {TRIED} instances.*OSError.*0 is lost"
    with pytest.raises(ConfigurationError, match=message):
        check(chat, opens(None))
    with pytest.raises(ConfigurationError, match=r"an observation must be text \(str\), not int"):
        check(chat, opens(1, number=True))
    with pytest.raises(
        ConfigurationError, match=r"rollout\.environment: .*argument: .letters.; its arguments are: letters"
    ):
        check(chat, EnvironmentConfig("tests/Opens-v0", {"letter": [1]}))


def test_a_template_without_a_system_role_is_refused_where_the_environment_has_a_system_prompt(model_path):
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tokenizer.chat_template = template + tokenizer.chat_template
    check(ChatFormat(tokenizer), opens(1))
    with pytest.raises(ConfigurationError, match=r"model\.path: .*no system role.*rollout\.environment=tests/Opens-v0"):
        check(ChatFormat(tokenizer), opens(1, system="Play."))


def test_random_states_are_those_from_before(chat):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    check(chat, opens(1))
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


@pytest.fixture
def never_loaded(monkeypatch):
    def never(*_):
        raise AssertionError("a model was loaded before the configuration was refused")

    monkeypatch.setattr(PolicyNet, "from_pretrained", never)


@pytest.mark.usefixtures("never_loaded")
@pytest.mark.parametrize("where", ["rollout", "evaluation"])
def test_a_run_ends_before_its_model_is_loaded(tmp_path, model_path, where):
    fields = {"environment": opens(400)} if where == "rollout" else {}
    held_out = EvaluationCallback(episodes=4, environment=opens(400) if where == "evaluation" else None)
    with pytest.raises(ConfigurationError, match=rf"max_model_len=160 must be at least \d+: .*{where}\.environment"):
        fit(tmp_path, policy(model_path), replay_data(), rollout=rollout_callback(**fields), evaluation=held_out)


def test_what_a_run_does_not_play_is_not_begun(tmp_path, model_path):
    """An evaluation of its own environment has no use for that of training, nor have demonstrations."""
    lake = EnvironmentConfig("tests/HashScore-v0")
    fields = {"rollout": rollout_callback(environment=opens(None)), "logger": False, "enable_checkpointing": False}
    fields |= {"evaluation": EvaluationCallback(episodes=2, modes=["greedy"], environment=lake)}
    trainer(tmp_path, **fields).validate(policy(model_path), dataloaders=[0], verbose=False)
    demonstrations = DemonstrationsDataModule(lambda seed: [("q", "a")], episodes=2, batch_size=2)
    fit(tmp_path, policy(model_path, algorithm=SFT()), demonstrations, iterations=1, **fields)
    assert Opens.resets == 0


def test_the_instances_that_are_tried_are_those_of_the_run(tmp_path, model_path):
    seen = []

    class Seen(Opens):
        def reset(self, *, seed=None, options=None):
            seen.append(seed)
            return super().reset(seed=seed)

    gymnasium.register("tests/Seen-v0", entry_point=Seen)
    seen_by = {"letters": [1]}
    run = rollout_callback(environment=EnvironmentConfig("tests/Seen-v0", seen_by), seed=5)
    held_out = EvaluationCallback(episodes=2, instances=3, modes=["greedy"], at_start=False)
    fit(tmp_path, policy(model_path), replay_data(), rollout=run, evaluation=held_out, iterations=1)
    assert seen[:2] == [training_instance_seed(5, 1, 0), evaluation_instance_seed(3, 0)]
    assert seen[2:] == [training_instance_seed(5, 1, group) for group in (0, 1) for _ in range(4)] + [
        evaluation_instance_seed(3, episode) for episode in (0, 1)
    ]
