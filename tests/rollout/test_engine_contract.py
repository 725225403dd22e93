"""What every engine promises, checked on the real engines and on every family of tiny models."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from freshper_lightning.rollout.engine import GenerationRequest
from freshper_lightning.rollout.sampling import Truncation, penalize_repetition, truncate
from tests.rollout.rigs import STOP, VERSION, checkpoint, engine_for, prompts, request, requests, train, trained_rig

TOLERANCE = 1e-4
KINDS = [pytest.param("transformers"), pytest.param("vllm", marks=pytest.mark.vllm)]


def models(kind, marks=()):
    return [
        pytest.param((kind, family, tied), marks=marks, id=f"{kind}-{family}-{'tied' if tied else 'untied'}")
        for family in ("llama", "qwen2", "qwen3")
        for tied in (True, False)
    ]


MODELS = [*models("transformers"), *models("vllm", pytest.mark.vllm)]
one_model = pytest.mark.parametrize(
    "rig",
    [
        pytest.param(("transformers", "llama", True), id="transformers"),
        pytest.param(("vllm", "llama", True), marks=pytest.mark.vllm, id="vllm"),
    ],
    indirect=True,
)
every_model = pytest.mark.parametrize("rig", MODELS, indirect=True)


@pytest.fixture(scope="module")
def rig(request, tmp_path_factory):
    kind, family, tied = request.param
    rig = trained_rig(kind, checkpoint(tmp_path_factory.mktemp(family), family, tied))
    yield rig
    rig.engine.close()


@every_model
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_samples_are_the_trainers_after_a_sync(rig, temperature):
    sent = requests(16, temperature=temperature)
    assert rig.gap(sent, rig.engine.generate(sent)) < TOLERANCE


@every_model
def test_greedy_replies_are_the_trainers_and_certain(rig):
    sent = requests(8, temperature=0.0)
    received = rig.engine.generate(sent)
    assert [answer.token_ids for answer in received] == [rig.greedy(question) for question in sent]
    assert all(set(answer.log_probs) == {0.0} for answer in received)


@every_model
def test_a_sync_shows_in_the_fingerprint_and_on_every_completion(rig):
    before, after = rig.fingerprints
    assert before != after
    assert rig.engine.weight_version == VERSION
    assert {answer.weight_version for answer in rig.engine.generate(requests(3))} == {VERSION}


@one_model
def test_replies_end_with_a_stop_token_or_at_the_bound(rig):
    received = rig.engine.generate(requests(128, max_tokens=40))
    reasons = Counter(answer.finish_reason for answer in received)
    assert set(reasons) == {"stop", "length"}
    for answer in received:
        assert STOP not in answer.token_ids[:-1]
        assert (answer.token_ids[-1] == STOP) == (answer.finish_reason == "stop")
        assert len(answer.token_ids) == len(answer.log_probs) <= 40
        assert answer.finish_reason == "stop" or len(answer.token_ids) == 40


@one_model
def test_each_request_has_its_own_bound_and_temperature(rig):
    sent = [
        request(index, prompts()[0], max_tokens=2 + index, temperature=[0.0, 0.5, 1.5][index % 3]) for index in range(9)
    ]
    received = rig.engine.generate(sent)
    assert [answer.request_id for answer in received] == list(range(9))
    assert all(len(answer.token_ids) <= question.max_tokens for question, answer in zip(sent, received, strict=True))
    for place in (1, 2):
        assert rig.gap(sent[place::3], received[place::3]) < TOLERANCE
    assert rig.greedy(sent[0]) == received[0].token_ids


@one_model
def test_a_sample_depends_on_its_seed_and_not_on_batch_mates_or_global_state(rig):
    alone = [rig.engine.generate([question])[0].token_ids for question in requests(6)]
    torch.manual_seed(99)
    together = rig.engine.generate(requests(24))
    assert [answer.token_ids for answer in together[:6]] == alone
    other = rig.engine.generate([request(i, prompt, seed=77 + i) for i, prompt in enumerate(prompts(6))])
    assert all(answer.token_ids != tokens for answer, tokens in zip(other, alone, strict=True))


@one_model
def test_seeds_give_the_frequencies_of_the_distribution(rig):
    prompt, count = prompts()[0], 2000
    seeds = np.random.default_rng(0).integers(2**63 - 1, size=count).tolist()
    sent = [request(i, prompt, max_tokens=1, temperature=0.3, seed=seed) for i, seed in enumerate(seeds)]
    received = rig.engine.generate(sent)
    expected = (rig.logits(prompt, [0])[0].double() / 0.3).softmax(-1)
    observed = torch.bincount(torch.tensor([answer.token_ids[0] for answer in received]), minlength=len(expected))
    likely = expected.topk(8).indices
    deviations = (observed[likely] / count - expected[likely]) / (
        expected[likely] * (1 - expected[likely]) / count
    ).sqrt()
    assert float(deviations.abs().max()) < 4.5


@one_model
def test_generating_leaves_global_random_states_alone(rig):
    random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    rig.engine.generate([*requests(4), request(9, prompts()[0], temperature=0.0)])
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


@one_model
def test_replies_need_no_gradient_state(rig):
    assert torch.is_grad_enabled()
    rig.engine.generate(requests(1))
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


@one_model
def test_poll_returns_what_has_finished_and_is_empty_when_nothing_is_under_way(rig):
    assert rig.engine.poll() == []
    for question in requests(5):
        rig.engine.submit(question)
    received = []
    while finished := rig.engine.poll():
        received += finished
    assert sorted(answer.request_id for answer in received) == [0, 1, 2, 3, 4]


@one_model
def test_without_waiting_a_request_may_join_those_under_way(rig):
    first, late = requests(2)
    rig.engine.submit(first)
    received = rig.engine.poll(wait=False)
    rig.engine.submit(late)
    while len(received) < 2:
        received += rig.engine.poll(wait=False)
    assert sorted(answer.request_id for answer in received) == [0, 1]
    assert [answer.token_ids for answer in sorted(received, key=lambda answer: answer.request_id)] == [
        answer.token_ids for answer in rig.engine.generate([first, late])
    ]


@one_model
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_token_ids": []}, r"prompt_token_ids must not be empty"),
        ({"max_tokens": 0}, r"max_tokens.*1.*0"),
        ({"max_tokens": 254}, r"3 prompt tokens and max_tokens=254 exceed max_model_len=256"),
        ({"temperature": -1.0}, r"temperature.*-1"),
        ({"temperature": 0.001}, r"temperature must be 0 or at least 0.01"),
        ({"seed": -1}, r"seed.*-1"),
        ({"images": (b"png",)}, r"images"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_by_name(rig, fields, message):
    valid = {"request_id": 3, "prompt_token_ids": [5, 6, 7], "max_tokens": 4, "temperature": 1.0, "seed": 0}
    with pytest.raises(ValueError, match=message):
        rig.engine.submit(GenerationRequest(**(valid | fields)))
    assert rig.engine.poll() == []


@one_model
def test_a_request_id_may_not_be_under_way_twice_and_weights_may_not_change_meanwhile(rig):
    rig.engine.submit(request(1, [5, 6]))
    with pytest.raises(ValueError, match="request_id 1 is under way"):
        rig.engine.submit(request(1, [7]))
    with pytest.raises(RuntimeError, match="1 requests are under way"):
        rig.engine.load_weights(rig.trainer.named_parameters(), VERSION)
    assert len(rig.engine.poll()) == 1
    rig.engine.submit(request(1, [7]))
    assert len(rig.engine.poll()) == 1


@one_model
def test_incomplete_or_unknown_weights_are_refused_and_a_whole_set_repairs_the_engine(rig):
    parameters = list(rig.trainer.named_parameters())
    name, tensor = parameters[3]
    cases = [
        (parameters[:-1], f"no value was given for {parameters[-1][0]}"),
        ([*parameters[:3], ("model.nothing", tensor)], "no weight called 'model.nothing'"),
        ([*parameters[:3], (name, tensor[:1])], rf"'{name}' must have shape"),
    ]
    for stream, message in cases:
        with pytest.raises(ValueError, match=message):
            rig.engine.load_weights(stream, 1000)
        with pytest.raises(RuntimeError, match="without a whole set of weights"):
            rig.engine.submit(request(0, [5]))
    rig.engine.load_weights(iter(rig.trainer.named_parameters(remove_duplicate=False)), VERSION)
    sent = requests(4)
    assert rig.gap(sent, rig.engine.generate(sent)) < TOLERANCE


@one_model
def test_weights_are_the_engines_own_and_come_one_at_a_time(rig):
    sent = requests(4)
    first = rig.engine.generate(sent)
    with torch.no_grad():
        kept = [parameter.clone() for parameter in rig.trainer.parameters()]
        for parameter in rig.trainer.parameters():
            parameter.mul_(2.0)
    assert [answer.token_ids for answer in rig.engine.generate(sent)] == [answer.token_ids for answer in first]
    with torch.no_grad():
        for parameter, value in zip(rig.trainer.parameters(), kept, strict=True):
            parameter.copy_(value)
    rig.engine.load_weights(((name, value.double()) for name, value in rig.trainer.named_parameters()), VERSION)
    assert rig.gap(sent, rig.engine.generate(sent)) < TOLERANCE


@one_model
def test_a_sleeping_engine_refuses_requests_and_wakes_with_its_weights(rig):
    rig.engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        rig.engine.submit(request(0, [5]))
    rig.engine.wake()
    with pytest.raises(RuntimeError, match="not asleep"):
        rig.engine.wake()
    sent = requests(4)
    assert rig.gap(sent, rig.engine.generate(sent)) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_distribution_is_the_one_that_is_reported_and_a_closed_engine_refuses(kind, tmp_path):
    truncation = Truncation(top_p=0.8, top_k=40, min_tokens=3, repetition_penalty=1.3)
    path = checkpoint(tmp_path)
    engine = engine_for(kind, path, truncation)
    trainer = AutoModelForCausalLM.from_pretrained(path)
    train(trainer)
    engine.load_weights(trainer.named_parameters(), 1)
    sent = [*requests(15, temperature=0.8), request(15, [5, 6, 7], max_tokens=2, temperature=0.8)]
    for question, answer in zip(sent, engine.generate(sent), strict=True):
        ids = torch.tensor([[*question.prompt_token_ids, *answer.token_ids]])
        with torch.no_grad():
            logits = trainer(ids).logits[0]
        for place, (token, log_prob) in enumerate(zip(answer.token_ids, answer.log_probs, strict=True)):
            end = len(question.prompt_token_ids) + place
            seen = torch.zeros(1, logits.shape[1], dtype=torch.bool)
            seen[0, ids[0, :end]] = True
            row = penalize_repetition(logits[None, end - 1], seen, 1.3)
            if place < 3:
                row[0, STOP] = -torch.inf
            own = truncate(row / 0.8, 40, 0.8).log_softmax(-1)[0, token]
            assert abs(float(own) - log_prob) < TOLERANCE
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(request(0, [5]))
