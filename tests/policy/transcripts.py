"""Conversations and batches of random tokens, for tests of what is done with them."""

import numpy as np
import torch

from freshper_lightning.policy.packing import collate, openings_of
from freshper_lightning.trajectory import ClockReading, Trajectory, Transcript


def transcript(length: int, seed: int = 0, turns=None) -> Transcript:
    """``length`` random bytes, one turn in the middle by default."""
    generator = np.random.default_rng(seed)
    turns = [(max(1, length // 3), max(2, 2 * length // 3))] if turns is None else turns
    return Transcript(
        token_ids=torch.from_numpy(generator.integers(3, 259, length).astype(np.int32)),
        turns=torch.tensor(turns, dtype=torch.int32),
    )


def family(opening: int, tails, seed: int = 0) -> list[Transcript]:
    """Conversations that all begin with the same ``opening`` tokens, and go on with so many of the policy's."""
    start = transcript(opening, 1000 + seed).token_ids
    own = [transcript(tail + 1, 10 * seed + number).token_ids[1:] for number, tail in enumerate(tails)]
    return [
        Transcript(torch.cat([start, tokens]), torch.tensor([[opening, opening + len(tokens)]], dtype=torch.int32))
        for tokens in own
    ]


def trajectory(length: int, seed: int = 0, turns=None, advantage: float = 1.0) -> Trajectory:
    """A :func:`transcript` with random behavior log-probs and one advantage for all turns."""
    plain = transcript(length, seed, turns)
    generator = torch.Generator().manual_seed(seed)
    return Trajectory(
        token_ids=plain.token_ids,
        turns=plain.turns,
        behavior_log_probs=-5.5 - torch.rand(plain.num_sampled, generator=generator),
        rewards=torch.zeros(plain.num_turns),
        weight_versions=torch.zeros(plain.num_turns, dtype=torch.int64),
        born=ClockReading(),
        group=0,
        member=seed,
        seed=0,
        task="random",
        advantages=torch.full((plain.num_turns,), advantage),
    )


def statistics(net, batch, temperature=1.0, with_entropy=True):
    return net(**batch.forward_arguments(), temperature=temperature, with_entropy=with_entropy)


def alone(net, item, temperature=1.0):
    """Log-probabilities and entropies [S] from one plain forward pass over one conversation, in float64."""
    with torch.no_grad():
        logits = net.model(item.token_ids[None].long()).logits[0].double() / temperature
    positions = item.sampled_positions()
    log_probs = logits.log_softmax(-1)[positions - 1]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs[torch.arange(len(positions)), item.token_ids[positions].long()], entropy


def context(batch, place):
    """int64: what the last trained token of the batch's ``place``-th conversation is predicted from."""
    last = int(batch.predicted_from[batch.segments == place][-1])
    row, column = divmod(last, batch.input_ids.shape[1])
    if batch.spans is None:
        start = column - int(batch.position_ids[row, column])
        return batch.input_ids[row, start : column + 1]
    piece, continued = batch.spans[:, row, : column + 1]
    return batch.input_ids[row, : column + 1][(piece == piece[-1]) | (piece == continued[-1])]


def packed(items, *, share=False, **fields):
    openings = openings_of(items) if share else None
    return collate(items, **({"phase": "fresh", "openings": openings} | fields))
