import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from freshper_lightning.checkpoint import LAST, ReplayCheckpointIO, side_files
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.replay import write_state
from tests.loop import fit, policy, replay_data


@pytest.fixture(scope="module")
def saved(tmp_path_factory, model_path):
    """Folder of a run that kept every checkpoint, and its data module."""
    folder, data = tmp_path_factory.mktemp("saved"), replay_data()
    keep_all = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    fit(folder, policy(model_path), data, checkpoint=keep_all)
    return folder, data


def test_checkpoint_and_side_file_hold_tensors_and_primitives_only(saved):
    folder, data = saved
    checkpoint = torch.load(folder / "step=10.ckpt", weights_only=True)
    (side,) = side_files(folder / "step=10.ckpt")
    assert checkpoint["ReplayDataModule"]["buffer"] == side.name
    buffer = torch.load(side, weights_only=True)
    assert len(buffer["columns"]["ids"]) == len(data.buffer)


def test_loading_puts_the_buffer_that_is_named_in_its_place(saved):
    folder, data = saved
    state = ReplayCheckpointIO().load_checkpoint(folder / "step=10.ckpt")["ReplayDataModule"]
    restored = replay_data()
    restored.load_state_dict(state)
    assert restored.buffer.ids().tolist() == data.buffer.ids().tolist()


def test_the_last_checkpoint_is_a_link_to_the_newest_and_finds_its_buffer(saved):
    folder, data = saved
    assert (folder / LAST).is_symlink()
    last = ReplayCheckpointIO().load_checkpoint(folder / LAST)
    assert last["global_step"] == 12
    assert len(last["ReplayDataModule"]["buffer"]["columns"]["ids"]) == len(data.buffer)


def checkpoint_of(step, buffer):
    lightning = {"state_dict": {}, "loops": {}, "pytorch-lightning_version": "2.6"}
    return lightning | {"ReplayDataModule": {"buffer": {"x": buffer}}, "step": step}


def test_a_checkpoint_written_over_never_meets_the_buffer_of_another(tmp_path):
    """Killed between the new buffer and the new checkpoint, the old checkpoint still has the old buffer."""
    io, path = ReplayCheckpointIO(), tmp_path / "a.ckpt"
    io.save_checkpoint(checkpoint_of(1, 1), path)
    with pytest.raises(AttributeError, match="pickle"):
        io.save_checkpoint(checkpoint_of(lambda: 2, 2), path)
    assert io.load_checkpoint(path) == checkpoint_of(1, 1)
    io.save_checkpoint(checkpoint_of(3, 3), path)
    assert io.load_checkpoint(tmp_path / LAST) == checkpoint_of(3, 3)
    assert len(side_files(path)) == 1


@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_a_damaged_checkpoint_is_refused_in_a_sentence(tmp_path, content):
    path = tmp_path / "a.ckpt"
    ReplayCheckpointIO().save_checkpoint(checkpoint_of(1, 1), path)
    path.write_bytes(path.read_bytes()[:300] if content is None else content)
    with pytest.raises(ConfigurationError, match=r"a\.ckpt is damaged or not a file of this program"):
        ReplayCheckpointIO().load_checkpoint(path)


def test_a_file_of_another_program_is_refused(tmp_path):
    path = tmp_path / "a.ckpt"
    write_state({"weights": torch.zeros(2)}, path)
    with pytest.raises(ConfigurationError, match=r"a\.ckpt is not a checkpoint of a run of this program"):
        ReplayCheckpointIO().load_checkpoint(path)


def test_the_last_good_checkpoint_is_not_taken_for_the_newest(tmp_path):
    io = ReplayCheckpointIO()
    io.save_checkpoint(checkpoint_of(1, 1), tmp_path / "a.ckpt")
    io.save_checkpoint(checkpoint_of(2, 2), tmp_path / "last_good.ckpt")
    assert io.load_checkpoint(tmp_path / LAST)["step"] == 1


def test_the_end_of_a_run_is_not_written_over_that_of_another_in_the_same_folder(tmp_path, model_path):
    def play(iterations, ckpt_path=None):
        seldom = ModelCheckpoint(tmp_path, every_n_epochs=100)
        data = replay_data(replay_updates=0)
        fit(tmp_path, policy(model_path), data, ckpt_path, checkpoint=seldom, iterations=iterations)
        return sorted(path.name for path in tmp_path.glob("*.ckpt")), (tmp_path / LAST).readlink().name

    assert play(1) == (["end.ckpt", LAST], "end.ckpt")
    assert play(1) == (["end-v1.ckpt", "end.ckpt", LAST], "end-v1.ckpt")
    assert play(2, str(tmp_path / LAST)) == (["end-v1.ckpt", "end.ckpt", LAST], "end-v1.ckpt")
    assert play(2, str(tmp_path / "end.ckpt")) == (["end-v1.ckpt", "end.ckpt", LAST], "end.ckpt")
    assert all(side_files(tmp_path / name) for name in ("end.ckpt", "end-v1.ckpt"))


def test_a_missing_checkpoint_or_buffer_is_named(saved, tmp_path):
    folder, _ = saved
    with pytest.raises(ConfigurationError, match=r"no checkpoint .*none\.ckpt"):
        ReplayCheckpointIO().load_checkpoint(tmp_path / "none.ckpt")
    (tmp_path / "step=5.ckpt").write_bytes((folder / "step=5.ckpt").read_bytes())
    with pytest.raises(ConfigurationError, match=r"step=5\.ckpt needs the replay buffer .*step=5\.ckpt\..*\.buffer"):
        ReplayCheckpointIO().load_checkpoint(tmp_path / "step=5.ckpt")


def test_old_checkpoints_go_with_their_side_files(tmp_path, model_path):
    newest = ModelCheckpoint(tmp_path / "kept", filename="{step}", every_n_train_steps=3, save_top_k=1)
    fit(tmp_path, policy(model_path), replay_data(), checkpoint=newest)
    (side,) = side_files(tmp_path / "kept" / "step=12.ckpt")
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"step=12.ckpt", side.name, LAST}


def test_no_checkpoint_is_there_before_its_buffer_is(tmp_path):
    """A writer that fails at the checkpoint has written the buffer, and one that fails at the buffer nothing."""
    io, path = ReplayCheckpointIO(), tmp_path / "a.ckpt"
    with pytest.raises(AttributeError, match="pickle"):
        io.save_checkpoint({"ReplayDataModule": {"buffer": {"x": 1}}, "bad": lambda: 0}, path)
    assert len(side_files(path)) == 1
    assert not path.exists()
    other = tmp_path / "b.ckpt"
    with pytest.raises(AttributeError, match="pickle"):
        io.save_checkpoint({"ReplayDataModule": {"buffer": lambda: 0}}, other)
    assert not other.exists()
    assert not side_files(other)
