"""What every rollout engine promises, and the plain values that cross its border."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One reply to sample. Token ids go in and token ids come out; no text crosses this border."""

    request_id: int
    """Chosen by the caller, unique among the requests under way."""
    prompt_token_ids: Sequence[int]
    """The conversation so far, never empty."""
    max_tokens: int
    """Upper bound on sampled tokens, at least 1."""
    temperature: float
    """Divides the logits; 0 takes the most likely token."""
    seed: int
    """Determines the sample (0 <= seed < 2**63), together with weights and prompt."""
    images: tuple[bytes, ...] = ()
    """Encoded images in the order of their placeholders."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled reply, with the distribution's own log-probabilities at the request's temperature."""

    request_id: int
    token_ids: tuple[int, ...]
    """Sampled tokens in order, the stop token included where one was sampled; never empty."""
    log_probs: tuple[float, ...]
    """Natural log-probability of each token under the distribution that it was drawn from; 0 at temperature 0."""
    finish_reason: FinishReason
    """``stop``: a stop token was sampled; ``length``: the bound was reached."""
    weight_version: int
    """Version given to :meth:`RolloutEngine.load_weights`, or -1 while the engine has the checkpoint's weights."""


class RolloutEngine(ABC):
    """Samples replies from its own copy of the policy's weights.

    What it returns is what it sampled, and ``log_probs`` are those of the distribution that it sampled from. Equal
    weights, requests and batch composition give equal samples, whatever global random state is.
    """

    name: str
    """Short name for logs, such as ``vllm``."""

    @abstractmethod
    def submit(self, request: GenerationRequest) -> None:
        """Queue one request.

        Raises:
            ValueError: Empty prompt, prompt plus ``max_tokens`` beyond the context, or an id that is under way.
        """

    @abstractmethod
    def poll(self, wait: bool = True) -> list[Completion]:
        """Make progress and return what has finished since the last call; empty only when nothing is under way.

        Without ``wait`` the engine makes one step, and may return nothing although requests are under way.
        """

    def generate(self, requests: Iterable[GenerationRequest]) -> list[Completion]:
        """Submit all and wait; completions come in the order of the requests."""
        order = []
        for request in requests:
            self.submit(request)
            order.append(request.request_id)
        finished: dict[int, Completion] = {}
        while len(finished) < len(order):
            batch = self.poll()
            if not batch:
                raise RuntimeError(f"{self.name} lost {len(order) - len(finished)} of {len(order)} requests")
            finished.update((completion.request_id, completion) for completion in batch)
        return [finished[request_id] for request_id in order]

    @abstractmethod
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights, given under their checkpoint names, and drop every cache that the old ones filled.

        Tied tensors may come under one name or under both. A generator is consumed lazily, tensor by tensor.

        Raises:
            ValueError: A name is unknown, or a weight of the engine was not given.
            RuntimeError: Requests are under way.
        """

    @property
    @abstractmethod
    def weight_version(self) -> int:
        """Version of the weights now loaded; -1 for those of the checkpoint."""

    @abstractmethod
    def weight_fingerprint(self) -> float:
        """A number that changes when the weights that sampling uses change (float64 sum of absolute values)."""

    @abstractmethod
    def sleep(self) -> None:
        """Give memory back until :meth:`wake`; nothing may be submitted meanwhile."""

    @abstractmethod
    def wake(self) -> None:
        """Undo :meth:`sleep`; the weights are those from before or are loaded next."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent; afterwards only ``close`` may be called."""
