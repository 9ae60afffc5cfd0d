"""What is on disk after an export is what was to be written: lost, changed and misplaced values are found."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import MASK_ID, tiny_model, word_tokenizer
from transformers import PreTrainedModel

from workers.models.checksums import agree, checksum, magnitude
from workers.models.export import export_folder
from workers.models.export_check import ExportError, check_written_weights
from workers.models.folder import MultiTokenSettings

SETTINGS = MultiTokenSettings(mask_token_id=MASK_ID, block_size=8, prompt_format="raw", objective="mars")
NAME = "model.layers.1.mlp.up_proj.weight"


def change_one_value(weights: dict) -> None:
    weights[NAME][3, 5] += 1e-4


def exchange_two_rows(weights: dict) -> None:
    weights[NAME][[0, 1]] = weights[NAME][[1, 0]]


def lose_a_tensor(weights: dict) -> None:
    del weights[NAME]


def transpose(weights: dict) -> None:
    weights[NAME] = weights[NAME].T.contiguous()


def round_values(weights: dict) -> None:
    weights[NAME] = weights[NAME].bfloat16()


@pytest.mark.parametrize("model_type", ["llama", "llama_tied", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_exports_pass(model_type, dtype, tmp_path):
    model = tiny_model(model_type).to(dtype)
    separate = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export_folder(separate, model, word_tokenizer(), SETTINGS, str(tmp_path / "model"))
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    check_written_weights(separate, model, tmp_path / "shards")


@pytest.mark.parametrize("damage", [change_one_value, exchange_two_rows, lose_a_tensor, transpose, round_values])
def test_damaged_weights_are_not_published(damage, tmp_path, monkeypatch):
    save_pretrained = PreTrainedModel.save_pretrained

    def save_damaged(self, folder, **options):
        save_pretrained(self, folder, **options)
        weights = load_file(Path(folder) / "model.safetensors")
        damage(weights)
        save_file(weights, Path(folder) / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save_damaged)
    with pytest.raises(ExportError, match=NAME.replace(".", r"\.")):
        export_folder(None, tiny_model("llama"), word_tokenizer(), SETTINGS, str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


def test_a_shared_tensor_with_other_values_under_its_second_name_is_found(tmp_path):
    model = tiny_model("llama_tied")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    state["lm_head.weight"][2, 2] += 1.0
    with pytest.raises(ExportError, match=r"lm_head\.weight"):
        check_written_weights(state, model, tmp_path)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_checksums_of_parts_add_up_and_tell_places_apart(num_parts):
    whole = torch.randn(2999, generator=torch.Generator().manual_seed(0))
    parts = whole.split(-(-len(whole) // num_parts))
    offsets = [sum(map(len, parts[:index])) for index in range(len(parts))]
    total = sum(checksum(part, offset=offset) for part, offset in zip(parts, offsets, strict=True))
    assert agree(total, checksum(whole), magnitude(whole))
    exchanged = whole.clone()
    exchanged[[1, 2]] = whole[[2, 1]]
    assert not agree(checksum(exchanged), checksum(whole), magnitude(whole))
    assert not agree(checksum(whole + 1e-6), checksum(whole), magnitude(whole))
