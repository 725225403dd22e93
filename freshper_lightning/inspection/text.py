"""A replay buffer and its episodes as text."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from freshper_lightning.inspection.entries import Entry, Sort, first
from freshper_lightning.inspection.wrapping import wrapped
from freshper_lightning.replay import ReplayBuffer
from freshper_lightning.trajectory import ClockReading, Trajectory

WIDTH = 80
"""Columns of a terminal of the usual size."""

Kind = Literal["facts", "heading", "prompt", "reply"]


@dataclass(frozen=True, slots=True)
class Block:
    """A part of what is shown of an episode; ``reply`` is what the policy wrote, ``prompt`` what it was given."""

    kind: Kind
    text: str
    indent: int = 0
    """Of what a line that is too long goes on with."""

    def lines(self, width: int) -> list[str]:
        """Lines of at most ``width`` columns."""
        return wrapped(self.text, width, self.indent)


def overview(buffer: ReplayBuffer, now: ClockReading, sort: Sort = "priority", top: int = 5, width: int = WIDTH) -> str:
    """What is stored, and a table of the ``top`` entries that are greatest in ``sort``.

    Raises:
        ValueError: There is no such order, ``top`` is below 1, or the clock ran backwards.
    """
    shown = first(buffer, now, sort, top)
    count = f"{len(buffer)} episodes, {buffer.draws()} replay batches so far, at {_reading(now)}"
    lines = wrapped(count, width)
    if shown:
        lines += ["", *table(shown, width)]
    return "\n".join(lines)


COLUMNS = ("id", "group", "return", "success", "advantage", "priority", "probability", "age", "draws")


def table(shown: Sequence[Entry], width: int = WIDTH) -> list[str]:
    """One row for each entry, under the names of the columns."""
    rows = [COLUMNS, *(_row(entry) for entry in shown)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)) for row in rows]
    return [piece for line in lines for piece in wrapped(line, width)]


def _row(entry: Entry) -> tuple[str, ...]:
    trajectory = entry.trajectory
    return (
        str(entry.id),
        f"{trajectory.group}.{trajectory.member}",
        number(trajectory.episode_return),
        _verdict(trajectory.success),
        number(entry.mean_advantage()),
        number(entry.priority),
        number(entry.probability),
        number(entry.age),
        str(entry.draws),
    )


def episode(entry: Entry, tokenizer: PreTrainedTokenizerBase, width: int = WIDTH) -> str:
    """Everything about one episode: what the buffer knows of it, and its conversation, special tokens included."""
    return "\n".join(line for block in blocks(entry, tokenizer) for line in block.lines(width))


def blocks(entry: Entry, tokenizer: PreTrainedTokenizerBase) -> Iterator[Block]:
    """The parts of :func:`episode`, in order."""
    facts = list(_facts(entry))
    indent = max(len(name) for name, _ in facts) + 2
    yield Block("facts", "\n".join(f"{name:<{indent}}{value}" for name, value in facts), indent)
    yield from conversation(entry.trajectory, tokenizer)


def conversation(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> Iterator[Block]:
    """Prompts and replies in turns, decoded as they stand, each turn under a heading with its numbers."""
    log_probs = trajectory.behavior_log_probs.double().split(trajectory.turn_lengths.tolist())
    begin = 0
    for turn, (start, end) in enumerate(trajectory.turns.tolist()):
        yield Block("heading", "--- prompt" if turn == 0 else "--- message", 4)
        yield Block("prompt", _decoded(trajectory, tokenizer, begin, start))
        yield Block("heading", f"--- turn {turn + 1}: " + _numbers(trajectory, turn, float(log_probs[turn].mean())), 4)
        yield Block("reply", _decoded(trajectory, tokenizer, start, end))
        begin = end


def _decoded(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase, start: int, end: int) -> str:
    ids = trajectory.token_ids[start:end].tolist()
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _numbers(trajectory: Trajectory, turn: int, log_prob: float) -> str:
    advantage = None if trajectory.advantages is None else float(trajectory.advantages[turn])
    parts = [
        f"reward {number(float(trajectory.rewards[turn]))}",
        f"advantage {number(advantage)}",
        f"mean log-prob {number(log_prob)}",
        f"weights of update {int(trajectory.weight_versions[turn])}",
    ]
    if trajectory.invalid_turns in (0, trajectory.num_turns):
        parts.append("invalid" if trajectory.invalid_turns else "valid")
    return ", ".join(parts)


def _facts(entry: Entry) -> Iterator[tuple[str, str]]:
    item = entry.trajectory
    yield f"episode {entry.id}", f"{item.task}, instance seed {item.seed}, group {item.group}, member {item.member}"
    trained = f" (for training {number(item.training_return)})" if item.format_penalty else ""
    yield "return", number(item.episode_return) + trained
    yield (
        "penalty",
        f"{number(item.format_penalty)} for format, {item.invalid_turns} of {item.num_turns} replies invalid",
    )
    yield "success", _verdict(item.success)
    yield "truncated", "yes" if item.truncated else "no"
    yield "tokens", f"{item.num_tokens}, of which {item.num_sampled} sampled in {item.num_turns} turns"
    if item.images:
        yield "images", str(len(item.images))
    if item.advantages is not None:
        yield "group", f"{number(item.group_mean)} mean training return, {number(item.group_std)} standard deviation"
    yield "born", _reading(item.born)
    yield "age", f"{number(entry.age)} ({entry.clock})"
    factors = f"{number(entry.base)} base x {number(entry.freshness)} measured freshness x {number(entry.decay)} decay"
    yield "priority", f"{number(entry.priority)} = {factors}"
    yield (
        "probability",
        f"{number(entry.probability)} of one draw, {number(entry.probability / entry.uniform)} x uniform",
    )
    yield "draws", str(entry.draws)


def _reading(reading: ClockReading) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in asdict(reading).items())


def _verdict(success: bool | None) -> str:
    return "-" if success is None else "yes" if success else "no"


def number(value: float | None) -> str:
    """Four digits, integers in full; a dash for what is not known."""
    if value is None:
        return "-"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"
