"""The statement a privacy officer files, and the command line that writes it."""

import itertools
import json
import subprocess
import sys

import pytest

import clipwise as cw
from clipwise.cli import main
from clipwise.report import PrivacyReport
from training_helpers import small_plan, steps, training


@pytest.fixture
def ledger(tmp_path):
    path = tmp_path / "ledger"
    private, model, optimizer = training(seed=None, ledger=path)
    for _ in steps(private, model, optimizer, limit=4):
        pass
    private.close()
    return path


def test_the_statement_says_everything(ledger):
    report = PrivacyReport.from_ledger(ledger)
    text = report.markdown()
    expected = small_plan().budget(4)
    assert report.budget == expected and report.spent == 4
    for words in (
        "4 of 18 steps", "one example added or removed", "add_or_remove_one", "Poisson: every example by itself with probability 0.1667", "drawn by clipwise",
        "PLD", "δ | 0.001", "noise multiplier 1.3", "source: fast", "flat(bound=0.7), sensitivity 0.7", "(Σ clip(gᵢ) + noise) / 10", "clipwise.compose",
        "early stopping", "exception", "floating-point", "dp-accounting 0.6", "torch 2.", "SGD",
    ):  # fmt: skip
        assert words in text, words
    values = json.loads(report.json())
    assert values["epsilon"] == expected.epsilon and values["plan"] == small_plan().to_dict()
    assert values["training"]["batches"] == "clipwise" and len(values["not_covered"]) == 7


def test_what_changes_the_statement():
    facts = {"noise": "secure", "batches": "caller"}
    own = PrivacyReport(small_plan(unit="user"), 3, facts)
    assert "the caller, who gives their word" in own.markdown() and "their word for it" in own.not_covered()[-1]
    assert "one user" in own.markdown() and not any("floating-point" in text for text in own.not_covered())
    void = PrivacyReport(small_plan(), 3, {"noise": "reproducible"})
    assert void.is_void and "No privacy is guaranteed" in void.markdown() and json.loads(void.json())["void"]
    shuffled = PrivacyReport(small_plan(sampler="shuffle"), 3, {"noise": "fast"})
    assert "WITHOUT amplification" in shuffled.markdown()
    counted = PrivacyReport(small_plan(clipping=cw.adaptive()), 3, {"noise": "fast"})
    assert "noised count" in counted.markdown()


def test_the_folder(ledger, tmp_path):
    written = PrivacyReport.from_ledger(ledger).save(tmp_path / "report")
    assert [path.name for path in written] == ["privacy_report.md", "privacy_report.json", "privacy_report.png"]
    assert written[2].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and written[2].stat().st_size > 10_000


def test_the_curve_ends_where_the_budget_is():
    from clipwise.accounting import curve

    for plan in (small_plan(), small_plan(sampler="shuffle"), small_plan(sampler="fixed_size"), small_plan(accountant="rdp_classic")):
        points = curve([(plan.mechanism, plan.steps)], plan.delta, plan.accountant)
        assert points[0] == (0, 0.0) and points[-1] == (plan.steps, plan.budget().epsilon)
        assert all(a[0] < b[0] and a[1] <= b[1] * 1.005 for a, b in itertools.pairwise(points))


def test_calibrate(capsys, tmp_path):
    arguments = "calibrate --epsilon 3 --delta 1e-5 --dataset-size 60000 --batch-size 512 --epochs 10".split()
    assert main([*arguments, "--out", str(tmp_path / "plan.json")]) == 0
    printed = capsys.readouterr().out
    assert "noise multiplier  0.78" in printed and "1172 (10 epochs)" in printed and "PLD" in printed
    plan = cw.PrivacyPlan.load(tmp_path / "plan.json")
    assert plan.budget().epsilon <= 3
    assert main([*arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert cw.PrivacyPlan.from_dict(values["plan"]) == plan and values["budget"]["epsilon"] <= 3
    assert main(["spent", str(tmp_path / "plan.json"), "--steps", "100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 100


def test_spent_and_report(capsys, ledger, tmp_path):
    assert main(["spent", str(ledger)]) == 0
    assert "after 4 steps" in capsys.readouterr().out
    assert main(["spent", str(ledger), str(ledger), "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert both["steps"] == 8 and both["epsilon"] > small_plan().budget(4).epsilon
    assert main(["report", str(ledger)]) == 0
    assert capsys.readouterr().out.startswith("# Privacy report")
    assert main(["report", str(ledger), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["delta"] == 1e-3
    assert main(["report", str(ledger), "--out", str(tmp_path / "out")]) == 0
    assert "privacy_report.png" in capsys.readouterr().out and (tmp_path / "out" / "privacy_report.md").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("spent nowhere", 1, "there is no ledger nowhere"),
        ("report nowhere", 1, "there is no ledger nowhere"),
        ("calibrate --epsilon 3 --delta 2 --dataset-size 100 --batch-size 10 --epochs 1", 1, "delta must be between 0 and 1"),
        ("calibrate --epsilon 3 --delta 1e-5 --dataset-size 100", 1, "exactly one of"),
        (
            "calibrate --epsilon 3 --delta 1e-5 --dataset-size 100 --batch-size 10 --epochs 1 --sampler fixed_size --accountant pld",
            1,
            "does not cover",
        ),
        ("calibrate --epsilon 3 --delta 1e-5 --dataset-size 100 --batch-size 10 --epochs inf", 1, "epochs must be"),
        ("calibrate --epsilon three", 2, "invalid float"),
        ("calibrat", 2, "invalid choice"),
        ("", 2, "required"),
    ],
)
def test_wrong_usage(capsys, arguments, code, message):
    try:
        found = main(arguments.split())
    except SystemExit as stop:
        found = stop.code
    assert found == code and message in capsys.readouterr().err


def test_spent_says_when_it_is_worth_nothing(capsys, tmp_path):
    private, model, optimizer = training(ledger=tmp_path / "ledger")
    for _ in steps(private, model, optimizer, limit=1):
        pass
    private.close()
    assert main(["spent", str(tmp_path / "ledger")]) == 0 and "VOID" in capsys.readouterr().out
    small_plan().save(tmp_path / "plan.json")
    assert main(["spent", str(tmp_path / "plan.json"), "--steps", "-5"]) == 1
    assert "none or more" in capsys.readouterr().err


def test_help_has_examples(capsys):
    for command in ("calibrate", "spent", "report"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0 and f"clipwise {command} " in capsys.readouterr().out.split("examples:")[1]


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "clipwise", "--help"], capture_output=True, text=True, check=True)
    assert "calibrate" in done.stdout
