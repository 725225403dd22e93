"""Errors that are the user's to mend, or that end a run on purpose."""


class ConfigurationError(ValueError):
    """A setting cannot work; the message names the key, its value and what is allowed. Raised before a model loads."""


class NumericsError(RuntimeError):
    """A number that training needs is NaN or infinite, as it will be when the run is made again."""


class NonFiniteError(NumericsError):
    """A loss was NaN or infinite; the parameters are those of the last good update."""


def require_setting(key: str, value: object, holds: bool, allowed: str) -> None:
    """Does nothing if the condition holds.

    Raises:
        ConfigurationError: It does not; the message has key, value and what is allowed.
    """
    if not holds:
        raise ConfigurationError(f"{key}={value} must be {allowed}")


def require_count(key: str, value: object) -> None:
    """Does nothing if the value is a whole number of at least 1; see :func:`require_setting`."""
    holds = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require_setting(key, repr(value), holds, "a whole number of at least 1")
