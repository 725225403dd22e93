"""Episodes whose replies somebody else wrote, played by the product's own code."""

from freshper_lightning.envs.protocol import make_text_env
from freshper_lightning.rollout.engine import Completion
from freshper_lightning.rollout.episode import Episode, EpisodePlan, reset
from freshper_lightning.trajectory import ClockReading


def played(chat, environment, replies, seed=8):
    """The trajectory of an episode in which the policy says ``replies``, as far as it goes."""
    env, plan = make_text_env(environment.id, environment.kwargs), EpisodePlan(0, 0, seed, (0,))
    episode = Episode.start(plan, env, reset(env, plan), chat, 10_000)
    for reply in replies:
        if episode.running:
            ids = tuple(chat.reply_ids(reply))
            said = episode.take(Completion(0, ids, (-0.5,) * len(ids), "stop", 0))
            episode.settle(episode.play(said))
    return episode.trajectory(ClockReading(), environment.id, -0.1)
