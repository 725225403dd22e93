"""How settings and loss inputs are refused: by name, with the value and what is allowed."""

import math
from collections.abc import Sequence
from dataclasses import fields

from torch import Tensor

from freshper_lightning.algorithms.inputs import LossInputs


def check_choice(key: str, value: object, allowed: Sequence[object]) -> None:
    """Refuse a value that is none of those allowed.

    Raises:
        ValueError: It is not.
    """
    if value not in allowed:
        raise ValueError(f"{key} must be one of {', '.join(map(str, allowed))}, not {value!r}")


def check_range(
    key: str,
    value: float | None,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
) -> None:
    """Refuse a value that is not finite or not above ``above`` and within [least, most]; ``None`` means not set.

    Raises:
        ValueError: It is.
    """
    if value is None or (above < value < math.inf and least <= value <= most):
        return
    low = f"at least {least:g}" if math.isfinite(least) else f"above {above:g}"
    high = f"at most {most:g}" if math.isfinite(most) else "finite"
    raise ValueError(f"{key} must be {low} and {high}, not {value}")


def check_inputs(inputs: LossInputs) -> None:
    """Refuse shapes that would broadcast into something else than one number per token.

    Raises:
        ValueError: A tensor is not of the shape [S].
    """
    shape = inputs.log_probs.shape
    for field in fields(inputs):
        tensor: Tensor | None = getattr(inputs, field.name)
        if tensor is None or field.name == "lengths":
            continue
        if len(shape) != 1 or tensor.shape != shape:
            raise ValueError(
                f"{field.name} must have the shape [S] of log_probs, {list(shape)}, not {list(tensor.shape)}"
            )
