import logging
import os
import warnings

import pytest

from tests.loop import tiny_model


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
