"""Alternates rollouts and updates: collects at the start of an iteration and keeps the clock."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any, get_args

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from transformers import AutoTokenizer

from datamodules.epoch import Preparation
from datamodules.replay import Measure, ReplayDataModule
from freshper_lightning.callbacks.checks import chat_format, check_checkpoint, check_configuration
from freshper_lightning.callbacks.critic import Visits, priorities_at_collection
from freshper_lightning.callbacks.drift import DriftMeter
from freshper_lightning.callbacks.metrics import log_scalars
from freshper_lightning.callbacks.openings import check_openings
from freshper_lightning.callbacks.parts import data_module, policy_module, replay_data, summary_writers, summing
from freshper_lightning.callbacks.progress import LoopProgress
from freshper_lightning.checkpoint import nothing_new_to_save, save_end, save_last_good
from freshper_lightning.errors import NonFiniteError
from freshper_lightning.policy.module import PolicyModule
from freshper_lightning.policy.packing import TrajectoryBatch
from freshper_lightning.policy.preparation import prepare, prepared_under
from freshper_lightning.replay import TDError
from freshper_lightning.replay.clock import DRIFT_CLOCKS
from freshper_lightning.rollout.collector import Collection, Collector, EnvironmentConfig, Play
from freshper_lightning.rollout.conversation import ChatFormat, History
from freshper_lightning.rollout.engine import RolloutEngine
from freshper_lightning.rollout.episode import EpisodePlan
from freshper_lightning.rollout.factory import EngineConfig, build_engine
from freshper_lightning.rollout.sampling import SamplingConfig
from freshper_lightning.rollout.seeds import training_instance_seed
from freshper_lightning.trajectory import ClockReading, Trajectory

logger = logging.getLogger(__name__)


class RolloutCallback(Callback):
    """Every iteration: newest weights to the engine, whole groups from it, advantages once, all into the buffer.

    The clock counts applied updates, rollout phases, learning rates and, where asked for, drift; it moves after an
    applied update, before any checkpoint of it is written. Rollouts are a function of weights, seed and clock alone.
    """

    def __init__(
        self,
        environment: EnvironmentConfig,
        engine: EngineConfig = EngineConfig(),
        sampling: SamplingConfig = SamplingConfig(),
        groups: int = 16,
        group_size: int = 8,
        format_penalty: float = 0.0,
        max_failure_share: float = 0.1,
        history: History = "strict",
        play: Play = "lock_step",
        threads: int | None = None,
        measure_drift: bool = False,
        seed: int = 0,
    ) -> None:
        """Keep the settings; the engine starts when the trainer does.

        Args:
            environment: What is played.
            engine: What samples the replies.
            sampling: How replies are sampled for training.
            groups: Instances per iteration, over all ranks.
            group_size: Episodes per instance.
            format_penalty: Added to the training return for each reply that the environment cannot parse; at most 0.
            max_failure_share: Share of an iteration's episodes that may be lost to failing environments.
            history: ``verbatim`` keeps earlier replies as sampled where the chat template would rewrite them.
            play: ``lock_step`` gives equal episodes to equal seeds; ``streaming`` gives that up, so that an environment
                that is ready has its next reply while slow ones are still busy.
            threads: How many environments of a rank may be busy at the same time, such as those that ask a search
                server; they must share no state then. By default 32 when streaming, and one after the other else.
            measure_drift: Measure and log the policy's drift even where ``data.clock`` does not need it.
            seed: Seed of instances and samples.
        """
        for key, value in {"groups": groups, "group_size": group_size, "threads": threads}.items():
            if value is not None and value < 1:
                raise ValueError(f"rollout.{key}={value} must be at least 1")
        if play not in get_args(Play):
            raise ValueError(f"rollout.play={play!r} must be one of {', '.join(get_args(Play))}")
        if not -math.inf < format_penalty <= 0:
            raise ValueError(f"rollout.format_penalty={format_penalty} must be finite and at most 0")
        if not 0 <= max_failure_share < 1:
            raise ValueError(f"rollout.max_failure_share={max_failure_share} must be in [0, 1)")
        self.environment = environment
        self.engine_config = engine
        self.sampling = sampling
        self.groups, self.group_size = groups, group_size
        self.format_penalty, self.max_failure_share = format_penalty, max_failure_share
        self.history = history
        self.play, self.threads = play, threads
        self.measure_drift = measure_drift
        self.seed = seed
        self.clock = ClockReading()
        self.drift_meter = DriftMeter(seed)
        self.environment_steps = 0
        self.groups_begun = 0
        """Training groups so far, after which the next ones are named, whatever ``groups`` was before a resumption."""
        self.engine: RolloutEngine | None = None
        self._collectors: list[Collector] = []
        self._learning_rate = 0.0
        self._visits = Visits()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work, before a model is loaded."""
        module = policy_module(pl_module)
        check_configuration(trainer, module, self)
        data = replay_data(trainer)
        if data is not None:
            prepared = None
            if module.algorithm.needs_preparation():
                prepared = Preparation(partial(prepare, module, reduce=summing(trainer)), prepared_under(module))
            size, longest = self.groups * self.group_size, self.engine_config.max_model_len
            data.bind(size, lambda: self.clock, self.group_size, prepared, longest, _measure(module, data))
            if stage == TrainerFn.FITTING:
                chat, ours = chat_format(module, self), self._groups(trainer.global_rank, trainer.world_size)
                instances = [training_instance_seed(self.seed, self.clock.iteration + 1, group) for group in ours]
                check_openings("rollout.environment", self.environment, instances, chat, longest)

    def collector(
        self, trainer: Trainer, module: PolicyModule, environment: EnvironmentConfig | None = None
    ) -> Collector:
        """The collector of an environment (the training one by default) over this rank's one engine.

        The engine holds the policy's present weights on return. It is made at the first call, after the trainer's
        process group exists; a collective.
        """
        engine = self._synchronized_engine(trainer, module)
        played = self.environment if environment is None else environment
        for collector in self._collectors:
            if collector.environment == played:
                return collector
        collector = Collector(
            engine=engine,
            chat=ChatFormat(AutoTokenizer.from_pretrained(module.path), history=self.history),
            environment=played,
            sampling=self.sampling,
            format_penalty=self.format_penalty,
            max_failure_share=self.max_failure_share,
            max_context=self.engine_config.max_model_len,
            play=self.play,
            threads=self.threads,
        )
        self._collectors.append(collector)
        return collector

    def _synchronized_engine(self, trainer: Trainer, module: PolicyModule) -> RolloutEngine:
        if self.engine is None:
            seed = self.seed + trainer.global_rank
            truncation = self.sampling.truncation()
            self.engine = build_engine(self.engine_config, module.path, seed, module.device, truncation)
        if self.engine.weight_version != self.clock.updates:
            start = time.perf_counter()
            self.engine.load_weights(module.policy.checkpoint_tensors(), version=self.clock.updates)
            if module.device.type == "cuda":
                torch.cuda.synchronize(module.device)
            log_scalars(trainer, {"time/sync": time.perf_counter() - start}, self.clock.updates)
        return self.engine

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have an iteration begun where a run resumes from the last batch of the one before, and nothing saved twice.

        Lightning takes such a checkpoint for one from the middle of an epoch and would not call
        :meth:`on_train_epoch_start`.
        """
        nothing_new_to_save(trainer)
        loop = trainer.fit_loop
        progress = loop.epoch_loop.batch_progress
        if loop.epoch_loop.restarted_on_train_batch_end and progress.is_last_batch:
            # Lightning starts to count anew from as many batches as an iteration has, which may be more now.
            progress.current.completed = int(trainer.num_training_batches)
            loop.reset_restart_stage()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an iteration; not called when a run resumes in the middle of one."""
        data = replay_data(trainer)
        if data is None:
            return
        module = policy_module(pl_module)
        self.clock = replace(self.clock, iteration=self.clock.iteration + 1)
        start = time.perf_counter()
        collection = self._collect(trainer, module)
        self.groups_begun += self.groups
        scorer = _Scorer(module)
        trajectories = module.algorithm.advantages(collection.trajectories, summing(trainer), scorer)
        _warn_without_signal(trajectories)
        data.add_fresh(trajectories)
        self.drift_meter.restart()
        filtered = torch.tensor(float(len(collection.trajectories) - len(trajectories)))
        steps = torch.tensor(float(collection.num_env_steps), dtype=torch.float64)
        self.environment_steps += int(summing(trainer)(steps))
        metrics = {"rollout/filtered": float(summing(trainer)(filtered))}
        if module.algorithm.needs_reference_at_collection():
            total, count = summing(trainer)(scorer.sums).tolist()
            metrics["rollout/kl_reference"] = total / max(count, 1.0)
        log_scalars(trainer, metrics, self.clock.updates)
        self._log(trainer, module, collection, time.perf_counter() - start)

    def _collect(self, trainer: Trainer, module: PolicyModule) -> Collection:
        collector = self.collector(trainer, module)
        plans = self._plans(trainer.global_rank, trainer.world_size)
        bar = trainer.progress_bar_callback
        if not isinstance(bar, LoopProgress):
            return collector.collect(plans, born=self.clock)
        with bar.phase(f"Rollout {self.clock.iteration}", total=len(plans)) as finished:
            return collector.collect(plans, born=self.clock, progress=finished)

    def _plans(self, rank: int, world_size: int) -> list[EpisodePlan]:
        """This rank's episodes; groups are whole on one rank, and no two of a run have the same name."""
        plans = []
        for group in self._groups(rank, world_size):
            instance = training_instance_seed(self.seed, self.clock.iteration, group)
            for member in range(self.group_size):
                key = (self.seed, self.clock.iteration, group, member)
                name = self.groups_begun + group
                plans.append(EpisodePlan(group=name, member=member, instance_seed=instance, sampling_key=key))
        return plans

    def _groups(self, rank: int, world_size: int) -> range:
        return range(rank * self.groups // world_size, (rank + 1) * self.groups // world_size)

    def _log(self, trainer: Trainer, module: PolicyModule, collection: Collection, seconds: float) -> None:
        summary = summarize(collection, summing(trainer))
        speed = {"time/engine_tokens_per_second": summary.pop("engine_tokens_per_second")}
        metrics = {f"rollout/{name}": value for name, value in summary.items()} | speed
        metrics["rollout/environment_steps"] = float(self.environment_steps)
        metrics["time/rollout"] = seconds
        log_scalars(trainer, metrics, self.clock.updates)
        shown: dict[str, float] = {name: summary[name] for name in ("return", "success") if name in summary}
        module.log_dict(shown, prog_bar=True, logger=False)
        text = "\n".join("    " + line for line in collection.transcript.splitlines())
        for writer in summary_writers(trainer):
            writer.add_text("rollout/conversation", text, self.clock.updates)

    def measures_drift(self, data: ReplayDataModule) -> bool:
        """Whether drift is measured: the buffer's clock needs it, or a setting asks for it."""
        return self.measure_drift or data.buffer.clock in DRIFT_CLOCKS

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TrajectoryBatch, batch_idx: int
    ) -> None:
        """Take what the clock needs from before an update: its learning rate, and the policy that it is to move."""
        self._learning_rate = float(trainer.optimizers[0].param_groups[0]["lr"])
        data = replay_data(trainer)
        if data is not None and self.measures_drift(data) and not batch.skip:
            self.drift_meter.before(trainer, policy_module(pl_module), data)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance the clock after an applied update, write back what its batch showed, ask for the next snapshot."""
        module, data = policy_module(pl_module), replay_data(trainer)
        if data is not None:
            self._visits.add(data, batch)
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if module.applied:
            measured = data is not None and self.measures_drift(data)
            drift = self.drift_meter.after(trainer, module) if measured else 0.0
            self.clock = self.clock.after_update(self._learning_rate * module.guard_factor, drift)
        if data is not None:
            self._visits.write_back(data)
            if not data.rewrites_freshness:  # FreshnessCallback has more to write, and then asks itself
                data.buffer.prefetch(self.clock)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave a checkpoint of the last good update where a loss broke; every rank raises that error together."""
        data, module = data_module(trainer), policy_module(pl_module)
        if isinstance(exception, NonFiniteError) and data is not None and module.has_finite_parameters():
            path = save_last_good(trainer, data.train_dataloader())
            logger.error("the last good update is in %s", path)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave a checkpoint of what training ended with, where the last one is older."""
        save_end(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close environments and engine, after everything that could still need the engine's process group."""
        while self._collectors:
            self._collectors.pop().close()
        if self.engine is not None:
            self.engine.close()
        self.engine = None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """See :func:`check_checkpoint`; the command line asks it before a model is loaded."""
        check_checkpoint(trainer, trainer.ckpt_path, trainer.state.fn == TrainerFn.FITTING)

    def state_dict(self) -> dict[str, Any]:
        """The clock, and the environment steps and groups so far."""
        return {**asdict(self.clock), "environment_steps": self.environment_steps, "groups_begun": self.groups_begun}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.clock = clock_of(state_dict)
        self.environment_steps = state_dict["environment_steps"]
        self.groups_begun = state_dict.get("groups_begun", self.clock.iteration * self.groups)


def clock_of(state: Mapping[str, Any]) -> ClockReading:
    """The clock in a state of :class:`RolloutCallback`; one that the state does not know yet stands at 0."""
    return ClockReading(**{f.name: state[f.name] for f in fields(ClockReading) if f.name in state})


def _measure(module: PolicyModule, data: ReplayDataModule) -> Measure | None:
    priority = data.buffer.priority
    if not isinstance(priority, TDError):
        return None
    return partial(priorities_at_collection, module, priority, visited_first=data.epochs > 0)


class _Scorer:
    """Scores trajectories by the reference, and adds up how far the behavior policy was from it."""

    def __init__(self, module: PolicyModule) -> None:
        self._module = module
        self.sums = torch.zeros(2, dtype=torch.float64)
        """Sum of log(behavior / reference) over sampled tokens, in nats, and their number."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        found = self._module.reference_log_probs(trajectories)
        for item, log_probs in zip(trajectories, found, strict=True):
            total = float((item.behavior_log_probs.double() - log_probs).sum())
            self.sums += torch.tensor([total, float(item.num_sampled)], dtype=torch.float64)
        return found


def _warn_without_signal(trajectories: list[Trajectory]) -> None:
    advantages = [t.advantages for t in trajectories if t.advantages is not None]
    if advantages and not any(bool(values.any()) for values in advantages):
        returns = sorted({round(t.training_return, 4) for t in trajectories})
        logger.warning(
            "all %d advantages are 0 (returns: %s): there is nothing to learn from in this iteration",
            len(trajectories),
            ", ".join(map(str, returns[:5])),
        )


def summarize(collection: Collection, total: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Means over the episodes of all ranks; ``total`` sums a float64 tensor over ranks.

    ``success`` is the share of the episodes that succeeded, and is not there where no episode has a verdict. One that
    was cut off ahead of its verdict has failed.
    """
    episodes = collection.trajectories
    sums = {
        "episodes": len(episodes),
        "return": sum(t.episode_return for t in episodes),
        "successes": sum(t.success is True for t in episodes),
        "verdicts": sum(t.success is not None for t in episodes),
        "undecided": sum(t.success is None and t.truncated for t in episodes),
        "turns": sum(t.num_turns for t in episodes),
        "sampled_tokens": sum(t.num_sampled for t in episodes),
        "length": sum(t.num_tokens for t in episodes),
        "truncated": sum(t.truncated for t in episodes),
        "steps": collection.num_env_steps,
        "valid": collection.num_valid,
        "effective": collection.num_effective,
        "failures": len(collection.failures),
        "dropped": collection.num_dropped,
        "speed": collection.num_sampled_tokens / max(collection.seconds_generating, 1e-9),
    }
    totals = total(torch.tensor(list(map(float, sums.values())), dtype=torch.float64)).tolist()
    of = dict(zip(sums, totals, strict=True))
    means = ("return", "turns", "sampled_tokens", "length", "truncated")
    summary = {name: of[name] / max(of["episodes"], 1.0) for name in means}
    if of["verdicts"]:
        summary["success"] = of["successes"] / (of["verdicts"] + of["undecided"])
    return summary | {
        "valid_actions": of["valid"] / max(of["steps"], 1.0),
        "effective_actions": of["effective"] / max(of["steps"], 1.0),
        "failures": of["failures"],
        "dropped": of["dropped"],
        "engine_tokens_per_second": of["speed"],
    }
