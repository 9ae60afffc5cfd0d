"""The device check finds a wrong token, says so by its exit code, and needs neither Ray nor DeepSpeed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import decoding, device_check
from benchmarks.decoding_methods import Decoded, Engines
from benchmarks.decoding_models import Subject, trained_walker
from benchmarks.decoding_work import Work


@pytest.fixture(scope="module")
def walker() -> Subject:
    return trained_walker(60, torch.device("cpu"), torch.float32)


def test_oracles_pass_the_engine_and_catch_a_wrong_one(walker: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "ORACLE_ROWS", 6)

    def run() -> list[str]:
        oracles = device_check.Oracles(walker)
        oracles.run(device_check.QUICK_ORACLE_SIZES)
        return list(oracles.failures())

    assert run() == []
    right = Engines.method

    def wrong(engines: Engines, cache: str, **settings):
        def run(work: Work) -> Decoded:
            decoded = right(engines, cache, **settings)(work)
            first, *others = decoded.answers
            changed = [(*first[:-1], (first[-1] + 1) % 63), *others]
            is_wrong = settings["mode"] == "verified" and settings["window"] == 8
            return Decoded(changed if is_wrong else decoded.answers, 1.0, 1.0, decoded.statistics)

        return run

    monkeypatch.setattr(Engines, "method", wrong)
    failures = run()
    assert len(failures) == 2
    assert all(failure.startswith("verified, W = 8") for failure in failures)


def test_a_check_without_an_accepted_draft_says_nothing(walker: Subject) -> None:
    oracles = device_check.Oracles(walker, {}, dict.fromkeys(device_check.VERIFIED, 1.5))
    assert list(oracles.failures()) == []
    oracles.tokens_per_forward["verified, W = 2"] = 1.0
    oracles.tokens_per_forward["verified, automatic window"] = 1.0  # may find that drafts do not pay
    assert list(oracles.failures()) == ["verified, W = 2: no draft was kept, so the check says nothing"]


@pytest.mark.timeout(300)
def test_device_check_and_its_exit_code(
    walker: Subject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_check, "models_to_check", lambda options, device, dtype: [walker])
    monkeypatch.setattr(device_check, "ORACLE_ROWS", 6)
    monkeypatch.setattr(decoding, "RAGGED_SLOTS", 3)
    arguments = ["--quick", "--silent", "--device", "cpu", "--dtypes", "float32", "--batches", "2", "--repeats", "1"]
    assert device_check.main(arguments) == 0
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert values["failures"] == []
    ((name, checks),) = values["checks"].items()
    assert name.endswith("float32")
    assert all(counts[:2] == [0, device_check.ORACLE_ROWS] for counts in checks["rows_with_other_tokens"].values())
    assert checks["tokens_per_forward"]["verified, W = 8, branches"] > 1
    speed = values["speed"][name]
    assert all(set(speed[each]) == {"2"} for each in ("auto_window_vs_best_fixed", "one_token_vs_generate"))
    assert all(counts[0] == 0 for counts in speed["rows_with_other_tokens"].values())
    monkeypatch.setattr(device_check, "argmax_loop", lambda subject, work: [(5,)] * len(work.prompts))
    assert device_check.main([*arguments, "--only-checks"]) == 1
    assert "FAILED: " in capsys.readouterr().out


def test_device_check_imports_neither_ray_nor_deepspeed() -> None:
    code = (
        "import sys; sys.modules.update(ray=None, deepspeed=None); sys.path.insert(0, '.');"
        "import benchmarks.device_check; print(sorted({'ray', 'deepspeed'} & {m for m in sys.modules if sys.modules[m]}))"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
