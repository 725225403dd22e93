"""Errors that are the user's to mend, or that end a run on purpose."""


class ConfigurationError(ValueError):
    """A setting cannot work; the message names the key, its value and what is allowed. Raised before a model loads."""


class NonFiniteError(RuntimeError):
    """A loss was NaN or infinite; the parameters are those of the last good update."""
