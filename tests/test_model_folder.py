"""Model folders: what is read from them, what is refused, and that an exported one is an ordinary one."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import MASK_ID, MODEL_TYPES, tiny_model, word_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from workers.errors import InputError
from workers.models.export import export_folder
from workers.models.folder import (
    RECURRENT_TYPES,
    ModelFacts,
    MultiTokenSettings,
    inspect_model_folder,
    load_tokenizer,
    read_multi_token_settings,
)
from workers.models.loading import add_mask_row, check_loadable, init_mask_embedding, load_causal_lm

SETTINGS = MultiTokenSettings(mask_token_id=MASK_ID, block_size=8, prompt_format="chat", objective="mars")


def exported(tmp_path: Path, model: PreTrainedModel, settings: MultiTokenSettings = SETTINGS) -> str:
    folder = tmp_path / "model"
    tokenizer = word_tokenizer("<unused0>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    export_folder(None, model, tokenizer, settings, str(folder))
    return str(folder)


def force_token(model: PreTrainedModel, token_id: int) -> None:
    """Make `token_id` the favourite by far: its row of the head is the hidden state of the test prompt."""
    with torch.no_grad():
        prompt = torch.tensor([[4, 5, 4]])
        hidden_D = model.base_model(prompt).last_hidden_state[0, -1]
        model.get_output_embeddings().weight[token_id] = 100 * hidden_D


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_exported_folder_is_an_ordinary_one(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    folder = exported(tmp_path, model)
    prompt = torch.tensor([[4, 5, 4]])
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(loaded(prompt).logits, model(prompt).logits, atol=0, rtol=0)
    ours = load_causal_lm(folder, dtype=torch.float32)
    torch.testing.assert_close(ours(prompt).logits, model(prompt).logits, atol=0, rtol=0)
    assert not ours.training
    assert loaded.generate(prompt, do_sample=False, max_new_tokens=3).shape[1] <= 6
    assert AutoTokenizer.from_pretrained(folder).chat_template == load_tokenizer(folder).chat_template != ""
    assert read_multi_token_settings(folder) == SETTINGS
    assert inspect_model_folder(folder) == ModelFacts(41, model.config.model_type, 128, frozenset({1, 2}))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_generate_never_gives_the_mask(tmp_path: Path) -> None:
    """The reference of our decoders, whose mask logit is -inf, is greedy `generate` of the exported folder."""
    model = tiny_model("llama")
    force_token(model, MASK_ID)
    prompt = torch.tensor([[4, 5, 4]])
    assert model.generate(prompt, do_sample=False, max_new_tokens=1)[0, -1] == MASK_ID
    loaded = AutoModelForCausalLM.from_pretrained(exported(tmp_path, model), dtype=torch.float32).eval()
    tokens = prompt
    for _ in range(6):
        logits_V = model(tokens).logits[0, -1]
        logits_V[MASK_ID] = -torch.inf
        tokens = torch.cat([tokens, logits_V.argmax()[None, None]], dim=1)
    generated = loaded.generate(prompt, do_sample=False, max_new_tokens=6, eos_token_id=None)
    assert generated.tolist() == tokens.tolist()
    assert MASK_ID not in generated[0].tolist()


def test_export_takes_a_given_state_in_the_dtype_of_the_model(tmp_path: Path) -> None:
    """A training engine hands over float32 master weights of a bf16 model."""
    model = tiny_model("llama_tied").to(torch.bfloat16)
    state = {name: tensor.float() + 1 for name, tensor in model.state_dict().items()}
    export_folder(state, model, word_tokenizer(), SETTINGS, str(tmp_path / "model"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.dtype == torch.bfloat16
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, state[name].to(torch.bfloat16), atol=0, rtol=0)


def test_export_replaces_an_older_folder(tmp_path: Path) -> None:
    folder = exported(tmp_path, tiny_model("llama", seed=1))
    (Path(folder) / "left_over.txt").write_text("old")
    (tmp_path / ".model.unfinished").mkdir()
    (tmp_path / ".model.unfinished" / "half.safetensors").write_text("broken")
    model = tiny_model("llama", seed=2)
    exported(tmp_path, model)
    assert not (Path(folder) / "left_over.txt").exists()
    assert not (Path(folder) / "half.safetensors").exists()
    token_ids = torch.tensor([[4, 5]])
    loaded = load_causal_lm(folder, dtype=torch.float32)
    torch.testing.assert_close(loaded(token_ids).logits, model(token_ids).logits, atol=0, rtol=0)


@pytest.mark.parametrize("model_type", ["llama", "llama_tied", "gpt2"])
def test_added_mask_row_is_the_mean_row_and_survives_export(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    token_ids = torch.tensor([[4, 5, 4]])
    before = model(token_ids).logits.detach()
    mean_D = model.get_input_embeddings().weight.detach().mean(dim=0)
    head_mean_D = model.get_output_embeddings().weight.detach().mean(dim=0)
    add_mask_row(model)
    torch.testing.assert_close(model.get_output_embeddings().weight[41], head_mean_D)
    torch.testing.assert_close(model.get_input_embeddings().weight[41], mean_D)
    torch.testing.assert_close(model(token_ids).logits[..., :41], before)
    settings = MultiTokenSettings(mask_token_id=41, block_size=4, prompt_format="raw", objective="mars")
    folder = exported(tmp_path, model, settings)
    assert inspect_model_folder(folder).vocab_size == 42
    loaded = load_causal_lm(folder, dtype=torch.float32)
    torch.testing.assert_close(loaded(token_ids).logits, model(token_ids).logits, atol=0, rtol=0)


def test_mask_embedding_becomes_the_mean_of_the_others() -> None:
    model = tiny_model("llama")
    head = model.get_output_embeddings().weight.detach().clone()
    init_mask_embedding(model, MASK_ID)
    weight_VD = model.get_input_embeddings().weight
    torch.testing.assert_close(weight_VD[MASK_ID], weight_VD[:MASK_ID].mean(dim=0))
    assert torch.equal(model.get_output_embeddings().weight, head)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    for refuse in (inspect_model_folder, load_tokenizer, lambda path: load_causal_lm(path, dtype=torch.float32)):
        with pytest.raises(InputError, match="no folder"):
            refuse(str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"no config\.json"):
        inspect_model_folder(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="invalid JSON"):
        inspect_model_folder(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(InputError, match="no vocab_size"):
        inspect_model_folder(str(tmp_path))
    tiny_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no weights"):
        load_causal_lm(str(tmp_path), dtype=torch.float32)
    with pytest.raises(InputError, match="no tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(("given", "meant"), [("run", "run/mars/model"), ("run/sft", "run/sft/model")])
def test_the_folder_of_a_run_or_a_stage_is_answered_with_that_of_its_model(given, meant, tmp_path: Path) -> None:
    for stage in ("mars", "sft"):
        (tmp_path / "run" / stage / "model").mkdir(parents=True)
    with pytest.raises(InputError, match=rf"no config\.json; .* Did you mean {tmp_path / meant}\?"):
        inspect_model_folder(str(tmp_path / given))


@pytest.mark.parametrize("model_type", ["mamba", "rwkv", "jamba", "recurrent_gemma", "bamba", "zamba", "qwen3_next"])
def test_recurrent_models_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 41}))
    with pytest.raises(InputError, match=rf"{model_type}, which has recurrent state"):
        inspect_model_folder(str(tmp_path))
    with pytest.raises(InputError, match=rf"{model_type}, which has recurrent state"):
        load_causal_lm(str(tmp_path), dtype=torch.float32)


STATEFUL = re.compile(
    r"_is_stateful = True|\b(conv|recurrent|ssm)_states?\b|selective_scan|linear_attn|LightningAttention"
)


def test_every_stateful_causal_model_of_transformers_is_in_the_list() -> None:
    """By the text of its module: it says that it is stateful, or keeps a convolution's or a recurrence's state."""
    spec = importlib.util.find_spec("transformers")
    models = Path(spec.origin).parent / "models"
    stateful, num_read = set(), 0
    for model_type, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for path in (models / model_type_to_module_name(model_type)).glob("modeling_*.py"):
            text = path.read_text()
            if f"class {class_name}(" in text:
                num_read += 1
                if STATEFUL.search(text):
                    stateful.add(model_type)
    assert num_read > 150
    assert len(stateful) > 25
    assert stateful <= RECURRENT_TYPES
    assert not RECURRENT_TYPES & {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "phi3"}


@pytest.mark.parametrize(("model_type", "layers"), [("llama4_text", "chunked_attention"), ("glm_moe_dsa", "indexed")])
def test_layers_that_no_mask_can_express_are_refused_before_weights_are_read(
    model_type: str, layers: str, tmp_path: Path
) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=f"{model_type}.*{layers}"):
        check_loadable(str(tmp_path))


@pytest.mark.parametrize(
    "config", [{"model_type": "bloom"}, {"model_type": "mpt"}, {"model_type": "falcon", "alibi": True}]
)
def test_models_without_position_ids_are_refused_by_name(config: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 41}))
    with pytest.raises(InputError, match=f"{config['model_type']} with ALiBi"):
        inspect_model_folder(str(tmp_path))


def test_a_model_that_generates_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "vocab_size": 41}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="vit.*causal language model"):
        load_causal_lm(str(tmp_path), dtype=torch.float32)


def test_end_ids_are_gathered_from_all_files(tmp_path: Path) -> None:
    folder = Path(exported(tmp_path, tiny_model("llama")))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert inspect_model_folder(str(folder)).end_ids == {7, 8, 9, 2}
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    assert inspect_model_folder(str(folder)).end_ids == frozenset()


@pytest.mark.parametrize(
    "content",
    ['{"mask_token_id": 3}', '{"mask_token_id": "3", "block_size": 4, "prompt_format": "raw", "objective": "mars"}'],
)
def test_broken_multi_token_settings_are_refused(content: str, tmp_path: Path) -> None:
    assert read_multi_token_settings(str(tmp_path)) is None
    (tmp_path / "marsray.json").write_text(content)
    with pytest.raises(InputError, match="Export the checkpoint again"):
        read_multi_token_settings(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('{"version": "1.0", "trunc', "invalid JSON"),
        ('{"a": 1}', "no tokenizer"),
        ('{"model": [1], "added_tokens": []}', "no tokenizer"),
        ('{"model": {"type": "WordLevel", "vocab": {}}, "added_tokens": [{"id": "x"}]}', "no tokenizer"),
        ('{"model": {"type": "unheard of"}, "added_tokens": []}', "no tokenizer"),
    ],
)
def test_a_broken_tokenizer_is_refused_by_the_name_of_its_file(content: str, found: str, tmp_path: Path) -> None:
    folder = exported(tmp_path, tiny_model("llama"))
    (Path(folder) / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match=rf"tokenizer\.json.*{found}"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("file", "changes", "found"),
    [
        ("config.json", {"vocab_size": "many"}, r"config\.json: vocab_size: found 'many'"),
        ("config.json", {"vocab_size": None}, r"config\.json: vocab_size: found None"),
        ("config.json", {"max_position_embeddings": "x"}, r"config\.json: max_position_embeddings: found 'x'"),
        ("config.json", {"num_attention_heads": "x"}, r"config\.json.*num_attention_heads"),
        (
            "config.json",
            {"vocab_size": 50},
            r"weights: found .*embed_tokens.weight of shape \[41, 32\], not \[50, 32\]",
        ),
        ("config.json", {"num_hidden_layers": 3}, r"weights: found no model\.layers\.2\..* and \d more"),
        ("generation_config.json", {"eos_token_id": "x"}, r"generation_config\.json: eos_token_id: found 'x'"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(file: str, changes: dict, found: str, tmp_path: Path) -> None:
    """Layers that the files do not have would otherwise be random ones."""
    path = Path(exported(tmp_path, tiny_model("llama"))) / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(InputError, match=found):
        load_causal_lm(str(path.parent), dtype=torch.float32)
