"""What Python does around graphs that are replayed, in calls of functions: the same on any machine (benchmarks/host_cost.py has the microseconds)."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import host_cost

MOST = {"mlp": (2150, 600), "cnn": (2750, 800)}  # of an eager step and a compiled one, a few per cent above what they make


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MOST)
def test_python_makes_few_calls(name):
    """An ordinary step of the MLP makes 430, and starts every kernel by one."""
    eager, compiled = MOST[name]
    with host_cost.pretending():
        private = host_cost.measure(host_cost.CASES[name], host_cost._private, 1)["calls"]
        replayed = host_cost.measure(host_cost.CASES[name], host_cost._compiled, 1)["calls"]
    assert private["all"] <= eager and replayed["all"] <= compiled, (private, replayed)
