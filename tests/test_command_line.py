"""Recipes, overrides, help and exit codes: what is refused, and in which words."""

import pytest

from jobs import command_line
from workers.config import (
    EvaluateRecipe,
    GenerateRecipe,
    OptimizationSettings,
    Settings,
    TrainMarsRecipe,
    TrainSftRecipe,
)
from workers.errors import InputError


def parse(*arguments: str, recipe_type=TrainMarsRecipe, default="train_mars.yaml"):
    return command_line.parse(recipe_type, default, list(arguments))[0]


def test_the_default_recipe_and_overrides_on_top():
    recipe = parse(
        "training.num_steps=7", "data.train=a.jsonl", "data.prompt_column=question", "sft.learning_rate=5e-6"
    )
    assert recipe.training.num_steps == 7
    assert recipe.data.train == ("a.jsonl",)
    assert recipe.data.prompt_column == "question"
    assert recipe.sft is not None
    assert recipe.sft.learning_rate == 5e-6
    assert recipe.objective.block_size == 8


def test_a_list_override_and_a_text_that_looks_like_a_number():
    recipe = parse("data.train=[a.jsonl, b.jsonl]", "run.output=2026")
    assert recipe.data.train == ("a.jsonl", "b.jsonl")
    assert recipe.run.output == "2026"


@pytest.mark.parametrize("text", ["*.jsonl", "[0-9]*.jsonl", "{a}.jsonl", "one.jsonl #x", "2024-01-01", "yes"])
def test_a_single_item_of_a_text_list_is_taken_as_typed(text):
    if text.startswith("["):
        text = f"./{text}"
    assert parse(f"data.train={text}").data.train == (text,)


def test_null_takes_a_section_away():
    recipe = parse("sft=null", "model.path=some/folder")
    assert recipe.sft is None


@pytest.mark.parametrize(
    ("argument", "where", "expected"),
    [
        ("training.learning_rat=1", "training.learning_rat", "learning_rate"),
        ("trainin.num_steps=1", "trainin", "training"),
        ("training.num_steps=0", "training.num_steps", "greater than or equal to 1"),
        ("training.num_steps=many", "training.num_steps", "valid integer"),
        ("training.num_steps=1.5", "training.num_steps", "integer"),
        ("objective.block_size=1", "objective.block_size", "greater than or equal to 2"),
        ("objective.block_size=1000", "objective.block_size", "less than or equal to 64"),
        ("distributed.zero_stage=4", "distributed.zero_stage", "0, 1, 2 or 3"),
        ("model.from_scratch.num_heads=3", "model.from_scratch", "must divide"),
        ("data.max_length=4096", "recipe", "max_positions"),
        ("training.betas=[0.9, 1.0]", "training.betas.1", "less than 1"),
        ("sft=null", "recipe", "needs the AR SFT stage"),
        ("training.learning_rate=.nan", "training.learning_rate", "finite"),
        ("training=3", "training", "object"),
    ],
)
def test_what_is_wrong_is_named(argument, where, expected):
    with pytest.raises(InputError) as caught:
        parse(argument)
    assert caught.value.where == where
    assert expected in str(caught.value)


def test_all_problems_are_named_at_once():
    with pytest.raises(InputError, match=r"Also wrong: training\.num_epochs, run\.sed"):
        parse("training.num_steps=0", "training.num_epochs=0", "run.sed=1")


@pytest.mark.parametrize("argument", ["--fast", "num_steps", "-x"])
def test_unknown_arguments_are_refused(argument):
    with pytest.raises(InputError, match="command line"):
        parse(argument)


def test_a_missing_and_a_broken_recipe(tmp_path):
    with pytest.raises(InputError, match="--config"):
        parse("--config", str(tmp_path / "none.yaml"))
    broken = tmp_path / "broken.yaml"
    broken.write_text("training: {num_steps: 3")
    with pytest.raises(InputError, match="no valid YAML"):
        parse("--config", str(broken))


def test_a_recipe_file_replaces_the_default_recipe(tmp_path):
    recipe_file = tmp_path / "mine.yaml"
    recipe_file.write_text("model: {path: m}\ntraining: {learning_rate: 1e-4}\n")
    recipe = parse("--config", str(recipe_file))
    assert recipe.model.path == "m"
    assert recipe.sft is None
    assert recipe.training.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("recipe_type", "default"),
    [
        (TrainSftRecipe, "train_sft.yaml"),
        (TrainMarsRecipe, "train_mars.yaml"),
        (GenerateRecipe, "generate.yaml"),
        (EvaluateRecipe, "evaluate.yaml"),
    ],
)
def test_help_names_every_field_with_default_and_meaning(recipe_type, default):
    text = command_line.help_text(recipe_type, default)
    fields = list(leaf_fields(recipe_type))
    assert len(fields) > 10
    for name, field in fields:
        line, meaning = text.split(f"  {name} (")[1].split("\n")[:2]
        assert "default" in line
        assert meaning.strip() == field.description


def leaf_fields(model, prefix=""):
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            yield from leaf_fields(field.annotation, f"{prefix}{name}.")
        elif field.annotation != OptimizationSettings | None:
            yield f"{prefix}{name}", field


def test_exit_codes_and_last_line(caplog):
    caplog.set_level("INFO")
    run = command_line.run
    assert run(GenerateRecipe, "generate.yaml", lambda recipe, dry: 0, []) == 0
    assert run(GenerateRecipe, "generate.yaml", lambda recipe, dry: 3, []) == 3
    assert run(GenerateRecipe, "generate.yaml", lambda recipe, dry: 0, ["nonsense"]) == 2
    assert run(GenerateRecipe, "generate.yaml", lambda recipe, dry: 1 // 0, []) == 1
    assert caplog.messages[-1] == "exit code 1"


def test_a_dry_run_prints_the_resolved_settings(capsys):
    seen = []
    arguments = ["--dry-run", "training.num_steps=9"]
    assert command_line.run(TrainMarsRecipe, "train_mars.yaml", lambda r, dry: seen.append(dry) or 0, arguments) == 0
    assert seen == [True]
    assert "num_steps: 9" in capsys.readouterr().out
