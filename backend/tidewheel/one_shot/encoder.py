"""Encoders of a Hugging Face folder, by transformers: texts in; embeddings, classes, or scores of pairs out.

Weights are safetensors, and no code of the folder runs. Texts are tokenised in the engine, and cut to `max_tokens`.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.one_shot.adapters import Adapter, converted
from tidewheel.one_shot.signature import Arrays, Signature, TensorSpec
from tidewheel.one_shot.torch_program import take_device
from tidewheel.regular_files import read_object

_CHARS_PER_TOKEN = 64  # of a text, more are cut before it is tokenised
_IS_CLS = {"mean": False, "pooling_mode_mean_tokens": False, "cls": True, "pooling_mode_cls_token": True}


class EncoderOptions(msgspec.Struct, forbid_unknown_fields=True):
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_tokens: int | None = None  # none: as the folder says
    normalize: bool = True  # embeddings have length 1


def load(folder: Path, config: EngineConfig) -> Adapter:
    """Load a folder with config.json, tokenizer.json and safetensors."""
    options, device = converted(config.adapter_options, "adapter_options", EncoderOptions), take_device(config)
    is_classifier = "ForSequenceClassification" in str(read_object(folder / "config.json").get("architectures"))
    kind: Any = AutoModelForSequenceClassification if is_classifier else AutoModel
    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model = kind.from_pretrained(folder, dtype=getattr(torch, options.dtype), use_safetensors=True, **safe).to(device)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, tokenizer_file=str(folder / "tokenizer.json"), **safe)
    tokenizer.model_max_length = _max_tokens(folder, options, model.config, tokenizer.model_max_length)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.convert_ids_to_tokens(model.config.pad_token_id or 0)
    has_types = getattr(model.config, "type_vocab_size", 0) > 1
    tokenizer.model_input_names = ["input_ids", "attention_mask", *["token_type_ids"] * has_types]
    is_cls = not is_classifier and _is_cls(folder)
    signature, max_chars = _signature(model.config, is_classifier), _CHARS_PER_TOKEN * tokenizer.model_max_length

    def run(inputs: Arrays) -> Arrays:
        texts = ([text.decode()[:max_chars] for text in inputs[spec.name]] for spec in signature.inputs)
        with torch.inference_mode():
            tokens = tokenizer(*texts, padding=True, padding_side="right", truncation=True, return_tensors="pt")
            output, mask = model(**tokens.to(device)), tokens["attention_mask"]  # [batch, length]
            if is_classifier:
                answer = _classes(output.logits.float(), model.config)
            else:
                hidden, weights = output.last_hidden_state.float(), mask[:, :, None].float()
                mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
                pooled = hidden[:, 0] if is_cls else mean
                embedding = torch.nn.functional.normalize(pooled) if options.normalize else pooled
                answer = {"embedding": embedding.cpu().numpy()}
            return {**answer, "num_input_tokens": mask.sum(dim=1, dtype=torch.int32).cpu().numpy()}

    return Adapter(signature, f"{device} ({torch.get_num_threads()} threads)", model.get_memory_footprint(), run)


def _classes(logits: torch.Tensor, config: Any) -> Arrays:
    if len(config.id2label) == 1:
        return {"score": logits[:, 0].sigmoid().cpu().numpy()}
    is_multi = config.problem_type == "multi_label_classification"
    scores = (logits.sigmoid() if is_multi else logits.softmax(dim=1)).cpu().numpy()
    labels = [str(config.id2label[index]).encode() for index in scores.argmax(axis=1).tolist()]
    return {"scores": scores, "label": np.array(labels, np.object_)}


def _max_tokens(folder: Path, options: EncoderOptions, config: Any, tokenizer_limit: float) -> int:
    """Return the shortest of the lengths that option, folder and model set."""
    positions = config.max_position_embeddings - (config.pad_token_id + 1 if "roberta" in config.model_type else 0)
    told = options.max_tokens or read_object(folder / "sentence_bert_config.json").get("max_seq_length")
    return min(
        int(limit) for limit in (told, tokenizer_limit, positions) if isinstance(limit, int | float) and limit > 0
    )


def _is_cls(folder: Path) -> bool:
    """Return whether sentence-transformers' files ask for the first token's state; False: for the mean."""
    settings = read_object(folder / "1_Pooling" / "config.json")
    modes = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True]
    mode = str(settings.get("pooling_mode") or ",".join(modes) or "mean")
    others = {each.name for each in folder.glob("[1-9]_*")} - {"1_Pooling", "2_Normalize"}
    if mode not in _IS_CLS or others:
        raise ConfigError(f"{folder} asks for {', '.join(others) or mode}: only mean and cls are served")
    return _IS_CLS[mode]


def _signature(config: Any, is_classifier: bool) -> Signature:
    """Tensors: text → embedding; of a classifier, text → scores, label; if it has one label, query, text → score."""
    query, text = (TensorSpec(name, "BYTES", ("batch",)) for name in ("query", "text"))
    num_tokens, num_labels = TensorSpec("num_input_tokens", "INT32", ("batch",)), len(config.id2label)
    if not is_classifier:
        return Signature((text,), (TensorSpec("embedding", "FP32", ("batch", config.hidden_size)), num_tokens))
    if num_labels == 1:
        return Signature((query, text), (TensorSpec("score", "FP32", ("batch",)), num_tokens))
    scores = TensorSpec("scores", "FP32", ("batch", num_labels))
    return Signature((text,), (scores, TensorSpec("label", "BYTES", ("batch",)), num_tokens))
