import pytest

from freshper_lightning.policy.tiny import byte_tokenizer
from freshper_lightning.rollout.conversation import ChatFormat
from tests.command import in_this_process

CLOCK = ("--data.clock=lr_path", "--data.decay=ExponentialDecay", "--data.decay.tau=0.5")


@pytest.fixture(scope="session")
def chat():
    return ChatFormat(byte_tokenizer())


@pytest.fixture(scope="session")
def run(tmp_path_factory, model_path):
    """Folder of a run of two iterations that measured freshness; its environment has no frames."""
    folder = tmp_path_factory.mktemp("inspected")
    short = ["--trainer.max_epochs=2", "--evaluation.at_start=false", "--evaluation.every_n_iterations=9"]
    with pytest.MonkeyPatch.context() as patch:
        in_this_process(patch, model_path, folder, "--freshness.measured=true", *CLOCK, *short)
    return folder / "run"


@pytest.fixture(scope="session")
def checkpoint(run):
    return run / "checkpoints" / "last.ckpt"
