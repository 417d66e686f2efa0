"""clipwise bench: the figures compare speed alone, what they leave behind, and what happens when memory runs out."""

import csv
import json
import re
from dataclasses import replace

import pytest
import torch

from clipwise.cli import main
from clipwise.experiments import FIGURES, Measured
from clipwise.experiments import report as reports
from clipwise.experiments import timing as timings
from clipwise.experiments.case import Case
from clipwise.experiments.contenders import CLIPPED_SUMS, COMPILED, NONPRIVATE, NXBP, make_step
from clipwise.experiments.largest_batch import largest
from clipwise.experiments.timing import OUT_OF_MEMORY, Measurement, Settings, measure

CPU = torch.device("cpu")
FAST = Settings(device=CPU, warm_up=1, least=2, most=2, seconds=0.0)
SMALL = {
    "mlp": Case("MNIST", "MLP", "mlp", "mnist", 4),
    "deep mlp": Case("CIFAR10", "6", "mlp-6", "cifar10", 4),
    "cnn": Case("MNIST", "CNN", "cnn", "mnist", 4),
    "rnn": Case("MNIST", "RNN", "rnn", "mnist", 4),
    "lstm": Case("CIFAR10", "LSTM", "lstm", "cifar10", 4),
    "transformer": Case("IMDB", "Transformer", "transformer", "imdb", 3),
    "resnet": Case("ResNet", "18", "resnet18", "lsun", 2, 32),
}


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
)
@pytest.mark.parametrize("name", SMALL)
def test_every_way_finds_the_same_clipped_sum(name, device):
    """What is timed is what is tested: the very functions that `clipwise bench` runs."""
    model, batches = SMALL[name].prepare(False, torch.device(device))
    x, y = next(batches)
    sums = {}
    for method, make in CLIPPED_SUMS.items():
        find = make()
        for _ in range(9 if method == COMPILED else 1):  # eager steps come before the graph
            sums[method] = {name: total.clone() for name, total in find(model, x, y).items()}
    for method, found in sums.items():
        assert found.keys() == sums[NXBP].keys()
        size = sum(float(total.square().sum()) for total in sums[NXBP].values()) ** 0.5
        error = sum(float((found[key] - total).square().sum()) for key, total in sums[NXBP].items()) ** 0.5
        assert 0 < size <= len(y) and error <= (1e-4 if device == "cpu" else 2e-2) * size, (
            method,
            error,
            size,
        )  # TF32, and norms that allow for it


def test_a_private_step_adds_the_papers_noise():
    """σ = 0.05 on the mean gradient: at learning rate 1 a step of SGD moves by it."""
    model, batches = SMALL["mlp"].prepare(False, CPU)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    x, y = next(batches)
    sums = torch.cat([total.flatten() for total in CLIPPED_SUMS["bookkeep"]()(model, x, y).values()])
    make_step("bookkeep", model, torch.optim.SGD(model.parameters(), lr=1.0), 4)(x, y)
    noise = before - torch.cat([p.detach().flatten() for p in model.parameters()]) - sums / 4
    assert abs(float(noise.std()) / 0.05 - 1) < 0.02


def test_measure_takes_turns_and_times_every_way():
    methods = [NONPRIVATE, *CLIPPED_SUMS]
    found = measure(SMALL["mlp"], methods, FAST)
    assert [m.method for m in found] == methods
    assert all(m.seconds > 0 and m.spread >= 0 and m.steps == 2 and m.why_not is None for m in found)


def test_a_way_that_runs_out_of_memory_leaves_the_others_alone(monkeypatch):
    def greedy(model, x, y):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(CLIPPED_SUMS, "multiLoss", lambda: greedy)
    found = {m.method: m for m in measure(SMALL["mlp"], [NONPRIVATE, "multiLoss", "bookkeep"], FAST)}
    assert found["multiLoss"].why_not == OUT_OF_MEMORY and found["multiLoss"].seconds is None
    assert found["bookkeep"].seconds > 0 and found[NONPRIVATE].seconds > 0


def test_other_errors_are_not_taken_for_memory(monkeypatch):
    monkeypatch.setitem(CLIPPED_SUMS, "multiLoss", lambda: lambda *_: (_ for _ in ()).throw(RuntimeError("shapes disagree")))
    with pytest.raises(RuntimeError, match="shapes disagree"):
        measure(SMALL["mlp"], ["multiLoss"], FAST)


def test_a_computer_that_would_kill_the_process_is_not_asked_to(monkeypatch):
    monkeypatch.setattr(timings, "free_memory", lambda: 2**20)
    found = {m.method: m for m in measure(SMALL["mlp"], ["multiLoss", "bookkeep"], FAST)}
    assert found["multiLoss"].why_not == OUT_OF_MEMORY and found["bookkeep"].seconds > 0


@pytest.mark.parametrize("limit", [0, 1, 3, 4, 37, 48, 500, 5000])
def test_largest(limit):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= limit

    found = largest(fits, most=10_000)
    assert found <= limit <= found + max(1, 0.05 * found) and len(tried) < 30
    assert largest(fits, most=256) == 256 or limit <= 256


def test_seconds_an_epoch_are_the_median_step_times_the_steps():
    case = Case("MNIST", "MLP", "mlp", "mnist", 128)
    measured = Measured([(case, Measurement(NXBP, 0.2, 0.0, 5)), (case, Measurement("bookkeep", 0.004, 0.0, 5))])
    assert case.steps_an_epoch == 469 and measured.epoch(case, NXBP) == pytest.approx(93.8)
    assert measured.ratio(case, NXBP, "bookkeep") == pytest.approx(50)
    assert measured.speedups("bookkeep") == [("MLP, MNIST", pytest.approx(50))]


@pytest.mark.parametrize("figure", FIGURES)
def test_figures_are_the_papers(figure):
    """FACTS of the paper's section 6: networks, data sets, batch sizes."""
    cases = FIGURES[figure].cases(False)
    expected = {
        "architecture": (13, {32}), "batch-size": (12, {16, 32, 64, 128}), "depth": (12, {128}), "resnet": (8, {20}), "vgg": (4, {20}),
        "image-size": (5, {32}), "memory": (2, {32, 512}),
    }  # fmt: skip
    assert (len(cases), {case.batch_size for case in cases}) == expected[figure]
    quick = FIGURES[figure].cases(True)
    assert quick and all(case.size <= 64 for case in quick if case.data == "lsun" and figure != "memory")
    assert len({(case.panel, case.label) for case in cases}) == len(cases)


@pytest.fixture
def two_small_figures(monkeypatch):
    """bench architecture and memory, cut down to what a test may take."""
    monkeypatch.setattr(reports, "measure", lambda case, methods, settings: measure(case, methods, FAST))
    for figure in ("architecture", "image-size"):
        cases = FIGURES[figure].cases(True)[:4]
        small = [Case(c.panel, c.label, c.model if figure == "architecture" else "cnn", c.data, 4, 32) for c in cases]
        monkeypatch.setitem(FIGURES, figure, replace(FIGURES[figure], cases=lambda quick, small=small: small))


def test_what_a_run_leaves_behind(tmp_path, capsys, two_small_figures):
    out = tmp_path / "figures"
    assert main(["bench", "architecture", "--quick", "--device", "cpu", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "SYNTHETIC stand-ins" in printed and "over nxBP: multiLoss" in printed and "without Opacus" in printed
    assert {path.name for path in out.iterdir()} == {"results.json", "results.csv", "architecture.png", "index.html"}
    values = json.loads((out / "results.json").read_text())
    assert values["machine"]["torch"] == torch.__version__ and values["settings"]["data"] == "synthetic"
    rows = values["figures"]["architecture"]["rows"]
    assert {row["method"] for row in rows} >= {NONPRIVATE, NXBP, "multiLoss", "ReweightGP", "bookkeep"}
    with (out / "results.csv").open() as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(rows) and "SYNTHETIC" in written[0]["data_note"]
    page = (out / "index.html").read_text()
    assert "SYNTHETIC" in page and "ReweightGP reduces the time of an epoch" in page and page.count("data:image/png;base64,") == 1
    assert not re.search(r'(src|href)="(?!#|data:)', page)  # needs nothing else
    assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 100

    again = tmp_path / "again"
    assert main(["bench", "all", "--draw", str(out / "results.json"), "--out", str(again)]) == 0
    assert (again / "results.csv").read_text() == (out / "results.csv").read_text()
    assert (again / "index.html").exists() and (again / "architecture.png").read_bytes()[:4] == b"\x89PNG"


def test_runs_of_one_machine_share_a_page_and_others_do_not(tmp_path, capsys, two_small_figures):
    for figure in ("architecture", "image-size"):
        assert (
            main(
                [
                    "bench",
                    figure,
                    "--quick",
                    "--device",
                    "cpu",
                    "--methods",
                    "non-private",
                    "nxBP",
                    "bookkeep",
                    "--out",
                    str(tmp_path / figure),
                ]
            )
            == 0
        )
    files = [str(tmp_path / figure / "results.json") for figure in ("architecture", "image-size")]
    assert main(["bench", "all", "--draw", *files, "--out", str(tmp_path / "both")]) == 0
    page = (tmp_path / "both" / "index.html").read_text()
    assert 'id="architecture"' in page and 'id="image-size"' in page and "out of memory" not in page
    changed = json.loads((tmp_path / "image-size" / "results.json").read_text())
    changed["machine"]["processor"] = "another one"
    (tmp_path / "image-size" / "results.json").write_text(json.dumps(changed))
    assert main(["bench", "all", "--draw", *files, "--out", str(tmp_path / "both")]) == 1
    assert "different machines" in capsys.readouterr().err


def test_the_figure_of_memory_needs_a_gpu(tmp_path, capsys):
    assert main(["bench", "memory", "--device", "cpu", "--out", str(tmp_path)]) == 1
    assert "needs a GPU" in capsys.readouterr().err


def test_statements_bear_missing_measurements():
    """A run of few methods, or one that ran out of memory, still gets a page."""
    for figure in FIGURES.values():
        cases = figure.cases(True)
        nothing = Measured([(case, Measurement("multiLoss", why_not=OUT_OF_MEMORY)) for case in cases])
        assert all(isinstance(statement.measured(nothing), str) for statement in figure.statements)


def test_real_data_that_is_not_there_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CLIPWISE_DATA", str(tmp_path))
    assert main(["bench", "depth", "--data", "real", "--quick", "--device", "cpu", "--out", str(tmp_path / "out")]) == 1
    assert "clipwise data fetch mnist" in capsys.readouterr().err
