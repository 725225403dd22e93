import pytest
from transformers import AutoTokenizer

from freshper_lightning.policy.tiny import TinySpec, build_tiny, byte_tokenizer
from freshper_lightning.rollout.collector import Collector, EnvironmentConfig
from freshper_lightning.rollout.conversation import ChatFormat
from freshper_lightning.rollout.sampling import SamplingConfig
from tests.rollout.playing import ECHO, RecordingEngine


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    build_tiny(path, TinySpec(hidden_size=32, layers=2, intermediate=64, heads=2, kv_heads=1), byte_tokenizer())
    return path


@pytest.fixture(scope="module")
def shared_engine(model_path):
    engine = RecordingEngine(model_path, max_model_len=1024)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine):
    shared_engine.record, shared_engine.asked = [], {}
    return shared_engine


@pytest.fixture(scope="module")
def chat(model_path):
    return ChatFormat(AutoTokenizer.from_pretrained(model_path))


@pytest.fixture
def play(request):
    return getattr(request, "param", "lock_step")


@pytest.fixture
def collector(engine, chat, play):
    def make(
        env_id=ECHO,
        max_tokens=12,
        format_penalty=0.0,
        max_context=1024,
        max_failure_share=0.1,
        play=play,
        threads=None,
        **kwargs,
    ):
        return Collector(
            engine=engine,
            chat=chat,
            environment=EnvironmentConfig(env_id, kwargs),
            sampling=SamplingConfig(max_tokens=max_tokens),
            format_penalty=format_penalty,
            max_context=max_context,
            max_failure_share=max_failure_share,
            play=play,
            threads=threads,
        )

    return make
