"""Relative paths start at one place, which the first log line names, and never in Ray's copy of the code."""

import logging
from pathlib import Path

import pytest

from jobs import command_line
from pipelines.paths import home, resolve
from workers.config import Settings
from workers.errors import InputError

JOB_MARK = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A direct run in `tmp_path/here` by a user whose home is `tmp_path/user`."""
    monkeypatch.delenv("MARSRAY_HOME", raising=False)
    monkeypatch.delenv(JOB_MARK, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def first_log_line(caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert command_line.run(Settings, None, lambda recipe, is_dry_run: 0, []) == 0
    return caplog.messages[0]


def test_a_direct_run_starts_in_the_current_folder(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert resolve("runs/x") == str(folder / "here" / "runs" / "x")
    assert first_log_line(caplog) == f"relative paths start at {folder / 'here'} (the current folder)"


def test_a_submitted_job_starts_in_the_home_folder(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its current folder is Ray's uploaded copy, which vanishes with the job."""
    monkeypatch.setenv(JOB_MARK, "{}")
    assert resolve("runs/x") == str(folder / "user" / "marsray" / "runs" / "x")
    line = f"relative paths start at {folder / 'user' / 'marsray'} (submitted job; MARSRAY_HOME changes it)"
    assert first_log_line(caplog) == line


@pytest.mark.parametrize("is_submitted", [False, True])
def test_marsray_home_comes_first(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_submitted: bool
) -> None:
    if is_submitted:
        monkeypatch.setenv(JOB_MARK, "{}")
    for value, place in (
        (str(folder / "own"), folder / "own"),
        ("~/own", folder / "user" / "own"),
        ("own", folder / "here" / "own"),
    ):
        monkeypatch.setenv("MARSRAY_HOME", value)
        assert home() == place
        assert resolve("runs/x") == str(place / "runs" / "x")
        assert first_log_line(caplog) == f"relative paths start at {place} (MARSRAY_HOME)"


def test_an_empty_marsray_home_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARSRAY_HOME", "")
    assert home() == folder / "here"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/data/a", "/data/a"),
        ("/data//x/../a/", "/data/a"),
        ("../b/./c", "{folder}/b/c"),
        ("~/a", "{folder}/user/a"),
        ("~", "{folder}/user"),
        (".", "{folder}/here"),
        ("in/**/*.parquet", "{folder}/here/in/**/*.parquet"),
        ("a:b", "{folder}/here/a:b"),
        ("s3://bucket/a/../b/", "s3://bucket/a/../b/"),
    ],
)
def test_resolved_paths_are_absolute_and_normal(folder: Path, path: str, expected: str) -> None:
    assert resolve(path) == expected.format(folder=folder)


@pytest.mark.parametrize("path", ["gs://b/x", "file:///data/x", "hdfs://h/x", "http://h/x", "S3://b/x", "abfs+x://b"])
def test_other_schemes_are_refused(path: str) -> None:
    """`gs://b/x` was once the folder `./gs:/b/x`, and the results were written there."""
    with pytest.raises(InputError, match="s3://bucket/key") as refusal:
        resolve(path)
    assert path in str(refusal.value)
    assert ("without file://" in str(refusal.value)) == path.startswith("file:")


def test_no_path_and_unknown_users_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="empty"):
        resolve("")
    with pytest.raises(InputError, match=r"run\.output: found an empty text; expected a run folder"):
        resolve("", "run.output", "a run folder")
    with pytest.raises(InputError, match="home folder"):
        resolve("~no-such-user/x")
    monkeypatch.setenv("MARSRAY_HOME", "s3://bucket/x")
    with pytest.raises(InputError, match="MARSRAY_HOME"):
        home()
