"""Published losses as settings of :class:`Reinforce`: nothing here does anything that its fields cannot.

Numbers are those of the papers, where they give any; docs/losses.md has the table.
"""

from dataclasses import dataclass

from freshper_lightning.algorithms.advantages import Baseline
from freshper_lightning.algorithms.algorithm import GRPO, Correction, Reinforce, Surrogate
from freshper_lightning.algorithms.losses import Aggregation
from freshper_lightning.algorithms.ratios import Level, WeightBound


@dataclass(frozen=True)
class DAPO(GRPO):
    """:class:`GRPO` with DAPO's asymmetric clip and without groups of equal outcomes (arXiv:2503.14476).

    Groups are dropped and not replaced; the overlong penalty is the environment's to give.
    """

    clip_high: float | None = 0.28
    group_filter: float | None = 1e-6


@dataclass(frozen=True)
class DrGRPO(GRPO):
    """:class:`GRPO` without division by deviation or length (Dr. GRPO, arXiv:2503.20783).

    Raises:
        ValueError: ``aggregation_length``, the most tokens that a trajectory can have sampled, is not given.
    """

    baseline: Baseline = "mean"
    aggregation: Aggregation = "constant"


@dataclass(frozen=True)
class GSPO(GRPO):
    """:class:`GRPO` with the geometric mean of a conversation's ratios in the clip (arXiv:2507.18071, section 5)."""

    level: Level = "geometric"
    clip: float = 3e-4
    clip_high: float | None = 4e-4
    aggregation: Aggregation = "sequence_mean"


@dataclass(frozen=True)
class CISPO(GRPO):
    """:class:`GRPO` whose ratio is a weight clipped from above (MiniMax-M1, arXiv:2506.13585).

    The paper tunes the upper bound alone and does not print it; 5 is what trainers that offer CISPO use.
    """

    surrogate: Surrogate = "cispo"
    clip: float = 1.0
    clip_high: float | None = 4.0


@dataclass(frozen=True)
class M2PO(GRPO):
    """:class:`GRPO` that drops the tokens that make the second moment of the log-ratio large (arXiv:2510.01161)."""

    surrogate: Surrogate = "second_moment"


@dataclass(frozen=True)
class DecoupledGRPO(GRPO):
    """:class:`GRPO` with AReaL's decoupled objective (arXiv:2505.24298, section 5.2), its weight truncated."""

    correction: Correction = "decoupled"


@dataclass(frozen=True)
class TIS(GRPO):
    """:class:`GRPO` without a clip, under a truncated importance weight for every token (Ionides 2008)."""

    correction: Correction = "importance_sampling"


@dataclass(frozen=True)
class MIS(GRPO):
    """:class:`TIS` of whole conversations, which are masked where the weight is out of bounds."""

    correction: Correction = "importance_sampling"
    weight_level: Level = "sequence"
    weight_bound: WeightBound = "mask"


@dataclass(frozen=True)
class TOPR(Reinforce):
    """Tapered off-policy REINFORCE (arXiv:2503.14286): positive returns weigh 1, negative ones their ratio up to 1.

    The sign of the return decides, so that there is no baseline; returns must be negative where an episode fails.
    """

    whiten: bool = False
    correction: Correction = "importance_sampling"
    weight_level: Level = "sequence"
    weight_cap: float = 1.0
    weight_negative_only: bool = True
    aggregation: Aggregation = "sequence_sum"


@dataclass(frozen=True)
class RLOO(Reinforce):
    """REINFORCE with the mean of the other members as the baseline (arXiv:2402.14740), summed over each sequence."""

    baseline: Baseline = "leave_one_out"
    whiten: bool = False
    aggregation: Aggregation = "sequence_sum"


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(Reinforce):
    """REINFORCE++ with a group mean, then whitened over the batch (REINFORCE++-baseline, arXiv:2501.03262)."""

    baseline: Baseline = "mean"
