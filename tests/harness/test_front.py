"""`python test_memory_optimized.py` ends with the exit code that says how it went."""

import importlib.util
from pathlib import Path

import pytest

from zoo.report.two_runs import TwoRuns

ROOT = Path(__file__).parents[2]
RUN = "zoo.cli.comparison.run"


@pytest.fixture
def front():
    spec = importlib.util.spec_from_file_location("front", ROOT / "test_memory_optimized.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def comparison(ratio, loss):
    def record(peak, loss):
        return {
            "status": "done",
            "memory": {"peak": peak, "activation_peak": 9, "tensor_activation_peak": 9},
            "digests": [{"loss": loss}],
        }

    model = {"name": "vnet", "checkpoint": True, "data": "volume", "batch_size": 1, "size": 16}
    return {
        "model": model | {"largest_ratio": 0.5},
        "baseline": record(1000, "a"),
        "checkpointed": record(int(1000 * ratio), loss),
        "timing": {"status": "done"},
    }


@pytest.mark.parametrize(("ratio", "loss", "code"), [(0.4, "a", 0), (0.6, "a", 1), (0.4, "b", 1)])
def test_exit_code_says_whether_it_was_exact_and_saved_enough(
    front, monkeypatch, tmp_path, capsys, ratio, loss, code
):
    monkeypatch.setattr(RUN, lambda config, console: [comparison(ratio, loss)])
    assert front.main(["quick", "--output", str(tmp_path)]) == code
    assert f"report:  {tmp_path / 'quick' / 'report.html'}" in capsys.readouterr().out


def test_a_peak_that_has_grown_is_1(front, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(RUN, lambda config, console: [comparison(0.4, "a")])
    monkeypatch.setattr("zoo.cli.comparison.read_earlier", lambda config: ("peaks.jsonl", {}))
    monkeypatch.setattr(
        "zoo.cli.comparison.beside", lambda *arguments: TwoRuns("", "", (), (), (), ())
    )
    monkeypatch.setattr("zoo.cli.comparison.has_grown", lambda *arguments: True)
    assert front.main(["quick", "--output", str(tmp_path)]) == 1


def test_a_comparison_with_no_file_is_2_before_anything_runs(front, monkeypatch, capsys):
    monkeypatch.setattr(RUN, lambda config, console: pytest.fail("it ran"))
    assert front.main(["quick", "--compare", "no.jsonl"]) == 2
    assert "--compare 'no.jsonl': there is no such file" in capsys.readouterr().err


def test_a_misspelt_option_is_one_sentence_and_2(front, capsys):
    assert front.main(["--batchsize", "3"]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "Did you mean --batch-size" in printed.err


def test_an_interruption_is_130(front, monkeypatch, capsys):
    def interrupted(config, console):
        raise KeyboardInterrupt

    monkeypatch.setattr(RUN, interrupted)
    assert front.main(["quick"]) == 130
    assert "the same command resumes" in capsys.readouterr().err
