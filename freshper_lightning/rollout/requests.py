"""What every engine checks before it does what it is asked to."""

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Literal

from freshper_lightning.rollout.engine import GenerationRequest
from freshper_lightning.rollout.sampling import MIN_TEMPERATURE


def check_request(request: GenerationRequest, max_model_len: int, under_way: Container[int]) -> None:
    """Refuse what no engine can serve.

    Raises:
        ValueError: The message names the field, its value and what is allowed.
    """
    prompt = len(request.prompt_token_ids)
    if prompt == 0:
        raise ValueError(f"request {request.request_id}: prompt_token_ids must not be empty")
    if request.max_tokens < 1:
        raise ValueError(f"request {request.request_id}: max_tokens must be at least 1, not {request.max_tokens}")
    if prompt + request.max_tokens > max_model_len:
        raise ValueError(
            f"request {request.request_id}: {prompt} prompt tokens and max_tokens={request.max_tokens} "
            f"exceed max_model_len={max_model_len}"
        )
    if request.temperature != 0 and request.temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"request {request.request_id}: temperature must be 0 or at least {MIN_TEMPERATURE}, "
            f"not {request.temperature}"
        )
    if not 0 <= request.seed < 2**63:
        raise ValueError(f"request {request.request_id}: seed must be in [0, 2**63), not {request.seed}")
    if request.images:
        raise ValueError(f"request {request.request_id}: images must be empty, since the engine's model reads text")
    if request.request_id in under_way:
        raise ValueError(f"request_id {request.request_id} is under way already")


class EngineState:
    """Whether an engine may be used; a load of weights that failed leaves it unusable until one succeeds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._state: Literal["ready", "without a whole set of weights", "asleep", "closed"] = "ready"

    def require_ready(self) -> None:
        """Raise a RuntimeError unless the engine may sample."""
        if self._state != "ready":
            raise RuntimeError(f"the {self._name} engine is {self._state}")

    @contextmanager
    def loading(self, under_way: int) -> Iterator[None]:
        """Surrounds the replacement of all weights; ``under_way`` requests forbid it."""
        if self._state != "without a whole set of weights":
            self.require_ready()
        if under_way:
            raise RuntimeError(f"weights cannot change while {under_way} requests are under way")
        self._state = "without a whole set of weights"
        yield
        self._state = "ready"

    def fall_asleep(self) -> None:
        """From ready to asleep."""
        self.require_ready()
        self._state = "asleep"

    def wake(self) -> None:
        """From asleep to ready."""
        if self._state != "asleep":
            raise RuntimeError(f"the {self._name} engine is {self._state}, not asleep")
        self._state = "ready"

    def close(self) -> bool:
        """To closed; whether it was not closed before."""
        was_open = self._state != "closed"
        self._state = "closed"
        return was_open
