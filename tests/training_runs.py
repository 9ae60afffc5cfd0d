"""A small training run of both stages for tests: its shard, its command line, its curve."""

import json
from pathlib import Path

from jobs import command_line
from workers.config import TrainMarsRecipe

MODEL = "model.from_scratch={vocab_size: 300, hidden_size: 32, intermediate_size: 48, num_layers: 1, num_heads: 2, num_kv_heads: 2}"


def write_shard(folder: Path, num_rows: int = 40) -> Path:
    """Questions of several lengths, and one row that has to be rejected."""
    rows = [{"question": f"Say {i} twice.", "answer": " ".join([str(i)] * 2 * (1 + i % 3))} for i in range(num_rows)]
    rows.insert(3, {"question": "Nothing?", "answer": None})
    path = folder / "shard.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(shard: Path, output: Path) -> list[str]:
    return [
        f"data.train={shard}",
        "data.prompt_column=question",
        "data.response_column=answer",
        "data.max_length=128",
        MODEL,
        "sft={num_steps: 2, samples_per_step: 6, learning_rate: 1e-2}",
        "training={num_steps: 8, samples_per_step: 6, learning_rate: 1e-2, row_tokens: 64, micro_batch_rows: 2}",
        "objective.block_size=4",
        "distributed.zero_stage=2",
        f"run.output={output}",
        "run.log_every=1",
        "run.checkpoint_every=2",
    ]


def recipe_of(*argument_lists: str) -> TrainMarsRecipe:
    return command_line.parse(TrainMarsRecipe, "train_mars.yaml", list(argument_lists))[0]


def metric_lines(output: Path, stage: str) -> list[dict]:
    """Each step once and in order."""
    lines = [json.loads(line) for line in (output / stage / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return lines


def losses(output: Path, stage: str) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metric_lines(output, stage)}
