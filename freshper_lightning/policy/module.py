"""The LightningModule: one training step, one optimizer, and the rule by which an update is skipped."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from freshper_lightning.algorithms.base import Algorithm
from freshper_lightning.algorithms.ess import ess_of_moments, pooled_moments, weight_moments
from freshper_lightning.algorithms.ess_guard import ESSGuard
from freshper_lightning.algorithms.inputs import LossInputs, LossOutput
from freshper_lightning.errors import ConfigurationError, NonFiniteError
from freshper_lightning.policy.critic import CriticSettings
from freshper_lightning.policy.learning_rate import scaled_learning_rate
from freshper_lightning.policy.lora import BasePolicy, LoraSettings
from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.policy.optimization import apply_settings, checked_optimizer, kind_of, require_kind
from freshper_lightning.policy.packing import Phase, TrajectoryBatch
from freshper_lightning.policy.saved import is_frozen, parts, require_parts
from freshper_lightning.policy.scoring import chunks, evaluate, token_log_probs
from freshper_lightning.trajectory import Trajectory


@dataclass(slots=True)
class StepObservation:
    """What one micro-batch's step saw, detached, for those who log it or write it back to the buffer."""

    loss: Tensor
    """Scalar: this micro-batch's share of the loss of its optimizer batch, on this rank."""
    token_metrics: dict[str, Tensor]
    """float32 [S] per name."""


class PolicyModule(LightningModule):
    """The policy and its optimizer; an update whose batch says so leaves parameters and optimizer state bit-equal.

    The loss of a micro-batch is a sum over its tokens, scaled by micro-batches x world size, so that after Lightning's
    division and the strategy's average over ranks the gradient depends neither on accumulation nor on the number of
    ranks.
    """

    def __init__(
        self,
        path: str,
        algorithm: Algorithm,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        scheduler: LRSchedulerCallable | None = None,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
        guard: ESSGuard = ESSGuard(),
        lora: LoraSettings | None = None,
        critic: CriticSettings | None = None,
        compile: bool = False,
        max_micro_batch_tokens: int | None = None,
    ) -> None:
        """Keep the settings; the weights are loaded later, in :meth:`configure_model`.

        Args:
            path: Folder of a Hugging Face checkpoint, tokenizer included.
            algorithm: Loss and advantages.
            optimizer: Called with the parameters.
            scheduler: Called with the optimizer; stepped after every applied update, replay updates included.
            temperature: Divides the logits; must be the temperature that rollouts are sampled at.
            gradient_checkpointing: Recompute activations in the backward pass to save memory.
            guard: What to do about replay updates whose importance weights have degenerated; nothing by default.
            lora: Train adapters instead of the weights; checkpoints then hold the adapters only.
            critic: The value head that PPO needs and nothing else may have.
            compile: Compile the decoder layers; needs a C++ compiler on a CPU, Triton on a GPU.
            max_micro_batch_tokens: Most tokens of a micro-batch, with the room left over in its rows; more is an
                error instead of a lack of memory. Conversations are spread evenly over the micro-batches. It also
                bounds forward passes that score conversations outside of an update.
        """
        super().__init__()
        if temperature <= 0:
            raise ValueError(f"model.temperature={temperature} must be above 0")
        self.path = path
        self.algorithm = algorithm
        self.temperature = temperature
        if max_micro_batch_tokens is not None and max_micro_batch_tokens < 1:
            raise ValueError(f"model.max_micro_batch_tokens={max_micro_batch_tokens} must be at least 1")
        self.gradient_checkpointing = gradient_checkpointing
        self.guard = guard
        self.lora = lora
        self.critic = critic
        self.compiled = compile
        self.max_micro_batch_tokens = max_micro_batch_tokens
        self._make_optimizer = optimizer
        self._make_scheduler = scheduler
        self.net: PolicyNet | None = None
        self.reference: PolicyNet | BasePolicy | None = None
        self.applied = False
        """Whether the last optimizer step changed the parameters."""
        self.gradient_norm: Tensor | None = None
        """Norm before clipping of the last applied update."""
        self.guard_factor = 1.0
        """What the guard multiplied the learning rate of the last update by; 0 where it skipped the update."""
        self._weight_moments: list[Tensor] = []
        self._skip = False
        self._phase: Phase = "fresh"

    @property
    def policy(self) -> PolicyNet:
        """The network; only after :meth:`configure_model`."""
        if self.net is None:
            raise RuntimeError("the policy is loaded in configure_model, which has not run")
        return self.net

    def configure_model(self) -> None:
        """Load the weights once, and shard them where the strategy shards."""
        if self.net is not None:
            return
        self.net = self._load(self.critic)
        if self.gradient_checkpointing:
            self.net.model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.algorithm.needs_reference() or self.algorithm.needs_reference_at_collection():
            shared = self.net.lora is not None
            self.reference = BasePolicy(self.net) if shared else self._load().requires_grad_(False)

    def _load(self, critic: CriticSettings | None = None) -> PolicyNet:
        # Lightning calls this with its device as the default one, which transformers takes for a device map.
        with torch.device("cpu"):
            net = PolicyNet.from_pretrained(self.path)
            if self.lora is not None:
                net.add_adapters(self.lora)
            if critic is not None:
                net.add_critic(critic)
        if self.compiled:
            net.compile_blocks()
        shard: Callable[[PolicyNet, Any], None] | None = getattr(self.trainer.strategy, "shard", None)
        if shard is not None:
            shard(net, self.device_mesh)
        return net

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer over what is trained of the policy and, where given, its schedule in applied updates."""
        optimizer = self._make_optimizer([p for p in self.policy.parameters() if p.requires_grad])
        if self._make_scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self._make_scheduler(optimizer), "interval": "step"},
        }

    def check_optimizer(self) -> torch.optim.Optimizer:
        """Make optimizer and schedule over a stand-in for the weights; returns the optimizer.

        Raises:
            ConfigurationError: They refuse their settings, or a number is not finite.
        """
        return checked_optimizer(
            self._make_optimizer, self._make_scheduler, vectors=self.lora is None or self.critic is not None
        )

    def on_train_batch_start(self, batch: TrajectoryBatch, batch_idx: int) -> None:
        """Note, before the step, whether the update is to be skipped."""
        self._skip, self._phase = batch.skip, batch.phase

    def training_step(self, batch: TrajectoryBatch, batch_idx: int) -> dict[str, Any]:
        """One forward pass; returns the loss to differentiate and, under ``observation``, what was seen.

        Raises:
            ConfigurationError: The micro-batch is larger than ``max_micro_batch_tokens``.
            NonFiniteError: The loss is not finite on some rank; nothing has been stepped.
        """
        self.require_room(batch)
        output = self._loss(batch)
        self._require_finite(output.loss, batch)
        if self.guard.enabled and batch.phase == "replay" and not batch.is_filler:
            log_ratio = output.token_metrics["log_ratio"]
            self._weight_moments.append(self.guard.moments(log_ratio, batch.segments, len(batch.lengths)))
        scale = self.trainer.accumulate_grad_batches * self.trainer.world_size
        observation = StepObservation(output.loss.detach(), output.token_metrics)
        return {"loss": output.loss * scale, "observation": observation}

    def _loss(self, batch: TrajectoryBatch) -> LossOutput:
        reference = batch.reference_log_probs
        if self.reference is not None and self.algorithm.needs_reference() and reference is None:
            reference = evaluate(self.reference, batch, self.temperature).log_probs
        log_probs, entropy, values = self.policy(
            **batch.forward_arguments(),
            temperature=self.temperature,
            with_entropy=self.algorithm.needs_rollouts,
            entropy_gradient=self.algorithm.needs_entropy(),
        )
        totals = (batch.total_tokens, batch.total_sequences)
        coefficients = self.algorithm.coefficients(batch.segments, batch.lengths, *totals)
        inputs = LossInputs(
            log_probs=log_probs,
            behavior_log_probs=log_probs.detach() if batch.behavior_log_probs is None else batch.behavior_log_probs,
            advantages=batch.token_advantages(),
            coefficients=coefficients,
            importance_weights=batch.importance_weights[batch.segments],
            segments=batch.segments,
            lengths=batch.lengths,
            proximal_log_probs=batch.proximal_log_probs,
            entropy=entropy,
            reference_log_probs=reference,
            values=values,
            old_values=batch.values,
            returns=batch.returns,
            td_errors=batch.td_errors,
        )
        return self.algorithm.loss(inputs)

    @property
    def shares_openings(self) -> bool:
        """Whether conversations of a micro-batch may share what they begin with."""
        return self.policy.shares_openings

    def reference_log_probs(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Float32 [S] for each trajectory: log-probabilities of its tokens under the frozen reference; a collective.

        Raises:
            RuntimeError: The algorithm has no reference.
        """
        if self.reference is None:
            raise RuntimeError(f"{self.algorithm} has no reference policy")
        passes = self.scoring_passes(trajectories)
        with self.trainer.strategy.precision_plugin.forward_context():
            return token_log_probs(self.reference, passes, self.temperature, self.device)

    def scoring_passes(self, trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
        """What each forward pass without gradient holds, within ``max_micro_batch_tokens``; a collective.

        Every rank runs as many passes as the one that needs most, of which the last may be empty.
        """
        own = chunks(trajectories, self.max_micro_batch_tokens)
        return own + [[] for _ in range(int(self._maximum(len(own))) - len(own))]

    def _maximum(self, value: float) -> float:
        """The largest of all ranks' values."""
        own = torch.tensor(float(value), device=self.device)
        return float(self.trainer.strategy.reduce(own, reduce_op="max"))

    def require_room(self, batch: TrajectoryBatch) -> None:
        """Refuse a micro-batch of more tokens than are allowed, on all ranks together; a collective with a limit.

        Raises:
            ConfigurationError: That of some rank has more than ``max_micro_batch_tokens``.
        """
        limit = self.max_micro_batch_tokens
        if limit is None:
            return
        size = int(self._maximum(batch.input_ids.numel()))
        if size > limit:
            raise ConfigurationError(
                f"model.max_micro_batch_tokens={limit}, but a micro-batch takes {size} tokens, with the room left over"
                f" in its rows; raise trainer.accumulate_grad_batches={self.trainer.accumulate_grad_batches}, or lower"
                " data.batch_size or rollout.engine.max_model_len"
            )

    def _require_finite(self, loss: Tensor, batch: TrajectoryBatch) -> None:
        broken = self.trainer.strategy.reduce((~torch.isfinite(loss.detach())).double(), reduce_op="sum")
        if float(broken) > 0:
            raise NonFiniteError(
                f"the loss of a {batch.phase} batch is {float(loss.detach())} in epoch {self.trainer.current_epoch};"
                f" buffer ids {batch.ids.tolist()}"
            )

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step, or run forward and backward only: a step on zero gradients would still move along Adam's momentum.

        Forward and backward come first, since the guard decides about the weights of the whole optimizer batch.

        Raises:
            NonFiniteError: The step made a parameter infinite or NaN.
        """
        loss: Any = None if optimizer_closure is None else optimizer_closure()
        self.guard_factor = self._guarded_factor()
        self.applied = not self._skip and self.guard_factor > 0
        if not self.applied:
            return
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        with scaled_learning_rate(plain, self.guard_factor):
            optimizer.step(closure=lambda: loss)
        if not self.has_finite_parameters():
            raise NonFiniteError(
                f"the update on a {self._phase} batch in epoch {self.trainer.current_epoch} made parameters NaN or"
                " infinite; resume from the newest checkpoint with a smaller learning rate"
            )

    def _guarded_factor(self) -> float:
        """The guard's factor for the update whose gradient is there now; a collective where there is a guard."""
        moments, self._weight_moments = self._weight_moments, []
        if not self.guard.enabled or self._phase != "replay" or self._skip:
            return 1.0
        nothing = weight_moments(torch.empty(0, device=self.device))
        own = pooled_moments(torch.stack([nothing, *moments]))
        of_all_ranks = self.all_gather(own)
        assert isinstance(of_all_ranks, Tensor)
        pooled = pooled_moments(of_all_ranks.reshape(-1, 3))
        return self.guard.factor(ess_of_moments(pooled) / float(pooled[2]))

    def has_finite_parameters(self) -> bool:
        """Whether every parameter is finite on every rank; a collective."""
        parameters = [p.to_local() if isinstance(p, DTensor) else p for p in self.policy.parameters()]
        # A tensor's extremes say it, NaN included, in a small part of the time of asking each element.
        extremes = [value for p in parameters if p.numel() for value in torch.aminmax(p.detach())]
        finite = torch.isfinite(torch.stack(extremes)).all()
        broken = self.trainer.strategy.reduce((~finite).double(), reduce_op="sum")
        return float(broken) == 0

    def on_train_start(self) -> None:
        """Apply what the configuration says of the optimizer where the checkpoint that is resumed says otherwise.

        Under a schedule the checkpoint's settings stay: the schedule alone knows what they should be by now.
        """
        if self.trainer.ckpt_path is None or self._make_scheduler is not None:
            return
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                apply_settings(group, optimizer.defaults)

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Advance the schedule with applied updates only."""
        if self.applied:
            scheduler.step()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip as the trainer is configured to, and keep the norm from before.

        Raises:
            NonFiniteError: The gradient is not finite though the loss is; clipping would spread it to every parameter.
        """
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self.gradient_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if not bool(torch.isfinite(self.gradient_norm)):
            raise NonFiniteError(
                f"the gradient norm of a {self._phase} batch is {float(self.gradient_norm)} in epoch"
                f" {self.trainer.current_epoch}"
            )
        if gradient_clip_val:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm or "norm")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing: EvaluationCallback plays the episodes."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing: EvaluationCallback plays the episodes."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave out what is frozen, which is the checkpoint at ``path``: the reference and the base of adapters."""
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in state.items() if not is_frozen(name, self.lora)}
        checkpoint |= parts(self.lora, self.critic) | {"optimizer": kind_of(self.trainer.optimizers)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Fill in what :meth:`on_save_checkpoint` left out.

        Raises:
            ConfigurationError: A run with replay is to resume from a checkpoint without a replay buffer, one with
                adapters or a critic from a checkpoint with other adapters or none, or without a critic, or a run from
                one of another kind of optimizer.
        """
        data = type(getattr(self.trainer, "datamodule", None)).__name__
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        if fitting and self.algorithm.needs_rollouts and data not in checkpoint:
            raise ConfigurationError(
                f"ckpt_path={self.trainer.ckpt_path!r} holds no replay buffer: it is not from a run like this one;"
                " to start from its weights, `freshper export` them and set model.path"
            )
        require_parts(checkpoint, self.trainer.ckpt_path, self.lora, self.critic)
        if fitting:
            require_kind(checkpoint, kind_of([self.check_optimizer()]))
        frozen = {name: value for name, value in self.state_dict().items() if is_frozen(name, self.lora)}
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **frozen}
