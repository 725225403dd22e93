"""Training batches from demonstrations: the supervised warm start, on the same loop as everything else."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from datamodules.loader import LoopDataModule, seed_of_run
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.module import PolicyModule
from freshper_lightning.policy.net import require_model_folder
from freshper_lightning.policy.packing import TrajectoryBatch, collate
from freshper_lightning.policy.rows import balanced_parts
from freshper_lightning.rollout.conversation import ChatFormat, Conversation, History
from freshper_lightning.rollout.seeds import demonstration_instance_seed, stable_hash
from freshper_lightning.trajectory import Transcript

Demonstrate = Callable[..., list[tuple[str, str]]]
"""``demonstrate(seed, **arguments)``: the user message and the reply of each turn of one episode."""


class DemonstrationsDataModule(LoopDataModule):
    """One iteration is one pass over ``episodes`` demonstrations, in an order of its own.

    A demonstration is built as a rollout is: prompt and later user turns from the chat template, replies ended by the
    end token, and only the replies are trained on, unless ``observations`` are as well. It has no system prompt, which
    environments may have.
    """

    def __init__(
        self,
        demonstrate: Demonstrate,
        arguments: dict[str, Any] | None = None,
        episodes: int = 2048,
        batch_size: int = 64,
        resample: bool = False,
        observations: bool = False,
        history: History = "strict",
        seed: int | None = None,
    ) -> None:
        """Keep the settings; the first demonstrations are played in :meth:`setup`.

        Args:
            demonstrate: Import path of a function that plays one episode from a seed.
            arguments: Further arguments of that function; one with the name of an argument of the environment of
                rollouts means the same, so that what is demonstrated can be kept apart from what is evaluated on.
            episodes: Demonstrations in one pass.
            batch_size: Demonstrations per optimizer batch, over all ranks and micro-batches.
            resample: Whether every pass plays new demonstrations, rather than all passes the same.
            observations: Whether what the environment says after the first reply is trained on as well as the replies.
                A policy that starts from nothing learns from it what a move does, long before it learns to play.
            history: As in the rollouts that follow.
            seed: Seed of instances and of the order; by default that of ``seed_everything``.
        """
        super().__init__()
        if batch_size < 1 or episodes < 1 or episodes % batch_size:
            raise ValueError(f"data.batch_size={batch_size} must divide data.episodes={episodes}, both at least 1")
        self.demonstrate, self.arguments, self.history = demonstrate, arguments or {}, history
        self.episodes, self.batch_size = episodes, batch_size
        self.seed = seed_of_run() if seed is None else seed
        self.resample, self.observations = resample, observations
        self.demonstrations: list[Transcript] = []
        """Those of the present pass."""
        self._chat: ChatFormat | None = None
        self._played: int | None = None

    def setup(self, stage: str) -> None:
        """Play and tokenise the demonstrations."""
        if stage != "fit" or self.demonstrations:
            return
        assert self.trainer is not None
        module = self.trainer.lightning_module
        assert isinstance(module, PolicyModule)
        require_model_folder(module.path)
        self._chat = ChatFormat(AutoTokenizer.from_pretrained(module.path), history=self.history)
        self._play(0)

    def _play(self, number: int) -> None:
        """Play the ``number``-th set of demonstrations, unless they are at hand.

        Raises:
            ConfigurationError: The demonstrator does not do what is asked of it.
        """
        if self._played == number:
            return
        assert self._chat is not None
        first = number * self.episodes
        try:
            self.demonstrations = [self._episode(self._chat, first + index) for index in range(self.episodes)]
        except (ValueError, TypeError) as error:
            name = getattr(self.demonstrate, "__name__", repr(self.demonstrate))
            raise ConfigurationError(
                f"data.demonstrate={name} with data.arguments={self.arguments}: {error}"
            ) from error
        self._played = number

    def _episode(self, chat: ChatFormat, number: int) -> Transcript:
        instance = demonstration_instance_seed(self.seed, number)
        turns = self.demonstrate(instance, **self.arguments)
        if not turns:
            raise ValueError(f"there is no turn in the demonstration of seed {instance}; is there a way to play it?")
        conversation = Conversation(chat, turns[0][0])
        for index, (user, reply) in enumerate(turns):
            if index > 0:
                conversation.add_user(user)
            conversation.add_reply(chat.reply_ids(reply))
        length = len(conversation.token_ids)
        learned = [(conversation.turns[0][0], length)] if self.observations else conversation.turns
        return Transcript(
            token_ids=torch.tensor(conversation.token_ids, dtype=torch.int32),
            turns=torch.tensor(learned, dtype=torch.int32),
        )

    @property
    def updates_per_iteration(self) -> int:
        """Optimizer batches in one pass."""
        return self.episodes // self.batch_size

    def sizes(self) -> dict[str, int]:
        """Demonstrations of a pass and of a batch."""
        return {"data.episodes": self.episodes, "data.batch_size": self.batch_size}

    def optimizer_batch(self, update: int) -> list[TrajectoryBatch]:
        """This rank's part of the ``update``-th batch of the pass, as micro-batches."""
        assert self.trainer is not None
        self._play(self.trainer.current_epoch if self.resample else 0)
        key = stable_hash("demonstration order", self.seed, self.trainer.current_epoch)
        order = np.random.default_rng(key).permutation(self.episodes)
        members = np.split(order, self.updates_per_iteration)[update]
        tokens = float(sum(self.demonstrations[index].num_sampled for index in members))
        micro_batches = []
        mine = np.array_split(members, self.trainer.world_size)[self.trainer.global_rank]
        items = [self.demonstrations[index] for index in mine]
        for part in balanced_parts([item.num_tokens for item in items], self.micro_batches):
            batch = collate([items[index] for index in part], phase="demonstration")
            batch.total_tokens, batch.total_sequences = tokens, float(self.batch_size)
            micro_batches.append(batch)
        return micro_batches
