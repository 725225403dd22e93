import logging
import os
import warnings

import pytest
from hypothesis import HealthCheck, settings

from tests.loop import tiny_model

# On shared machines what a test says does not depend on how long an example takes.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """A tiny untrained policy as a Hugging Face checkpoint."""
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(autouse=True)
def _quiet_lightning():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


@pytest.fixture(autouse=True)
def _the_seed_of_a_run_ends_with_it():
    """Lightning leaves it in the environment, where processes that a later test starts would take it for theirs."""
    yield
    os.environ.pop("PL_GLOBAL_SEED", None)
