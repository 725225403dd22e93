import shutil

import pytest
import torch
import yaml
from PIL import Image

from freshper_lightning.cli import main
from freshper_lightning.inspection.saved import SavedRun


def inspected(capsys, *arguments):
    main(["inspect", *map(str, arguments)])
    return capsys.readouterr().out


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *map(str, arguments)])
    assert ended.value.code not in (0, None)
    return capsys.readouterr().err + str(ended.value.code)


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the run that may be spoilt."""
    shutil.copytree(run, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy"


def changed(copy, change):
    settings = yaml.safe_load((copy / "config.yaml").read_text())
    change(settings)
    path = copy / "other.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_a_checkpoint_alone_is_enough_and_no_model_is_loaded(capsys, monkeypatch, checkpoint, run):
    def never(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("freshper_lightning.policy.net.AutoModelForCausalLM.from_pretrained", never)
    before = sorted(run.rglob("*"))
    table = inspected(capsys, "--checkpoint", checkpoint, "--sort", "age", "--top", 3)
    assert len(table.splitlines()) == 3 + 1 + 3
    ids = [line.split()[0] for line in table.splitlines()[-3:]]
    text = inspected(capsys, "--checkpoint", checkpoint, "--ids", *ids[:2])
    assert [line.split()[1] for line in text.splitlines() if line.startswith("episode ")] == ids[:2]
    assert sorted(run.rglob("*")) == before, "nothing is written"


def test_the_buffer_is_the_one_of_the_checkpoint(checkpoint):
    saved = SavedRun.read(str(checkpoint))
    content = torch.load(checkpoint, weights_only=True)
    state = torch.load(checkpoint.parent / content["ReplayDataModule"]["buffer"], weights_only=True)
    assert saved.buffer.ids().tolist() == state["columns"]["ids"].tolist()
    assert saved.buffer.times_drawn(saved.buffer.ids()).tolist() == state["columns"]["draws"].tolist()
    assert (saved.buffer.clock, saved.buffer.alpha, saved.buffer.draws()) == ("lr_path", 0.6, state["draws"])
    assert int(state["columns"]["draws"].sum()) == 4 * state["draws"] > 0, "batches of four"
    assert saved.now.updates == content["callbacks"]["RolloutCallback"]["updates"] > 0


def test_tau_is_that_of_the_checkpoint(copy):
    path = copy / "checkpoints" / "last.ckpt"
    content = torch.load(path, weights_only=True)
    content["ReplayDataModule"]["tau"] = 7.5
    path.unlink()
    torch.save(content, path)
    assert SavedRun.read(str(path)).buffer.decay.tau == 7.5


def test_a_picture_is_written(capsys, checkpoint, tmp_path):
    said = inspected(capsys, "--checkpoint", checkpoint, "--ids", "3", "--png", tmp_path / "a.png")
    assert said.endswith(f"picture in {tmp_path / 'a.png'}\n")
    assert Image.open(tmp_path / "a.png").format == "PNG"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--ids", "5", "999"], ["ids=[999]", "16 ids from 0 to 15"]),
        (["--sort", "best"], ["sort", "best", "'priority', 'age', 'return', 'advantage', 'newest', 'draws'"]),
        (["--top", "0"], ["top=0", "at least 1"]),
        (["--png", "a.png"], ["png='a.png'", "ids must name one"]),
        (["--png", "nowhere/a.png", "--ids", "3"], ["png='nowhere/a.png'", "folder that exists"]),
        (["--png", "tests", "--ids", "3"], ["png='tests'", "must be a file"]),
        (["--png", "", "--ids", "3"], ["png=''", "must be a file"]),
        (["--png", f"{'a' * 300}.png", "--ids", "3"], ["freshper: error: [Errno", "too long"]),
        (["--config", "nowhere.yaml"], ["config='nowhere.yaml' is not a file"]),
        (["--checkpoint", "nowhere.ckpt"], ["checkpoint='nowhere.ckpt' is not a file"]),
    ],
)
def test_a_mistake_is_named(capsys, checkpoint, arguments, parts):
    said = refused(capsys, "--checkpoint", checkpoint, *arguments)
    for part in parts:
        assert part in said


def test_a_configuration_that_is_gone_or_of_another_run_is_named(capsys, copy):
    checkpoint = copy / "checkpoints" / "last.ckpt"
    other = changed(copy, lambda settings: settings["data"]["init_args"].update(clock="updates"))
    said = refused(capsys, "--checkpoint", checkpoint, "--config", other)
    assert "does not fit" in said
    assert "clock of the saved replay buffer must be 'updates', not 'lr_path'" in said
    search = changed(copy, lambda settings: settings["rollout"]["environment"].update(id="freshper/SearchQuestion-v0"))
    said = refused(capsys, "--checkpoint", checkpoint, "--config", search)
    assert "rollout.environment.id='freshper/SearchQuestion-v0' must be 'tests.loop:tests/HashScore-v0'" in said
    other.write_text("- 1")
    assert "not a configuration" in refused(capsys, "--checkpoint", checkpoint, "--config", other)
    wrong = changed(copy, lambda settings: settings["data"]["init_args"].update(alpha=7))
    assert "alpha must be in [0, 1], not 7" in refused(capsys, "--checkpoint", checkpoint, "--config", wrong)
    (copy / "config.yaml").unlink()
    said = refused(capsys, "--checkpoint", checkpoint)
    assert "config must name the config.yaml" in said
    assert str(copy) in said


def test_a_model_that_is_gone_is_named(capsys, copy):
    moved = changed(copy, lambda settings: settings["model"].update(path="nowhere"))
    said = refused(capsys, "--checkpoint", copy / "checkpoints" / "last.ckpt", "--config", moved, "--ids", "3")
    assert "model.path='nowhere'" in said


@pytest.mark.parametrize(("damaged", "missing"), [("*.ckpt", "is not a file"), ("*.buffer", "is not there")])
def test_a_damaged_or_missing_file_is_named(capsys, copy, damaged, missing):
    (path,) = [path for path in (copy / "checkpoints").glob(damaged) if not path.is_symlink()]
    path.write_bytes(path.read_bytes()[:-2000])
    said = refused(capsys, "--checkpoint", copy / "checkpoints" / "last.ckpt")
    assert "damaged" in said
    path.unlink()
    assert missing in refused(capsys, "--checkpoint", copy / "checkpoints" / "last.ckpt")


def test_a_run_without_a_buffer_is_named(capsys, copy):
    path = copy / "checkpoints" / "last.ckpt"
    content = torch.load(path, weights_only=True)
    content.pop("ReplayDataModule")
    path.unlink()
    torch.save(content, path)
    assert "has no replay buffer" in refused(capsys, "--checkpoint", path)


def test_a_checkpoint_that_is_not_there_is_named_before_its_configuration(capsys, tmp_path):
    assert "none.ckpt' is not a file" in refused(capsys, "--checkpoint", tmp_path / "none.ckpt")
