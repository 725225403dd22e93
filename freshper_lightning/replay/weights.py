"""Importance weights of a batch that is drawn from one buffer, or in parts from one buffer on each rank."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from freshper_lightning.replay.columns import Floats
from freshper_lightning.replay.decay import Decay, log_freshness
from freshper_lightning.replay.masses import Scale
from freshper_lightning.replay.schemes import Picked

WeightsOver = Literal["max", "sum"]
Gather = Callable[[Floats], Floats]
"""A collective: from this rank's row [k] to the rows of all ranks [R, k], in the same order on every rank."""


@dataclass(frozen=True, slots=True, eq=False)
class Weighed:
    """What a draw of ``n`` entries says of each of them."""

    probabilities: Floats
    """float64 [n]: share of the mass of all ranks."""
    weights: Floats
    """float64 [n]: importance weights."""
    multiplicities: Floats
    """float64 [n]: the second factor of the weight alone: of how many draws from one buffer each is worth."""


@dataclass(frozen=True, slots=True)
class Weighting:
    """``weight = (N P)**-beta / max x (n P / expected count)``, in which P is the probability among all ranks.

    With replacement from one buffer the second factor is 1. It makes the weighted batch of any other draw have the same
    expectation: for R ranks that draw n/R each from shards of mass Z_r it is R Z_r / Z, without an exponent, and for
    draws without replacement it undoes that a likely entry cannot come up twice. The maximum is taken over the batches
    of all ranks, and of the first factor only. Over the sum instead, weights add up to n, so that their mean is 1.

    Source: Schaul et al. 2016 (1511.05952), section 3.4; Kool et al. 2019 (1903.06059), for draws without
    replacement.
    """

    alpha: float
    beta: float
    decay: Decay
    over: WeightsOver
    gather: Gather | None
    """None for a single buffer."""

    def weigh(self, picked: Picked | None, requested: int, total: float, scale: Scale) -> Weighed | None:
        """Probabilities among all ranks and weights; one collective, which every rank must join.

        Args:
            picked: What this rank has drawn; none where its shard has no mass or cannot fill its part.
            requested: Size of this rank's part of the batch.
            total: Mass of this rank's shard, above 0 where it could not fill its part.
            scale: What its masses are relative to.

        Returns:
            None on every rank where no rank has mass, or one could not fill its part.
        """
        log_a, factor = self._local(picked, requested)
        if self.gather is None:
            return None if picked is None else Weighed(picked.shares, self._alone(log_a, factor), factor)
        failed = float(picked is None and total > 0)
        peak = float(log_a.max(initial=-np.inf))
        row = [
            total,
            scale.reference,
            scale.high,
            scale.low,
            peak,
            float(factor @ np.exp(log_a - peak)),
            failed,
            requested,
        ]
        rows = self.gather(np.array(row, np.float64))
        log_shard = self._log_shards(rows)  # log Z_r up to a constant
        if rows[:, 6].any() or not (log_shard > -np.inf).any():
            return None
        if picked is None:
            return Weighed(np.empty(0), np.empty(0), np.empty(0))
        log_share = log_shard - np.log(np.exp(log_shard - log_shard.max()).sum()) - log_shard.max()
        own = self._own(rows, row)
        share = np.exp(log_share[own])
        worth = factor * (rows[:, 7].sum() / requested * share)
        return Weighed(picked.shares * share, self._normalised(log_a, worth, own, rows, log_share), worth)

    def _local(self, picked: Picked | None, requested: int) -> tuple[Floats, Floats]:
        """Logarithm of the first factor, and the second factor, as far as this rank's shard is concerned."""
        if picked is None:
            return np.empty(0), np.empty(0)
        return -self.beta * np.log(picked.shares), requested * picked.shares / picked.expected

    def _alone(self, log_a: Floats, factor: Floats) -> Floats:
        weights: Floats = np.exp(log_a - log_a.max()) * factor
        return weights if self.over == "max" else weights * (len(weights) / weights.sum())

    def _own(self, rows: Floats, row: list[float]) -> int:
        """A row that is equal to this rank's own; any such row says the same."""
        return int(np.flatnonzero((rows == np.array(row)).all(axis=1))[0])

    def _log_shards(self, rows: Floats) -> Floats:
        """Masses of all ranks on one scale: that of the rank with the greatest mass."""
        latest = int(np.argmax(np.where(rows[:, 0] > 0, rows[:, 1], -np.inf)))
        return self._log_shards_like(rows, int(np.argmax(self._log_shards_like(rows, latest))))

    def _log_shards_like(self, rows: Floats, chosen: int) -> Floats:
        with np.errstate(divide="ignore"):
            log_total = np.log(rows[:, 0])
        offset = (rows[:, 2] - rows[chosen, 2]) + (rows[:, 3] - rows[chosen, 3])
        if self.decay.factorises:
            offset = offset + log_freshness(self.decay, rows[chosen, 1] - rows[:, 1])
        return np.where(rows[:, 0] > 0, log_total + self.alpha * offset, -np.inf)

    def _normalised(self, log_a: Floats, worth: Floats, own: int, rows: Floats, log_share: Floats) -> Floats:
        drawn = rows[:, 0] > 0
        peaks = rows[drawn, 4] - self.beta * log_share[drawn]
        weights: Floats = np.exp(log_a - self.beta * log_share[own] - peaks.max()) * worth
        if self.over == "sum":
            parts = rows[:, 7].sum() / rows[drawn, 7]
            every = parts * np.exp(log_share[drawn]) * rows[drawn, 5] * np.exp(peaks - peaks.max())
            weights = weights * (rows[:, 7].sum() / every.sum())
        return weights
