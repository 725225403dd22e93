"""How fast replayed data goes stale: tau that follows the measured drift, and freshness measured per trajectory."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from numpy.typing import NDArray

from datamodules.checks import LIKE_50_UPDATES
from datamodules.replay import ReplayDataModule
from freshper_lightning.callbacks.metrics import log_scalars
from freshper_lightning.callbacks.parts import callback_of, policy_module, replay_data, summing
from freshper_lightning.callbacks.rollout import RolloutCallback
from freshper_lightning.errors import ConfigurationError, NumericsError, require_setting
from freshper_lightning.policy.module import PolicyModule, StepObservation
from freshper_lightning.policy.packing import TrajectoryBatch, collate
from freshper_lightning.policy.scoring import evaluate
from freshper_lightning.replay import AdaptiveTau, ExponentialDecay, HeldOut, LogRatios
from freshper_lightning.replay.adaptive import LEVELS, Growth, Level
from freshper_lightning.replay.schemes import GumbelTopK, Stratified, WholeGroups
from freshper_lightning.rollout.seeds import stable_hash
from freshper_lightning.trajectory import ClockReading, Trajectory

BOUNDS = (1.0, 1000.0)
"""Least and greatest tau by default, in updates or iterations."""
KEPT_ITERATIONS = 4
"""Least number of iterations that held-out trajectories are kept for: the newest have age 0, and show no drift."""
LEAST_WINDOW = 32
"""Observations of which enough have an age above 0 for a fit, however they fall into its buckets."""


@dataclass(frozen=True)
class ProbeConfig:
    """Trajectories that are held out of training, and how often the policy is asked about them.

    Where there are any, enough of them are kept for a fit: at least three ages above 0, in enough observations.

    Raises:
        ConfigurationError: A number is out of range.
    """

    held_out: int = 0
    """Trajectories of each iteration, over all ranks, that are never trained on; 0 switches probing off."""
    every_n_iterations: int = 1
    """Iterations from one probe to the next."""
    batch_size: int = 32
    """Trajectories of a probe, over all ranks: forward passes without gradient, evenly over age."""
    capacity: int = 512
    """Held-out trajectories that are kept, over all ranks; the oldest go first."""
    window: int = 512
    """Observations that the fits use, the latest ones."""

    def __post_init__(self) -> None:
        require_setting("freshness.probe.held_out", self.held_out, self.held_out >= 0, "at least 0")
        for key in ("every_n_iterations", "batch_size", "window"):
            require_setting(f"freshness.probe.{key}", getattr(self, key), getattr(self, key) >= 1, "at least 1")
        least = max(KEPT_ITERATIONS * self.held_out, self.batch_size)
        why = f"{KEPT_ITERATIONS} x held_out, so that there are ages to tell apart, and batch_size"
        require_setting("freshness.probe.capacity", self.capacity, self.capacity >= least, f"at least {least} ({why})")
        enough = not self.held_out or self.window >= LEAST_WINDOW
        require_setting(
            "freshness.probe.window",
            self.window,
            enough,
            f"at least {LEAST_WINDOW}, below which nothing is ever fitted",
        )


@dataclass(frozen=True, eq=False)
class _Visit:
    """What a micro-batch showed of its trajectories, with one entry each."""

    ids: NDArray[np.int64]
    """int64 [B]."""
    divergences: NDArray[np.float64]
    """float64 [B]: mean over sampled tokens of k3, in nats per token: estimates KL(behavior || current)."""
    log_ratios: NDArray[np.float64]
    """float64 [S]: of current to behavior policy at each sampled token."""
    segments: NDArray[np.int64]
    """int64 [S]: the entry that each token belongs to."""
    ages: NDArray[np.float64]
    """float64 [B]."""

    @classmethod
    def of(cls, batch: TrajectoryBatch, observation: StepObservation) -> "_Visit":
        segments, ages = batch.segments.cpu(), batch.ages.cpu()
        divergence = observation.token_metrics["kl_behavior"].double().cpu()
        sums = torch.zeros(len(ages), dtype=torch.float64).index_add_(0, segments, divergence)
        log_ratio = observation.token_metrics["log_ratio"].double().cpu().numpy()
        divergences = (sums / batch.lengths.cpu()).numpy()
        return cls(batch.ids.cpu().numpy(), divergences, log_ratio, segments.numpy(), ages.double().numpy())


class FreshnessCallback(Callback):
    """Reads drift off trajectories that no update was trained on; writes back what updates say of the others.

    With ``adapt`` tau follows ``alpha x tau_hat``, at the start of an iteration, after the rollout. With ``measured``
    every applied update sets the freshness of the trajectories it was trained on, fresh and replayed, to
    ``exp(-eta x divergence)`` and restarts their age, as of the moment before the update, whose policy was measured:
    ahead of any checkpoint and of the next draw. The state is part of the checkpoint; tau is, with the data.

    Its place is after RolloutCallback, whose clock it reads.
    """

    def __init__(
        self,
        probe: ProbeConfig = ProbeConfig(),
        adapt: bool = False,
        level: Level = "token",
        growth: Growth = "linear",
        bounds: tuple[float, float] = BOUNDS,
        measured: bool = False,
        eta: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Keep the settings.

        Args:
            probe: What drift is estimated from.
            adapt: Whether tau follows the estimate; it is logged either way.
            level: ``token`` for losses on ratios of tokens, as all here are; ``sequence`` for those of trajectories.
            growth: Whether tau follows the ``linear`` or the ``quadratic`` fit of variance over age.
            bounds: Least and greatest tau, in units of the clock; to be set for clocks other than updates and
                iterations.
            measured: Whether visits rewrite freshness.
            eta: How much freshness a nat per token of divergence costs: a factor of exp(-eta).
            seed: Seed of what is held out and probed, at least 0.

        Raises:
            ConfigurationError: A setting is out of range.
        """
        require_setting("freshness.eta", eta, 0 < eta < float("inf"), "finite and above 0")
        require_setting("freshness.seed", seed, seed >= 0, "at least 0")
        try:
            self.estimator = AdaptiveTau(level, growth, bounds, probe.window)
        except ValueError as error:
            raise ConfigurationError(f"freshness.{error}") from error
        self.probe, self.adapt, self.measured, self.eta, self.seed = probe, adapt, measured, eta, seed
        self.held_out: HeldOut | None = None
        self._visits: list[_Visit] = []
        self._visited = np.empty(0, np.int64)
        self._now = ClockReading()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work, before a model is loaded, and hold out from the first iteration on."""
        data = replay_data(trainer)
        if data is None:
            return
        rollout = callback_of(trainer, RolloutCallback)
        self._check(trainer, data, rollout.groups * rollout.group_size // 2)
        withhold = None
        if self.probe.held_out:
            seed = stable_hash("held out", self.seed, trainer.global_rank)
            self.held_out = HeldOut(-(-self.probe.capacity // trainer.world_size), data.buffer.clock, seed)
            share = self.probe.held_out // trainer.world_size
            withhold = partial(self._withhold, share=share, rollout=rollout)
        data.bind_freshness(withhold, restores_tau=self.adapt, rewrites_freshness=self.measured)

    def _check(self, trainer: Trainer, data: ReplayDataModule, most: int) -> None:
        held_out, decay = self.probe.held_out, data.buffer.decay
        require_setting("freshness.probe.held_out", held_out, held_out <= most, f"at most half of an iteration, {most}")
        world_size = trainer.world_size
        require_setting(
            "freshness.probe.held_out", held_out, held_out % world_size == 0, f"a multiple of the ranks, {world_size}"
        )
        whole = isinstance(data.buffer.scheme, WholeGroups)
        require_setting(
            "freshness.probe.held_out", held_out, not (held_out and whole), "0 where whole groups are drawn"
        )
        if not self.adapt:
            return
        require_setting(
            "freshness.adapt", True, held_out > 0, "false where freshness.probe.held_out=0: there is nothing to fit"
        )
        require_setting(
            "freshness.adapt", True, data.buffer.alpha > 0, "false where data.alpha=0: draws do not depend on age"
        )
        if not isinstance(decay, ExponentialDecay):
            name = type(decay).__name__
            raise ConfigurationError(f"freshness.adapt=True needs data.decay=ExponentialDecay with a tau, not {name}")
        clock, (low, high) = data.buffer.clock, self.estimator.bounds
        fit_in = clock not in LIKE_50_UPDATES or (low, high) != BOUNDS
        wanted = f"set around data.decay.tau where data.clock={clock}: the default is meant for updates"
        require_setting("freshness.bounds", self.estimator.bounds, fit_in, wanted)
        require_setting(
            "freshness.bounds", self.estimator.bounds, low <= decay.tau <= high, f"around data.decay.tau={decay.tau}"
        )

    def _withhold(self, trajectories: list[Trajectory], share: int, rollout: RolloutCallback) -> list[Trajectory]:
        assert self.held_out is not None
        return self.held_out.take(trajectories, min(share, len(trajectories) // 2), rollout.clock)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Probe, fit, and set tau; then log."""
        data = replay_data(trainer)
        if data is None:
            return
        now = callback_of(trainer, RolloutCallback).clock
        metrics: dict[str, float] = {}
        if self.held_out is not None and now.iteration % self.probe.every_n_iterations == 0:
            start = time.perf_counter()
            self.estimator.observe(self._probe(trainer, policy_module(pl_module), data, self.held_out, now))
            metrics = self._fitted(data) | {"time/probe": time.perf_counter() - start}
        if isinstance(data.buffer.decay, ExponentialDecay):
            metrics["replay/tau"] = data.buffer.decay.tau
        log_scalars(trainer, metrics, now.updates)

    def _probe(
        self, trainer: Trainer, module: PolicyModule, data: ReplayDataModule, held_out: HeldOut, now: ClockReading
    ) -> LogRatios:
        """What the policy says of held-out trajectories, of all ranks; as many forward passes on each of them."""
        share = -(-self.probe.batch_size // trainer.world_size)
        items, ages = held_out.probe(share, now)
        size = max(data.batch_size // (trainer.world_size * data.micro_batches), 1)
        parts = [_log_ratios(trainer, module, items[first : first + size]) for first in range(0, share, size)]
        seen = np.concatenate(parts)[: sum(item.num_sampled for item in items)]
        _require_finite(trainer, seen)
        segments = np.repeat(np.arange(len(items)), [item.num_sampled for item in items])
        return _gathered(trainer, LogRatios.of_tokens(seen, segments, ages), share)

    def _fitted(self, data: ReplayDataModule) -> dict[str, float]:
        decay, metrics = data.buffer.decay, {}
        for level in LEVELS:
            fits = self.estimator.fits(level)
            if fits is not None:
                metrics[f"replay/tau_hat_linear_{level}"] = fits.linear.tau_hat()
                metrics[f"replay/tau_hat_quadratic_{level}"] = fits.quadratic.tau_hat()
                metrics[f"replay/quadratic_aic_gain_{level}"] = fits.quadratic_gain()
                metrics[f"replay/s2_at_birth_{level}"] = fits.at_birth
        if self.adapt and isinstance(decay, ExponentialDecay):
            data.buffer.decay = ExponentialDecay(self.estimator.next_tau(decay.tau, data.buffer.alpha))
        return metrics

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the clock of the policy that the batch is going to be evaluated with."""
        self._now = callback_of(trainer, RolloutCallback).clock

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TrajectoryBatch, batch_idx: int
    ) -> None:
        """Once an optimizer batch is complete and applied, write back what all of its micro-batches showed."""
        data = replay_data(trainer)
        if data is None or not (self.measured or self._uses_draws(data)):
            return
        if not batch.is_filler:
            self._visits.append(_Visit.of(batch, outputs["observation"]))
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        visits, self._visits = self._visits, []
        if policy_module(pl_module).applied:
            if self._uses_draws(data):
                self._observe_first_visits(trainer, data, visits)
            if self.measured:
                self._write_back(data, visits)
        if self.measured:
            data.buffer.prefetch(callback_of(trainer, RolloutCallback).clock)

    def _uses_draws(self, data: ReplayDataModule) -> bool:
        """Whether replay is the first to train on a trajectory, and draws it with a bias that is known afterwards."""
        buffer = data.buffer
        known = isinstance(buffer.scheme, Stratified | GumbelTopK) and not buffer.priority.rewritten
        return self.held_out is not None and data.epochs == 0 and known

    def _observe_first_visits(self, trainer: Trainer, data: ReplayDataModule, visits: Sequence[_Visit]) -> None:
        ids = np.concatenate([np.empty(0, np.int64), *(visit.ids for visit in visits)])
        first = ~np.isin(ids, self._visited)
        _require_finite(trainer, np.concatenate([np.empty(0), *(visit.log_ratios for visit in visits)]))
        seen = [LogRatios.of_tokens(visit.log_ratios, visit.segments, visit.ages) for visit in visits]
        rows = LogRatios.joined(seen).chosen(first).rows
        rows[:, 1] = data.buffer.bases(ids[first]) ** -data.buffer.alpha
        self.estimator.observe_drawn(_gathered(trainer, LogRatios(rows), data.batch_size // trainer.world_size))
        stored = data.buffer.ids()
        self._visited = np.intersect1d(np.union1d(self._visited, ids), stored)

    def _write_back(self, data: ReplayDataModule, visits: Sequence[_Visit]) -> None:
        """Rounding can make a divergence of nothing negative."""
        for visit in visits:
            data.buffer.observe(visit.ids, -self.eta * np.maximum(visit.divergences, 0.0), self._now)

    def state_dict(self) -> dict[str, Any]:
        """What is held out, what was observed, and which stored trajectories have been trained on."""
        return {
            "held_out": None if self.held_out is None else self.held_out.state_dict(),
            "estimator": self.estimator.state_dict(),
            "visited": torch.from_numpy(self._visited.copy()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; a run that probed nothing so far starts to hold out now.

        Raises:
            ConfigurationError: What was held out does not fit the present settings.
        """
        if self.held_out is None or state_dict["held_out"] is None:
            return
        try:
            self.held_out.load_state_dict(state_dict["held_out"])
        except ValueError as error:
            raise ConfigurationError(f"the checkpoint does not fit freshness.probe: {error}") from error
        self.estimator.load_state_dict(state_dict["estimator"])
        self._visited = state_dict["visited"].numpy().copy()


def _log_ratios(trainer: Trainer, module: PolicyModule, items: Sequence[Trajectory]) -> NDArray[np.float64]:
    """float64 [S]: log-ratio of current to behavior policy at each sampled token; a forward pass of all ranks."""
    batch = collate(items, phase="replay").to(module.device)
    with trainer.precision_plugin.forward_context():
        seen = evaluate(module.policy, batch, module.temperature)
    assert batch.behavior_log_probs is not None
    log_ratios: NDArray[np.float64] = (seen.log_probs - batch.behavior_log_probs).double().cpu().numpy()
    return log_ratios


def _require_finite(trainer: Trainer, log_ratios: NDArray[np.float64]) -> None:
    """Does nothing if the log-ratios [S] of all ranks are finite; otherwise every rank raises, and none waits.

    Raises:
        NumericsError: One is not: a token's probability has become 0 or no number.
    """
    wrong = torch.tensor(np.count_nonzero(~np.isfinite(log_ratios)), dtype=torch.float64)
    total = float(summing(trainer)(wrong))
    if total:
        raise NumericsError(
            f"{total:g} tokens that freshness is measured on have lost their probability: their log-ratios are not"
            " finite; resume from the newest checkpoint with a smaller learning rate"
        )


def _gathered(trainer: Trainer, ratios: LogRatios, most: int) -> LogRatios:
    """The rows of all ranks, of which none has more than ``most``; equal on every rank."""
    padded = torch.zeros(trainer.world_size, most, 5, dtype=torch.float64)
    padded[trainer.global_rank, : len(ratios)] = torch.from_numpy(ratios.rows)
    rows = summing(trainer)(padded).reshape(-1, 5).numpy()
    return LogRatios(rows[rows[:, 1] > 0])
