"""Attention for grouped queries that does not copy each key for every query head that shares it."""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

GROUPED_SDPA = "grouped_sdpa"


def caps_attention(config: PreTrainedConfig) -> bool:
    """Whether attention scores are soft-capped, as in Gemma 2; of the attention on a CPU only ``eager`` does that."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention [B, Hq, Q, D] x [B, Hkv, W, D] -> [B, Q, Hq, D], in the form transformers calls.

    Equal to the stock ``sdpa``, which on a CPU repeats keys and values whenever there is a mask: four times slower for
    one query over a cache of 400 tokens.
    """
    causal = attention_mask is None and query.shape[2] > 1
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, is_causal=causal, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(GROUPED_SDPA, grouped_sdpa)
ALL_MASK_ATTENTION_FUNCTIONS.register(GROUPED_SDPA, sdpa_mask)
