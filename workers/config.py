"""Every setting of every job: frozen, strict, and the only place where a default stands. Torch-free.

A recipe (`jobs/recipes/*.yaml`) is one of the `*Recipe` models below, written as YAML. Unknown keys, wrong types and impossible
combinations are refused here, before any model loads.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PromptFormat = Literal["chat", "raw"]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
StopString = Annotated[str, Field(min_length=1)]
Threshold = Annotated[float, Field(ge=0.0)]
Window = Annotated[int, Field(ge=1, le=64)]


class Settings(BaseModel):
    """Base of all settings: immutable, unknown keys refused, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class FromScratch(Settings):
    """A new model with random weights, and a tokenizer trained on the data, for when `model.path` is not given."""

    architecture: Literal["llama", "qwen2"] = Field("llama", description="model type of the new model")
    vocab_size: int = Field(512, ge=300, description="size of the byte-level BPE vocabulary trained on the data")
    hidden_size: int = Field(128, ge=8, description="width of the model")
    intermediate_size: int = Field(384, ge=8, description="width of the feed-forward layers")
    num_layers: int = Field(4, ge=1, description="number of decoder layers")
    num_heads: int = Field(4, ge=1, description="number of attention heads; must divide hidden_size")
    num_kv_heads: int = Field(4, ge=1, description="number of key/value heads; must divide num_heads")
    max_positions: int = Field(512, ge=16, description="longest sequence in tokens")
    rope_theta: float = Field(10000.0, gt=0, description="base of the rotary position encoding")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(f"num_heads={self.num_heads} must divide hidden_size={self.hidden_size} into even parts")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}")
        return self


class ModelSettings(Settings):
    """Which model to start from."""

    path: str | None = Field(None, description="Hugging Face model folder to start from; null trains `from_scratch`")
    from_scratch: FromScratch = Field(FromScratch(), description="used when `path` is null")
    mask_token: str = Field(
        "auto", description="the [MASK] placeholder: `auto` finds an unused reserved id; or a token of the vocabulary"
    )
    add_mask_row: bool = Field(False, description="grow the vocabulary by one row when no free id exists")


class DataSettings(Settings):
    """SFT shards: rows of `messages`, or of `prompt` and `response`; Parquet or JSONL."""

    train: tuple[str, ...] = Field((), description="shard files, folders or globs; empty means the embedded example")
    messages_column: str = Field("messages", description="column with a list of {role, content}")
    prompt_column: str = Field("prompt", description="column with the prompt, when there is no messages column")
    response_column: str = Field("response", description="column with the response, when there is no messages column")
    prompt_format: PromptFormat = Field(
        "chat", description="`chat` puts prompt and response through the chat template; `raw` joins them as they are"
    )
    max_length: int = Field(512, ge=2, description="longest sample in tokens")
    too_long: Literal["reject", "truncate"] = Field("truncate", description="what to do with a longer sample")
    allow_empty_answer: bool = Field(
        False, description="train on an empty final assistant turn instead of rejecting it"
    )
    max_rejected_share: Share = Field(0.05, description="stop before training when more of the rows than this are bad")
    shuffle_window: int = Field(65536, ge=1, description="rows shuffled together in memory; windows are shuffled too")


class ObjectiveSettings(Settings):
    """The MARS objective. Block size 1 without the mask loss is plain AR SFT."""

    block_size: int = Field(8, ge=2, le=64, description="B, tokens predicted in one forward")
    ar_weight: float = Field(1.0, ge=0, description="weight of the next-token loss on the clean stream")
    random_block_phase: bool = Field(True, description="shift the block cuts of each response by a random offset")


class OptimizationSettings(Settings):
    """One training stage: how long, how fast. A step is one optimizer step over all ranks."""

    num_steps: int | None = Field(None, ge=1, description="optimizer steps; null means `num_epochs` epochs")
    num_epochs: int = Field(1, ge=1, description="passes over the data when `num_steps` is null")
    samples_per_step: int = Field(32, ge=1, description="samples of one optimizer step, all ranks together")
    row_tokens: int = Field(512, ge=2, description="samples are packed into rows of at most this many positions")
    micro_batch_rows: int = Field(8, ge=1, description="rows of one forward on one rank")
    head_chunk: int = Field(2048, ge=1, description="supervised positions whose logits are held in memory at once")
    learning_rate: float = Field(5e-6, gt=0, description="peak learning rate")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="shape after the warm-up")
    warmup_share: Share = Field(0.03, description="share of the steps with a rising learning rate")
    final_learning_rate_share: Share = Field(0.0, description="learning rate at the end, as a share of the peak")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="AdamW betas")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    activation_checkpointing: bool = Field(False, description="recompute activations in the backward pass")


class DistributedSettings(Settings):
    """Ray Train and DeepSpeed."""

    num_workers: int = Field(2, ge=1, description="training workers (ranks)")
    use_gpu: bool = Field(False, description="one GPU per worker, NCCL and bf16; otherwise CPU, gloo and float32")
    cpus_per_worker: float = Field(0.5, gt=0, description="logical CPUs asked of Ray for each worker")
    zero_stage: Literal[0, 1, 2, 3] = Field(2, description="DeepSpeed ZeRO stage")
    max_failures: int = Field(2, ge=0, description="how often a lost worker is replaced before the run fails")


class RunSettings(Settings):
    """Where a training run lives and how often it speaks and saves."""

    output: str = Field("runs/train", description="run folder: config, data, checkpoints, metrics, model, report")
    log_every: int = Field(10, ge=1, description="steps between metric lines")
    checkpoint_every: int = Field(200, ge=1, description="steps between checkpoints")
    num_to_keep: int = Field(2, ge=1, description="checkpoints kept")
    seed: int = Field(0, ge=0, description="seed of the order, the block phase and new weights")
    overwrite: bool = Field(False, description="delete an earlier run in `output` first")


def _require_positions(model: ModelSettings, data: DataSettings) -> None:
    if model.path is None and data.max_length > model.from_scratch.max_positions:
        raise ValueError(
            f"data.max_length={data.max_length} is more than model.from_scratch.max_positions="
            f"{model.from_scratch.max_positions}; raise the one or lower the other"
        )


class TrainSftRecipe(Settings):
    """AR SFT: ordinary next-token training on the assistant turns."""

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    training: OptimizationSettings = OptimizationSettings()
    distributed: DistributedSettings = DistributedSettings()
    run: RunSettings = RunSettings()

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        _require_positions(self.model, self.data)
        return self


class TrainMarsRecipe(Settings):
    """MARS, after an AR SFT stage when `sft` is given."""

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    sft: OptimizationSettings | None = Field(None, description="the AR SFT stage; null when the model has had it")
    objective: ObjectiveSettings = ObjectiveSettings()
    training: OptimizationSettings = Field(OptimizationSettings(), description="the MARS stage")
    distributed: DistributedSettings = DistributedSettings()
    run: RunSettings = RunSettings()

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        _require_positions(self.model, self.data)
        if self.model.path is None and self.sft is None:
            raise ValueError("sft: null, but a model from scratch (model.path: null) needs the AR SFT stage")
        return self


class AnswerSettings(Settings):
    """How tokens of an answer are chosen and where it ends, whatever the number of tokens per forward."""

    score: Literal["probability", "margin", "entropy"] = Field("probability", description="what tau is compared with")
    max_new_tokens: int = Field(256, ge=1, description="token budget of the answer")
    temperature: float = Field(0.0, ge=0, le=1000, description="0 is greedy")
    top_k: int = Field(0, ge=0, description="sample among the k likeliest tokens; 0 means all")
    top_p: float = Field(1.0, gt=0, le=1, description="sample among the likeliest tokens of this total probability")
    seed: int | None = Field(None, ge=0, description="same seed, same text; null derives one from the row id")
    stop: tuple[StopString, ...] = Field((), description="strings that end the answer; they are not part of it")


class EngineSettings(Settings):
    """The decoding engine of an actor."""

    cache: Literal["ragged", "none"] = Field("ragged", description="`none` recomputes everything: slow, the oracle")
    num_slots: int = Field(16, ge=1, description="rows decoded at the same time by one actor")
    max_length: int | None = Field(None, ge=2, description="prompt and answer tokens of a slot; null means the model's")


class RowDecodingSettings(AnswerSettings):
    """How one row is decoded; each field may also stand in the row itself."""

    mode: Literal["one_token", "tau"] = Field("tau", description="one token per forward, or several by threshold")
    threshold: Threshold | None = Field(
        default_factory=lambda fields: 0.95 if fields.get("mode") == "tau" else None,
        description="tau: a drafted token is kept while its score reaches this; 0.95 in tau mode, none in the others",
    )
    window: Window | None = Field(None, description="W, tokens per forward; null means the block size")

    @model_validator(mode="after")
    def _threshold_belongs_to_tau(self) -> Self:
        if self.mode != "tau" and self.threshold is not None:
            raise ValueError(f"no threshold with mode {self.mode}; it belongs to mode tau")
        if self.mode == "tau" and self.threshold is None:
            raise ValueError("a threshold with mode tau; leave it out for the default")
        return self


class DecodingSettings(RowDecodingSettings, EngineSettings):
    """The decoding engine and the defaults of its rows."""


class EvaluationDecodingSettings(AnswerSettings, EngineSettings):
    """What all settings of an evaluation share; mode, threshold and window are its grid."""


class ActorSettings(Settings):
    """The pool of inference actors."""

    num_actors: int = Field(1, ge=1, description="actors that hold a model")
    num_cpus: float = Field(1.0, ge=0, description="logical CPUs of an actor")
    num_gpus: float = Field(0.0, ge=0, description="GPUs of an actor")
    max_restarts: int = Field(2, ge=0, description="how often the actor of one unit may die before the job fails")


class PromptSettings(Settings):
    """The prompt set: rows with an optional `id`, and `prompt` or `messages`; Parquet or JSONL."""

    paths: tuple[str, ...] = Field((), description="prompt files, folders or globs; empty means the quickstart's")
    id_column: str = Field("id", description="column with a unique string or integer; made from the position if absent")
    prompt_column: str = Field("prompt", description="column with the prompt text")
    messages_column: str = Field("messages", description="column with a list of {role, content}")
    passthrough: tuple[str, ...] = Field((), description="input columns copied to the output")
    rows_per_unit: int = Field(256, ge=1, description="rows of one work unit, which is one output file")


class GenerateRecipe(Settings):
    """Batch inference over a prompt set."""

    model: str | None = Field(None, description="model folder; null means the newest quickstart checkpoint")
    prompts: PromptSettings = PromptSettings()
    output: str = Field("runs/generate", description="output folder")
    decoding: DecodingSettings = DecodingSettings()
    actors: ActorSettings = ActorSettings()
    max_error_share: Share = Field(1.0, description="exit code 3 when more of the rows than this could not be done")
    overwrite: bool = Field(False, description="delete an earlier output first")


class EvaluateRecipe(Settings):
    """Accuracy, tokens per forward and tokens per second at a grid of decoding settings."""

    model: str | None = Field(None, description="model folder; null means the newest quickstart checkpoint")
    prompts: PromptSettings = PromptSettings()
    output: str = Field("runs/evaluate", description="folder for the report and the answers of each setting")
    thresholds: tuple[Threshold, ...] = Field((0.95, 0.9, 0.7, 0.5), description="tau values beside one-token decoding")
    windows: tuple[Window, ...] = Field((), description="windows W of each tau; empty means the block size")
    decoding: EvaluationDecodingSettings = Field(
        EvaluationDecodingSettings(), description="of all settings; mode, threshold and window come from the grid"
    )
    actors: ActorSettings = ActorSettings()
    overwrite: bool = Field(False, description="delete an earlier output first")
