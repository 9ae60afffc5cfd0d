"""Settings of the training jobs: start model, data, objective, pace, distribution, run folder."""

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from workers.config.base import PromptFormat, Settings, Share

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Weight = Annotated[float, Field(ge=0.001, le=1000.0)]


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

    path: str | None = Field(
        None, description="Hugging Face model folder, local or s3://, or a .gguf file; null trains `from_scratch`"
    )
    from_scratch: FromScratch = Field(FromScratch(), description="used when `path` is null")
    mask_token: str = Field(
        "auto", description="the [MASK] placeholder: `auto` finds an unused reserved id; or a token of the vocabulary"
    )
    add_mask_row: bool = Field(False, description="grow the vocabulary by one row when no free id exists")
    attention: Literal["auto", "dense", "flex"] = Field(
        "auto", description="masks: dense for SDPA, or blocks for FlexAttention; auto is flex on GPUs, dense on CPUs"
    )


class DataSettings(Settings):
    """SFT shards: rows of `messages`, or of `prompt` and `response`; Parquet or JSONL."""

    train: tuple[str, ...] = Field((), description="shard files, folders or globs; empty means the embedded example")
    weights: tuple[Weight, ...] = Field(
        (), description="how often the rows of each entry of `train` are used in an epoch; empty means once"
    )
    held_out: tuple[str, ...] = Field((), description="shards for the held-out loss; never trained on")
    max_held_out: int = Field(512, ge=1, description="samples of the held-out loss at most, the first ones")
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

    @model_validator(mode="after")
    def _one_weight_each(self) -> Self:
        if self.weights and len(self.weights) != len(self.train):
            raise ValueError(f"weights has {len(self.weights)} entries and train has {len(self.train)}; one for each")
        return self


class ObjectiveSettings(Settings):
    """The MARS objective. Block size 1 without the mask loss is plain AR SFT."""

    block_size: int = Field(8, ge=2, le=64, description="B, tokens predicted in one forward")
    ar_weight: float = Field(1.0, ge=0, description="weight of the next-token loss on the clean stream")
    random_block_phase: bool = Field(True, description="shift the block cuts of each response by a random offset")


class LoraSettings(Settings):
    """Low-rank adapters in place of training every weight; they are merged into the exported model."""

    rank: int = Field(16, ge=1, description="rank of the adapters")
    alpha: float = Field(32.0, gt=0, description="the adapters are scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout in front of the adapters")
    target_modules: tuple[str, ...] = Field((), description="names of the modules adapted; empty means all linear ones")


class OptimizationSettings(Settings):
    """One training stage: how long, how fast. A step is one optimizer step over all ranks."""

    num_steps: int | None = Field(None, ge=1, description="optimizer steps; null means `num_epochs` epochs")
    num_epochs: int = Field(1, ge=1, description="passes over the data when `num_steps` is null")
    samples_per_step: int = Field(32, ge=1, description="samples of one optimizer step, all ranks together")
    row_tokens: int = Field(512, ge=2, description="samples are packed into rows of at most this many positions")
    micro_batch_rows: int = Field(8, ge=1, description="rows of one forward on one rank")
    head_chunk: int | None = Field(
        None, ge=1, description="supervised positions whose logits are in memory at once; null: 256 MiB of them"
    )
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
    offload: Literal["none", "optimizer", "optimizer_and_parameters"] = Field(
        "none", description="what is kept in host memory: optimizer state (ZeRO 1-3), parameters too (ZeRO 3)"
    )
    deepspeed: dict[str, JsonValue] = Field({}, description="further DeepSpeed options, as in its JSON configuration")
    max_failures: int = Field(2, ge=0, description="how often a lost worker is replaced before the run fails")

    @model_validator(mode="after")
    def _offload_fits_the_stage(self) -> Self:
        lowest = {"none": 0, "optimizer": 1, "optimizer_and_parameters": 3}[self.offload]
        if self.zero_stage < lowest:
            raise ValueError(f"offload={self.offload} needs zero_stage of at least {lowest}, not {self.zero_stage}")
        return self


class RunSettings(Settings):
    """Where a training run lives and how often it speaks and saves."""

    output: str = Field(
        "runs/train", description="run folder, local or s3://: config, data, checkpoints, metrics, model, report"
    )
    log_every: int = Field(10, ge=1, description="steps between metric lines")
    evaluate_every: int = Field(200, ge=1, description="steps between held-out losses, when data.held_out is given")
    checkpoint_every: int = Field(200, ge=1, description="steps between checkpoints")
    num_to_keep: int = Field(2, ge=1, description="checkpoints kept")
    keep: Literal["newest", "best"] = Field(
        "newest", description="which checkpoints stay; best (by held-out loss) also publishes the model of the best"
    )
    tensorboard: bool = Field(True, description="write TensorBoard event files beside metrics.jsonl")
    tracker: Literal["none", "mlflow", "wandb"] = Field(
        "none", description="also log to MLflow or Weights & Biases, set up by their own environment variables"
    )
    tracker_project: str = Field("marsray", description="experiment or project of the tracker")
    seed: int = Field(0, ge=0, description="seed of the order, the block phase and new weights")
    overwrite: bool = Field(False, description="delete an earlier run in `output` first")


class _TrainRecipe(Settings):
    """What all training jobs share."""

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    lora: LoraSettings | None = Field(None, description="train low-rank adapters only; null trains every weight")
    training: OptimizationSettings = OptimizationSettings()
    distributed: DistributedSettings = DistributedSettings()
    run: RunSettings = RunSettings()

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        scratch = self.model.from_scratch
        if self.model.path is None and self.data.max_length > scratch.max_positions:
            raise ValueError(
                f"data.max_length={self.data.max_length} is more than model.from_scratch.max_positions="
                f"{scratch.max_positions}; raise the one or lower the other"
            )
        if self.model.path is None and self.lora is not None:
            raise ValueError("lora, but a model from scratch (model.path: null) has nothing to adapt")
        if self.run.keep == "best" and not self.data.held_out:
            raise ValueError("run.keep=best, but data.held_out names no shards to choose by")
        if self.model.attention == "flex" and not self.distributed.use_gpu:
            raise ValueError("model.attention=flex trains on GPUs only; set distributed.use_gpu=true, or dense")
        return self


class TrainSftRecipe(_TrainRecipe):
    """AR SFT: ordinary next-token training on the assistant turns."""


class TrainMarsRecipe(_TrainRecipe):
    """MARS, after an AR SFT stage when `sft` is given."""

    sft: OptimizationSettings | None = Field(None, description="the AR SFT stage; null when the model has had it")
    objective: ObjectiveSettings = ObjectiveSettings()

    @model_validator(mode="after")
    def _starts_trained(self) -> Self:
        if self.model.path is None and self.sft is None:
            raise ValueError("sft: null, but a model from scratch (model.path: null) needs the AR SFT stage")
        return self
