import pytest

from freshper_lightning.policy.net import PolicyNet


@pytest.fixture(scope="module")
def net(model_path):
    return PolicyNet.from_pretrained(model_path)
