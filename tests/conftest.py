import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")  # bf16 products hang or crash on some processors otherwise

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("clipwise", deadline=None, max_examples=15, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("clipwise")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
