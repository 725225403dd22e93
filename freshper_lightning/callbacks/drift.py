"""How far each update moves the policy, measured on a few of the iteration's own tokens."""

import logging
import math
import time
from collections.abc import Sequence

import torch
from lightning import Trainer
from torch import Tensor

from datamodules.replay import ReplayDataModule
from freshper_lightning.algorithms.losses import k3
from freshper_lightning.callbacks.parts import summing
from freshper_lightning.errors import NumericsError
from freshper_lightning.policy.module import PolicyModule
from freshper_lightning.policy.packing import TrajectoryBatch, collate
from freshper_lightning.policy.scoring import evaluate
from freshper_lightning.rollout.seeds import stable_hash
from freshper_lightning.trajectory import Trajectory, Transcript

logger = logging.getLogger(__name__)

PROBE_SHARE = 16
"""The probe has one of so many sampled tokens of an optimizer batch: its forward pass is small beside an update."""


class DriftMeter:
    """The drift d of each applied update in nats per sampled token, equal on all ranks; at least 0.

    d is the mean of ``r - 1 - ln r``, ``r = pi_after / pi_before`` at the sampling temperature, over the tokens of a
    probe (:func:`choose_probe`) that stays the same for an iteration: an estimate of KL(before || after) in the
    conversations of that iteration's rollouts. The probe is a function of the fresh trajectories, and its
    log-probabilities are one of the weights, so that nothing has to be saved for a resumed run to measure the same.

    Source: Schulman 2020, estimator k3; a log-ratio above 20 counts as 20.

    Args:
        seed: Seed of the choice of probes.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.latest: float | None = None
        """Drift of the last update that was measured."""
        self.seconds = 0.0
        """Time spent on measuring since it was last reset."""
        self._probe: TrajectoryBatch | None = None
        self._log_probs: Tensor | None = None

    def restart(self) -> None:
        """Have the next :meth:`before` choose a probe from new trajectories."""
        self._probe = self._log_probs = None

    def before(self, trainer: Trainer, module: PolicyModule, data: ReplayDataModule) -> None:
        """Forward the probe ahead of the first update of an iteration, or of a resumed run; a collective then."""
        if self._probe is not None:
            return
        start = time.perf_counter()
        fresh = data.fresh()
        self._probe = collate(choose_probe(fresh, data.batches_per_epoch, self.seed), phase="fresh").to(module.device)
        self._log_probs = _log_probs(trainer, module, self._probe)
        self.seconds += time.perf_counter() - start

    def after(self, trainer: Trainer, module: PolicyModule) -> float:
        """The drift of the update that has just been applied; a collective.

        It is 0, with a warning, where no rank has a fresh trajectory to measure it on.

        Raises:
            RuntimeError: :meth:`before` has not been called.
            NumericsError: A token's probability has become 0 or no number.
        """
        if self._probe is None or self._log_probs is None:
            raise RuntimeError("there is no drift without the log-probabilities from before the update")
        start = time.perf_counter()
        before, self._log_probs = self._log_probs, _log_probs(trainer, module, self._probe)
        terms = k3(self._log_probs.double() - before.double())
        sums = [0.0, 0.0] if self._probe.is_filler else [float(terms.sum()), float(len(terms))]
        self.latest = mean_drift(*summing(trainer)(torch.tensor(sums, dtype=torch.float64)).tolist())
        self.seconds += time.perf_counter() - start
        return self.latest


def choose_probe(trajectories: Sequence[Trajectory], batches: int, seed: int) -> list[Transcript]:
    """The conversations that drift is measured on: 1/16 of the sampled tokens of one of ``batches`` optimizer batches.

    Trajectories are taken whole, in the order of a hash of seed, group and member; the last one is cut behind the token
    that completes the number, so that it is never exceeded and long trajectories are as likely as short ones. At least
    one token is taken where there is one.
    """
    sampled = sum(trajectory.num_sampled for trajectory in trajectories)
    left = max(sampled // (PROBE_SHARE * batches), 1)
    probe: list[Transcript] = []
    for trajectory in sorted(trajectories, key=lambda t: stable_hash("drift probe", seed, t.group, t.member)):
        if left == 0:
            break
        probe.append(beginning(trajectory, left))
        left -= probe[-1].num_sampled
    return probe


def beginning(transcript: Transcript, sampled: int) -> Transcript:
    """The conversation up to its ``sampled``-th sampled token (at least 1), or all turns where there are fewer."""
    end = int(transcript.sampled_positions()[:sampled][-1]) + 1
    turns = transcript.turns[transcript.turns[:, 0] < end]
    return Transcript(transcript.token_ids[:end], turns.clamp(max=end))


def mean_drift(total: float, count: float) -> float:
    """``total`` nats over ``count`` tokens, at least 0; 0, with a warning, where there is no token.

    Raises:
        NumericsError: The total is not finite: a token's probability has become 0 or no number.
    """
    if count == 0:
        logger.warning("no fresh trajectory is left to measure drift on: the clock of drift stands still")
        return 0.0
    if not math.isfinite(total):
        raise NumericsError(
            f"the update moved the policy by {total} nats on {count:g} tokens of the iteration; resume from the newest"
            " checkpoint with a smaller learning rate"
        )
    return max(total / count, 0.0)  # rounding can leave a trace below 0


def _log_probs(trainer: Trainer, module: PolicyModule, probe: TrajectoryBatch) -> Tensor:
    """float32 [S], on the CPU: log-probabilities of the probe's tokens, in the precision that training has."""
    with trainer.precision_plugin.forward_context():
        return evaluate(module.policy, probe, module.temperature).log_probs.cpu()
