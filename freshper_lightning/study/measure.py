"""Everything that is measured of one policy on the probe and on fresh episodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.policy.scoring import chunks, token_log_probs
from freshper_lightning.rollout.seeds import stable_hash
from freshper_lightning.study.alignment import Alignment
from freshper_lightning.study.bootstrap import Estimate, resamples
from freshper_lightning.study.divergence import divergence, ess_bound, staleness
from freshper_lightning.study.episodes import HeldOutPlay, play
from freshper_lightning.study.gradients import group_gradients, log_prob_gradients, menu_products, products
from freshper_lightning.study.menu import MENU, ON_POLICY
from freshper_lightning.study.sketch import CountSketch
from freshper_lightning.study.table import Key, Row
from freshper_lightning.trajectory import Trajectory

Groups = list[list[Trajectory]]


@dataclass(frozen=True, eq=False)
class Study:
    """One frozen probe, and how it looks to later policies.

    Args:
        how: How the run that is studied plays held-out instances.
        start: Folder of the policy that samples the probe.
        seed: Of the run.
        groups: Groups of the probe, and of each half of the fresh episodes.
        draws: Bootstrap samples.
        device: Where models run.
    """

    how: HeldOutPlay
    start: Path
    seed: int
    groups: int
    draws: int
    device: torch.device

    def probe(self) -> Groups:
        """The frozen trajectories: of instances that are never trained on."""
        return play(self.how, self.start, self.seed, "probe", self.groups, self.device)

    def rows(self, key: Key, policy: Path, probe: Groups) -> list[Row]:
        """All measures of a later policy, from its folder; of a variant only those that need no fresh episodes."""
        net = PolicyNet.from_pretrained(policy).to(self.device)
        current = self._log_probs(net, probe)
        samples = resamples(self.groups, self.draws, self.seed)
        ratios = [_less(now, group) for now, group in zip(_grouped(current, probe), probe, strict=True)]
        rows = key.rows(staleness(ratios, samples))
        if key.variant:
            return rows
        fresh = play(self.how, policy, self.seed, "fresh", 2 * self.groups, self.device)
        rows += key.rows(self._of_fresh(fresh))
        return rows + self._gradients(key, net, probe, fresh, current)

    def _of_fresh(self, fresh: Groups) -> dict[str, Estimate]:
        """Divergence of the current to the behavior policy on samples of the former, and how well it does."""
        behavior = self._log_probs(PolicyNet.from_pretrained(self.start).to(self.device), fresh)
        ratios = [_less(then, group) for then, group in zip(_grouped(behavior, fresh), fresh, strict=True)]
        samples = resamples(len(fresh), self.draws, self.seed)
        returns = np.array([np.mean([item.episode_return for item in group]) for group in fresh])
        score = Estimate(float(returns.mean()), *np.quantile(returns[samples].mean(1), [0.025, 0.975]).tolist())
        found = divergence("kl_current_behavior", ratios, samples)
        bound = ess_bound(found["kl_current_behavior_sequence"])
        return found | {"ess_bound_sequence": bound, "return": score}

    def _gradients(
        self, key: Key, net: PolicyNet, probe: Groups, fresh: Groups, current: Sequence[Tensor]
    ) -> list[Row]:
        temperature = self.how.rollout.sampling.temperature
        halves = (fresh[: self.groups], fresh[self.groups :])  # each an optimizer batch, as the probe is
        own = torch.cat([log_prob_gradients(ON_POLICY, half, self._log_probs(net, half)) for half in halves])
        sketch = CountSketch(sum(p.numel() for p in net.parameters() if p.requires_grad))
        of_fresh = group_gradients(net, fresh, [own], temperature, self.device, sketch)[0]
        one, two, three = (resamples(self.groups, self.draws, stable_hash("staleness", self.seed, i)) for i in range(3))
        alignment = Alignment(self.groups, (one, two, three))
        rows = key.rows({"ceiling": alignment.ceiling(products(of_fresh, of_fresh))})
        by_token = {name: log_prob_gradients(loss, probe, current) for name, loss in MENU.items()}
        for name, found in menu_products(net, probe, by_token, of_fresh, temperature, self.device, sketch):
            rows += key.rows(alignment.of_loss(found), name)
        return rows

    def _log_probs(self, net: PolicyNet, groups: Groups) -> list[Tensor]:
        items = [item for group in groups for item in group]
        return token_log_probs(net, chunks(items), self.how.rollout.sampling.temperature, self.device)


def _grouped(values: Sequence[Tensor], groups: Groups) -> list[list[Tensor]]:
    """Values by trajectory, as values by group and trajectory."""
    following = iter(values)
    return [[next(following) for _ in group] for group in groups]


def _less(log_probs: Sequence[Tensor], group: Sequence[Trajectory]) -> list[Tensor]:
    """Log-ratios [S] of other log-probabilities to those that a group was sampled with."""
    return [ours - item.behavior_log_probs for ours, item in zip(log_probs, group, strict=True)]
