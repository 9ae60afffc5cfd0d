"""Model folders on S3 become local copies that are whole, fresh and made once."""

import json
import shutil
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from s3_server import StartProxy
from transformers import AutoModelForCausalLM

from pipelines import model_folders, storage
from pipelines.tokenizer_training import create_model_folder, train_tokenizer
from workers.config import FromScratch
from workers.errors import InputError
from workers.models.folder import MultiTokenSettings, inspect_model_folder, load_tokenizer, write_multi_token_settings
from workers.models.loading import check_loadable

SCRATCH = FromScratch(vocab_size=300, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=2)


@pytest.fixture(scope="module")
def local_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "model"
    tokenizer = train_tokenizer(iter(["Say 7 twice."]), vocab_size=300, max_positions=128)
    create_model_folder(SCRATCH, tokenizer, folder, seed=0)
    write_multi_token_settings(MultiTokenSettings(5, 4, "chat", "mars"), folder)
    return str(folder)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MARSRAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def remote_model(bucket: str, local_model: str) -> str:
    model_folders.publish(local_model, f"{bucket}/models/mine")
    return f"{bucket}/models/mine"


def content(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_a_local_folder_is_used_where_it_is(local_model: str) -> None:
    assert model_folders.fetch(local_model) == local_model
    assert model_folders.fetch_facts(local_model) == local_model
    with model_folders.facts(local_model) as folder:
        assert folder == local_model


def test_the_folder_around_a_model_on_s3_is_answered_with_that_of_the_model(bucket: str, local_model: str) -> None:
    model_folders.publish(local_model, f"{bucket}/run/mars/model")
    with pytest.raises(InputError, match=rf"no config\.json; .* Did you mean {bucket}/run/mars/model\?"):
        model_folders.fetch(f"{bucket}/run")


def test_a_model_makes_the_way_to_s3_and_back(local_model: str, remote_model: str, cache: Path) -> None:
    folder = model_folders.fetch(f"{remote_model}/")
    assert content(folder) == content(local_model)
    assert Path(folder).parent == cache
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (local_model, folder))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_single_file_is_copied_alone(bucket: str, cache: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        storage.publish_bytes(f"{bucket}/models/{name}", name.encode())
    copy = Path(model_folders.fetch(f"{bucket}/models/a.gguf"))
    assert content(str(copy.parent)) == {"a.gguf": b"a.gguf"}
    with pytest.raises(InputError, match=r"c\.gguf"):
        model_folders.fetch(f"{bucket}/models/c.gguf")


def test_a_copy_is_used_until_the_model_changes(
    local_model: str, remote_model: str, cache: Path, proxy: StartProxy
) -> None:
    folder = model_folders.fetch(remote_model)
    calls = proxy(lambda method, path, number: None)
    assert model_folders.fetch(remote_model) == folder
    assert [method for method, _ in calls.seen] == ["GET"]  # the listing
    storage.publish_bytes(f"{remote_model}/marsray.json", b"{}")
    assert model_folders.fetch(remote_model) != folder


def test_those_who_fetch_at_the_same_time_share_one_copy(remote_model: str, cache: Path, proxy: StartProxy) -> None:
    calls = proxy(lambda method, path, number: 0.2)
    barrier = threading.Barrier(4)

    def fetch(_: int) -> str:
        barrier.wait()
        return model_folders.fetch(remote_model)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(fetch, range(4)))) == 1
    assert sum("model.safetensors" in path for _, path in calls.seen) == 1


def test_what_a_killed_copy_has_left_is_not_used(local_model: str, remote_model: str, cache: Path) -> None:
    folder = Path(model_folders.fetch(remote_model))
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    folder.rename(unfinished)
    (unfinished / "model.safetensors").write_bytes(b"half")
    (unfinished / "stray").touch()
    assert content(model_folders.fetch(remote_model)) == content(local_model)


def test_facts_are_read_without_the_weights(remote_model: str, cache: Path, proxy: StartProxy) -> None:
    calls = proxy(lambda method, path, number: None)
    with model_folders.facts(remote_model) as folder:
        check_loadable(folder)
        assert inspect_model_folder(folder).model_type == "llama"
        load_tokenizer(folder)
    assert not any("model.safetensors" in path for _, path in calls.seen)
    whole = model_folders.fetch(remote_model)
    assert whole != folder
    assert (Path(whole) / "model.safetensors").stat().st_size
    assert model_folders.fetch_facts(remote_model) == whole


def test_mistakes_name_the_path_on_s3(local_model: str, remote_model: str, bucket: str, cache: Path) -> None:
    config = json.loads((Path(local_model) / "config.json").read_text())
    storage.publish_bytes(f"{remote_model}/config.json", json.dumps(config | {"model_type": "mamba"}).encode())
    mistake = pytest.raises(InputError, match=f"{remote_model}: found model type mamba")
    with mistake, model_folders.facts(remote_model) as folder:
        inspect_model_folder(folder)
    for path in (f"{bucket}/nowhere", "s3://no-such-bucket/model"):
        with pytest.raises(InputError, match=path):
            model_folders.fetch(path)


def test_a_model_that_is_half_uploaded_is_none(local_model: str, bucket: str, cache: Path, proxy: StartProxy) -> None:
    path = f"{bucket}/model"
    model_folders.publish(local_model, path)
    assert model_folders.exists(path)
    proxy(lambda method, url, number: (403, "AccessDenied") if method == "PUT" and "marsray.json" in url else None)
    with pytest.raises(InputError, match="access denied"), model_folders.staged(path) as folder:
        shutil.copytree(local_model, folder)
    assert f"{path}/model.safetensors" in [info.path for info in storage.list_folder(path)]
    assert not model_folders.exists(path)
    with pytest.raises(InputError, match=r"no config\.json"):
        model_folders.fetch(path)


def fail_half_way(folder: str) -> None:
    storage.publish_bytes(f"{folder}/config.json", b"{}")
    raise ZeroDivisionError


def test_a_failure_before_the_upload_leaves_the_earlier_model(remote_model: str, cache: Path) -> None:
    before = content(model_folders.fetch(remote_model))
    with pytest.raises(ZeroDivisionError), model_folders.staged(remote_model) as folder:
        fail_half_way(folder)
    assert content(model_folders.fetch(remote_model)) == before


def test_a_full_disk_is_told_before_the_copy(remote_model: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(100, 90, 10))
    with pytest.raises(InputError, match="MARSRAY_CACHE"):
        model_folders.fetch(remote_model)
