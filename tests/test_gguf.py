"""Start models from GGUF files: the same model and tokenizer as an ordinary folder, and what is refused."""

import shutil
from pathlib import Path

import pytest
import torch
from tiny_gguf import write_tiny_gguf
from transformers import AutoModelForCausalLM

from jobs import train_mars
from pipelines.run_folder import RunFolder
from pipelines.training_inputs import TrainingInputs
from workers.config import DataSettings, ModelSettings, TrainMarsRecipe
from workers.errors import InputError
from workers.models.folder import inspect_model_folder, load_tokenizer
from workers.models.gguf import convert_gguf, describe_gguf, is_gguf
from workers.models.loading import load_causal_lm


def test_the_folder_has_the_model_of_the_file(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    convert_gguf(str(tmp_path / "tiny.gguf"), str(tmp_path / "folder"))
    token_ids = torch.arange(10, 60)[None]
    loaded = load_causal_lm(str(tmp_path / "folder"), dtype=torch.float32)
    torch.testing.assert_close(loaded(token_ids).logits, model(token_ids).logits, atol=1e-5, rtol=0)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert plain.dtype == torch.float32
    assert getattr(plain.config, "quantization_config", None) is None
    facts = inspect_model_folder(str(tmp_path / "folder"))
    assert (facts.vocab_size, facts.model_type, facts.max_positions) == (model.config.vocab_size, "llama", 512)
    tokenizer = load_tokenizer(str(tmp_path / "folder"))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "he é 12"}], tokenize=False)
    assert text == "<|bos|><|user|>he é 12<|end|>\n"
    assert tokenizer.decode(tokenizer("he é 12", add_special_tokens=False).input_ids) == "he é 12"
    assert tokenizer.eos_token == "<|end|>"
    assert facts.end_ids == {tokenizer.eos_token_id}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "tiny.gguf"]


def inputs_of(tmp_path: Path, model: str) -> TrainingInputs:
    shard = tmp_path / "shard.jsonl"
    shard.write_text('{"prompt": "1+1?", "response": "2"}\n')
    recipe = TrainMarsRecipe(model=ModelSettings(path=model), data=DataSettings(train=(str(shard),), max_length=64))
    run = RunFolder(str(tmp_path / "run"), recipe)
    run.take(overwrite=False)
    return TrainingInputs(recipe.model, recipe.data, 0, run)


def test_a_run_converts_the_file_once(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    inputs = inputs_of(tmp_path, str(path))
    inputs.check()
    assert not (tmp_path / "run" / "initial_model").exists()
    start, _ = inputs.materialize()
    assert start.folder == str(tmp_path / "run" / "initial_model")
    written = (tmp_path / "run" / "initial_model" / "model.safetensors").stat().st_mtime_ns
    assert inputs.materialize()[0] == start
    assert (tmp_path / "run" / "initial_model" / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0", b"safetensors", "half"])
def test_broken_files_are_refused(content: bytes | str, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    if isinstance(content, str):
        write_tiny_gguf(path)
        path.write_bytes(path.read_bytes()[:2000])
    else:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"model\.path.*broken\.gguf"):
        describe_gguf(str(path), str(tmp_path / "folder"))
    with pytest.raises(InputError, match=r"model\.path.*broken\.gguf"):
        convert_gguf(str(path), str(tmp_path / "folder"))
    assert not (tmp_path / "folder").exists()


def test_unknown_architectures_and_missing_files_are_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "other.gguf", architecture="unheard-of")
    with pytest.raises(InputError, match="unheard-of"):
        describe_gguf(str(tmp_path / "other.gguf"), str(tmp_path / "folder"))
    with pytest.raises(InputError, match=r"a \.gguf file that exists"):
        describe_gguf(str(tmp_path / "none.gguf"), str(tmp_path / "folder"))
    assert is_gguf("a/b.gguf")
    assert not is_gguf("a/b")


def test_a_dry_run_checks_the_file_like_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(Path(__file__).parent / "tiny_gguf.py", tmp_path / "wrong.gguf")
    write_tiny_gguf(tmp_path / "tiny.gguf")
    shard = tmp_path / "shard.jsonl"
    shard.write_text('{"prompt": "1+1?", "response": "2"}\n')
    common = [f"data.train={shard}", "sft=null", f"run.output={tmp_path / 'run'}", "--dry-run"]
    assert train_mars.main([f"model.path={tmp_path / 'tiny.gguf'}", *common]) == 0
    assert train_mars.main([f"model.path={tmp_path / 'wrong.gguf'}", *common]) == 2
    too_long = [f"model.path={tmp_path / 'tiny.gguf'}", "data.max_length=513", *common]
    assert train_mars.main(too_long) == 2
    assert not (tmp_path / "run").exists()
