"""Diffusion pipelines from folders of diffusers: only safetensors are loaded, and no code of a folder runs."""

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import diffusers
import msgspec
import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor
from transformers import CLIPTextModel, CLIPTokenizer

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError, InvalidRequest
from tidewheel.one_shot.adapters import converted
from tidewheel.one_shot.signature import Arrays, Signature, StepOffer, StepOptions, TensorSpec
from tidewheel.one_shot.torch_program import take_device
from tidewheel.regular_files import read_object

_PICKLED = (".bin", ".ckpt", ".pt", ".pth", ".pkl")
_PIPELINES = ("DDPMPipeline", "DDIMPipeline", "StableDiffusionPipeline")
_MAX_PROMPT_CHARS = 4096  # more are cut; the tokenizer keeps 77 tokens
_TRIAL_STEPS = 2
_DEFAULT_STEPS = 50
_Count = Annotated[int, msgspec.Meta(ge=1)]


class DiffusersOptions(msgspec.Struct, forbid_unknown_fields=True):
    sizes: list[str] = []  # such as "512x512", width first; none: the model's own
    max_steps: _Count = 1000
    default_steps: _Count | None = None  # none: `_DEFAULT_STEPS`, or `max_steps` if that is less
    default_guidance: Annotated[float, msgspec.Meta(ge=0, le=100)] = 7.5  # of pipelines with guidance
    null_label: int | None = None  # label that means no label, for guidance
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class Denoising:
    """State of one picture: its noisy sample, and its own scheduler of diffusers."""

    def __init__(self, scheduler: Any, steps: int, sample: torch.Tensor, generator: torch.Generator) -> None:
        scheduler.set_timesteps(steps)
        names = inspect.signature(scheduler.step).parameters
        self.scheduler = scheduler
        self._step_arguments = {"generator": generator} if "generator" in names else {}
        self.sample = sample * getattr(scheduler, "init_noise_sigma", 1.0)  # [1, channels, height, width]
        self.estimate = self.sample  # of the finished picture
        self.num_done = 0
        self.guidance = 0.0
        self.conditions: list[torch.Tensor] = []  # the request's; with guidance also the empty one

    def next_sample(self, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sample after a step, and an estimate of the finished picture.

        Classifier-free guidance makes one noise [1, …] of two: the request's and the unconditional one.
        """
        if len(noise) == 2:
            conditional, unconditional = noise[:1], noise[1:]
            noise = unconditional + self.guidance * (conditional - unconditional)
        timesteps = self.scheduler.timesteps
        found = self.scheduler.step(noise, timesteps[self.num_done], self.sample, **self._step_arguments)
        estimate = found.get("pred_original_sample")
        is_last = self.num_done + 1 == len(timesteps)
        return found.prev_sample, found.prev_sample if is_last or estimate is None else estimate


class Pipeline:
    """Model without condition, with a label, or with a text and a VAE that makes samples pixels.

    Methods may raise anything; `step` then leaves all states as they were.
    """

    def __init__(self, folder: Path, kind: str, config: EngineConfig, options: DiffusersOptions) -> None:
        device, takes_text = take_device(config), kind == "StableDiffusionPipeline"
        self._torch_device, self._dtype, self._null_label = device, getattr(torch, options.dtype), options.null_label
        network = diffusers.UNet2DConditionModel if takes_text else diffusers.UNet2DModel
        self._unet = painter = self._load(network, folder / "unet")
        models, self._vae = [self._unet], None
        if takes_text:
            self._vae = painter = self._load(diffusers.AutoencoderKL, folder / "vae")
            self._text_encoder = self._load(CLIPTextModel, folder / "text_encoder")
            self._tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)
            models += [self._vae, self._text_encoder]
        self._make_scheduler = _scheduler_maker(folder / "scheduler", is_ddim=kind == "DDIMPipeline")
        labels = range(self._unet.config.get("num_class_embeds") or 0)
        if options.null_label is not None and options.null_label not in labels:
            raise ConfigError(f"null_label is {options.null_label}: the model has {len(labels)} labels, from 0 on")
        self._labels = [label for label in labels if label != options.null_label]
        self.device = f"{device} ({torch.get_num_threads()} threads)"
        self.weights_bytes = sum(model.get_memory_footprint() for model in models)
        unit = 2 ** (len(painter.config.block_out_channels) - 1)  # pixels
        self._scale = unit if takes_text else 1  # pixels of a sample's element
        self.offer = self._make_offer(options, unit, has_guidance=takes_text or options.null_label is not None)
        names = {"prompt": "BYTES"} if takes_text else {"label": "INT32"} if self._labels else {}
        image = TensorSpec("image", "UINT8", ("height", "width", int(painter.config.out_channels)))
        others = {"step": "INT32", "steps": "INT32", "finish_reason": "BYTES", "png": "BYTES"}
        inputs, outputs = (tuple(TensorSpec(*each, (1,)) for each in one.items()) for one in (names, others))
        self.signature = Signature(inputs, (image, *outputs))

    def _load(self, kind: Any, folder: Path) -> Any:
        """Load a part. Raise `ConfigError` for pickled weights."""
        if not read_object(folder / "config.json"):  # diffusers would ask the Hub
            raise ConfigError(f"{folder} has no config.json: the model's folder is not whole")
        pickled = [file.name for file in sorted(folder.iterdir()) if file.suffix in _PICKLED]
        if pickled and not any(folder.glob("*.safetensors")):
            raise ConfigError(f"{folder} has {pickled[0]}, which is pickled: save the model as safetensors")
        model = kind.from_pretrained(
            folder, use_safetensors=True, local_files_only=True, low_cpu_mem_usage=False, dtype=self._dtype
        )
        return model.to(self._torch_device).eval()

    def _make_offer(self, options: DiffusersOptions, unit: int, *, has_guidance: bool) -> StepOffer:
        max_steps = min(options.max_steps, self._make_scheduler().config.num_train_timesteps)
        default_steps = options.default_steps or min(_DEFAULT_STEPS, max_steps)
        if default_steps > max_steps:
            raise ConfigError(f"default_steps is {default_steps}: at most {max_steps} are allowed (max_steps)")
        own = self._unet.config.sample_size
        height, width = (own, own) if isinstance(own, int) else own
        sizes = tuple(options.sizes) or (f"{width * self._scale}x{height * self._scale}",)
        for size in sizes:
            is_size = re.fullmatch(r"[1-9][0-9]{0,3}x[1-9][0-9]{0,3}", size)
            if not is_size or any(int(side) % unit for side in size.split("x")):
                wanted = f"give width x height, multiples of {unit} up to 9999, as 512x512"
                raise ConfigError(f"sizes has {size!r}: {wanted}")
        return StepOffer(sizes, max_steps, default_steps, options.default_guidance if has_guidance else 0.0)

    @torch.inference_mode()
    def prepare(self, inputs: Arrays, seed: int, options: StepOptions) -> Denoising:
        generator = torch.Generator().manual_seed(seed)
        width, height = (int(side) // self._scale for side in options.size.split("x"))
        shape = (1, self._unet.config.in_channels, height, width)
        sample = randn_tensor(shape, generator, self._torch_device, self._dtype)
        state = Denoising(self._make_scheduler(), options.steps or 1, sample, generator)
        state.guidance = options.guidance_scale or 0.0
        state.conditions = self._conditions(inputs, has_guidance=state.guidance > 1.0)
        return state

    def _conditions(self, inputs: Arrays, *, has_guidance: bool) -> list[torch.Tensor]:
        if self._vae is not None:
            prompt = inputs["prompt"][0].decode("utf-8", "replace")[:_MAX_PROMPT_CHARS]
            texts = [prompt, ""] if has_guidance else [prompt]
            ids = self._tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
            return list(self._text_encoder(ids.to(self._torch_device))[0].split(1))
        if not self._labels:
            return []
        label = int(inputs["label"][0])
        if label not in self._labels:
            known = f"{self._labels[0]} to {self._labels[-1]} (null_label: {self._null_label})"
            raise InvalidRequest(f"label is {label}: the model's labels are {known}")
        labels = [label, self._null_label] if has_guidance else [label]
        return [torch.tensor([label], device=self._torch_device) for label in labels]

    @torch.inference_mode()
    def step(self, states: Sequence[Denoising]) -> list[bool]:
        """Compute the next step of states of one size. Return which samples are finite.

        A row with guidance has two samples in the network's batch.
        """
        samples, timesteps, counts = [], [], []
        for state in states:
            timestep = state.scheduler.timesteps[state.num_done]
            count = max(len(state.conditions), 1)
            samples += [state.scheduler.scale_model_input(state.sample, timestep)] * count
            timesteps += [timestep.reshape(1)] * count
            counts.append(count)
        conditions = [condition for state in states for condition in state.conditions]
        name = "class_labels" if self._vae is None else "encoder_hidden_states"
        condition = {name: torch.cat(conditions)} if conditions else {}
        times = torch.cat(timesteps).to(self._torch_device)
        noise = self._unet(torch.cat(samples), times, **condition).sample.split(counts)
        found = [state.next_sample(part) for state, part in zip(states, noise, strict=True)]
        for state, (sample, estimate) in zip(states, found, strict=True):
            state.sample, state.estimate = sample, estimate
            state.num_done += 1
        return [bool(torch.isfinite(state.sample).all()) for state in states]

    @torch.inference_mode()
    def decode(self, states: Sequence[Denoising]) -> list[Arrays]:
        """Return each state's picture, or before its last step a preview."""
        samples = torch.cat([state.estimate for state in states])
        if self._vae is not None:
            samples = self._vae.decode(samples / self._vae.config.scaling_factor).sample
        pixels = (samples.float() / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).cpu().numpy()
        return [{"image": image} for image in (pixels * 255).round().astype(np.uint8)]


def load(folder: Path, config: EngineConfig) -> Pipeline:
    """Load a folder with model_index.json."""
    options = converted(config.adapter_options, "adapter_options", DiffusersOptions)
    index = folder / "model_index.json"
    if not index.is_file():
        raise ConfigError(f"{folder} is no folder of diffusers: it has no model_index.json")
    kind = str(read_object(index).get("_class_name"))
    if kind not in _PIPELINES:
        raise ConfigError(f"{index} has the _class_name {kind}: served are {', '.join(_PIPELINES)}")
    diffusers.utils.logging.disable_progress_bar()
    return Pipeline(folder, kind, config, options)


def _scheduler_maker(folder: Path, *, is_ddim: bool) -> Callable[[], Any]:
    """Return a maker of a request's scheduler, of which two steps are tried. Raise `ConfigError`."""
    settings = read_object(folder / "scheduler_config.json")
    name = str(settings.get("_class_name"))
    kind: Any = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.SchedulerMixin)):
        raise ConfigError(f"{folder} names the scheduler {name}, which diffusers {diffusers.__version__} has not")
    kind = diffusers.DDIMScheduler if is_ddim else kind  # as that pipeline does
    zeros = torch.zeros(1, 1, 1, 1)
    trial = Denoising(kind.from_config(settings), _TRIAL_STEPS, zeros, torch.Generator())
    if (count := len(trial.scheduler.timesteps)) != _TRIAL_STEPS:
        wrong = f"{name} runs the network {count} times in {_TRIAL_STEPS} steps"
        raise ConfigError(f"{folder}: {wrong}: name DDIMScheduler, say")
    trial.next_sample(zeros)
    return lambda: kind.from_config(settings)
