"""What takes its time: Inductor, the benchmarks, the whole demonstration. Run by `make test-all`."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import clipwise as cw
from clipwise.testing import clip_and_add, loop_gradients, squared_output
from helpers import examples

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("warm", [True, False])
def test_models_compiled_for_real(backend, warm):
    """Compiled before, or for the first time inside the block; the compiled code works as before afterwards."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    compiled, x = torch.compile(model, backend=backend), examples(5, 4)
    plain = compiled(x) if warm else model(x)
    with cw.capture(compiled) as tape:
        losses = squared_output(compiled(x))
    found = cw.clipped_gradients(tape, losses, cw.flat(0.5))
    for name, value in clip_and_add(loop_gradients(model, (x,)), 0.5)[0].items():
        torch.testing.assert_close(found[f"_orig_mod.{name}"], value)
    torch.testing.assert_close(compiled(x), plain)


@pytest.mark.parametrize("script", ["flops.py", "tape_overhead.py"])
def test_benchmarks_run(script, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script)],
        capture_output=True,
        text=True,
        env={"CLIPWISE_RESULTS": str(tmp_path), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("*.json"))


def test_the_demonstration(capsys):
    sys.path.insert(0, str(ROOT / "examples"))
    import compare_methods

    results = compare_methods.main(["--seconds", "5"])
    for outcomes in results.values():
        by_method = {outcome.method: outcome for outcome in outcomes}
        assert by_method["bookkeep"].accuracy > 0.6
        assert by_method["bookkeep"].seconds_an_epoch < by_method["nxBP"].seconds_an_epoch
