"""Training batches from fresh rollouts and from the replay buffer, drawn when they are asked for."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from datamodules.checks import decay_of, require, require_age_of_clock, require_bytes, require_room
from datamodules.epoch import Preparation, PreparedEpoch
from datamodules.loader import LoopDataModule, seed_of_run
from datamodules.optimizer_batch import Floats, Ids, OptimizerBatch, Part
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.module import PolicyModule
from freshper_lightning.policy.packing import TrajectoryBatch
from freshper_lightning.replay import (
    AbsoluteAdvantage,
    Decay,
    Draw,
    DrawScheme,
    Eviction,
    ExponentialDecay,
    NothingToDraw,
    Priority,
    ReplayBuffer,
    WholeGroups,
)
from freshper_lightning.replay.clock import ClockName
from freshper_lightning.replay.codec import LogProbDtype
from freshper_lightning.replay.eviction import EvictionName
from freshper_lightning.replay.schemes import DrawName
from freshper_lightning.replay.weights import WeightsOver
from freshper_lightning.rollout.seeds import stable_hash
from freshper_lightning.trajectory import ClockReading, Trajectory

Withhold = Callable[[list[Trajectory]], list[Trajectory]]
"""Takes some of an iteration's new trajectories out of training and returns the others."""
Measure = Callable[[list[Trajectory]], Floats]
"""Base priorities of trajectories that go into the buffer; a collective."""


class ReplayDataModule(LoopDataModule):
    """One iteration is ``epochs`` passes over the fresh trajectories, then ``replay_updates`` x as many replay batches.

    Every optimizer batch holds ``batch_size`` trajectories over all ranks and micro-batches. A replay batch is one
    draw, taken when the batch is asked for, with the clock of that moment. Of several ranks each draws its share from
    its own buffer, and the weighted parts together have the expectation of a draw from one buffer. Where nothing, or
    too little for the kind of draw, can be drawn, the batch is empty and the update is skipped, so that the number of
    batches never changes. Fresh trajectories are pinned until those of the next iteration come in.

    Where the policy has to prepare an epoch, its F batches are made when the first of them is asked for: F draws with
    one reading of the clock, then one call of what prepares them, then the updates.
    """

    def __init__(
        self,
        batch_size: int = 64,
        epochs: int = 1,
        replay_updates: int = 2,
        capacity: int = 10_000,
        max_bytes: int | None = None,
        minimum_size: int | None = None,
        priority: Priority = AbsoluteAdvantage(),
        decay: Decay | Literal["none"] | None = ExponentialDecay(tau=50.0),
        clock: ClockName = "updates",
        alpha: float = 0.6,
        beta: float = 0.0,
        beta_end: float | None = None,
        beta_updates: int = 1000,
        asynchronous: bool = True,
        draw: DrawName | DrawScheme = "stratified",
        eviction: EvictionName | Eviction = "fifo",
        weights: WeightsOver = "max",
        log_prob_dtype: LogProbDtype = "float32",
        memory_map: str | None = None,
        seed: int | None = None,
    ) -> None:
        """Check the settings and make the buffer.

        Args:
            batch_size: Trajectories per optimizer batch, over all ranks and micro-batches.
            epochs: Passes over the fresh trajectories of an iteration.
            replay_updates: Replay batches per fresh batch of one pass (K of the paper); 0 is on-policy training.
            capacity: Trajectories that the buffer holds (per rank).
            max_bytes: Bytes that the buffer holds (per rank), at least those of an iteration; no bound by default.
            minimum_size: Trajectories that the buffers of all ranks must hold before they are drawn from;
                ``batch_size`` by default.
            priority: Base priority; CustomPriority names a function by its import path.
            decay: Decay of a priority with age; ``none`` (or null) is standard prioritized replay.
            clock: What age is counted in, and therefore the unit of ``tau``: ``updates``, ``iterations``, ``lr_path``
                (sum of learning rates), ``drift`` (nats per token) or ``drift_length`` (sum of sqrt(2 x drift)). Ages
                that are the default of a decay or an eviction are meant for the first two and refused with the others.
            alpha: Exponent of the priority.
            beta: Exponent of the importance weights at the first update; 0 does not weight.
            beta_end: Exponent of the importance weights from ``beta_updates`` on; by default ``beta``.
            beta_updates: Applied updates over which beta goes linearly from ``beta`` to ``beta_end``.
            asynchronous: Whether a thread prepares the next draw; changes speed and nothing else.
            draw: How a batch is drawn: ``stratified`` (with replacement), ``gumbel`` (without), ``groups`` (whole, by
                the mean of their members; WholeGroups has the maximum), ``newest`` or ``oldest``.
            eviction: What goes when the buffer is full: the oldest (``fifo``), the ``lowest`` priority of the moment,
                or, with HardAge, whatever is too old.
            weights: What importance weights are divided by: their maximum in the batch, or their sum (mean weight 1).
            log_prob_dtype: How log-probabilities are stored; ``float16`` takes half the room.
            memory_map: Folder, on a large disk, for files that hold the trajectories instead of memory.
            seed: Seed of the draws and of the order of fresh trajectories; by default that of ``seed_everything``.

        Raises:
            ConfigurationError: A setting is out of range.
        """
        super().__init__()
        self.batch_size = batch_size
        self.epochs = epochs
        self.replay_updates = replay_updates
        self.minimum_size = batch_size if minimum_size is None else minimum_size
        self.beta, self.beta_end, self.beta_updates = beta, beta if beta_end is None else beta_end, beta_updates
        self.seed = seed_of_run() if seed is None else seed
        self._check()
        of_age = decay_of(decay)
        require_age_of_clock(clock, of_age, eviction)
        try:
            self.buffer = ReplayBuffer(
                capacity=capacity,
                priority=priority,
                decay=of_age,
                clock=clock,
                alpha=alpha,
                seed=self.seed,
                max_bytes=max_bytes,
                draw=draw,
                eviction=eviction,
                asynchronous=asynchronous,
                weights=weights,
                log_prob_dtype=log_prob_dtype,
                memory_map=memory_map,
            )
        except ValueError as error:
            raise ConfigurationError(f"data.{error}") from error
        self.last_draw: Draw | None = None
        """The draw that is now being trained on (this rank's part); None for fresh data and in a skipped update."""
        self.effective_draw = 0.0
        """Effective number of distinct trajectories in that draw, over all ranks."""
        self.seconds_sampling = 0.0
        """Time spent on drawing and collating since it was last reset."""
        self.seconds_preparing = 0.0
        """Time spent on preparing epochs since it was last reset."""
        self.rewrites_freshness = False
        """Whether FreshnessCallback writes to the buffer after updates, and asks for the next snapshot when it has."""
        self._fresh: Ids = np.empty(0, dtype=np.int64)
        self._batches_per_epoch: int | None = None
        self._now: Callable[[], ClockReading] = ClockReading
        self._preparation: Preparation | None = None
        self._measure: Measure | None = None
        self._withhold: Withhold | None = None
        self._restores_tau = False
        self._epoch = PreparedEpoch({}, {})

    def _check(self) -> None:
        require("batch_size", self.batch_size, self.batch_size >= 1, "at least 1")
        require("epochs", self.epochs, self.epochs >= 0, "at least 0")
        require("replay_updates", self.replay_updates, self.replay_updates >= 0, "at least 0")
        require("epochs", self.epochs, self.epochs + self.replay_updates >= 1, "at least 1 where replay_updates is 0")
        require("beta", self.beta, 0 <= self.beta <= 1, "in [0, 1]")
        require("beta_end", self.beta_end, 0 <= self.beta_end <= 1, "in [0, 1]")
        require("beta_updates", self.beta_updates, self.beta_updates >= 1, "at least 1")
        require("minimum_size", self.minimum_size, self.minimum_size >= 1, "at least 1")

    def bind(
        self,
        trajectories_per_iteration: int,
        now: Callable[[], ClockReading],
        group_size: int = 1,
        preparation: Preparation | None = None,
        longest: int = 0,
        measure: Measure | None = None,
    ) -> None:
        """Tell what the other parts of the run know; what :meth:`bind_freshness` has told before is forgotten.

        Args:
            trajectories_per_iteration: Over all ranks.
            now: Where to read the clock.
            group_size: Members of a group.
            preparation: What prepares an epoch, where it has to be prepared.
            longest: Tokens that a trajectory may have.
            measure: What gives base priorities, where the priority cannot tell them by itself.

        Raises:
            ConfigurationError: The sizes do not divide, or the buffer has no room for an iteration.
        """
        size = trajectories_per_iteration
        if size % self.batch_size:
            raise ConfigurationError(
                f"data.batch_size={self.batch_size} must divide rollout.groups x rollout.group_size = {size}"
            )
        require_room(self.buffer.capacity, self.minimum_size, size, self._world_size)
        require_bytes(self.buffer.max_bytes, size, self._world_size, longest)
        self._bind_groups(group_size)
        if self._world_size > 1:
            assert self.trainer is not None
            self.buffer.seed = stable_hash("replay draws", self.seed, self.trainer.global_rank)
        self._batches_per_epoch, self._now = size // self.batch_size, now
        self._preparation, self._measure = preparation, measure
        self.bind_freshness()

    def bind_freshness(
        self, withhold: Withhold | None = None, restores_tau: bool = False, rewrites_freshness: bool = False
    ) -> None:
        """Tell, after :meth:`bind`, what follows drift.

        Args:
            withhold: What takes trajectories out of training, where that is asked for.
            restores_tau: Whether a checkpoint's tau replaces that of the configuration, since training moves it.
            rewrites_freshness: See the attribute.
        """
        self._withhold, self._restores_tau, self.rewrites_freshness = withhold, restores_tau, rewrites_freshness

    def _bind_groups(self, group_size: int) -> None:
        scheme = self.buffer.scheme
        if not isinstance(scheme, WholeGroups):
            return
        if scheme.size not in (None, group_size):
            raise ConfigurationError(
                f"data.draw.size={scheme.size} must be rollout.group_size={group_size}, or left out, which means that"
            )
        if self._share % group_size:
            raise ConfigurationError(
                f"data.batch_size={self.batch_size} on {self._world_size} rank(s) must be a multiple of"
                f" rollout.group_size={group_size} on each, since data.draw={scheme} draws whole groups"
            )
        self.buffer.scheme = replace(scheme, size=group_size)

    @property
    def batches_per_epoch(self) -> int:
        """F: optimizer batches in one pass over an iteration's fresh trajectories."""
        if self._batches_per_epoch is None:
            raise RuntimeError("ReplayDataModule needs RolloutCallback, which tells it the size of an iteration")
        return self._batches_per_epoch

    @property
    def updates_per_iteration(self) -> int:
        """(epochs + K) x F."""
        return (self.epochs + self.replay_updates) * self.batches_per_epoch

    def sizes(self) -> dict[str, int]:
        """Passes, K and F."""
        of_pass = {"rollout.groups x rollout.group_size / data.batch_size": self.batches_per_epoch}
        return {"data.epochs": self.epochs, "data.replay_updates": self.replay_updates} | of_pass

    def current_beta(self) -> float:
        """Exponent of the importance weights at the clock's present reading."""
        progress = min(1.0, self._now().updates / self.beta_updates)
        return self.beta + (self.beta_end - self.beta) * progress

    def add_fresh(self, trajectories: list[Trajectory]) -> None:
        """Put this rank's trajectories of a new iteration into the buffer and make them the fresh ones."""
        kept = trajectories if self._withhold is None else self._withhold(trajectories)
        self.buffer.unpin(self._fresh)
        self._fresh = self.buffer.add(kept, self._now(), self._bases(kept), pin=True)

    def _bases(self, trajectories: list[Trajectory]) -> Floats | None:
        """Base priorities of new trajectories, where the buffer is not to compute them."""
        return None if self._measure is None else self._measure(trajectories)

    def fresh(self) -> list[Trajectory]:
        """This rank's trajectories of the present iteration."""
        return list(self.buffer.get(self._fresh))

    def optimizer_batch(self, update: int) -> list[TrajectoryBatch]:
        """The micro-batches of the iteration's ``update``-th optimizer batch, on this rank."""
        preparation = self._preparation
        batch = self._batch(update) if preparation is None else self._prepared_batch(update, preparation)
        self.last_draw, self.effective_draw = batch.draw, batch.effective_draw
        return batch.micro_batches

    def _batch(self, update: int) -> OptimizerBatch:
        start = time.perf_counter()
        fresh = update < self.epochs * self.batches_per_epoch
        part = self._fresh_part(update) if fresh else Part.drawn(self._draw(), self._share)
        batch = part.split(self.micro_batches, self._reduce, self._shares_openings())
        self.seconds_sampling += time.perf_counter() - start
        return batch

    def _shares_openings(self) -> bool:
        module = self.trainer.lightning_module if self.trainer is not None else None
        return isinstance(module, PolicyModule) and module.shares_openings

    def _prepared_batch(self, update: int, preparation: Preparation) -> OptimizerBatch:
        """One of those that were drawn for the whole epoch; the ages are those of now, as the current policy's are."""
        first, index = update - update % self.batches_per_epoch, update % self.batches_per_epoch
        if index == 0:
            self._epoch = self._prepared_epoch(range(first, first + self.batches_per_epoch), preparation)
        batch = self._epoch.take(index, preparation.settings)
        for micro_batch in batch.micro_batches:
            micro_batch.ages = torch.from_numpy(self._ages(micro_batch.ids.numpy()))
        return batch

    def _prepared_epoch(self, updates: range, preparation: Preparation) -> PreparedEpoch:
        batches = [self._batch(update) for update in updates]
        start = time.perf_counter()
        preparation.fill([micro_batch for batch in batches for micro_batch in batch.micro_batches])
        self.seconds_preparing += time.perf_counter() - start
        return PreparedEpoch(dict(enumerate(batches)), preparation.settings)

    def _fresh_part(self, update: int) -> Part:
        epoch, index = divmod(update, self.batches_per_epoch)
        key = stable_hash("fresh order", self.seed, self._now().iteration, epoch)
        order = np.random.default_rng(key).permutation(self._fresh)
        ids = np.array_split(order, self.batches_per_epoch)[index]
        return Part.fresh(ids, self.buffer.get(ids), self._ages(ids))

    def _ages(self, ids: Ids) -> Floats:
        """float64 [n]: ages of stored trajectories by the clock of now."""
        ages: Floats = self.buffer.ages(self._now())[np.searchsorted(self.buffer.ids(), ids)].astype(np.float64)
        return ages

    def _draw(self) -> Draw | None:
        """This rank's part of one draw; None on every rank where there is nothing, or too little, to draw from."""
        held = self._reduce(torch.tensor(float(len(self.buffer)), dtype=torch.float64))
        if float(held) < self.minimum_size:
            return None
        gather = self._gather if self._world_size > 1 else None
        try:
            return self.buffer.sample(self._share, self._now(), self.current_beta(), gather)
        except NothingToDraw:
            return None

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    @property
    def _share(self) -> int:
        """Trajectories of an optimizer batch on each rank."""
        return self.batch_size // self._world_size

    def _reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks."""
        if self._world_size == 1:
            return tensor
        assert self.trainer is not None
        strategy = self.trainer.strategy
        reduced: Tensor = strategy.reduce(tensor.to(strategy.root_device), reduce_op="sum")
        return reduced.cpu()

    def _gather(self, row: Floats) -> Floats:
        """Rows of all ranks, one below the other."""
        assert self.trainer is not None
        strategy = self.trainer.strategy
        rows: Floats = strategy.all_gather(torch.from_numpy(row).to(strategy.root_device)).cpu().numpy()
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Tensors and primitives: the buffer (under ``buffer``), its fresh entries, tau, and the prepared batches."""
        decay = self.buffer.decay
        return {
            "buffer": self.buffer.state_dict(),
            "fresh": torch.from_numpy(self._fresh.copy()),
            "tau": decay.tau if isinstance(decay, ExponentialDecay) else None,
            "epoch": self._epoch.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, bit by bit; an evaluation needs none of it and restores nothing.

        Raises:
            ConfigurationError: The buffer was saved under settings that do not fit the present ones, or is damaged.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return
        tau = state_dict.get("tau")
        if self._restores_tau and tau is not None:
            self.buffer.decay = ExponentialDecay(tau)
        try:
            self.buffer.load_state_dict(state_dict["buffer"])
        except ValueError as error:
            raise ConfigurationError(f"the checkpoint does not fit data: {error}") from error
        fresh = state_dict["fresh"].numpy().copy()
        if not np.isin(fresh, self.buffer.ids()).all():
            raise ConfigurationError("the checkpoint is damaged: trajectories of its iteration are not in its buffer")
        self._fresh = fresh
        if self._preparation is not None:
            self._epoch = PreparedEpoch.restored(state_dict["epoch"], self.buffer)

    def teardown(self, stage: str) -> None:
        """Stop the buffer's thread."""
        self.buffer.close()
