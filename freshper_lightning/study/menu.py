"""The losses that are compared: one set of advantages, one aggregation, so that only the correction differs."""

from freshper_lightning.algorithms import CISPO, GRPO, GSPO, M2PO, MIS, TIS, TOPR, DecoupledGRPO, Reinforce

ON_POLICY = GRPO()
"""The loss of the fresh gradient: on fresh data every bound of it is idle, and it is REINFORCE on group advantages."""

MENU: dict[str, Reinforce] = {
    "no correction": GRPO(surrogate="cispo", clip=1e-9, clip_high=1e-9),
    "bypass, clip 0.2": GRPO(),
    "bypass, clip 0.2, negative mask 0.1": GRPO(negative_mask=0.1),
    "M2PO": M2PO(),
    "TIS, token": TIS(),
    "CISPO": CISPO(),
    "decoupled": DecoupledGRPO(),
    "TIS, sequence": TIS(weight_level="sequence"),
    "importance sampling, sequence, uncapped": TIS(weight_level="sequence", weight_cap=1e9),
    "MIS, sequence": MIS(),
    "TOPR": TOPR(aggregation="token_mean"),
    "GSPO": GSPO(aggregation="token_mean"),
    "GSPO, clip 0.2": GSPO(clip=0.2, clip_high=0.2, aggregation="token_mean"),
}
"""By name. The first takes stale tokens for fresh ones: a weight clipped from both sides to 1 is 1."""
