"""Completions of different lengths, sampled once for both sides."""

from transformers import AutoTokenizer

from benchmarks.trainer.task import Job, Ragged, ragged_lengths
from freshper_lightning.rollout.conversation import ChatFormat
from freshper_lightning.rollout.engine import GenerationRequest
from freshper_lightning.rollout.sampling import Truncation
from freshper_lightning.rollout.seeds import stable_hash
from freshper_lightning.rollout.transformers_engine import TransformersEngine


def sample(job: Job, longest: int) -> Ragged:
    """What ``job`` plays, with lengths up to ``longest`` that are the same in each iteration."""
    chat = ChatFormat(AutoTokenizer.from_pretrained(job.model))
    prompts = [chat.prompt_ids(text, None) for text in job.prompts for _ in range(job.group_size)]
    lengths = ragged_lengths(job.groups * job.group_size, longest) * job.iterations
    requests = [
        GenerationRequest(index, ids, length, 1.0, stable_hash("ragged", job.seed, index))
        for index, (ids, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    # No end token before the bound, so that lengths are as they are meant to be.
    engine = TransformersEngine(job.model, truncation=Truncation(min_tokens=longest), kv_cache_mib=0)
    completions = engine.generate(requests)
    engine.close()
    return Ragged(prompts, [list(one.token_ids) for one in completions], [list(one.log_probs) for one in completions])
