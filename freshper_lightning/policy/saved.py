"""What a checkpoint of the policy holds, and which checkpoint goes with which settings."""

from dataclasses import asdict
from typing import Any

from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.critic import CriticSettings
from freshper_lightning.policy.lora import LoraSettings, is_adapter


def is_frozen(name: str, lora: LoraSettings | None) -> bool:
    """Whether ``name`` of the module's state is never trained, so that ``model.path`` has it."""
    trained = is_adapter(name) or name.startswith("net.critic.")
    return name.startswith("reference.") or (lora is not None and not trained)


def parts(lora: LoraSettings | None, critic: CriticSettings | None) -> dict[str, Any]:
    """What a checkpoint says of the parts that were trained."""
    return {"lora": None if lora is None else asdict(lora), "critic": None if critic is None else asdict(critic)}


def require_parts(
    checkpoint: dict[str, Any], path: Any, lora: LoraSettings | None, critic: CriticSettings | None
) -> None:
    """Refuse a checkpoint of other parts than these.

    Raises:
        ConfigurationError: It has other adapters or none, or a critic where there shall be none, or none.
    """
    wanted = parts(lora, critic)
    remedy = "use the same, or `freshper export` it and set model.path"
    if checkpoint.get("lora") != wanted["lora"]:
        raise ConfigurationError(
            f"model.lora={wanted['lora']}, but the checkpoint {path!r} was written with"
            f" {checkpoint.get('lora')}; {remedy}"
        )
    if (checkpoint.get("critic") is None) != (critic is None):
        raise ConfigurationError(
            f"model.critic={wanted['critic']}, but the checkpoint {path!r} was written with"
            f" {checkpoint.get('critic')}; {remedy}"
        )
