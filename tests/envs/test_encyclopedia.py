import json

import pytest

from freshper_lightning.cli import main
from freshper_lightning.envs.encyclopedia import (
    FIRST,
    ISOLATE,
    LAST,
    VALUES,
    corpus,
    demonstrate,
    draw_people,
    write_encyclopedia,
)
from freshper_lightning.envs.search import SearchQuestion, parse_reply
from freshper_lightning.policy.tiny import train_tokenizer

ENDS = {"max_searches": 4, "max_turns": 6, "top_k": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("encyclopedia")
    assert write_encyclopedia(path, train=30, heldout=20, seed=3) == 50
    return path


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def files(folder, split="train"):
    return {"questions": str(folder / f"{split}.jsonl"), "index": str(folder / "index"), **ENDS}


def test_nobody_is_in_both_splits_not_even_as_a_friend():
    for seed in range(20):
        train, heldout = (draw_people(split, 200, seed) for split in ("train", "heldout"))
        names = [{person.name for person in people} for people in (train, heldout)]
        assert len(names[0]) == len(names[1]) == 200
        assert not names[0] & names[1]
        assert {person.friend for person in train} <= names[0]
        assert {person.friend for person in heldout} <= names[1]
        assert all(person.friend != person.name for person in [*train, *heldout])


def test_every_question_has_one_true_answer(folder):
    pages = {page["contents"].partition("\n")[0]: page["contents"] for page in rows(folder / "corpus.jsonl")}
    assert len(pages) == 50
    for split, people in (("train", 30), ("heldout", 20)):
        questions = rows(folder / f"{split}.jsonl")
        assert len(questions) == people * 2 * len(VALUES)
        for question in questions:
            words = question["question"].rstrip("?").split()
            key, name = words[3], words[-1]
            if "friend" in words:
                name = pages[name].partition(f"The friend of {name} is ")[2].partition(".")[0]
            assert f"The {key} of {name} is {question['answer'][0]}." in pages[name]


def test_a_seed_fixes_every_file_and_another_changes_them(tmp_path):
    written = []
    for number, seed in enumerate((5, 5, 6)):
        write_encyclopedia(tmp_path / str(number), train=10, heldout=10, seed=seed)
        texts = [(tmp_path / str(number) / f"{name}.jsonl").read_bytes() for name in ("corpus", "train", "heldout")]
        written.append(texts)
    assert written[0] == written[1]
    assert all(one != other for one, other in zip(written[0], written[2], strict=True))


@pytest.mark.parametrize("number", [1, 201])
def test_more_people_than_names_are_refused(number):
    with pytest.raises(ValueError, match=rf"people of the split train must be in \[2, 200\], not {number}"):
        draw_people("train", number, 0)


def play(folder, seed, noise, split="train"):
    """Turns of a demonstration, and the reward of its last reply."""
    env = SearchQuestion(**files(folder, split))
    turns = demonstrate(seed, noise, **files(folder, split))
    env.reset(seed=seed)
    reward = 0.0
    for _, reply in turns:
        reward += env.step(reply)[1]
    return turns, reward


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_reader_without_mistakes_is_always_right_by_the_shortest_way(folder, split):
    for seed in range(60):
        turns, reward = play(folder, seed, 0.0, split)
        assert reward == 1
        assert len(turns) == (3 if "friend" in turns[0][0].rpartition("Question")[2] else 2)


def test_a_reader_with_mistakes_is_right_now_and_then_and_always_valid(folder):
    rewards = []
    for seed in range(100):
        turns, reward = play(folder, seed, 0.5)
        assert all(parse_reply(reply) is not None for _, reply in turns)
        assert 1 <= len(turns) <= ENDS["max_turns"]
        rewards.append(reward)
    assert 0.2 < sum(rewards) / 100 < 0.7


def test_a_demonstration_is_a_function_of_its_seed(folder):
    assert demonstrate(7, 0.5, **files(folder)) == demonstrate(7, 0.5, **files(folder))
    assert any(demonstrate(7, 0.5, **files(folder)) != demonstrate(seed, 0.5, **files(folder)) for seed in (8, 9))


def test_what_a_reader_cannot_do_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"noise must be in \[0, 1\], not 2"):
        demonstrate(0, 2, **files(folder))
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "why?", "answer": "because"}\n')
    with pytest.raises(ValueError, match="a reader of the encyclopedia cannot answer"):
        demonstrate(0, 0.0, questions=str(other), index=str(folder / "index"))


def test_syllables_and_values_are_tokens_and_a_name_is_the_same_tokens_everywhere():
    tokenizer = train_tokenizer(corpus(40, seed=0, **ENDS), 768, ISOLATE)

    def tokens(text):
        return [tokenizer.decode([index]) for index in tokenizer(text, add_special_tokens=False)["input_ids"]]

    for first, last in zip(FIRST, reversed(LAST), strict=True):
        assert tokens(f"<search>{first}{last}</search>") == ["<search>", first, last, "</search>"]
        assert tokens(f"the food of {first}{last}?")[-3:] == [first, last, "?"]
    for value in (value for values in VALUES.values() for value in values):
        assert tokens(f"<answer>{value}</answer>") == ["<answer>", value, "</answer>"]


def test_the_command_writes_what_the_environment_reads(tmp_path, capsys):
    main(["encyclopedia", f"--path={tmp_path}", "--train=10", "--heldout=6", "--seed=1"])
    assert f"encyclopedia of 16 pages in {tmp_path}" in capsys.readouterr().out
    assert play(tmp_path, 0, 0.0, "heldout")[1] == 1


def spoil(folder, name):
    if name == "questions":
        (folder / "train.jsonl").write_text('{"question": "why?", "answer": "because"}\n')
    elif name == "part":
        (folder / "corpus.jsonl").unlink()
    else:
        (folder / name).write_text("keep")


@pytest.mark.parametrize("name", ["notes.txt", "index/notes.txt", "questions", "part"])
def test_what_is_no_encyclopedia_is_never_replaced(tmp_path, name):
    write_encyclopedia(tmp_path / "mine", train=10, heldout=6, seed=0)
    spoil(tmp_path / "mine", name)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        ValueError, match=r"path='.*mine' must be .* is empty or holds an encyclopedia and nothing else"
    ):
        write_encyclopedia(tmp_path / "mine", train=10, heldout=6, seed=1)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_encyclopedia_is_replaced_by_another(tmp_path):
    for seed in (0, 1):
        assert write_encyclopedia(tmp_path / "mine", train=10, heldout=6, seed=seed) == 16
    write_encyclopedia(tmp_path / "other", train=10, heldout=6, seed=1)
    assert (tmp_path / "mine" / "corpus.jsonl").read_bytes() == (tmp_path / "other" / "corpus.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "other"]
