import logging
import time
from dataclasses import replace

import gymnasium
import pytest
import torch
from gymnasium.spaces import Text
from transformers import AutoModelForCausalLM

from freshper_lightning.envs.protocol import ReplySpace
from freshper_lightning.rollout.collector import EpisodePlan
from freshper_lightning.rollout.seeds import sampling_seed
from tests.rollout.playing import BORN, ECHO, SLOW, Echo, Slow, plans

both_ways = pytest.mark.parametrize("play", ["lock_step", "streaming"], indirect=True)


class Terse(gymnasium.Env):
    """Says what it is told to about its steps, which is nothing by default, and never ends by itself."""

    observation_space, action_space = Text(1000), ReplySpace()

    def __init__(self, says=None):
        self.says = says or {}

    def reset(self, *, seed=None, options=None):
        return "Go.", {}

    def step(self, action):
        return "Go on.", 0, False, False, self.says


gymnasium.register("freshper-test/Terse-v0", Terse)


def fields(trajectory):
    return {name: getattr(trajectory, name) for name in trajectory.__slots__}


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        for name, value in fields(one).items():
            match = fields(other)[name]
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, match, rtol=0, atol=0)
            else:
                assert value == match or value != value, name


@both_ways
def test_tokens_stand_in_the_trajectory_as_they_were_sampled(collector, engine):
    trajectories = collector().collect(plans(), BORN).trajectories
    for slot, trajectory in enumerate(trajectories):
        sampled = [completion for _, completion in engine.of(slot)]
        spans = trajectory.turns.tolist()
        assert [tuple(trajectory.token_ids[a:b].tolist()) for a, b in spans] == [c.token_ids for c in sampled]
        expected = torch.tensor([value for completion in sampled for value in completion.log_probs])
        torch.testing.assert_close(trajectory.behavior_log_probs, expected, rtol=0, atol=0)
        assert trajectory.sampled_mask().sum() == sum(len(completion.token_ids) for completion in sampled)
        for (start, _), (request, _) in zip(spans, engine.of(slot), strict=True):
            assert trajectory.token_ids[:start].tolist() == list(request.prompt_token_ids)


@both_ways
def test_stored_log_probs_are_those_of_the_model_on_the_stored_tokens(collector, model_path):
    model = AutoModelForCausalLM.from_pretrained(model_path)
    for trajectory in collector().collect(plans(groups=2), BORN).trajectories:
        with torch.no_grad():
            log_probs = model(trajectory.token_ids[None].long()).logits[0].log_softmax(-1)
        positions = trajectory.sampled_positions()
        tokens = trajectory.token_ids[positions].long()
        expected = log_probs[positions - 1, tokens]
        torch.testing.assert_close(trajectory.behavior_log_probs, expected, rtol=0, atol=1e-5)


@both_ways
def test_every_plan_gives_one_trajectory_that_says_what_was_played(collector):
    asked = plans()
    collection = collector().collect(asked, BORN)
    assert len(collection.trajectories) == len(asked)
    for plan, trajectory in zip(asked, collection.trajectories, strict=True):
        assert (trajectory.group, trajectory.member, trajectory.seed) == (plan.group, plan.member, plan.instance_seed)
        assert (trajectory.task, trajectory.born) == (ECHO, BORN)
        assert trajectory.rewards.tolist() == [1.0, 2.0, 3.0]
        assert trajectory.weight_versions.tolist() == [-1, -1, -1]
        assert trajectory.advantages is None
        assert not trajectory.truncated


@both_ways
def test_a_users_own_environment_is_heard_and_answered(collector, chat):
    collection = collector().collect(plans(groups=1, size=1), BORN)
    text = chat.decode(collection.trajectories[0].token_ids.tolist(), keep_special=True)
    assert text.startswith("<|im_start|>system\nSay something.<|im_end|>\n<|im_start|>user\ninstance 100<|im_end|>\n")
    assert "<|im_end|>\n<|im_start|>user\nturn 2 of instance 100<|im_end|>\n<|im_start|>assistant\n" in text
    assert "turn 3" not in text  # the observation that ends an episode is shown to nobody
    assert collection.transcript == text


@both_ways
def test_members_of_a_group_share_the_instance_and_sample_for_themselves(collector):
    trajectories = collector("freshper/FrozenLake-v0", max_turns=2).collect(plans(groups=2), BORN).trajectories
    prompts = [tuple(t.token_ids[: t.turns[0, 0]].tolist()) for t in trajectories]
    assert len(set(prompts[:3])) == len(set(prompts[3:])) == 1
    assert prompts[0] != prompts[3]
    assert len({tuple(t.token_ids.tolist()) for t in trajectories}) == len(trajectories)


def test_equal_plans_give_equal_episodes_whatever_the_global_random_state(collector):
    torch.manual_seed(1)
    first = collector().collect(plans(), BORN).trajectories
    torch.manual_seed(2)
    again = collector()
    again.collect(plans(key=5), BORN)
    assert_same(first, again.collect(plans(), BORN).trajectories)
    other = again.collect(plans(key=1), BORN).trajectories
    assert all(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(first, other, strict=True))


@both_ways
def test_every_turn_is_sampled_with_the_seed_of_its_place(collector, engine):
    asked = plans(groups=2)
    collector().collect(asked, BORN)
    for slot, plan in enumerate(asked):
        seeds = [request.seed for request, _ in engine.of(slot)]
        assert seeds == [sampling_seed(plan.sampling_key, turn) for turn in range(3)]


def test_a_temperature_for_one_collection_replaces_the_configured_one(collector, engine):
    greedy = collector().collect(plans(groups=1), BORN, temperature=0.0).trajectories
    assert {request.temperature for request, _ in engine.record} == {0.0}
    assert len({tuple(t.token_ids.tolist()) for t in greedy}) == 1
    assert all((t.behavior_log_probs == 0).all() for t in greedy)


@both_ways
def test_a_reply_cut_short_is_closed_by_an_end_token_that_is_not_sampled(collector, chat, engine):
    trajectories = collector(max_tokens=2).collect(plans(), BORN).trajectories
    cut = [completion for _, completion in engine.record if completion.finish_reason == "length"]
    assert cut
    for trajectory in trajectories:
        mask = trajectory.sampled_mask()
        for _, end in trajectory.turns[:-1].tolist():
            closing = end if trajectory.token_ids[end - 1] != chat.end_token_id else end - 1
            assert trajectory.token_ids[closing] == chat.end_token_id
            assert bool(mask[closing]) == (closing == end - 1)


@both_ways
def test_an_episode_without_room_for_two_more_tokens_is_truncated(collector, engine):
    playing = collector("freshper-test/Terse-v0", max_tokens=100, max_context=200)
    collection = playing.collect(plans(groups=3), BORN)
    for trajectory in collection.trajectories:
        assert trajectory.truncated
        assert trajectory.token_ids.numel() == trajectory.turns[-1, 1] <= 200
    exchanges = engine.record
    assert min(request.max_tokens for request, _ in exchanges) < max(request.max_tokens for request, _ in exchanges)
    for request, completion in exchanges:
        assert request.max_tokens == min(100, 200 - len(request.prompt_token_ids)) >= 2
        assert len(completion.token_ids) <= request.max_tokens


@pytest.mark.parametrize("says", [{}, {"success": None}])
def test_an_environment_that_says_nothing_about_its_steps_has_valid_ones_and_no_verdict(collector, says):
    collection = collector("freshper-test/Terse-v0", max_context=200, says=says).collect(plans(groups=1), BORN)
    assert all(t.success is None and t.invalid_turns == 0 for t in collection.trajectories)
    assert collection.num_valid == collection.num_effective == collection.num_env_steps


@both_ways
def test_the_format_penalty_counts_once_per_invalid_turn_and_stays_out_of_the_rewards(collector, chat):
    collection = collector(format_penalty=-0.5, max_tokens=2).collect(plans(), BORN)
    invalid = 0
    for trajectory in collection.trajectories:
        replies = [chat.decode(trajectory.token_ids[a:b].tolist()) for a, b in trajectory.turns]
        wrong = sum(not any(character.isalnum() for character in reply) for reply in replies)
        assert trajectory.invalid_turns == wrong
        assert trajectory.format_penalty == -0.5 * wrong
        assert trajectory.rewards.tolist() == [1.0, 2.0, 3.0]
        assert trajectory.success == any(character.isalnum() for character in replies[-1])
        invalid += wrong
    assert 0 < invalid < collection.num_env_steps == 36
    assert collection.num_valid == 36 - invalid
    assert collection.num_effective < collection.num_valid


def test_replies_of_an_untrained_policy_never_raise_in_frozen_lake(collector):
    playing = collector("freshper/FrozenLake-v0", format_penalty=-0.1, max_turns=5)
    collection = playing.collect(plans(groups=2), BORN)
    for trajectory in collection.trajectories:
        assert trajectory.num_turns == trajectory.invalid_turns == 5
        assert (trajectory.episode_return, trajectory.success, trajectory.truncated) == (0.0, False, True)
        assert trajectory.training_return == pytest.approx(-0.5)
    assert collection.num_valid == 0


@both_ways
def test_counts_are_those_of_what_was_played(collector):
    collection = collector().collect(plans(), BORN)
    assert collection.num_sampled_tokens == sum(t.num_sampled for t in collection.trajectories)
    assert collection.num_env_steps == sum(t.num_turns for t in collection.trajectories)
    assert collection.seconds_generating > 0
    assert (collection.failures, collection.num_dropped) == ([], 0)


@both_ways
def test_nothing_to_play_is_an_empty_collection(collector):
    collection = collector().collect([], BORN)
    assert (collection.trajectories, collection.transcript) == ([], "")
    assert collection.num_env_steps == 0


@pytest.mark.parametrize("fails_at", [0, 2])
def test_a_failing_environment_costs_its_group_and_is_counted_and_logged(collector, fails_at, caplog):
    playing = collector(fails_at=fails_at, bad_seeds=(102,), max_failure_share=0.5)
    with caplog.at_level(logging.ERROR):
        collection = playing.collect(plans(), BORN)
    assert [t.group for t in collection.trajectories] == [0] * 3 + [1] * 3 + [3] * 3
    assert len(collection.failures) == 3
    assert f"instance seed 102): OSError: server lost in turn {fails_at}" in collection.failures[0]
    assert "Traceback" in caplog.text
    assert "in _maybe_fail" in caplog.text
    assert collection.num_env_steps == 9 * 3 + 3 * max(fails_at - 1, 0)


class FailsOnce(Echo):
    """Only the first member to reach the turn fails."""

    failed = False
    made = 0
    closed = 0

    def __init__(self):
        super().__init__()
        FailsOnce.made += 1

    def _maybe_fail(self):
        if self.instance == 102 and self.turn == 1 and not FailsOnce.failed:
            FailsOnce.failed = True
            raise OSError("once")

    def close(self):
        FailsOnce.closed += 1
        raise OSError("and what it held is lost")


gymnasium.register("freshper-test/FailsOnce-v0", FailsOnce)


def test_the_others_of_a_failed_group_are_dropped_unplayed_and_counted(collector, engine, monkeypatch, caplog):
    FailsOnce.failed, FailsOnce.made, FailsOnce.closed = False, 0, 0
    playing = collector("freshper-test/FailsOnce-v0")
    collection = playing.collect(plans(), BORN)
    assert [t.group for t in collection.trajectories] == [0] * 3 + [1] * 3 + [3] * 3
    assert (len(collection.failures), collection.num_dropped) == (1, 2)
    assert len(engine.record) == 12 + 9 + 9
    assert len(playing.collect(plans(), BORN).trajectories) == 12
    assert FailsOnce.made == 13  # a fresh environment takes the slot of the one that raised
    assert FailsOnce.closed == 1
    assert "could not be closed: OSError: and what it held is lost" in caplog.text
    monkeypatch.setattr(FailsOnce, "close", Echo.close)


@pytest.mark.parametrize(("share", "stops"), [(0.24, True), (0.25, False)])
def test_failures_beyond_the_share_stop_the_run_with_the_first_one_as_cause(collector, share, stops):
    playing = collector(fails_at=1, bad_seeds=(102,), max_failure_share=share)
    if not stops:
        assert len(playing.collect(plans(), BORN).failures) == 3
        return
    with pytest.raises(RuntimeError, match=r"3 of 12 episodes .*max_failure_share 0.24.*server lost") as raised:
        playing.collect(plans(), BORN)
    assert isinstance(raised.value.__cause__.__cause__, OSError)


@both_ways
def test_an_observation_that_is_no_text_is_a_failure_of_the_environment(collector):
    with pytest.raises(RuntimeError, match="must be text"):
        collector(returns="number").collect(plans(), BORN)


@both_ways
def test_a_first_prompt_beyond_the_context_is_a_failure_in_words(collector):
    with pytest.raises(RuntimeError, match=r"first prompt of .* tokens leaves no room in 50"):
        collector(max_context=50).collect(plans(), BORN)


def test_environments_play_side_by_side_in_lock_step_where_threads_allow_and_give_the_same_episodes(collector):
    found = {}
    for threads, most in ((None, 1), (1, 1), (3, 3)):
        Slow.begin()
        found[threads] = collector(SLOW, threads=threads).collect(plans(groups=3), BORN).trajectories
        assert Slow.most == most
    for one, other in zip(found[1], found[3], strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.behavior_log_probs, other.behavior_log_probs)
    assert len(found[3]) == 9


class FailsInReverse(Slow):
    """The environments of three groups fail, and the later ones sooner; counts those that were reset."""

    resets = 0

    def reset(self, *, seed=None, options=None):
        FailsInReverse.resets += 1
        time.sleep(0.05 * max(103 - seed, 1))
        if seed != 103:
            raise OSError(f"no server for instance {seed}")
        return super(Slow, self).reset(seed=seed)

    def _work(self, what):
        pass


gymnasium.register("freshper-test/FailsInReverse-v0", FailsInReverse)


@pytest.mark.parametrize("threads", [1, 4])
def test_what_fails_side_by_side_is_heard_in_order(collector, threads):
    playing = collector("freshper-test/FailsInReverse-v0", max_failure_share=1.0, threads=threads)
    collection = playing.collect(plans(size=1), BORN)
    assert [failure[-3:] for failure in collection.failures] == ["100", "101", "102"]
    assert [t.seed for t in collection.trajectories] == [103]


@pytest.mark.parametrize("threads", [1, 4])
def test_too_many_failures_stop_what_has_not_begun(collector, threads):
    FailsInReverse.resets = 0
    playing = collector("freshper-test/FailsInReverse-v0", max_failure_share=0.0, threads=threads)
    with pytest.raises(RuntimeError, match="1 of 32 episodes"):
        playing.collect([EpisodePlan(i, 0, 100, (0, i)) for i in range(32)], BORN)
    assert FailsInReverse.resets <= 2 * threads


def test_progress_adds_up_to_the_number_of_episodes(collector):
    told = []
    collector("freshper/FrozenLake-v0", max_turns=3).collect(plans(), BORN, progress=told.append)
    assert told == [12]


def test_environments_are_made_once_and_reused(collector, engine):
    playing = collector()
    playing.collect(plans(groups=2), BORN)
    envs = dict(playing._envs)
    playing.collect(plans(groups=1), replace(BORN, iteration=4))
    assert playing._envs == envs
    assert len(envs) == 6
    playing.close()
    assert not playing._envs


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format_penalty", 0.1),
        ("format_penalty", float("nan")),
        ("max_failure_share", 1.5),
        ("max_context", 2),
        ("threads", 0),
        ("play", "x"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(collector, field, value):
    with pytest.raises(ValueError, match=f"{field}.*{value}"):
        collector(**{field: value})


def test_an_unknown_environment_is_refused_before_anything_is_played(collector):
    with pytest.raises(ValueError, match="freshper-test/Ecko-v0"):
        collector("freshper-test/Ecko-v0")
