"""Every recipe as its user runs it: with data and a model folder of the right type, up to where a GPU would be needed."""

import logging
from pathlib import Path

import pytest
from chat_tokenizers import byte_tokenizer
from tiny_gguf import write_tiny_gguf
from transformers import AutoConfig, AutoModelForCausalLM

from jobs import command_line, train_mars, train_sft
from workers.config import TrainMarsRecipe

RECIPES = Path(__file__).resolve().parent.parent / "jobs" / "recipes"
JOBS = {"sft_": train_sft, "mars_": train_mars}
SIZES = {
    "vocab_size": 265,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}


def start_model(recipe: str, folder: Path) -> Path:
    """A tiny model of the type that the recipe is for."""
    if "smollm2" in recipe:
        write_tiny_gguf(folder / "tiny.gguf")
        return folder / "tiny.gguf"
    assert "qwen2.5" in recipe
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SIZES)).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.parametrize("recipe", sorted(path.name for path in RECIPES.glob("*_*_*.yaml")))
def test_recipes_of_a_model_pass_their_dry_run(recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shard = tmp_path / "shard.jsonl"
    shard.write_text('{"prompt": "1+1?", "response": "2"}\n')
    job = next(job for prefix, job in JOBS.items() if recipe.startswith(prefix))
    arguments = ["--config", recipe, f"data.train={shard}", f"run.output={tmp_path / 'run'}", "--dry-run"]
    with caplog.at_level(logging.INFO, logger="marsray"):
        assert job.main([*arguments, "model.path=path/to/nothing"]) == 2
        changes = ["model.mask_token=auto"] if "smollm2" in recipe else []
        assert job.main([*arguments, f"model.path={start_model(recipe, tmp_path)}", *changes]) == 0
    assert "settings, inputs, output and model folder are fine" in caplog.text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change", ["training.learning_rate=1e-5", "training.num_steps=7", "training.samples_per_step=7"]
)
def test_a_model_of_ones_own_at_the_pace_of_the_example_is_warned_of(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shard = tmp_path / "shard.jsonl"
    shard.write_text('{"prompt": "1+1?", "response": "2"}\n')
    common = [f"data.train={shard}", f"run.output={tmp_path / 'run'}", "--dry-run", change]
    assert train_sft.main(common) == 0
    assert "a pace of its own" not in caplog.text
    for job, arguments in ((train_sft, []), (train_mars, ["sft=null"])):
        caplog.clear()
        assert job.main([*common, f"model.path={start_model('qwen2.5', tmp_path)}", *arguments]) == 0
        assert ("a pace of its own" in caplog.text) == (change == "training.samples_per_step=7")


@pytest.mark.parametrize("size", ["0.5b", "7b"])
def test_the_recipes_for_qwen_have_the_settings_of_the_paper(size: str) -> None:
    for stage in ("sft", "mars"):
        recipe = command_line.parse(TrainMarsRecipe, f"{stage}_qwen2.5_{size}.yaml", [])[0]
        training, distributed = recipe.training, recipe.distributed
        assert (training.samples_per_step, training.num_epochs, training.num_steps) == (384, 5, None)
        assert (training.learning_rate, training.warmup_share, training.schedule) == (5e-6, 0.03, "cosine")
        assert (distributed.num_workers, distributed.use_gpu, distributed.zero_stage) == (8, True, 2)
        assert (recipe.data.max_length, recipe.objective.ar_weight) == (512, 1.0)
    assert recipe.model.path == f"runs/sft_qwen2.5_{size}/sft/model"  # what the first stage leaves
    assert (
        command_line.parse(TrainMarsRecipe, f"sft_qwen2.5_{size}.yaml", [])[0].run.output == f"runs/sft_qwen2.5_{size}"
    )
