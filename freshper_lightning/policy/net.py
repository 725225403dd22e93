"""The network that the trainer trains: a Hugging Face causal LM that answers in log-probabilities of given tokens."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.attention import attention_masks, can_share
from freshper_lightning.policy.critic import CriticSettings, ValueHead
from freshper_lightning.policy.log_prob import Readout, TokenStatistics, linear_log_probs
from freshper_lightning.policy.lora import LoraSettings, add_adapters, merged_tensors, whole
from freshper_lightning.policy.packing import collate, openings_of
from freshper_lightning.rollout.attention import caps_attention
from freshper_lightning.trajectory import Transcript

log = logging.getLogger(__name__)

PARITY = 1e-3
"""Largest difference in nats that rounding in float32 may make."""


class PolicyNet(nn.Module):
    """Log-probabilities of given tokens under a Hugging Face model, in float32 from the logits on.

    The head runs inside this module's forward, on the positions that predict a trained token and on no others, so
    that a sharding strategy may wrap this module as its root.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.lora: LoraSettings | None = None
        """Settings of the adapters, where there are any."""
        self.critic: ValueHead | None = None
        """The value head, where there is one."""
        self.shares_openings = can_share(model)
        """Whether :meth:`forward` takes ``spans``."""

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "PolicyNet":
        """Load a checkpoint folder with float32 weights, in training mode.

        Dropout is switched off, since a log-probability must be the one that the engine sampled with.

        Raises:
            ConfigurationError: The folder holds no model, or one whose log-probabilities are not computed right here.
        """
        require_model_folder(path)
        config = AutoConfig.from_pretrained(path)
        for name, value in config.to_dict().items():
            if "dropout" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        attention = "eager" if caps_attention(config) else None
        try:
            model, loaded = cast(
                tuple[PreTrainedModel, dict[str, Any]],
                AutoModelForCausalLM.from_pretrained(
                    path,
                    config=config,
                    dtype=torch.float32,
                    attn_implementation=attention,
                    output_loading_info=True,
                ),
            )
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            raise ConfigurationError(f"model.path={str(path)!r} cannot be loaded: {error}") from error
        absent = sorted(loaded["missing_keys"]) + sorted(str(key) for key in loaded["mismatched_keys"])
        if absent:
            raise ConfigurationError(f"model.path={str(path)!r} lacks weights: {', '.join(absent[:5])}")
        # from_pretrained returns a model in evaluation mode, in which gradient checkpointing is silently off.
        net = cls(model).train()
        net.require_parity(str(path))
        net.require_parity_of_sharing(str(path))
        return net

    @torch.no_grad()
    def require_parity(self, name: str) -> None:
        """Compare with the model's own logits on two conversations that share a row.

        Raises:
            ConfigurationError: They differ, as they do where a model scales or caps its logits behind the head, keeps
                dropout, or does not tell packed conversations apart.
        """
        vocabulary = self.model.config.get_text_config().vocab_size
        pair = [torch.arange(start, start + 12) * 7 % vocabulary for start in (3, 5)]
        positions = torch.arange(12)
        predicted_from = torch.cat([positions[:-1], positions[:-1] + 12])
        targets = torch.cat([ids[1:] for ids in pair])
        packed = self(torch.cat(pair)[None], positions.repeat(2)[None], predicted_from, targets).log_probs
        alone = torch.cat([self.model(ids[None], use_cache=False).logits[0, :-1] for ids in pair])
        expected = alone.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        gap = float((packed - expected).abs().max())
        if not gap <= PARITY:
            raise ConfigurationError(
                f"model.path={name!r}: packed log-probabilities differ from the model's own by {gap:.2g} nats, where"
                f" {PARITY} is allowed; the architecture {type(self.model).__name__} is not supported"
            )

    @torch.no_grad()
    def require_parity_of_sharing(self, name: str) -> None:
        """Share no openings where two conversations with the same one do not come out as they do apart."""
        if not self.shares_openings:
            return
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = [torch.cat([torch.arange(8), torch.arange(start, start + 8)]) * 7 % vocabulary for start in (20, 30)]
        items = [Transcript(one.int(), torch.tensor([[8, 16]], dtype=torch.int32)) for one in ids]
        shared, apart = (collate(items, phase="demonstration", openings=one) for one in (openings_of(items), None))
        values = [self(**batch.forward_arguments()).log_probs for batch in (shared, apart)]
        gap = float((values[0] - values[1]).abs().max())
        if not gap <= PARITY:
            self.shares_openings = False
            log.warning("%s: prompts are not shared in training, since log-probabilities differ by %.2g", name, gap)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        predicted_from: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
        spans: Tensor | None = None,
    ) -> TokenStatistics:
        """Statistics of ``targets`` [S], predicted from flat positions [S] of the rows ``input_ids`` [R, W].

        ``position_ids`` restart at 0 where a new conversation begins in a row; conversations do not see each other.
        With ``spans`` [2, R, W] a token sees what stands before it in its own piece (``spans[0]``) and in the one that
        its piece continues (``spans[1]``). Entropy is a value only, which takes less memory, unless its gradient is
        asked for.
        """
        # Without a mask and without a cache, Transformers tells packed conversations apart by their positions.
        masks = None if spans is None else attention_masks(self.model, spans, position_ids)
        backbone = self.model.base_model
        hidden = backbone(input_ids=input_ids, position_ids=position_ids, attention_mask=masks, use_cache=False)
        selected = hidden.last_hidden_state.flatten(0, 1)[predicted_from]
        # The head is the root's own parameter, which a sharding strategy makes whole for the time of this forward.
        head, config = self.model.get_output_embeddings(), self.model.config.get_text_config()
        cap = getattr(config, "final_logit_softcapping", None)
        readout = Readout(temperature, cap, with_entropy, entropy_gradient)
        statistics = linear_log_probs(selected, head.weight, head.bias, targets, readout)
        return statistics if self.critic is None else statistics._replace(values=self.critic(selected))

    def add_critic(self, settings: CriticSettings) -> None:
        """Have :meth:`forward` return values as well, 0 at first; what else it returns stays as it is."""
        self.critic = ValueHead(self.model.config.get_text_config().hidden_size, settings)

    def add_adapters(self, settings: LoraSettings) -> None:
        """Freeze the weights and train adapters beside them; the output stays as it is.

        Raises:
            ConfigurationError: No layer that could have an adapter is called as the settings say.
        """
        add_adapters(self.model, settings)
        self.lora = settings

    def blocks(self) -> list[nn.Module]:
        """The decoder layers, of which most of the network consists."""
        names = set(self.model._no_split_modules or ())
        return [module for module in self.model.modules() if type(module).__name__ in names]

    def compile_blocks(self) -> None:
        """Have each decoder layer compiled when it first runs, for rows of any length."""
        for block in self.blocks():
            block.compile(dynamic=True)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor) one by one, each tied tensor once; a collective where sharded.

        Adapters are merged into the tensors that are yielded, and into no parameter.
        """
        if self.lora is not None:
            yield from merged_tensors(self.model)
            return
        for name, parameter in self.model.named_parameters():
            yield name, whole(parameter)


def require_model_folder(path: str | Path, key: str = "model.path") -> None:
    """Refuse a path that is not the folder of a Hugging Face checkpoint; ``key`` is the setting that it came from.

    Raises:
        ConfigurationError: There is no config.json in it.
    """
    if not (Path(path) / "config.json").is_file():
        raise ConfigurationError(f"{key}={str(path)!r} is not the folder of a Hugging Face model: no config.json in it")
