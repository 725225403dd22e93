import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshper_lightning.inspection import entries, episode, first, overview
from freshper_lightning.inspection.saved import SavedRun
from freshper_lightning.inspection.wrapping import visible, width_of, wrapped


@pytest.fixture(scope="module")
def saved(checkpoint):
    return SavedRun.read(str(checkpoint))


def columns_of(line):
    return sum(map(width_of, line))


def test_the_table_says_what_the_buffer_says(saved):
    buffer, now = saved.buffer, saved.now
    lines = overview(buffer, now, sort="newest", top=4, width=120).splitlines()
    stored = f"16 episodes, {buffer.draws()} replay batches so far, "
    assert lines[0].startswith(f"{stored}at updates {now.updates}, iteration 2, ")
    names, *rows = (line.split() for line in lines[2:])
    assert len(rows) == 4
    probabilities = dict(zip(buffer.ids().tolist(), buffer.probabilities(now).tolist(), strict=True))
    ages = dict(zip(buffer.ids().tolist(), buffer.ages(now).tolist(), strict=True))
    for row in rows:
        shown = dict(zip(names, row, strict=True))
        id = int(shown["id"])
        (item,) = buffer.get([id])
        assert shown["group"] == f"{item.group}.{item.member}"
        assert shown["success"] == ("yes" if item.success else "no")
        assert int(shown["draws"]) == buffer.times_drawn([id])[0]
        for name, value in (
            ("return", item.episode_return),
            ("advantage", float(item.token_advantages().mean())),
            ("probability", probabilities[id]),
            ("age", ages[id]),
        ):
            assert float(shown[name]) == pytest.approx(value, rel=1e-3), name
    assert [int(row[0]) for row in rows] == buffer.ids()[:-5:-1].tolist()


def test_an_episode_shows_every_token_and_every_number_of_a_turn(saved):
    tokenizer = saved.tokenizer()
    for entry in entries(saved.buffer, saved.now):
        item, text = entry.trajectory, episode(entry, tokenizer, width=10_000)
        body = "\n".join(text.partition("\n--- prompt\n")[2].split("\n"))
        said = re.sub(r"\n--- (turn|message).*\n", "", body)
        assert said == visible(tokenizer.decode(item.token_ids.tolist()))
        headings = re.findall(r"--- turn \d+: reward (\S+), advantage (\S+), mean log-prob (\S+), weights of", text)
        spread = item.behavior_log_probs.split(item.turn_lengths.tolist())
        for turn, (reward, advantage, log_prob) in enumerate(headings):
            assert float(reward) == pytest.approx(float(item.rewards[turn]), rel=1e-3)
            assert float(advantage) == pytest.approx(float(item.advantages[turn]), rel=1e-3)
            assert float(log_prob) == pytest.approx(float(spread[turn].mean()), rel=1e-3)
        assert len(headings) == item.num_turns
        validity = {0: item.num_turns}.get(item.invalid_turns, 0)
        assert len(re.findall(r"^--- turn .*, valid$", text, re.MULTILINE)) == validity


def test_an_episode_shows_what_the_buffer_knows_of_it(saved):
    (entry,) = first(saved.buffer, saved.now, "draws", top=1)
    item, text = entry.trajectory, episode(entry, saved.tokenizer(), width=200)
    facts = dict(line.split(maxsplit=1) for line in text.partition("--- prompt")[0].splitlines()[1:])
    place = f"instance seed {item.seed}, group {item.group}, member {item.member}"
    assert text.splitlines()[0].split(maxsplit=2) == ["episode", str(entry.id), f"{item.task}, {place}"]
    assert int(facts["draws"]) == entry.draws > 0
    assert facts["born"].startswith(f"updates {item.born.updates}, iteration {item.born.iteration}, lr_path ")
    assert facts["age"].endswith("(lr_path)")
    assert facts["tokens"].startswith(f"{item.num_tokens}, of which {item.num_sampled} sampled in {item.num_turns} ")
    assert facts["penalty"].endswith(f"{item.invalid_turns} of {item.num_turns} replies invalid")
    assert facts["truncated"] == ("yes" if item.truncated else "no")
    priority, base, fresh, decay = (float(number) for number in re.findall(r"\d[\d.e-]*", facts["priority"]))
    assert (priority, base, fresh, decay) == pytest.approx(
        (entry.priority, entry.base, entry.freshness, entry.decay), rel=1e-3
    )
    assert fresh < 1, "the run measured it"
    assert [float(n) for n in re.findall(r"\d[\d.e-]*", facts["group"])] == pytest.approx(
        [item.group_mean, item.group_std], rel=1e-3
    )


@pytest.mark.parametrize("width", [40, 80])
def test_nothing_is_wider_than_the_terminal(saved, width):
    tokenizer = saved.tokenizer()
    texts = [overview(saved.buffer, saved.now, width=width)]
    texts += [episode(entry, tokenizer, width) for entry in entries(saved.buffer, saved.now)]
    assert max(columns_of(line) for text in texts for line in text.splitlines()) <= width


@given(text=st.text(), width=st.integers(6, 30), indent=st.integers(0, 4))
def test_wrapping_keeps_every_character_and_the_width(text, width, indent):
    lines = wrapped(text, width, indent)
    assert all(columns_of(line) <= width for line in lines)
    if indent == 0:
        assert "".join(lines) == visible(text).replace("\n", "")


@given(text=st.text() | st.characters(categories=["Cc", "Cf"]))
def test_a_reply_cannot_steer_the_terminal(text):
    assert not any(unicodedata.category(character) in ("Cc", "Cf") for character in visible(text).replace("\n", ""))


def test_control_characters_are_written_out():
    assert visible("a\x1b[2Jb\tc\r\n\u202ed") == "a\\x1b[2Jb\\tc\\r\n\\u202ed"
    assert wrapped("one two three", 8) == ["one two ", "three"]
    assert wrapped("one two three", 8, indent=2) == ["one two ", "  three"]
    assert wrapped("日本語日本語", 5) == ["日本", "語日", "本語"]
