"""Who sees whom in rows where conversations share what they begin with."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

FULL, SLIDING = "full_attention", "sliding_attention"
ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text", "smollm3"})
"""Types of models that are tested: others may have windows or positions of which their masks know nothing."""


def can_share(model: PreTrainedModel) -> bool:
    """Whether masks of :func:`attention_masks` say all about the model's attention: softmax, full or in a window."""
    config = model.config.get_text_config()
    masked = config._attn_implementation in ("sdpa", "eager") and config.model_type in ARCHITECTURES
    return masked and set(getattr(config, "layer_types", None) or [FULL]) <= {FULL, SLIDING}


def attention_masks(model: PreTrainedModel, spans: Tensor, position_ids: Tensor) -> Tensor | dict[str, Tensor]:
    """Masks [R, 1, W, W] in the form that the model takes in the place of those that it makes itself.

    One for all layers, or one by the type of a layer where there are layers with a window. ``spans`` [2, R, W] and
    ``position_ids`` [R, W] are those of a :class:`~freshper_lightning.policy.packing.TrajectoryBatch`.
    """
    config = model.config.get_text_config()
    piece, continued = spans
    columns = torch.arange(spans.shape[-1], device=spans.device)
    before = columns[:, None] >= columns
    seen = before & ((piece[:, :, None] == piece[:, None]) | (continued[:, :, None] == piece[:, None]))
    full = _form(seen, config._attn_implementation)
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window is None or (types and SLIDING not in types):
        return full
    near = _form(seen & (position_ids[:, :, None] - position_ids[:, None] < window), config._attn_implementation)
    return {FULL: full, SLIDING: near} if types else near


def _form(seen: Tensor, implementation: str) -> Tensor:
    """Truth values, or what eager attention adds to its scores."""
    if implementation == "sdpa":
        return seen[:, None]
    return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]
