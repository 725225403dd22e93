"""What to do about a replay update whose importance weights to the behavior policy have degenerated."""

from dataclasses import dataclass
from math import sqrt
from typing import Literal, get_args

from torch import Tensor

from freshper_lightning.algorithms.checks import check_choice, check_range
from freshper_lightning.algorithms.ess import sequence_log_weights, weight_moments

GuardAction = Literal["scale", "skip"]
"""Take a smaller step, or none."""

GUARD_ACTIONS: tuple[str, ...] = get_args(GuardAction)


@dataclass(frozen=True)
class ESSGuard:
    """Below a threshold on the effective sample size of its behavior weights a replay update is scaled or skipped.

    The size is Kish's over the number of weights, 1 for data of the current policy, of the weights current / behavior
    of one optimizer batch over all micro-batches and ranks, neither truncated nor weighted by the draw: of tokens or of
    whole trajectories, and by one of them. ``scale`` multiplies the learning rate of that update by the square root of
    it, as VCPO (arXiv:2602.17616) does for AdamW; the loss is left alone, since Adam would undo a factor there.

    Raises:
        ValueError: A threshold is out of range, or there are two, or an action without one.
    """

    ess_token: float | None = None
    """Threshold on the effective share of tokens; 1 acts on every update that is off-policy at all."""
    ess_sequence: float | None = None
    """Threshold on the effective share of trajectories, whose weights are products over their tokens."""
    action: GuardAction = "scale"
    """``scale`` the learning rate of the update, or ``skip`` it."""

    def __post_init__(self) -> None:
        check_choice("action", self.action, GUARD_ACTIONS)
        for key in ("ess_token", "ess_sequence"):
            check_range(key, getattr(self, key), above=0.0, most=1.0)
        if self.ess_token is not None and self.ess_sequence is not None:
            raise ValueError(f"ess_token is {self.ess_token}, but ess_sequence {self.ess_sequence} allows only null")
        if self.action != "scale" and not self.enabled:
            raise ValueError(f"action is {self.action}, but without ess_token or ess_sequence it allows only scale")

    @property
    def enabled(self) -> bool:
        """Whether there is a threshold."""
        return self.ess_token is not None or self.ess_sequence is not None

    def moments(self, log_ratio: Tensor, segments: Tensor, num_sequences: int) -> Tensor:
        """Moments [3] of a micro-batch's weights, see :func:`freshper_lightning.algorithms.ess.weight_moments`.

        Args:
            log_ratio: [S], current to behavior.
            segments: int64 [S]: the trajectory of each token.
            num_sequences: Trajectories of the micro-batch.
        """
        if self.ess_sequence is None:
            return weight_moments(log_ratio)
        return weight_moments(sequence_log_weights(log_ratio, segments, num_sequences))

    def factor(self, ess_ratio: float) -> float:
        """What the learning rate of an update is multiplied by, for its effective share in (0, 1]; 0 is to skip it."""
        threshold = self.ess_token if self.ess_sequence is None else self.ess_sequence
        if threshold is None or ess_ratio >= threshold:
            return 1.0
        return sqrt(ess_ratio) if self.action == "scale" else 0.0
