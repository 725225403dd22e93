from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import rows
from benchmarks.trainer import ours, page, task
from benchmarks.trainer.__main__ import _in_another_process, _options, main
from benchmarks.trainer.cases import OURS, OURS_TRANSFORMERS, OURS_VLLM, TRL, Case, cases
from benchmarks.trainer.ragged import sample
from benchmarks.trainer.results import Results, Row
from benchmarks.trainer.targets import SMOLLM2, TINY, targets
from freshper_lightning.rollout.seeds import training_instance_seed

TRL_PYTHON = Path(".venv-trl/bin/python")

ROW = Row(
    model=TINY,
    kind="whole",
    trainer=OURS_VLLM,
    precision="float32",
    micro_batches=1,
    checkpointing=False,
    repetition=0,
    iterations=2,
    seconds=4.0,
    generation=1.0,
    training=3.0,
    prompt_tokens=100,
    completion_tokens=50,
    peak_mib=900.5,
    start_mib=400.0,
    threads=2,
    load=0.5,
    seed=0,
    commit="abc",
    versions="torch 2",
    machine="a machine",
)


def job(model, iterations=2, **fields):
    seeds = [training_instance_seed(0, i + 1, group) for i in range(iterations) for group in range(2)]
    prompts = [task.prompt(seed) for seed in seeds]
    shape = {"groups": 2, "group_size": 2, "new_tokens": 5, "iterations": iterations, "seed": 0, "prompts": prompts}
    settings = {"engine": "transformers", "precision": "float32", "micro_batches": 2, "checkpointing": False}
    return task.Job(str(model), **(settings | shape | fields))


def row(case, repetition=0, model=TINY, **fields):
    return replace(
        ROW,
        model=model,
        kind=case.kind,
        trainer=case.trainer,
        precision=case.precision,
        micro_batches=case.micro_batches,
        checkpointing=case.checkpointing,
        repetition=repetition,
        **fields,
    )


@pytest.fixture
def marked(tmp_path):
    """A page that has a mark for every table and nothing between them."""
    names = ("iterations", "ragged", "targets", "machine")
    path = tmp_path / "page.md"
    path.write_text("\n".join(f"{page.BEGIN.format(name=name)}\nold\n{page.END.format(name=name)}" for name in names))
    return path


def test_a_run_takes_generation_and_training_apart_and_counts_tokens(model_path, tmp_path):
    outcome = ours.run(job(model_path), tmp_path / "logs")
    assert len(outcome.iterations) == 2
    for one in outcome.iterations:
        assert 0 < one.generation < one.seconds
        assert one.completion_tokens == 2 * 2 * 5
    middle = outcome.middle()
    assert middle.training == pytest.approx(outcome.iterations[1].training)
    assert outcome.peak_mib >= outcome.start_mib > 50
    assert "torch" in outcome.versions


def test_given_completions_are_trained_on_as_they_are(model_path, tmp_path):
    whole = job(model_path)
    ragged = sample(whole, longest=6)
    lengths = [len(ids) for ids in ragged.completion_ids]
    assert sorted(lengths[:4]) == [1, 3, 4, 6]
    assert lengths[4:] == lengths[:4]
    assert all(value < 0 for values in ragged.log_probs for value in values)
    outcome = ours.run(replace(whole, ragged=ragged), tmp_path / "logs")
    assert [one.completion_tokens for one in outcome.iterations] == [14, 14]
    assert outcome.iterations[0].prompt_tokens == sum(map(len, ragged.prompt_ids[:4]))


def test_other_prompts_than_those_of_the_given_completions_are_refused(model_path, tmp_path):
    whole = job(model_path)
    other = sample(replace(whole, prompts=whole.prompts[::-1]), longest=6)
    with pytest.raises(ValueError, match="another prompt"):
        ours.run(replace(whole, ragged=other), tmp_path / "logs")


def test_jobs_and_outcomes_survive_their_files(tmp_path):
    ragged = task.Ragged([[1, 2]], [[3]], [[-0.5]])
    for one in (job("m"), replace(job("m"), ragged=ragged)):
        task.write(one, tmp_path / "job.json")
        assert task.read_job(tmp_path / "job.json") == one
    outcome = task.Outcome([task.Measured(2.0, 0.5, 3, 4)], 10.0, 5.0, "torch 2")
    task.write(outcome, tmp_path / "outcome.json")
    assert task.read_outcome(tmp_path / "outcome.json") == outcome


def test_finished_runs_are_kept_and_reported(marked, tmp_path, capsys):
    table = tmp_path / "t.csv"
    finished = [row(case, repetition, seconds=2.0 + repetition) for repetition in range(3) for case in cases()]
    rows.write(table, finished)
    main(["--models", TINY, "--table", str(table), "--page", str(marked), "--trl", "nowhere"])
    assert rows.read(table, Row) == finished
    text, said = marked.read_text(), capsys.readouterr().out
    assert "old" not in text
    assert "| tiny | ours, vLLM | float32 | 1 | no | 3 | 1 | 50 | 3 | 50 | 900 | 3 |" in text
    assert "| tiny | ours | bfloat16 | 150 | 3 | 50 | 900 | 3 |" in text
    assert "SmolLM2-135M, float32, ours, vLLM: an iteration takes at most 0.6 of TRL's |  | not measured" in said


def test_what_a_run_needs_is_asked_for_ahead_of_the_first(tmp_path):
    common = ["--table", str(tmp_path / "t.csv")]
    with pytest.raises(SystemExit, match="--trl=nowhere is not there"):
        main([*common, "--models", TINY, "--trl", "nowhere"])
    with pytest.raises(SystemExit, match="holds no model"):
        main([*common, "--models", SMOLLM2, "--trl", __file__, "--smollm2", str(tmp_path)])


def test_what_a_process_dies_of_is_shown(tmp_path):
    with pytest.raises(SystemExit, match=r"(?s)benchmarks\.trainer\.ours .* ended with 1.*no config\.json in it"):
        _in_another_process(job(tmp_path / "nothing"), _options([]))


@pytest.mark.parametrize(("seconds", "verdict"), [(6.0, "met"), (6.01, "missed")])
def test_an_iteration_is_compared_with_trls_under_the_same_setting(seconds, verdict):
    own, theirs = (Case("whole", trainer, "float32") for trainer in (OURS_VLLM, TRL))
    found = [row(own, model=SMOLLM2, seconds=seconds), row(theirs, model=SMOLLM2, seconds=10.0)]
    found.append(row(replace(theirs, checkpointing=True), model=SMOLLM2, seconds=99.0))
    assert targets(Results(found))[0].verdict == verdict


def test_training_speed_and_memory_are_compared_with_trls():
    found = [row(Case("ragged", OURS, "bfloat16", 4), training=2.0), row(Case("ragged", TRL, "bfloat16", 4))]
    found += [
        row(Case("whole", trainer, "float32"), peak_mib=peak) for trainer, peak in ((OURS_TRANSFORMERS, 9), (TRL, 9))
    ]
    verdicts = {target.text: target.verdict for target in targets(Results(found))}
    assert verdicts["tiny, bfloat16, ragged: at least 1.5 x TRL's training tokens per second"] == "met"
    assert verdicts["tiny, float32, ours, Transformers: less peak memory than TRL"] == "missed"
    assert verdicts["tiny, float32, ours, vLLM: less peak memory than TRL"] == "not measured"


@pytest.mark.slow
@pytest.mark.skipif(not TRL_PYTHON.exists(), reason="needs the environment that `make bench-trainer` makes")
def test_trl_plays_the_same_prompts_and_trains_on_the_same_tokens(model_path, tmp_path):
    options = _options(["--trl", str(TRL_PYTHON)])
    whole = job(model_path, engine="trl")
    given = replace(whole, ragged=sample(whole, longest=6))
    for one in (whole, given):
        own = ours.run(replace(one, engine="transformers"), tmp_path / str(one.ragged is None))
        theirs = _in_another_process(one, options)
        for a, b in zip(own.iterations, theirs.iterations, strict=True):
            assert (a.prompt_tokens, a.completion_tokens) == (b.prompt_tokens, b.completion_tokens)
            assert 0 <= b.generation < b.seconds


def test_rows_of_other_settings_need_a_table_of_their_own(capsys, tmp_path):
    with pytest.raises(SystemExit):
        _options(["--groups", "2"])
    assert "--groups=2 is not what docs/results/trainer.csv is of; give another --table" in capsys.readouterr().err
    assert _options(["--groups", "2", "--table", str(tmp_path / "own.csv")]).groups == 2
