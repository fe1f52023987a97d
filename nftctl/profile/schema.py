"""The whole profile as types: one class per section, one docstring per key, defaults of the specification.

Owns shapes and types only. What values are *allowed together* is preflight's business, so a forbidden topology still
parses here and is refused there with its reason. Refuses unknown keys, text for numbers, booleans for integers and
numbers that are not finite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler

from nftctl.profile.outline import meanings

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


class Section(BaseModel):
    """Base of every section: closed, immutable, strict."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = handler(schema)
        properties = handler.resolve_ref_schema(found)["properties"]
        # pydantic can collect the docstrings itself, but does so at every start and takes a fifth of it.
        for name, text in meanings(cls.__name__).items():
            properties[name]["description"] = text
        return found


Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class Job(Section):
    """Name and place of the run."""

    name: str = ""
    """Run name and folder name under `run_dir`; empty: profile name, date and time."""
    run_dir: str = "runs"
    """Folder that holds run folders."""
    deterministic: bool = False
    """Select deterministic kernels on GPUs."""


class Grid(Section):
    """Placement of the one actor group: its shape, which is fixed, and where its ranks are."""

    backend: str = "ray"
    """Process backend; must be `ray`."""
    grouping: str = "single"
    """Role grouping; must be `single`: data, rollout, reward, replay and policy share one process per rank."""
    gpu_placement: str = "colocated"
    """Must be `colocated`: the actors form one FSDP world."""
    gpus_per_role: dict[str, int] | int | None = None
    """Must stay unset: colocated roles take no per-role GPUs."""
    ranks: int | None = None
    """Model ranks per replica; unset: `rl.group_size`."""
    num_replicas: int = 1
    """Execution replicas; must be 1."""
    shapes: dict[str, list[int]] | None = None
    """`{policy = [1, N], rollout = [1, N]}`; wins over `ranks` and `num_replicas` when given."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute; `auto` takes GPUs when there are any."""
    address: str = "local"
    """`local` starts a private Ray, whatever `RAY_ADDRESS` says; `auto` joins the cluster of `RAY_ADDRESS`, else the
    one that `ray start` noted on this machine; `HOST:PORT` joins that one."""
    strategy: Literal["pack", "spread"] = "pack"
    """On a cluster: `pack` puts the ranks on as few nodes as have room, `spread` on all of them alike. Ranks of one
    node are neighbours either way, and no result depends on it."""
    interface: str = ""
    """Network interface of every node that ranks talk over, such as `eth0` or `bond0`; empty: the one that has the
    node's address in Ray."""
    shard_group: Annotated[int, Field(ge=2)] | None = None
    """Shard the base over groups of so many neighbouring ranks, each group with the whole of it, instead of over all
    ranks: gathers then stay within a node whose ranks are a group. Must divide `rl.group_size`. Unset: one group."""
    restart_wait_s: Positive = 900.0
    """Longest wait of `launch --max-restarts` for room to go on, after a node or a rank was lost."""
    collective_timeout_s: Positive = 120.0
    """Seconds after which a collective that a rank does not join fails."""


class Old(Section):
    """The moving old policy, which samples and anchors the implicit velocities."""

    build_old: bool = True
    """Keep a moving old policy; false: the policy samples and is its own anchor."""
    update_every: int | None = None
    """Refresh cadence in optimizer steps; required (>= 1, a multiple of `rl.updates_per_rollout`) with `build_old`."""
    decay: Literal["copy", "linear", "delayed", "constant"] = "copy"
    """Share of the old weights kept at refresh i (in optimizer steps): 0; min(0.001 i, 0.5); 0 until 75, then
    min(0.0075 (i - 75), 0.999); or `constant`."""
    constant: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share kept when `decay = "constant"`."""


class Ref(Section):
    """The frozen reference: the base weights with adapters off."""

    update_every: int = 0
    """Must be 0: the reference never moves."""


class Rl(Section):
    """The DiffusionNFT objective, its rollout and its schedule."""

    modality: Literal["image", "video"] = "video"
    """Decoded media type. Video is not in this release."""
    profile: str = ""
    """Named text-to-image contract; required for images, empty for video."""
    init_from: str = ""
    """Base weights: `embedded` (the packaged base of the profile's contract; `embedded:digits` and `embedded:scenes`
    name one), a diffusers folder, a DCP folder of safetensors beside a transformer/config.json, or a hub id
    `org/name@revision`, which is read from the local cache and pinned to its commit."""
    init_keys_to_skip_loading: list[str] = []
    """Substrings of parameter names that keep their seeded initialisation at a fresh launch."""
    group_size: int = 4
    """Samples per prompt, and the number of model ranks."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Root of every random number of the run."""
    max_steps: int | None = None
    """Total number of rollouts since the run's birth."""
    updates_per_rollout: Count = 1
    """Optimizer steps per rollout."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Keep a running average of the policy, to look at and to export: optimizer step i keeps the share
    min((1 + i) / (10 + i), ema_decay) of it. 0 keeps none."""
    beta: Positive = 1.0
    """Sharpness of the implicit velocities. No effect on the first optimizer step after a hard-copied refresh."""
    kl_beta: NonNegative = 1.0
    """Weight of the velocity-space penalty towards the reference; 0 runs no reference forward."""
    policy_loss_scale: Positive = 5.0
    """Scale of the policy loss; never follows the advantage bounds."""
    advantage_low: float = -5.0
    """Lower clamp of the advantage."""
    advantage_high: float = 5.0
    """Upper clamp of the advantage, and the divisor of the linear map."""
    advantage_std: Literal["group", "global"] = "group"
    """Spread that divides the advantage: of the row's group, or of the step's samples."""
    r_map: Literal["linear", "sigmoid"] = "linear"
    """Optimality map from clamped advantage to [0, 1]."""
    r_tau: Positive = 0.5
    """Temperature of the sigmoid map."""
    uniform_timestep: bool = False
    """Draw training timesteps uniformly instead of by the shifted logit-normal law."""
    timestep_source: Literal["continuous", "grid"] = "continuous"
    """`grid` draws the rollout's own sigmas without replacement."""
    timesteps_per_sample: Count = 1
    """Training timesteps per sample and optimizer step."""
    train_shift: Positive | None = None
    """Shift of the training law; unset: `rl.sampler_shift`."""
    train_t_range: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.0, 1.0]
    """Interval that training timesteps are kept to."""
    sample_steps: Count = 20
    """Sampler steps per generation."""
    sampler_shift: Positive = 5.0
    """Shift of the rollout's sigma schedule."""
    scheduler_type: str = "unipc"
    """Sampler; must be `unipc`."""
    guidance: NonNegative = 3.0
    """v_uncond + guidance (v_cond - v_uncond): 1 is conditional only, 0 is unconditional."""
    negative_prompt: str = ""
    """Prompt of the unconditional branch."""
    rollout_precision: Literal["base", "fp8"] = "base"
    """Precision in which samples are made for training: the base's own, or its layers' products in FP8 (e4m3, weights
    scaled per row, activations per token), which a GPU does twice as fast and which makes other samples. Training and
    evaluation keep the base's precision."""
    rollout_seed_clock: Literal["source_row", "optimizer_step"] = "source_row"
    """What advances the rank-local seeds: the source row, or the optimizer step."""
    old: Old = Old()
    ref: Ref = Ref()


class Lora(Section):
    """The adapter that is trained."""

    rank: Count = 16
    """Rank of the update."""
    alpha: Positive = 32.0
    """Scale: the update is multiplied by alpha / rank."""
    targets: list[str] = ["add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    """Modules of the denoiser, by the end of their names (`add_q_proj`) or, between slashes, by a regular expression
    that a whole name has to match (`/layers\\.[0-7]\\..*_proj/`); each must select at least one, and none of the prompt
    encoder."""
    init: Literal["gaussian", "kaiming"] = "gaussian"
    """Initialisation of A; B starts at zero."""


class Model(Section):
    """Media shape, precision and memory of the model."""

    vae: str = ""
    """Folder of the VAE; required when `rl.init_from` holds none."""
    tokenizer: str = ""
    """Folder of the tokenizer; required when `rl.init_from` holds none."""
    height: Count = 512
    """Image height in pixels."""
    width: Count = 512
    """Image width in pixels."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the frozen base; the adapter and its optimizer are always float32."""
    decode_dtype: Literal["bfloat16", "float32"] = "float32"
    """Precision of the decoder."""
    decode_slicing: bool = False
    """Decode image by image, which takes less memory; refused where the decoder cannot."""
    decode_tiling: bool = False
    """Decode large images in overlapping tiles, which takes less memory and changes pixels: a tile does not see the
    whole image. Refused where the decoder cannot."""
    t5: bool = True
    """Stable Diffusion 3: read prompts with the base's T5 encoder too, where it has one; false leaves it out, which
    saves its memory and its hold on long prompts, as if the base had none."""
    train: Literal["lora", "full"] = "lora"
    """What is trained: an adapter on the frozen base, or all weights of the denoiser (float32, sharded). All weights
    want a far smaller `optimizer.lr` than an adapter: one that suits an adapter can wreck the base in one step."""
    compile: Literal["auto", "always", "never"] = "auto"
    """Compile the denoiser's layers, one graph for each shape of batch; `auto` does on GPUs, unless
    `job.deterministic` asks for the same bits from run to run."""
    cuda_graphs: Literal["auto", "never"] = "auto"
    """Record forwards, and training's backward, as CUDA graphs, which a GPU plays without waiting for Python; `auto`
    does on GPUs where the base is frozen and whole, `job.deterministic` is off, and there is memory to spare."""
    shard: Literal["auto", "gather-once", "reshard", "replicate-base"] = "auto"
    """Memory policy of the sharded base: gather it once and keep it, or gather layer by layer at every forward; `auto`
    takes the former where the GPUs have room. `replicate-base` shards nothing: each rank holds a frozen base whole."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward, which runs the layer again: less memory, about a third more
    training time, the same numbers."""
    prompt_encoder: Literal["resident", "offload", "per-step"] = "resident"
    """Where what encodes prompts lives: on the compute device; in host memory, but for the time in which the new
    prompts of a step are encoded; or nowhere, read again from the base when a new prompt comes. The same numbers.
    Cosmos3's comes a layer at a time, Stable Diffusion 3's encoders come whole."""
    system_prompt: bool = True
    """Put the family's system prompt before each prompt."""
    resolution_template: bool = True
    """Append the family's sentence on the resolution to each prompt."""
    rollout_micro_batch: Count | None = None
    """Samples denoised and decoded together on a rank, which go to the scorer together; unset: as many as fill a large
    GPU, evenly cut."""
    train_micro_batch: Count | None = None
    """(sample, timestep) pairs per training forward on a rank; unset: all of them."""
    lora: Lora = Lora()


class Data(Section):
    """Prompts and how they are consumed."""

    prompt_file: str = ""
    """`.txt` (one prompt a line), `.jsonl` (`prompt`, a text or a JSON object; optional `reward_prompt` and
    `metadata`), or the training prompts of a packaged base: `embedded`, `embedded:digits`, `embedded:scenes`."""
    rows_per_step: Count = 4
    """Source rows per step; every rank makes one sample of each."""
    shuffle: bool = False
    """Permute the file anew in each epoch, keyed by seed and epoch."""


class Provider(Section):
    """One reward provider."""

    name: str
    """Label in metrics, messages and identity."""
    kind: Literal["http", "embedded"] = "http"
    """A running service, or a packaged scorer that the run starts and stops itself."""
    protocol: Literal["nftctl-reward/1", "cosmos-rl"] = "nftctl-reward/1"
    """Wire protocol of an http provider."""
    url: str = ""
    """Base URL of an http provider, without the protocol's own path."""
    revision: str = ""
    """Pinned revision; required for http, and equal to what the service declares. A `cosmos-rl` service declares none:
    there it is the operator's word for what runs behind the URL, recorded but never compared."""
    reward_fn: str = ""
    """`cosmos-rl`: the reward function that the service is to run, such as `hpsv3`; empty: `name`."""
    score_key: str = ""
    """`cosmos-rl`: the key of the answer that is the score, such as `ocr_reward`; `a+b` is a sum; empty: `name`."""
    scorer: str = ""
    """Name of the packaged scorer of an embedded provider."""
    weight: float = 1.0
    """Weight of the score in the reward; 0 is logged only, and yet `reward.on_failure` holds for it."""
    scale: Positive = 1.0
    """Factor on the score before clip and weight."""
    clip: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """Bounds on the scaled score; unset: none."""
    token_env: str = "NFTCTL_REWARD_TOKEN"
    """Environment variable that holds the bearer token."""


class Reward(Section):
    """Scoring and what happens when it fails."""

    providers: list[Provider] = []
    aggregation: Literal["sum", "gdpo"] = "sum"
    """How several providers become one advantage: `sum` adds weighted scores and normalises the sum; `gdpo` normalises
    each score within its group, adds them by weight, and normalises over the step, for scores of unlike scale."""
    on_failure: Literal["fail", "drop-group"] = "fail"
    """`fail` ends the run; `drop-group` leaves the row's group out, by collective decision. Either holds for every
    provider, whatever its weight."""
    max_dropped_groups: Count = 1
    """Groups that may be dropped in one step before the run fails all the same."""
    deadline_s: Positive = 60.0
    """Seconds from the first request of a step to its last score."""
    connect_timeout_s: Positive = 5.0
    """Seconds to establish a connection."""
    read_timeout_s: Positive = 30.0
    """Seconds of silence on an open connection."""
    retries: Annotated[int, Field(ge=0, le=20)] = 3
    """Attempts after the first on transport errors, 408, 425, 429 and 5xx, inside the deadline."""
    max_items_per_request: Count = 16
    """Images per request; the service's own limit also holds."""
    encoding: Literal["png", "jpeg", "raw"] = "png"
    """Image encoding on the wire of `nftctl-reward/1`. `jpeg` is smaller and faster than `png`, and lossy: scorers see
    its artefacts, and the policy learns to please them. An embedded scorer, on the same host, gets the pixels of `png`
    as they are."""
    jpeg_quality: Annotated[int, Field(ge=50, le=100)] = 95
    """Quality of `encoding = "jpeg"`, at full colour resolution."""


class Optimizer(Section):
    """AdamW on what is trained: the adapter, or all weights of the denoiser."""

    lr: Positive = 3e-4
    """Learning rate."""
    betas: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """Moment decays."""
    eps: Positive = 1e-8
    """Denominator floor."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    grad_clip: Positive = 1.0
    """Largest global gradient norm."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of linear warm-up; constant afterwards."""


class Checkpoint(Section):
    """When to save and what to keep."""

    every: Annotated[int, Field(ge=0)] = 50
    """Steps between checkpoints; 0: only at the last step."""
    keep_last: Count = 3
    """Newest checkpoints that are kept."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Also keep every checkpoint whose step is a multiple; 0: none."""


class Logging(Section):
    """Trackers beside metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb: bool = False
    """Also log to W&B, of the extra `nftctl[wandb]`; its key and host come from its own WANDB_* variables."""
    trackio: bool = False
    """Also log to trackio, of the extra `nftctl[trackio]`; its place comes from its own TRACKIO_* variables."""
    project: str = "nftctl"
    """Project at W&B and trackio: letters, digits, `.`, `_` and `-`."""


class Samples(Section):
    """Grids of fixed prompts and seeds, with the run's reward under each image."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between grids; 0: before the first and after the last step only. With each grid after a step go that step's
    own best and worst samples."""
    prompts: Annotated[int, Field(ge=0)] = 6
    """Prompts of the grid, taken from the evaluation prompts, else from the training prompts; 0: no grids."""
    noises: Count = 1
    """Noises per prompt. Each makes a row: one image by the base, by old, by the average (where `eval.weights` names
    it) and by the policy."""


class Eval(Section):
    """Held-out evaluation from fixed noise; never moves the run's random numbers."""

    prompt_file: str = ""
    """Held-out prompts, a file like `data.prompt_file`, or those of a packaged base: `embedded`, `embedded:digits`,
    `embedded:scenes`; empty: no evaluation."""
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0: before the first and after the last step only."""
    samples_per_prompt: Count = 8
    """Images per held-out prompt."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Root of the evaluation's noise."""
    steps: Count | None = None
    """Sampler steps; unset: `rl.sample_steps`."""
    guidance: NonNegative | None = None
    """Guidance; unset: `rl.guidance`."""
    weights: Literal["policy", "ema"] = "policy"
    """Which weights are evaluated; `ema` is then a column of the grids too, and needs `rl.ema_decay`."""
    providers: list[Provider] = []
    """Who scores evaluations in the reward's place, with the keys of `reward.providers`; may well be somebody who is
    never trained on. `eval/reward` is then their weighted sum. Empty: the run's own reward."""


AlarmCode = Literal[
    "reward-hacking", "clamp", "zero-spread", "policy-frozen", "old-not-moving", "images-saturating", "images-noisy",
    "diversity-collapse", "loss-exploding", "grad-exploding", "reward-collapse",
]  # fmt: skip


class Alarms(Section):
    """Signs in a run's own numbers that it pleases its scorer alone, collapses, or does not learn."""

    enabled: bool = True
    """Look for them after every step and evaluation: each is said once until it clears, and noted in alarms.jsonl."""
    stop: list[AlarmCode] = []
    """Alarms at which the run saves and ends, with exit code 7: any of `reward-hacking` (seen by evaluations alone),
    `clamp`, `zero-spread`, `policy-frozen`, `old-not-moving`, `images-saturating`, `images-noisy`,
    `diversity-collapse`, `loss-exploding`, `grad-exploding`, `reward-collapse`. Needs `enabled`."""


class Profile(Section):
    """A whole run."""

    job: Job = Job()
    grid: Grid = Grid()
    rl: Rl = Rl()
    model: Model = Model()
    data: Data = Data()
    reward: Reward = Reward()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    samples: Samples = Samples()
    eval: Eval = Eval()
    alarms: Alarms = Alarms()

    @property
    def ranks(self) -> int:
        """World size: one rank per sample of a group."""
        return self.rl.group_size

    @property
    def shard_ranks(self) -> int:
        """Ranks that share one copy of the base."""
        return self.grid.shard_group or self.ranks
