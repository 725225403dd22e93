"""The checks that every engine makes before it takes a request."""

from collections.abc import Container

from freshper_lightning.rollout.engine import GenerationRequest


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
    if request.temperature < 0:
        raise ValueError(f"request {request.request_id}: temperature must be at least 0, not {request.temperature}")
    if not 0 <= request.seed < 2**63:
        raise ValueError(f"request {request.request_id}: seed must be in [0, 2**63), not {request.seed}")
    if request.images:
        raise ValueError(f"request {request.request_id}: images must be empty, since the engine's model reads text")
    if request.request_id in under_way:
        raise ValueError(f"request_id {request.request_id} is under way already")
