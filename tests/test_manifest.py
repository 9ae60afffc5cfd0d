"""The manifest: what is done is never done again, and nobody resumes a job with other settings."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.manifest import Manifest, Totals, UnitEntry, fingerprint, identify_model, publish_entry
from pipelines.prompt_rows import PromptFile
from pipelines.work_units import list_prompt_files
from workers.config import DecodingSettings, PromptSettings
from workers.errors import InputError

FILES = (PromptFile("/in/a.parquet", 10, "1", "a.parquet"),)


def entry(name: str, **changes: object) -> UnitEntry:
    values = {"num_rows": 3, "num_results": 2, "errors": {"x": 1}, "num_prompt_tokens": 5, "num_generated_tokens": 7}
    return UnitEntry(**{"unit": name, "num_forwards": 4, **values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(9 << 20))
    return str(tmp_path / "model")


def settings(model: str, **decoding: object) -> dict[str, object]:
    return fingerprint(FILES, model, PromptSettings(), DecodingSettings(**decoding), False)  # type: ignore[arg-type]


def test_a_job_goes_from_new_to_resumable_to_finished(tmp_path: Path, model: str) -> None:
    output = str(tmp_path / "out")
    manifest = Manifest(output, settings(model))
    assert not manifest.check(overwrite=False) and not Path(output).exists()
    manifest.start(overwrite=False)
    assert manifest.finished_units() == {}
    publish_entry(output, entry("00000-000001"))
    again = Manifest(output, settings(model))
    assert not again.check(overwrite=False)
    assert again.finished_units() == {"00000-000001": entry("00000-000001")}
    again.finish({"num_rows": 3}, "<p>3 rows</p>")
    assert (tmp_path / "out" / "_report.html").read_text() == "<p>3 rows</p>"
    assert again.check(overwrite=False) and again.report() == {"num_rows": 3}
    assert not again.check(overwrite=True)
    again.start(overwrite=True)
    assert again.finished_units() == {} and not again.check(overwrite=False)


def test_resuming_with_other_settings_names_the_field(tmp_path: Path, model: str) -> None:
    output = str(tmp_path / "out")
    Manifest(output, settings(model, mode="tau")).start(overwrite=False)
    expected = r"decoding.threshold: found 0.5; expected 0.95, as in the job .* overwrite=true"
    with pytest.raises(InputError, match=expected):
        Manifest(output, settings(model, threshold=0.5)).check(overwrite=False)
    Manifest(output, settings(model, mode="tau", num_slots=3)).check(overwrite=False)
    Manifest(output, settings(model, threshold=0.5)).check(overwrite=True)
    for name, other in (
        (
            "prompts.paths",
            fingerprint(
                (PromptFile("/in/a.parquet", 11, "1", "a"),),
                model,
                PromptSettings(),
                DecodingSettings(mode="tau"),
                False,
            ),
        ),
        (
            "prompts.rows_per_unit",
            fingerprint(FILES, model, PromptSettings(rows_per_unit=2), DecodingSettings(mode="tau"), False),
        ),
        ("actors.num_gpus", fingerprint(FILES, model, PromptSettings(), DecodingSettings(mode="tau"), True)),
    ):
        with pytest.raises(InputError, match=f"^{name}: "):
            Manifest(output, other).check(overwrite=False)


def test_input_of_the_same_size_with_other_content_is_named(tmp_path: Path, model: str) -> None:
    """Path and size alone once took an edited prompt file for the old one, and the answers of two inputs were mixed."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.jsonl").write_text('{"prompt": "p"}\n')

    def manifest() -> Manifest:
        files = list_prompt_files((str(folder),))
        return Manifest(
            str(tmp_path / "out"), fingerprint(files, model, PromptSettings(), DecodingSettings(mode="tau"), False)
        )

    manifest().start(overwrite=False)
    assert not manifest().check(overwrite=False)
    (folder / "b.jsonl").write_text('{"prompt": "q"}\n')
    os.utime(folder / "b.jsonl", ns=(1, 1))
    with pytest.raises(InputError, match=r"^prompts\.paths: .*b\.jsonl") as refusal:
        manifest().check(overwrite=False)
    assert "a.jsonl" not in str(refusal.value) and "c.jsonl" not in str(refusal.value)
    (folder / "d.jsonl").write_text('{"prompt": "p"}\n')
    (folder / "b.jsonl").unlink()
    with pytest.raises(InputError, match=r"found .*d\.jsonl.* expected .*b\.jsonl"):
        manifest().check(overwrite=False)


def test_another_checkpoint_of_the_same_size_is_another_model(tmp_path: Path, model: str) -> None:
    """Sizes alone once took any checkpoint of a training run for any other."""
    output = str(tmp_path / "out")
    before = identify_model(model)
    Manifest(output, settings(model)).start(overwrite=False)
    weights = Path(model) / "model.safetensors"
    weights.write_bytes(b"".join(bytes([i % 251]) * 4096 for i in range((9 << 20) // 4096)))
    assert identify_model(model) != before
    with pytest.raises(InputError, match="^model: "):
        Manifest(output, settings(model)).check(overwrite=False)


def test_the_same_model_in_another_folder_is_the_same(tmp_path: Path, model: str) -> None:
    before = identify_model(model)
    (tmp_path / "moved").mkdir()
    moved = Path(model).rename(tmp_path / "moved" / "model")
    assert identify_model(str(moved)) == before


def test_files_of_others_are_neither_mixed_with_results_nor_deleted(tmp_path: Path, model: str) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "notes.txt").touch()
    manifest = Manifest(str(output), settings(model))
    assert not manifest.check(overwrite=False)
    with pytest.raises(InputError, match=r"notes\.txt, which no job of this kind has written"):
        manifest.check(overwrite=True)
    (output / "part-0.parquet").touch()
    with pytest.raises(InputError, match=r"part-0\.parquet, which no job"):
        manifest.check(overwrite=False)
    with pytest.raises(InputError, match="a file; expected a folder"):
        Manifest(str(output / "notes.txt"), settings(model)).check(overwrite=False)


def test_a_half_written_entry_is_no_entry(tmp_path: Path, model: str) -> None:
    output = tmp_path / "out"
    manifest = Manifest(str(output), settings(model))
    manifest.start(overwrite=False)
    (output / "_manifest" / ".unit-00000-000000.json.1234.tmp").write_text('{"unit": "000')
    assert manifest.finished_units() == {}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=8))
def test_totals_are_sums(counts: list[tuple[int, int, int]]) -> None:
    totals = Totals()
    for index, (results, a, b) in enumerate(counts):
        errors = {"a": a, "b": b}
        totals.add(entry(str(index), num_rows=results + a + b, num_results=results, errors=errors))
    assert totals.num_rows == totals.num_results + totals.errors.total()
    assert totals.num_units == len(counts) and totals.errors["a"] == sum(a for _, a, _ in counts)
