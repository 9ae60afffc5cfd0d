"""Settings of batch inference and evaluation: prompts, decoding, actors."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from workers.config.base import Settings, Share

StopString = Annotated[str, Field(min_length=1)]
Threshold = Annotated[float, Field(ge=0.0)]
Window = Annotated[int, Field(ge=1, le=64)]


def _window_or_auto(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """One message for both kinds of window."""
    try:
        return handler(value)
    except ValidationError:
        raise PydanticCustomError("window", "an integer from 1 to 64, or auto") from None


AutoWindow = Annotated[Window | Literal["auto"], WrapValidator(_window_or_auto)]
TokenId = Annotated[int, Field(ge=0)]
_THRESHOLD = 0.95


class AnswerSettings(Settings):
    """How tokens of an answer are chosen and where it ends, whatever the number of tokens per forward."""

    score: Literal["probability", "margin", "entropy"] = Field("probability", description="what tau is compared with")
    max_new_tokens: int = Field(256, ge=1, description="token budget of the answer")
    temperature: float = Field(0.0, ge=0, le=1000, description="0 is greedy")
    top_k: int = Field(0, ge=0, description="sample among the k likeliest tokens; 0 means all")
    top_p: float = Field(1.0, gt=0, le=1, description="sample among the likeliest tokens of this total probability")
    seed: int | None = Field(None, ge=0, description="same seed, same text; null derives one from the row id")
    stop: tuple[StopString, ...] = Field((), description="strings that end the answer; they are not part of it")
    min_new_tokens: int = Field(0, ge=0, description="no end token before so many tokens")
    repetition_penalty: float = Field(
        1.0, gt=0, le=100, description="divides the logits of tokens that stand in prompt or answer; 1 is none"
    )
    forbidden_ids: tuple[TokenId, ...] = Field((), description="token ids that are never generated")
    logprobs: bool = Field(False, description="report the log-probability of each token")


class EngineSettings(Settings):
    """The decoding engine of an actor."""

    cache: Literal["ragged", "block", "none"] = Field(
        "ragged", description="`block` is the paper's, where fast rows wait; `none` recomputes everything: the oracle"
    )
    cache_block: int = Field(32, ge=1, description="tokens of a block of the block cache")
    prefill_chunk: int = Field(512, ge=1, description="prompt tokens that share a step with the rows that decode")
    num_slots: int = Field(16, ge=1, description="rows decoded at the same time by one actor")
    max_length: int | None = Field(None, ge=2, description="prompt and answer tokens of a slot; null means the model's")


class RowDecodingSettings(AnswerSettings):
    """How one row is decoded."""

    # Before the mode, which follows from it.
    threshold: Threshold | None = Field(
        None,
        description="tau: a drafted token is kept while its score reaches this; means mode tau, where null is 0.95",
    )
    mode: Literal["one_token", "tau", "verified"] = Field(
        default_factory=lambda fields: "verified" if fields.get("threshold") is None else "tau",
        description="one token per forward; several, exactly those of one-token decoding (verified); or several by threshold "
        "(tau). Verified unless there is a threshold",
    )
    window: AutoWindow | None = Field(
        None, description="W, tokens per forward; null means auto in verified mode and the block size in tau mode"
    )
    draft_branches: bool | None = Field(
        None,
        description="verified: placeholders behind every possible acceptance; null leaves it to the automatic window",
    )

    @model_validator(mode="after")
    def _fields_belong_to_modes(self) -> Self:
        if self.mode != "tau" and self.threshold is not None:
            raise ValueError(f"no threshold with mode {self.mode}; it belongs to mode tau")
        if self.mode != "verified" and self.draft_branches:
            raise ValueError(f"no draft_branches with mode {self.mode}; they belong to mode verified")
        if self.mode == "tau" and self.threshold is None:
            object.__setattr__(self, "threshold", _THRESHOLD)
        return self


class DecodingSettings(RowDecodingSettings, EngineSettings):
    """The decoding engine and the defaults of its rows."""


class EvaluationDecodingSettings(AnswerSettings, EngineSettings):
    """What all settings of an evaluation share; mode, threshold and window are its grid."""


class ActorSettings(Settings):
    """The pool of inference actors. It grows while units wait for an actor, and shrinks when none are left."""

    min: int = Field(1, ge=1, description="actors at least: the job fails when there is no room for them")
    max: int | None = Field(None, ge=1, description="actors at most, where there is room; null means `min`")
    initial: int | None = Field(None, ge=1, description="actors at the start; null means `min`")
    num_cpus: float = Field(1.0, ge=0, description="logical CPUs of an actor")
    num_gpus: float = Field(0.0, ge=0, description="GPUs of an actor")
    memory: float | None = Field(
        None, gt=0, description="GiB of main memory that Ray sets aside for an actor; null asks for none"
    )
    max_restarts: int = Field(2, ge=0, description="how often the actor of one unit may die before the job fails")
    seconds_without_step: float = Field(
        600.0, gt=0, description="an actor that has rows and makes no step for so long is replaced"
    )
    seconds_idle: float = Field(30.0, ge=0, description="how long an actor beyond `min` is kept when no unit is left")
    seconds_to_place: float = Field(600.0, gt=0, description="how long `min` actors may wait for other jobs to end")

    @property
    def largest(self) -> int:
        """`max`, or `min` when it is null."""
        return self.min if self.max is None else self.max

    @property
    def first(self) -> int:
        """`initial`, or `min` when it is null."""
        return self.min if self.initial is None else self.initial

    @property
    def memory_bytes(self) -> int | None:
        """`memory` as Ray counts it."""
        return None if self.memory is None else int(self.memory * 2**30)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.min <= self.first <= self.largest:
            raise ValueError(
                f"min={self.min}, initial={self.first}, max={self.largest} are not in this order; raise max, or lower the others"
            )
        return self


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
    compare_with_one_token: Share = Field(
        0.0, description="share of the rows that are decoded a second time, one token per forward, to report agreement"
    )
    price_per_actor_hour: float | None = Field(
        None, ge=0, description="what an actor costs an hour, in any currency; the report then has the cost"
    )
    overwrite: bool = Field(False, description="delete an earlier output first")


class EvaluateRecipe(Settings):
    """Accuracy, tokens per forward and tokens per second at a grid of decoding settings."""

    model: str | None = Field(None, description="model folder; null means the newest quickstart checkpoint")
    prompts: PromptSettings = PromptSettings()
    output: str = Field("runs/evaluate", description="folder for the report and the answers of each setting")
    thresholds: tuple[Threshold, ...] = Field((0.95, 0.9, 0.7, 0.5), description="tau values beside one-token decoding")
    windows: tuple[Window, ...] = Field((), description="windows W of each tau; empty means the block size")
    verified_windows: tuple[AutoWindow, ...] = Field(
        ("auto",), description="windows of verified decoding; empty leaves it out"
    )
    decoding: EvaluationDecodingSettings = Field(
        EvaluationDecodingSettings(), description="of all settings; mode, threshold and window come from the grid"
    )
    actors: ActorSettings = ActorSettings()
    overwrite: bool = Field(False, description="delete an earlier output first")
