"""The examples run, the embedded data is what it says, and the README's code works as written."""

import re
import sys
from pathlib import Path

import pytest
import torch

from clipwise.data import fashion_mnist

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))


def test_compare_methods(capsys):
    import compare_methods

    results = compare_methods.main(["--seconds", "0.5", "--batch-size", "128", "--models", "mlp"])
    printed = capsys.readouterr().out
    assert [outcome.method for outcome in results["mlp"]] == list(compare_methods.METHODS)
    assert "No noise is added" in printed and "speed-up" in printed
    assert max(map(len, printed.splitlines())) <= 100
    assert all(outcome.seconds_an_epoch > 0 and 0 <= outcome.accuracy <= 1 for outcome in results["mlp"])


def test_train_privately(capsys, tmp_path):
    import train_privately

    arguments = ["--epochs", "1", "--epsilon", "8", "--batch-size", "100", "--images", "500", "--out", str(tmp_path)]
    budget, accuracy = train_privately.main(arguments)
    printed = capsys.readouterr().out
    assert budget.steps == 5 and budget.epsilon <= 8 and 0 < accuracy < 1
    assert "promised before the first step" in printed and "differentially private with ε = 7.99" in printed
    assert {path.name for path in tmp_path.iterdir()} >= {
        "ledger",
        "checkpoint.pt",
        "privacy_report.md",
        "privacy_report.json",
        "privacy_report.png",
    }
    again, _ = train_privately.main(arguments)  # nothing is left to do, and nothing is done
    assert again == budget and "going on after 5 steps" in capsys.readouterr().out


def test_methods_learn_the_same():
    import compare_methods

    data = fashion_mnist(train=True)
    x, y = data.inputs[:16], data.labels[:16]
    gradients = {}
    for method in list(compare_methods.METHODS)[1:]:
        torch.manual_seed(0)
        runner = compare_methods.Runner(method, compare_methods.cnn(), 16)
        runner.fill_gradients(x, y)
        gradients[method] = torch.cat([p.grad.flatten() for p in runner.model.parameters()])
    for method, gradient in gradients.items():
        # norms allow for what rounding may add to sums that cancel: some 64·2⁻²⁴ of their terms' norms
        assert (gradient - gradients["nxBP"]).norm() <= 5e-5 * gradient.norm(), method


@pytest.mark.parametrize(("train", "count"), [(True, 10_000), (False, 2_000)])
def test_embedded_images(train, count):
    images = fashion_mnist(train=train)
    assert images.inputs.shape == (count, 1, 28, 28) and images.labels.shape == (count,)
    assert images.labels.bincount(minlength=10).min() > count // 15
    assert abs(float(images.inputs.mean())) < 0.03 and abs(float(images.inputs.std()) - 1) < 0.03


@pytest.mark.parametrize("page", ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))])
def test_code_in_the_documentation_runs(page, registry):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)


def test_the_file_tree_in_the_readme_is_true():
    tree = re.search(r"```\nsrc/clipwise/\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert tree is not None
    named = set(re.findall(r"([a-z_]+(?:\.py|/))", tree[1]))
    package = ROOT / "src" / "clipwise"
    there = {path.name for path in package.glob("*.py")} | {
        f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()
    }
    assert there <= named, there - named
