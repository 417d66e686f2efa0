"""clipwise train: what it leaves behind, how it stops and goes on, and what it refuses."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import clipwise as cw
from clipwise.cli import _parser, main
from clipwise.commands.train import _job
from clipwise.data import Examples
from clipwise.data import catalog as catalogs
from clipwise.models.zoo import NAMES, build
from clipwise.runs import PRESETS, TrainJob, run
from clipwise.runs.bar import Bar, line
from clipwise.runs.curve import Point

FILES = {
    "checkpoint.pt",
    "ledger",
    "plan.json",
    "config.json",
    "curve.csv",
    "curve.png",
    "privacy_report.md",
    "privacy_report.json",
    "privacy_report.png",
}


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    """The embedded data, cut down."""
    real = catalogs.fashion_mnist

    def few(*, train):
        images = real(train=train)
        return Examples(images.inputs[:200], images.labels[:200])

    monkeypatch.setattr(catalogs, "fashion_mnist", few)


ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}  # for processes that run beside other tests
SMALL = ["--model", "mlp", "--batch-size", "50", "--epochs", "2", "--delta", "1e-3", "--epsilon", "8"]


def test_a_compiled_training(tmp_path, monkeypatch):
    """By the graph as it was traced: waiting for the compiler is test_compiled's business."""
    from clipwise.compiled import variant

    made = []
    monkeypatch.setattr(variant, "_compiled", lambda traced, inputs: made.append(traced) or traced.graph)
    job = TrainJob(model="mlp", batch_size=20, epochs=2, delta=1e-3, epsilon=8.0, compile=True)
    outcome = run(job, tmp_path / "run", say=lambda _: None)
    assert outcome.finished and len(made) == 1 and outcome.budget.epsilon <= 8
    assert json.loads((tmp_path / "run" / "config.json").read_text())["compile"] is True


def test_a_whole_training(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", *SMALL, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert (
        "200 private examples, 200 held out and declared public" in printed
        and "finished\nspent   ε = " in printed
        and "PRIVATE" not in printed
    )
    assert {path.name for path in out.iterdir()} >= FILES
    rows = (out / "curve.csv").read_text().splitlines()
    assert rows[0] == "step,epsilon,public_accuracy,public_loss" and len(rows) == 3 and rows[2].startswith("8,")
    assert cw.PrivacyPlan.load(out / "plan.json").budget().epsilon <= 8
    assert json.loads((out / "config.json").read_text())["model"] == "mlp"
    with pytest.raises(cw.BadLedger, match="holds a training already"):
        run(TrainJob(), out)


def test_json_and_private_accuracy(tmp_path, capsys):
    assert main(["train", *SMALL, "--out", str(tmp_path / "run"), "--json", "--private-accuracy"]) == 0
    printed = capsys.readouterr()
    values = json.loads(printed.out)
    assert values["finished"] and values["budget"]["steps"] == 8 and 0 <= values["public_accuracy"] <= 1
    assert "PRIVATE training accuracy" in printed.err


def test_ctrl_c_stops_cleanly_and_can_be_resumed(tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "clipwise", "train", "--model", "mlp", "--batch-size", "100", "--epochs", "40", "--out", str(out)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for _ in range(600):
        if (out / "checkpoint.pt").exists():
            break
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    printed = child.communicate(timeout=120)[0]
    assert child.returncode == 130 and "stopped; go on with --resume" in printed, printed
    state = torch.load(out / "checkpoint.pt", weights_only=True)["private"]
    assert 0 < state["position"] == state["spent"] < 4000
    assert "BudgetSpent" not in printed


def test_resume(tmp_path, capsys):
    out = tmp_path / "run"
    asked = []
    job = TrainJob(model="mlp", batch_size=50, epochs=4, delta=1e-3, epsilon=8.0)

    def stop(step, steps, note):
        if step == 6 and not asked:
            asked.append(step)
            os.kill(os.getpid(), signal.SIGINT)

    first = run(job, out, show=stop, say=lambda text: None)
    assert not first.finished and first.budget.steps == 6
    assert main(["train", "--resume", "--out", str(out)]) == 0
    assert "resumed after 6 steps; 6 are counted" in capsys.readouterr().out
    assert json.loads((out / "privacy_report.json").read_text())["budget"]["steps"] == 16
    assert main(["train", "--resume", "--epsilon", "9", "--out", str(out)]) == 1
    assert "goes on with the settings in --out" in capsys.readouterr().err
    again = _job(_parser().parse_args(["train", "--resume", "--epsilon", "8", "--compile", "--out", str(out)]))
    assert again == dataclasses.replace(job, compile=True)  # what is said again, and how a step is made, changes no plan


class Killed(BaseException):
    """Ends a training the way a crash does: nothing is saved on the way out."""


def test_killed_before_the_first_checkpoint(tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "clipwise", "train", "--out", str(out)]
    child = subprocess.Popen([*command, "--model", "mlp", "--batch-size", "50", "--epochs", "1"], stdout=subprocess.DEVNULL, env=ONE_THREAD)
    while not (out / "ledger").exists() or cw.ledger.read(out / "ledger").spent < 3:
        assert child.poll() is None
        time.sleep(0.01)
    child.kill()
    child.wait()
    counted = cw.ledger.read(out / "ledger").spent
    assert 3 <= counted < 200 and not (out / "checkpoint.pt").exists()
    resumed = subprocess.run([*command, "--resume"], capture_output=True, text=True, env=ONE_THREAD)
    assert resumed.returncode == 0, resumed.stderr
    assert f"no checkpoint was written: begins with new weights; {counted} steps are counted" in resumed.stdout
    state = torch.load(out / "checkpoint.pt", weights_only=True)["private"]
    assert (state["position"], state["spent"]) == (200 - counted, 200)
    assert json.loads((out / "privacy_report.json").read_text())["budget"]["steps"] == 200


@pytest.mark.parametrize("sampler", ["poisson", "shuffle"])
@pytest.mark.parametrize("place", ["before the ledger", "after the ledger", "after the last step"])
def test_killed_where_nothing_is_saved_yet(tmp_path, monkeypatch, capsys, place, sampler):
    out = tmp_path / "run"
    job = TrainJob(model="mlp", batch_size=50, epochs=1, delta=1e-3, epsilon=8.0, sampler=sampler)

    def kill(*arguments, **options):
        if place != "after the last step" or arguments[0] == 4:
            raise Killed

    with monkeypatch.context() as patch:
        if place != "after the last step":
            name = {"before the ledger": "PrivateTraining", "after the ledger": "Loop"}[place]
            patch.setattr(sys.modules["clipwise.runs.run"], name, kill)
        with pytest.raises(Killed):
            run(job, out, show=kill, say=lambda text: None)
    assert (out / "ledger").exists() == (place != "before the ledger")
    lost = 4 if place == "after the last step" else 0
    assert main(["train", "--resume", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"{lost} steps are counted" in printed and "accuracy 0.00 %" not in printed
    state = torch.load(out / "checkpoint.pt", weights_only=True)["private"]
    assert (state["position"], state["spent"]) == (4 - lost, 4)
    assert len((out / "curve.csv").read_text().splitlines()) == 2


def test_killed_between_settings_and_plan(tmp_path, monkeypatch):
    """Nothing was released and there is nothing to resume: the training begins anew."""
    out = tmp_path / "run"
    job = TrainJob(model="mlp", batch_size=50, epochs=1, delta=1e-3, epsilon=8.0)
    with monkeypatch.context() as patch:
        patch.setattr(cw.PrivacyPlan, "save", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            run(job, out, say=lambda text: None)
    assert {path.name for path in out.iterdir()} == {"config.json"}
    assert run(job, out, say=lambda text: None).finished


MEASURED = Point(step=3200, epsilon=1.81234, accuracy=0.7431, loss=0.71239)


@pytest.mark.parametrize("columns", [20, 40, 59, 79, 99, 200])
def test_the_bar_fits_its_terminal(columns):
    for measured in (None, MEASURED):
        for step in (1, 3999, 4000):
            assert len(line(step, 4000, measured, columns)) <= columns
    text = line(3999, 4000, MEASURED, columns)
    assert columns < 59 or all(part in text for part in (" 3999/4000  at ", "1.813, public ", "74.3 %"))
    assert columns < 99 or text.endswith(" 3999/4000  at step 3200: ε = 1.813, public accuracy 74.3 %, public loss 0.712")
    assert line(2000, 4000, None, 200).startswith("[" + "=" * 20 + " " * 20 + "] 2000/4000")


def shown(command, columns):
    """What a terminal of that width shows in the end, line by line, and every picture of the bar on the way."""
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=ONE_THREAD)
    os.close(theirs)
    written = b""
    with contextlib.suppress(OSError):  # how a terminal ends
        while piece := os.read(ours, 4096):
            written += piece
    os.close(ours)
    assert child.wait() == 0, written.decode()
    rows = [row.removesuffix("\r").split("\r\033[K") for row in written.decode().split("\n")]
    return [row[-1] for row in rows], [picture for row in rows for picture in row if picture.startswith("[")]


@pytest.mark.parametrize(
    ("columns", "point"),
    [(60, r"at 10: ε {}, public ([\d.]+) %, loss "), (100, r"at step 10: ε = {}, public accuracy ([\d.]+) %, public loss ")],
)
def test_what_a_terminal_shows(tmp_path, columns, point):
    settings = ["--model", "mlp", "--batch-size", "1000", "--epochs", "2", "--out", str(tmp_path / "run")]
    rows, bars = shown([sys.executable, "-m", "clipwise", "train", *settings], columns)
    assert max(map(len, bars)) < columns and not any("[" in row for row in rows)
    assert all(len(row) < columns or " " not in row.strip() for row in rows), rows  # only a path may be longer
    [header] = [number for number, row in enumerate(rows) if row.split() == "step ε so far public accuracy public loss seconds".split()]
    _, epsilon, accuracy, *_ = rows[header + 1].split()
    assert "after the epoch" in bars[0]
    [shown_accuracy] = re.findall(point.format(re.escape(epsilon)), bars[-1])
    assert abs(float(shown_accuracy) - float(accuracy)) < 0.051 and "/20 " in bars[-1]  # each is rounded once, from the same number


def test_what_the_demo_shows(tmp_path):
    columns = 60  # wider terminals: the test before this one
    example = Path(__file__).parents[1] / "examples" / "train_privately.py"
    settings = ["--epochs", "2", "--epsilon", "8", "--batch-size", "100", "--images", "500", "--out", str(tmp_path)]
    rows, bars = shown([sys.executable, str(example), *settings], columns)
    assert [row for row in rows if row][-3:] == [str(tmp_path / f"privacy_report.{kind}") for kind in ("md", "json", "png")]
    assert max(map(len, bars)) < columns and not any("[" in row for row in rows)
    assert all(len(row) < columns or " " not in row for row in rows), rows
    assert "/10  at " in bars[-1] and "5: ε " in bars[-1] and "loss " in bars[-1]


def test_a_refusal_does_not_share_a_line_with_the_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(ValueError), Bar() as bar:
        bar.show(1, 4, None)
        raise ValueError
    drawn = capsys.readouterr().err
    assert "1/4" in drawn and drawn.endswith("\r\033[K")


def test_epsilon_is_accounted_for_once_an_epoch(tmp_path, monkeypatch):
    real, calls, bars = cw.PrivateTraining.spent, [], []
    monkeypatch.setattr(cw.PrivateTraining, "spent", lambda self: (calls.append(self.position), real(self))[1])
    job = TrainJob(model="mlp", batch_size=20, epochs=2, delta=1e-3, epsilon=8.0)
    run(job, tmp_path / "run", show=lambda *given: bars.append(given), say=lambda text: None)
    assert calls == [10, 20] and [step for step, _, _ in bars] == [*range(1, 21)]
    assert [measured and measured.step for _, _, measured in bars] == [None] * 10 + [10] * 10


def test_public_loss(tmp_path):
    job = TrainJob(model="mlp", batch_size=50, epochs=2, delta=1e-3, epsilon=8.0)
    outcome = run(job, tmp_path / "run", say=lambda text: None)
    data = catalogs.load("embedded")
    model = build("mlp", data)
    model.load_state_dict(torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["model"])
    with torch.no_grad():
        output = model.double()(data.test.inputs.double())  # (N, classes)
    expected = -sum(float(row.log_softmax(0)[label]) for row, label in zip(output, data.test.labels)) / len(output)
    assert abs(outcome.loss - expected) < 1e-5 and outcome.accuracy == int((output.argmax(1) == data.test.labels).sum()) / len(output)
    assert abs(float((tmp_path / "run" / "curve.csv").read_text().splitlines()[-1].split(",")[3]) - expected) < 1e-5


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, monkeypatch):
    from clipwise import files

    target = tmp_path / "checkpoint.pt"
    files.write_whole(target, b"whole")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        files.write_whole(target, b"half")
    assert target.read_bytes() == b"whole" and os.listdir(tmp_path) == ["checkpoint.pt"]


@pytest.mark.parametrize("suffix", ["toml", "json", "yaml"])
def test_settings_from_a_file(tmp_path, suffix, capsys):
    if suffix == "yaml":
        pytest.importorskip("yaml")
    path = tmp_path / f"job.{suffix}"
    texts = {
        "toml": 'model = "mlp"\nbatch-size = 50\nepochs = 1\ndelta = 1e-3\n',
        "json": '{"model": "mlp", "batch_size": 50, "epochs": 1, "delta": 1e-3}',
        "yaml": "model: mlp\nbatch-size: 50\nepochs: 1\ndelta: 0.001\n",
    }
    path.write_text(texts[suffix])
    assert main(["train", "--config", str(path), "--epsilon", "8", "--out", str(tmp_path / "run")]) == 0
    path.write_text(texts[suffix].replace("epochs", "epoch"))
    assert main(["train", "--config", str(path), "--out", str(tmp_path / "other")]) == 1
    assert "Did you mean 'epochs'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "cnm"], "Did you mean 'cnn'?"),
        (["--data", "mnits"], "Did you mean 'mnist'?"),
        (["--data", "mnist", "--data-folder", "/nowhere"], "clipwise data fetch mnist"),
        (["--model", "transformer"], "the transformer is for text"),
        (["--model", "resnet18"], "three channels"),
        (["--compile", "--method", "reweight"], "bookkeep"),
        (["--resume"], "nothing to resume"),
        (["--config", "/nowhere.toml"], "No such file"),
    ],
)
def test_refusals(tmp_path, capsys, arguments, message):
    assert main(["train", *arguments, "--out", str(tmp_path / "run")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "ledger").exists()


def test_presets_are_complete():
    for name, settings in PRESETS.items():
        job = TrainJob().changed(settings)
        assert job.model in NAMES, name
    assert TrainJob().changed(PRESETS["paper-mnist-cnn"]).lr == 1e-3


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("resnet", "vgg"))])
def test_models_by_name(name):
    data = catalogs.load("synthetic-imdb" if name == "transformer" else "synthetic-cifar10", limit=4)
    assert build(name, data)(data.train.inputs).shape == (4, data.classes)


def test_data_command(capsys):
    assert main(["data", "list"]) == 0
    assert "fashion-mnist" in capsys.readouterr().out
    assert main(["data", "list", "--json"]) == 0
    assert "mnist" in json.loads(capsys.readouterr().out)
    assert main(["data", "fetch"]) == 1
    assert "which data set?" in capsys.readouterr().err
