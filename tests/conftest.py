import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")  # bf16 products hang or crash on some processors otherwise

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anybody imports triton: kernels run without a GPU

from hypothesis import HealthCheck, settings

settings.register_profile("clipwise", deadline=None, max_examples=15, derandomize=True, suppress_health_check=list(HealthCheck))
settings.register_profile("thorough", parent=settings.get_profile("clipwise"), max_examples=200, derandomize=False)
settings.load_profile("clipwise")
torch.set_num_threads(1)


@pytest.fixture
def registry():
    """Rules and rewrites registered by a test are gone after it."""
    from clipwise.registry import REWRITES, RULES, SPREADS

    saved = [dict(table) for table in (RULES, REWRITES, SPREADS)]
    yield
    for table, old in zip((RULES, REWRITES, SPREADS), saved):
        table.clear()
        table.update(old)


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _trainings_end():
    yield
    from training_helpers import close_all

    close_all()


@pytest.fixture
def fixed_entropy(monkeypatch):
    """What the operating system would give, from a seed: statistical tests must not fail by chance."""
    import random
    import secrets

    source = random.Random(17)
    monkeypatch.setattr(os, "urandom", source.randbytes)
    monkeypatch.setattr(secrets, "randbits", source.getrandbits)
