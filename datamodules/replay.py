"""Training batches from fresh rollouts and from the replay buffer, drawn when they are asked for."""

import math
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from numpy.typing import NDArray
from torch import Tensor

from datamodules.loader import LoopDataModule
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.packing import Phase, TrajectoryBatch, collate
from freshper_lightning.replay import AbsoluteAdvantage, Decay, Draw, ExponentialDecay, NoDecay, Priority, ReplayBuffer
from freshper_lightning.replay.clock import ClockName
from freshper_lightning.rollout.seeds import stable_hash
from freshper_lightning.trajectory import ClockReading, Trajectory

Ids = NDArray[np.int64]


class ReplayDataModule(LoopDataModule):
    """One iteration is ``epochs`` passes over the fresh trajectories, then ``replay_updates`` x as many replay batches.

    Every optimizer batch holds ``batch_size`` trajectories over all ranks and micro-batches. A replay batch is one
    draw, taken when the batch is asked for, with the clock of that moment. Where nothing can be drawn the batch is
    empty and the update is skipped, so that the number of batches never changes.
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
        beta: float = 0.4,
        beta_end: float = 1.0,
        beta_updates: int = 1000,
        asynchronous: bool = True,
        seed: int = 0,
    ) -> None:
        """Check the settings and make the buffer.

        Args:
            batch_size: Trajectories per optimizer batch, over all ranks and micro-batches.
            epochs: Passes over the fresh trajectories of an iteration.
            replay_updates: Replay batches per fresh batch of one pass (K of the paper); 0 is on-policy training.
            capacity: Trajectories that the buffer holds (per rank).
            max_bytes: Bytes that the buffer holds (per rank); no bound by default.
            minimum_size: Trajectories that the buffer must hold before it is drawn from; ``batch_size`` by default.
            priority: Base priority.
            decay: Decay of a priority with age; ``none`` (or null) is standard prioritized replay.
            clock: What age is counted in.
            alpha: Exponent of the priority.
            beta: Exponent of the importance weights at the first update.
            beta_end: Exponent of the importance weights from ``beta_updates`` on.
            beta_updates: Applied updates over which beta goes linearly from ``beta`` to ``beta_end``.
            asynchronous: Whether a thread prepares the next draw; changes speed and nothing else.
            seed: Seed of the draws and of the order of fresh trajectories.
        """
        super().__init__()
        self.batch_size = batch_size
        self.epochs = epochs
        self.replay_updates = replay_updates
        self.minimum_size = batch_size if minimum_size is None else minimum_size
        self.beta, self.beta_end, self.beta_updates = beta, beta_end, beta_updates
        self.seed = seed
        self._check(capacity)
        self.buffer = ReplayBuffer(
            capacity=capacity,
            priority=priority,
            decay=NoDecay() if decay is None or isinstance(decay, str) else decay,
            clock=clock,
            alpha=alpha,
            seed=seed,
            max_bytes=max_bytes,
            asynchronous=asynchronous,
        )
        self.last_draw: Draw | None = None
        """The draw of the replay batch now being trained on (this rank's part); None in a skipped update."""
        self.seconds_sampling = 0.0
        """Time spent on drawing and collating since it was last reset."""
        self.withhold: Callable[[list[Trajectory]], list[Trajectory]] | None = None
        """Takes trajectories of a new iteration out of training, where that is asked for; returns the others."""
        self.restores_tau = False
        """Whether a checkpoint's tau replaces that of the configuration, since training moves it."""
        self._fresh: Ids = np.empty(0, dtype=np.int64)
        self._batches_per_epoch: int | None = None
        self._now: Callable[[], ClockReading] = ClockReading

    def _check(self, capacity: int) -> None:
        _require("batch_size", self.batch_size, self.batch_size >= 1, "at least 1")
        _require("epochs", self.epochs, self.epochs >= 0, "at least 0")
        _require("replay_updates", self.replay_updates, self.replay_updates >= 0, "at least 0")
        _require("epochs", self.epochs, self.epochs + self.replay_updates >= 1, "at least 1 where replay_updates is 0")
        _require("beta", self.beta, 0 <= self.beta <= 1, "in [0, 1]")
        _require("beta_end", self.beta_end, 0 <= self.beta_end <= 1, "in [0, 1]")
        _require("beta_updates", self.beta_updates, self.beta_updates >= 1, "at least 1")
        _require("capacity", capacity, capacity >= self.batch_size, f"at least batch_size={self.batch_size}")
        _require("minimum_size", self.minimum_size, 1 <= self.minimum_size <= capacity, f"in [1, capacity={capacity}]")

    def bind(self, trajectories_per_iteration: int, now: Callable[[], ClockReading]) -> None:
        """Tell the size of an iteration (over all ranks) and where to read the clock.

        Raises:
            ConfigurationError: The sizes do not divide.
        """
        size = trajectories_per_iteration
        if size % self.batch_size:
            raise ConfigurationError(
                f"data.batch_size={self.batch_size} must divide rollout.groups x rollout.group_size = {size}"
            )
        _require("capacity", self.buffer.capacity, self.buffer.capacity >= size, f"at least one iteration ({size})")
        self._batches_per_epoch, self._now = size // self.batch_size, now

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

    def current_beta(self) -> float:
        """Exponent of the importance weights at the clock's present reading."""
        progress = min(1.0, self._now().updates / self.beta_updates)
        return self.beta + (self.beta_end - self.beta) * progress

    def add_fresh(self, trajectories: list[Trajectory]) -> None:
        """Put this rank's trajectories of a new iteration into the buffer and make them the fresh ones."""
        kept = trajectories if self.withhold is None else self.withhold(trajectories)
        self._fresh = self.buffer.add(kept, self._now())

    def optimizer_batch(self, update: int) -> list[TrajectoryBatch]:
        """The micro-batches of the iteration's ``update``-th optimizer batch, on this rank."""
        start = time.perf_counter()
        fresh = update < self.epochs * self.batches_per_epoch
        micro_batches = self._fresh_batch(update) if fresh else self._replay_batch()
        self.seconds_sampling += time.perf_counter() - start
        return micro_batches

    def _fresh_batch(self, update: int) -> list[TrajectoryBatch]:
        epoch, index = divmod(update, self.batches_per_epoch)
        key = stable_hash("fresh order", self.seed, self._now().iteration, epoch)
        order = np.random.default_rng(key).permutation(self._fresh)
        ids = np.array_split(order, self.batches_per_epoch)[index]
        ages = self.buffer.ages(self._now())[np.searchsorted(self.buffer.ids(), ids)]
        return self._split("fresh", ids, list(self.buffer.get(ids)), np.ones(len(ids)), ages)

    def _replay_batch(self) -> list[TrajectoryBatch]:
        now = self._now()
        self.last_draw = None
        ready = len(self.buffer) >= self.minimum_size // self._world_size and self.buffer.has_mass(now)
        if self._reduce(torch.tensor(0.0 if ready else 1.0)).item() > 0:
            return self._split("replay", np.empty(0, dtype=np.int64), [], np.empty(0), np.empty(0))
        draw = self.buffer.sample(self.batch_size // self._world_size, now, self.current_beta())
        self.last_draw = draw
        return self._split("replay", draw.ids, list(draw.trajectories), self._over_all_ranks(draw), draw.ages)

    def _over_all_ranks(self, draw: Draw) -> NDArray[np.float64]:
        """Weights of this rank's draw over the maximum of all ranks' draws."""
        own = -self.current_beta() * float(np.log(draw.probabilities.min()))
        largest = float(self._reduce(torch.tensor(own, dtype=torch.float64), "max"))
        return draw.weights * math.exp(own - largest)

    def _split(
        self, phase: Phase, ids: Ids, items: list[Trajectory], weights: NDArray[np.float64], ages: NDArray[np.float64]
    ) -> list[TrajectoryBatch]:
        tokens = float(sum(item.num_sampled for item in items))
        totals = self._reduce(torch.tensor([tokens, float(len(items))], dtype=torch.float64))
        micro_batches = []
        for part in np.array_split(np.arange(len(items)), self.micro_batches):
            batch = collate(
                [items[i] for i in part],
                phase=phase,
                importance_weights=torch.from_numpy(weights[part]),
                ids=torch.from_numpy(ids[part]),
                ages=torch.from_numpy(ages[part].astype(np.float64)),
            )
            batch.total_tokens, batch.total_sequences = float(totals[0]), float(totals[1])
            micro_batches.append(batch)
        return micro_batches

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    def _reduce(self, tensor: Tensor, operation: str = "sum") -> Tensor:
        if self._world_size == 1:
            return tensor
        assert self.trainer is not None
        strategy = self.trainer.strategy
        reduced: Tensor = strategy.reduce(tensor.to(strategy.root_device), reduce_op=operation)
        return reduced.cpu()

    def state_dict(self) -> dict[str, Any]:
        """Tensors and primitives: the buffer (under ``buffer``), which of its entries are fresh, and tau."""
        decay = self.buffer.decay
        return {
            "buffer": self.buffer.state_dict(),
            "fresh": torch.from_numpy(self._fresh.copy()),
            "tau": decay.tau if isinstance(decay, ExponentialDecay) else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, bit by bit; an evaluation needs none of it and restores nothing.

        Raises:
            ConfigurationError: The buffer was saved under settings that do not fit the present ones.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return
        tau = state_dict.get("tau")
        if self.restores_tau and tau is not None:
            self.buffer.decay = ExponentialDecay(tau)
        try:
            self.buffer.load_state_dict(state_dict["buffer"])
        except ValueError as error:
            raise ConfigurationError(f"the checkpoint does not fit data: {error}") from error
        self._fresh = state_dict["fresh"].numpy().copy()

    def teardown(self, stage: str) -> None:
        """Stop the buffer's thread."""
        self.buffer.close()


def _require(key: str, value: float, holds: bool, allowed: str) -> None:
    if not holds or not math.isfinite(value):
        raise ConfigurationError(f"data.{key}={value} must be {allowed}")
