"""What an algorithm is to the rest of the system."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from freshper_lightning.algorithms.advantages import Reduce
from freshper_lightning.algorithms.inputs import LossInputs, LossOutput, ValueInputs
from freshper_lightning.algorithms.values import Estimates
from freshper_lightning.trajectory import Trajectory

Scorer = Callable[[Sequence[Trajectory]], list[Tensor]]
"""Log-probabilities (float32 [S] on the CPU) of the sampled tokens of each trajectory; a collective over ranks."""


class Algorithm(ABC):
    """Turns trajectories into advantages and log-probabilities into a loss; holds settings and no state."""

    needs_rollouts: ClassVar[bool] = True
    """Whether it learns from its own samples, so that an engine has to be there."""

    def needs_reference(self) -> bool:
        """Whether the loss reads ``reference_log_probs``."""
        return False

    def needs_reference_at_collection(self) -> bool:
        """Whether :meth:`advantages` has trajectories scored by the reference policy."""
        return False

    def needs_proximal(self) -> bool:
        """Whether the loss reads ``proximal_log_probs``."""
        return False

    def needs_critic(self) -> bool:
        """Whether it reads a value head, from which :meth:`estimates` and :meth:`normalized` make its advantages."""
        return False

    def value_bound(self) -> float | None:
        """How far a value may move in an epoch, where that is bounded."""
        return None

    def needs_preparation(self) -> bool:
        """Whether the policy has to see all batches of an epoch before its first update."""
        return self.needs_proximal() or self.needs_critic()

    def needs_entropy(self) -> bool:
        """Whether the loss reads ``entropy`` and its gradient."""
        return False

    @abstractmethod
    def coefficients(self, segments: Tensor, lengths: Tensor, total_tokens: float, total_sequences: float) -> Tensor:
        """The aggregation: see :func:`freshper_lightning.algorithms.losses.aggregation_coefficients`."""

    @abstractmethod
    def advantages(
        self, trajectories: Sequence[Trajectory], reduce: Reduce, reference: Scorer | None = None
    ) -> list[Trajectory]:
        """The trajectories to train on with their advantages, out of whole groups; called once, at collection.

        It is called on every rank. Groups without anything to learn may be left out.

        Args:
            trajectories: What this rank has collected.
            reduce: Sums a float64 tensor over ranks.
            reference: Log-probabilities under the reference policy, where there is one.

        Raises:
            ValueError: A setting asks for ``reference`` and it is missing, or groups are not whole.
        """

    def estimates(self, inputs: ValueInputs) -> Estimates:
        """Advantages, neither whitened nor clipped, returns and TD errors, float32 [S] each.

        Raises:
            TypeError: It reads no critic.
            ValueError: A tensor that the settings ask for is missing.
        """
        raise TypeError(f"{type(self).__name__} reads no critic")

    def normalized(self, advantages: Tensor, reduce: Reduce) -> Tensor:
        """Advantages [S] of this rank's part of an optimizer batch as the loss shall have them; called on all ranks.

        Raises:
            TypeError: It reads no critic.
        """
        raise TypeError(f"{type(self).__name__} reads no critic")

    @abstractmethod
    def loss(self, inputs: LossInputs) -> LossOutput:
        """The micro-batch's share of the loss to minimise.

        Importance weights of prioritized replay multiply every term of a token alike, since they stand for how often
        its trajectory was drawn.

        Raises:
            ValueError: A tensor that the settings ask for is missing, or shapes differ.
        """
