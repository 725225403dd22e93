"""Every configuration file is part of a stack, parses, and runs an iteration with a tiny model in the model's place."""

import json
import re

import pytest
import yaml

from freshper_lightning import commands
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.cli import main
from freshper_lightning.compare.plan import Plan
from freshper_lightning.compare.settings import read_comparison
from freshper_lightning.envs.protocol import make_text_env
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.tiny import TinySpec
from tests.command import ROOT
from tests.questions import write_questions

CONFIGS = ROOT / "configs"
SPEC = TinySpec(hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate=64, max_position=6144)
ENVIRONMENTS = {
    "frozenlake": "frozen_lake",
    "sokoban_simple": "sokoban",
    "sokoban_hard": "sokoban",
    "cliff_walking": "cliff_walking",
    "arithmetic": "arithmetic",
    "search": "encyclopedia",
}
"""Modules with demonstrations, by task."""

TUNED = ("arithmetic", "cliff_walking", "search", "sokoban_hard")
"""Tasks whose tiny policy has sizes of its own."""

PLAIN = ("gsm8k", "aime", "gymnasium", "reasoning_gym", "textarena")
METHODS = (
    *("on_policy", "on_policy_epochs", "per", "per_reward", "ppo", "uniform", "recency_window", "inverse_age"),
    *("drift", "adaptive_tau", "measured", "null_replay", "published"),
)
COMPARISONS = ("frozenlake", "sokoban_simple")
SMALL_QWEN, LARGE_QWEN = "models/qwen2.5-0.5b-instruct", "models/qwen2.5-7b-instruct"


def paper(task, model, scale, *more):
    return ("base", f"tasks/{task}", model, "methods/freshper", "paper/base", "paper/freshper", f"paper/{scale}", *more)


STACKS = {
    "quickstart": ("base", "tasks/frozenlake", "methods/freshper", "quickstart"),
    "learn": ("base", "tasks/frozenlake", "methods/freshper", "learn"),
    "smollm2": ("base", "methods/freshper", "gsm8k_smollm2"),
    **{method: ("base", "tasks/frozenlake", f"methods/{method}") for method in METHODS},
    **{task: ("base", f"tasks/{task}", "methods/freshper") for task in (*ENVIRONMENTS, *PLAIN)},
    **{f"{task}_tiny": ("base", f"tasks/{task}", "methods/freshper", f"tasks/{task}_tiny") for task in TUNED},
    **{
        f"{task}_warm_start": ("base", f"tasks/{task}", "methods/warm_start", f"tasks/{task}_warm_start")
        for task in ENVIRONMENTS
    },
    **{f"paper_{task}": paper(task, SMALL_QWEN, "games") for task in ("frozenlake", "sokoban_simple")},
    "paper_cliff_walking": paper("cliff_walking", SMALL_QWEN, "games", "paper/cliff_walking"),
    "paper_sokoban_hard": paper("sokoban_hard", SMALL_QWEN, "games", "paper/sokoban_hard", "paper/tau_1000"),
    "paper_gsm8k": paper("gsm8k", LARGE_QWEN, "math", "paper/tau_1000"),
    "paper_aime": paper("aime", LARGE_QWEN, "math", "paper/tau_1000"),
    "paper_search": paper("search", LARGE_QWEN, "search"),
    **{
        f"paper_frozenlake_{method}": (
            *("base", "tasks/frozenlake", SMALL_QWEN, f"methods/{method}"),
            *("paper/base", "paper/games"),
        )
        for method in ("on_policy", "per_reward")
    },
}

PAPER = {
    **dict.fromkeys(("frozenlake", "sokoban_simple"), (500, 0.2, 64, 2, 128, 400, 128, 2048)),
    "cliff_walking": (500, 0.2, 64, 2, 128, 400, 128, 9216),
    "sokoban_hard": (1000, 0.2, 64, 2, 128, 400, 128, 14336),
    **dict.fromkeys(("gsm8k", "aime"), (1000, 0.2, 128, 4, 256, 400, 512, 4096)),
    "search": (500, 20.0, 64, 2, 64, 300, 1024, 12800),
}
"""What the files say, by task: tau in updates, clip of advantages, groups, their size, episodes of an update,
iterations, tokens of a reply, tokens of an episode."""

QWEN_WORDS = re.compile(r"<\|\w+\|>|[^\r\n\w]?[A-Za-z]+|\d| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
"""Where Qwen2.5's tokenizer may part a text of ASCII: a token never reaches beyond one of these, but may be shorter."""


def stacked(stack):
    return [part for name in STACKS[stack] for part in ("-c", str(CONFIGS / f"{name}.yaml"))]


def test_every_configuration_file_is_part_of_a_stack():
    files = {str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.rglob("*.yaml")}
    comparisons = {f"compare/{name}" for name in COMPARISONS}
    assert files == {name for names in STACKS.values() for name in names} | comparisons


@pytest.mark.parametrize("stack", STACKS)
def test_every_stack_of_configuration_files_parses(capsys, stack):
    config = parsed(capsys, stack)
    assert config["model"]["path"] == "somewhere"
    assert config["trainer"]["max_epochs"] >= 1


def parsed(capsys, stack):
    with pytest.raises(SystemExit) as ended:
        main(["fit", *stacked(stack), "--model.path=somewhere", "--print_config"])
    assert ended.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize("task", PAPER)
def test_at_the_papers_scale_the_settings_are_the_papers_where_the_files_say_nothing_else(capsys, task):
    config = parsed(capsys, f"paper_{task}")
    model, rollout = config["model"], config["rollout"]
    data, algorithm = config["data"]["init_args"], model["algorithm"]["init_args"]
    assert PAPER[task] == (
        data["decay"]["init_args"]["tau"],
        algorithm["advantage_clip"],
        rollout["groups"],
        rollout["group_size"],
        data["batch_size"],
        config["trainer"]["max_epochs"],
        rollout["sampling"]["max_tokens"],
        rollout["engine"]["max_model_len"],
    )
    assert (data["clock"], data["replay_updates"], data["epochs"], data["alpha"]) == ("updates", 2, 1, 0.6)
    assert (data["beta"], data["beta_end"], data["capacity"]) == (0.0, 0.0, 50_000)
    assert data["priority"]["class_path"].endswith("AbsoluteReward")
    assert (algorithm["clip"], algorithm["whiten"], algorithm["aggregation"]) == (0.2, True, "sequence_sum")
    assert model["optimizer"]["init_args"]["lr"] == 1e-6
    assert rollout["sampling"]["temperature"] == 0.99
    assert (rollout["sampling"]["top_p"], rollout["sampling"]["top_k"]) == (1.0, 0)
    assert rollout["groups"] * rollout["group_size"] % data["batch_size"] == 0


@pytest.mark.parametrize("task", ["sokoban_hard", "cliff_walking"])
def test_at_the_papers_scale_an_episode_has_room_for_all_its_turns(capsys, task):
    rollout = parsed(capsys, f"paper_{task}")["rollout"]
    env = make_text_env(rollout["environment"]["id"], rollout["environment"]["kwargs"])
    texts, replies = [env.reset(seed=2)[0]], 0
    over = False
    while not over:
        observation, _, terminated, truncated, _ = env.step("pass")
        texts += ["<|im_end|>\n<|im_start|>user\n", observation, "<|im_end|>\n<|im_start|>assistant\n"]
        replies += rollout["sampling"]["max_tokens"]
        over = terminated or truncated
    assert 1.1 * len(QWEN_WORDS.findall("".join(texts))) + replies < rollout["engine"]["max_model_len"]


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_arm_and_the_warm_start_of_every_comparison_parse(tmp_path, monkeypatch, name):
    monkeypatch.chdir(ROOT)
    comparison = read_comparison(f"configs/compare/{name}.yaml")
    plan = Plan(comparison, tmp_path, comparison.chosen(None))
    assert list(plan.recipes) == list(comparison.arms)
    assert plan.warm_starts([0])[0].content["fit"]["model"]["algorithm"]["class_path"].endswith("SFT")
    for arm, recipe in plan.recipes.items():
        assert recipe.learning_rate() > 0
        scheduler = recipe.config["model"]["scheduler"]
        if arm == "published":
            assert scheduler["init_args"]["T_max"] == 2 * recipe.config["trainer"]["max_epochs"]
        else:
            assert scheduler is None


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny model for an environment, made when it is first asked for."""
    made = {}

    def of(environment):
        if environment not in made:
            made[environment] = tmp_path_factory.mktemp(environment) / "model"
            module = f"freshper_lightning.envs.{environment}"
            commands.tiny(str(made[environment]), SPEC, 512, episodes=10, task=module)
        return made[environment]

    return of


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Where the files of questions lie that configuration files name by variables."""
    folder = tmp_path_factory.mktemp("questions")
    commands.encyclopedia(str(folder / "encyclopedia"), train=8, heldout=4)
    write_questions(folder / "train.jsonl", range(8))
    write_questions(folder / "test.jsonl", range(100, 104))
    return folder


SMALL = {
    "trainer": ["max_epochs=1", "devices=1", "precision=32-true", "strategy=auto", "accumulate_grad_batches=1"],
    "rollout": ["engine.name=transformers", "engine.dtype=float32", "engine.max_model_len=6144"],
    "evaluation": ["episodes=2", "every_n_iterations=1", "at_start=false"],
}
FEW_EPISODES = [
    *("--data.batch_size=4", "--data.minimum_size=4"),
    *("--rollout.groups=1", "--rollout.group_size=4", "--rollout.sampling.max_tokens=8"),
]

MATH = {"answers": "number", "form": "tag", "attempts": 3, "format_reward": 0.0}


def local(stack, folder):
    """Shorter games, and questions that a machine without a network has."""
    if stack in ("gsm8k", "aime", "paper_gsm8k", "paper_aime"):
        kwargs = [{"path": str(folder / f"{split}.jsonl"), **MATH} for split in ("train", "test")]
    elif stack == "paper_search":
        index = str(folder / "encyclopedia" / "index")
        names = [str(folder / "encyclopedia" / f"{split}.jsonl") for split in ("train", "heldout")]
        kwargs = [{"questions": name, "index": index, "max_turns": 2} for name in names]
    elif stack == "adaptive_tau":
        return ["--freshness.probe.held_out=2"]
    else:
        few = ["max_turns=15"] * ("sokoban" in stack or "cliff" in stack)
        return [f"--rollout.environment.kwargs.{setting}" for setting in few]
    groups = ("rollout", "evaluation")
    return [f"--{group}.environment.kwargs={json.dumps(value)}" for group, value in zip(groups, kwargs, strict=True)]


def smaller(stack, runs):
    """Arguments that make the stack small enough for a CPU."""
    options = [f"--{group}.{setting}" for group, settings in SMALL.items() for setting in settings]
    options += ["--trainer.accelerator=cpu", f"--trainer.logger.init_args.save_dir={runs}"]
    options += ["--trainer.logger.init_args.name=run", "--trainer.logger.init_args.version="]
    if stack.endswith("warm_start"):
        return [*options, "--data.episodes=2", "--data.batch_size=2"]
    return [*options, *FEW_EPISODES]


@pytest.mark.parametrize("stack", STACKS)
def test_every_stack_runs_an_iteration_with_a_tiny_model_in_its_place(
    tmp_path, models, questions, stack, monkeypatch, capsys
):
    monkeypatch.setenv("ENCYCLOPEDIA", str(questions / "encyclopedia"))
    monkeypatch.setenv("GSM8K_TRAIN", str(questions / "train.jsonl"))
    monkeypatch.setenv("GSM8K_TEST", str(questions / "test.jsonl"))
    task = stack.removeprefix("paper_").removesuffix("_warm_start").removesuffix("_tiny")
    model = models(ENVIRONMENTS.get(task, "frozen_lake"))
    main(["fit", *stacked(stack), *smaller(stack, tmp_path), *local(stack, questions), f"--model.path={model}"])
    scalars = read_scalars(tmp_path / "run")
    assert f"update/{'demonstration' if stack.endswith('warm_start') else 'fresh'}/loss" in scalars
    assert "evaluation/greedy/return" in scalars
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()
    assert "greedy" in capsys.readouterr().out


def test_a_task_that_has_no_texts_is_refused(tmp_path):
    for task, message in (("no.such", "cannot be imported"), ("json", "a module with corpus and ISOLATE")):
        with pytest.raises(ConfigurationError, match=rf"task='{task}' .*{message}"):
            commands.tiny(str(tmp_path), task=task)
