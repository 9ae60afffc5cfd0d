"""Adapters that a model cannot have are refused before the start."""

import sys

import pytest
from tiny_models import tiny_model

from workers.config import LoraSettings
from workers.errors import InputError
from workers.models.lora import check_lora


def test_targets_that_no_adapter_fits_are_refused(tmp_path):
    tiny_model("llama").config.save_pretrained(tmp_path)
    check_lora(LoraSettings(rank=4, target_modules=("q_proj", "layers.1.mlp.up_proj")), str(tmp_path))
    for target in ("lm_head", "embed_tokens", "q_pro"):
        with pytest.raises(InputError, match=r"lora\.target_modules: found .*; expected .*q_proj"):
            check_lora(LoraSettings(rank=4, target_modules=("q_proj", target)), str(tmp_path))


def test_a_rank_that_saves_nothing_is_refused_by_the_smallest_matrix(tmp_path):
    """A rank of 400,000 was trained with, if the memory held it."""
    model = tiny_model("llama")
    model.config.save_pretrained(tmp_path)
    side = min(model.model.layers[0].self_attn.k_proj.weight.shape)
    check_lora(LoraSettings(rank=side - 1), str(tmp_path))
    with pytest.raises(
        InputError, match=rf"lora\.rank: found {side}; expected less than {side}, .*layers\.0\..*k_proj"
    ):
        check_lora(LoraSettings(rank=side), str(tmp_path))
    check_lora(LoraSettings(rank=side, target_modules=("up_proj",)), str(tmp_path))


def test_without_peft_lora_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"lora: .*pip install peft"):
        check_lora(LoraSettings(), str(tmp_path))
