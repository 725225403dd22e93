"""What the trainer is meant to reach beside TRL, and whether it does."""

from collections.abc import Callable
from dataclasses import replace

from benchmarks.pages import Target
from benchmarks.trainer.cases import OURS, OURS_TRANSFORMERS, OURS_VLLM, TRL, TRLS_MICRO_BATCHES, Case
from benchmarks.trainer.results import Results, Row

SMOLLM2, TINY = "SmolLM2-135M", "tiny"


def targets(results: Results) -> list[Target]:
    """All of them, in the order in which they are reported."""
    iteration = [
        _ratio(results, model, trainer, bound)
        for model, bound in ((SMOLLM2, 0.6), (TINY, 1.0))
        for trainer in (OURS_VLLM, OURS_TRANSFORMERS)
    ]
    speed = [_training(results, model, precision) for model in (SMOLLM2, TINY) for precision in ("float32", "bfloat16")]
    memory = [
        _memory(results, model, trainer, frugal)
        for model in (SMOLLM2, TINY)
        for frugal in (False, True)
        for trainer in (OURS_VLLM, OURS_TRANSFORMERS)
    ]
    return iteration + speed + memory


def _ratio(results: Results, model: str, trainer: str, bound: float) -> Target:
    text = f"{model}, float32, {trainer}: an iteration takes at most {bound:g} of TRL's"
    own, theirs = _both(results, model, Case("whole", trainer, "float32"), lambda row: row.seconds)
    if own is None or theirs is None:
        return Target(text, "", None)
    return Target(text, f"{own:.3g} s against {theirs:.3g} s: {own / theirs:.2f}", own <= bound * theirs)


def _training(results: Results, model: str, precision: str) -> Target:
    text = f"{model}, {precision}, ragged: at least 1.5 x TRL's training tokens per second"
    own, theirs = _both(
        results, model, Case("ragged", OURS, precision, TRLS_MICRO_BATCHES), lambda row: row.training_speed
    )
    if own is None or theirs is None:
        return Target(text, "", None)
    return Target(text, f"{own:,.0f} against {theirs:,.0f}: {own / theirs:.2f} x", own >= 1.5 * theirs)


def _memory(results: Results, model: str, trainer: str, frugal: bool) -> Target:
    setting = ", 4 micro-batches, checkpointing" if frugal else ""
    text = f"{model}, float32{setting}, {trainer}: less peak memory than TRL"
    case = Case("whole", trainer, "float32", *((TRLS_MICRO_BATCHES, True) if frugal else ()))
    own, theirs = _both(results, model, case, lambda row: row.peak_mib)
    if own is None or theirs is None:
        return Target(text, "", None)
    return Target(text, f"{own:,.0f} MiB against {theirs:,.0f} MiB: {own / theirs:.2f}", own < theirs)


def _both(results: Results, model: str, own: Case, value: Callable[[Row], float]) -> tuple[float | None, float | None]:
    """Our median and TRL's under the same setting."""
    peer = replace(own, trainer=TRL)
    return results.median(model, own, value), results.median(model, peer, value)
