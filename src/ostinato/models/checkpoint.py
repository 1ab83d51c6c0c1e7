"""A model's checkpoint: its location, its architecture, and the check of a tokenizer that replaces its own.

Imports no torch.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import isfinite
from pathlib import Path

from ostinato.config import EngineConfig
from ostinato.demo import CHECKPOINTS, checkpoint_dir
from ostinato.errors import ConfigError, ModelError, Remedy
from ostinato.files import exists, expand, find_in_checkpoint, is_directory, is_file, matches, why_unreadable
from ostinato.formats.checkpoint_json import folder_advice, gguf_header, is_gguf, read_checkpoint_json
from ostinato.formats.gguf.architectures import checkpoint_name, find_contiguous_tensors
from ostinato.formats.gguf.reader import all_parts
from ostinato.formats.gguf.tensor_names import GATE, UP
from ostinato.formats.quantization_config import stored_weights
from ostinato.json_io import JsonObject, read_json
from ostinato.models.config_json import MAX_LENGTH
from ostinato.models.hub import HUB_ID, fetch_from_hub, gguf_files
from ostinato.models.named_models import NAMED, named_file
from ostinato.models.quantized_shards import check_quantized_cut, is_cut_between_groups, with_runs_of_rank
from ostinato.models.registry import MODELS, NOT_IMPLEMENTED, spec_reader
from ostinato.models.weight_table import with_draft_calls, with_weight_table
from ostinato.ops.quant.block_formats import BLOCK_FORMATS
from ostinato.plan.layer_specs import VisionSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.rope import RopeSpec, inverse_frequencies, resolve_rope
from ostinato.plan.tensor_parallel import shard, sharding_problems


def with_given_tokens(model: ModelSpec, tokenizer: str, place: Path) -> ModelSpec:
    """Return the model with the number of token ids that have a text in `tokenizer`, whose files are in `place`.

    ConfigError if there is no tokenizer, or it has ids that the model does not know; ModelError if it is damaged.
    """
    ids = _ids(read_checkpoint_json(place, "tokenizer.json"))
    if not ids:
        where = place if is_gguf(place) else place / "tokenizer.json"
        raise ConfigError(
            f"tokenizer {tokenizer!r} has no vocabulary: {where} is not there or names no tokens; give a directory "
            "with a tokenizer.json, or a GGUF file",
            [Remedy("tokenizer", None)],
        )
    highest = max(ids)
    if highest >= model.vocab_size:
        raise ConfigError(
            f"tokenizer {tokenizer!r} does not fit the model: it has token ids up to {highest:,}, and the model's are "
            f"from 0 to {model.vocab_size - 1:,}; give the tokenizer that the model was trained with",
            [Remedy("tokenizer", None)],
        )
    return replace(model, given_tokens=len(ids))


def _ids(parts: JsonObject) -> set[int]:
    """Return all token ids of a tokenizer.json.

    Its vocabulary maps text to id, or is a list of (text, score) in the order of the ids.
    """
    vocabulary = (parts.get("model") or {}).get("vocab") or {}
    ids = set(vocabulary.values()) if isinstance(vocabulary, dict) else set(range(len(vocabulary)))
    return ids | {token["id"] for token in parts.get("added_tokens") or ()}


CHECKPOINT_FILES = ("*.json", "*.safetensors", "*.jinja")
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "*.jinja")
"""Files of a tokenizer and its chat templates."""
PLAN_FILES = ("config.json", "processor_config.json", "preprocessor_config.json", "adapter_config.json")
"""Files of a checkpoint that a plan reads."""


def resolve_model_dir(
    model: str,
    revision: str | None = None,
    files: tuple[str, ...] = CHECKPOINT_FILES,
    download_dir: str | None = None,
) -> Path:
    """Return the directory or the GGUF file of `model`.

    `model` is the name of an embedded or named model, a directory, a file, or a hub id, which is fetched. A hub id with
    `:FILE.gguf` fetches only that file. `files` are the patterns to fetch from a hub, into `download_dir`. ModelError
    if there is no such directory or model; ConfigError if a `revision` is given for anything but a hub id.
    """
    if not model.strip():
        raise ModelError(f"there is no directory {model!r}: it names nothing; `demo` is a model that is always here")
    if model in NAMED:
        directory = named_file(model)
    else:
        directory = checkpoint_dir(model) if model in CHECKPOINTS else expand(model)
    if is_directory(directory) or is_gguf(directory):
        if revision is not None:
            what = "directory" if is_directory(directory) else "file"
            message = f"revision {revision!r} is for hub ids, and {model!r} is a {what}"
            raise ConfigError(message, [Remedy("revision", None)])
        return directory
    if exists(directory):
        raise ModelError(
            f"{model!r} is a file and does not end in .gguf; give a GGUF file, or the directory of a checkpoint, with "
            "its config.json"
        )
    # A single word is more likely a leftover argument of a command line.
    match = HUB_ID.fullmatch(model)
    if match is None or (match["file"] is None and directory.suffix == ".gguf" and is_directory(directory.parent)):
        raise ModelError(_no_such_model(model, directory))
    if match["file"] is None:
        directory = fetch_from_hub(model, revision, files, download_dir)
        wants_config = any(fnmatchcase("config.json", pattern) for pattern in files)
        if wants_config and not is_file(directory / "config.json") and (held := gguf_files(model, revision)):
            all_of_them = f" (there are {', '.join(held)})" if len(held) > 1 else ""
            raise ModelError(
                f"{model} on the hub has no config.json; it has GGUF files: give one, as {model}:{held[0]}{all_of_them}"
            )
        return directory
    parts = [str(part) for part in all_parts(Path(match["file"]))]
    file = fetch_from_hub(match["name"], revision, tuple(parts), download_dir) / match["file"]
    if not is_gguf(file):
        held = gguf_files(match["name"], revision)
        also = f"; it holds {', '.join(held)}" if held else ""
        raise ModelError(f"{match['name']} on the hub holds no file {match['file']!r}{also}")
    return file


_HUB_ADDRESS = re.compile(
    r"(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)(?P<name>[^/\s]+/[^/\s:?#]+)"
    r"(?:/(?:blob|resolve)/[^/]+/(?P<file>[^?#]+\.gguf))?(?P<tag>:\S*)?"
)


_OF_OLLAMA = re.compile(r"(?:registry\.ollama\.ai|(?:www\.)?ollama\.com)/\S+|(?:library/)?[\w.-]+:[\w.-]+(?<!\.gguf)")
"""Names and addresses of Ollama's library, such as llama3.2:1b."""


def _no_such_model(model: str, path: Path) -> str:
    """Return the message for a name of a model that is neither here nor a hub id, with what was probably meant."""
    of_hub = _HUB_ADDRESS.match(model)
    if of_hub is not None:
        file = f":{of_hub['file']}" if of_hub["file"] else ""
        tagged = "; a GGUF file of it is OWNER/NAME:FILE.gguf" if of_hub["tag"] else ""
        return f"{model!r} is an address; here it is the hub id alone: {of_hub['name']}{file}{tagged}"
    if "://" in model:
        return f"{model!r} is an address; models come from the hub (OWNER/NAME), or from files that are here"
    what = "file" if ":" not in model and path.suffix in (".gguf", ".safetensors", ".bin", ".pt") else "directory"
    message = f"there is no {what} {model!r}{why_unreadable(path)}"
    named = {name.lower(): name for name in (*CHECKPOINTS, *NAMED)}
    word = model.lower().replace("_", "-")
    near = [named[name] for name in named if word.startswith(name)] if "/" not in model else []
    near = near or [named[name] for name in get_close_matches(word, named, 1)]
    beside = {entry.name: str(path.parent / entry.name) for entry in matches(path.parent, "*") if exists(entry)}
    near = near or [beside[name] for name in get_close_matches(path.name, beside, 1)]
    if _OF_OLLAMA.fullmatch(model):
        message += "; names of Ollama's library are not known here: give a hub id, or OWNER/NAME:FILE.gguf"
    elif HUB_ID.fullmatch(model.partition(":")[0]) and ":" in model:
        message += f"; a GGUF file of a hub id is {model.partition(':')[0]}:FILE.gguf"
    elif "/" not in model and what == "directory":
        embedded = " and ".join(f"`{name}`" for name in CHECKPOINTS)
        message += f"; a hub id is OWNER/NAME, the embedded models are {embedded}, others {', '.join(NAMED)}"
    return message + (f"; did you mean {near[-1]}?" if near else "")


def checkpoint_of(config: EngineConfig, files: tuple[str, ...] = CHECKPOINT_FILES) -> Path:
    """Return the directory or the GGUF file of a configuration's model; see `resolve_model_dir`."""
    return resolve_model_dir(config.model, config.revision, files, config.download_dir)


def tokenizer_source(config: EngineConfig, checkpoint: Path) -> Path:
    """Return the directory or file with the tokenizer and chat template.

    It is the `checkpoint`, unless `config` names another. ModelError if that does not exist.
    """
    if config.tokenizer is None:
        return checkpoint
    try:
        return resolve_model_dir(config.tokenizer, files=TEXT_FILES, download_dir=config.download_dir)
    except ModelError as error:
        raise ModelError(f"the tokenizer: {error.message}", error.remedies) from error


def load_spec(config: EngineConfig) -> ModelSpec:
    """Return the spec of the model that `config` names, or of one rank's part of it, with its drafter attached.

    It reads only the config.json of each, the size of the smallest image from an image processor's file, and the
    vocabulary of a tokenizer that `config` names. ModelError as `resolve_model_dir`, `read_config`, `model_spec` and
    `with_smallest_item`; ConfigError as `with_drafter`, `with_quantization`, `with_given_tokens`, `shard` and
    `check_quantized_cut`.
    """
    directory = checkpoint_of(config, PLAN_FILES)
    model = _spec_of(directory)
    if model.target is not None:
        made_for = " or ".join(model.target.architectures)
        raise ModelError(
            f"{config.model} is an assistant ({model.architecture}), which makes drafts for a model and writes no text "
            f"alone; give a {made_for} model, and the assistant in speculative: draft:{config.model}:3"
        )
    if config.tokenizer is not None:
        model = with_given_tokens(model, config.tokenizer, tokenizer_source(config, directory))
    if model.vision is not None:
        model = replace(model, vision=with_smallest_item(model.vision, directory))
    draft = None
    if config.speculative is not None and config.speculative.model is not None:
        try:
            draft = _spec_of(
                resolve_model_dir(config.speculative.model, files=("config.json",), download_dir=config.download_dir)
            )
        except ModelError as error:
            raise ModelError(f"the draft model: {error.message}", error.remedies) from error
    ranks = config.tensor_parallel_size
    if ranks > 1:
        model = with_runs_of_rank(_part_of(model, ranks))
    model = _with_draft(config, model, draft)
    check_quantized_cut(model, _part_of)
    return model


def _with_draft(config: EngineConfig, model: ModelSpec, draft: ModelSpec | None) -> ModelSpec:
    """Return `model` with its drafter, quantised as `config` asks.

    A draft model is sharded if that is possible; else each rank has all of it.
    """
    # Imported here: a name that is none is answered without the planner.
    from ostinato.plan.choose_quantization import with_quantization
    from ostinato.plan.speculation import with_drafter

    def attached(draft: ModelSpec | None) -> ModelSpec:
        whole = with_drafter(config, model, draft)
        if draft is not None and draft.target is not None:
            whole = with_draft_calls(whole)
        return with_quantization(config, whole)

    if draft is not None and model.ranks > 1 and not sharding_problems(draft, model.ranks):
        shared = attached(with_runs_of_rank(_part_of(draft, model.ranks)))
        if shared.drafter is not None and shared.drafter.method == "assistant":
            return shared
        if shared.drafter is None or shared.drafter.model is None or is_cut_between_groups(shared.drafter.model):
            return shared
    return attached(draft)


def _part_of(model: ModelSpec, ranks: int) -> ModelSpec:
    return with_weight_table(shard(model, ranks))


def _spec_of(directory: Path) -> ModelSpec:
    config = read_config(directory)
    if not is_gguf(directory):
        return model_spec(config)
    try:
        model = model_spec(config)
    except ModelError as error:  # there is no such file
        raise ModelError(error.message.replace("config.json", f"the metadata of {directory}"), error.remedies) from None
    header = gguf_header(directory)
    formats, runs = _stored_formats(directory, model), find_contiguous_tensors(header, model)
    return replace(
        model,
        stored_blocks=_stored_blocks(directory),
        stored_formats=formats,
        stored_runs=runs,
        left_out=header.no_images,
        encoder_file=None if header.mmproj is None else header.mmproj.path.name,
    )


def read_config(directory: Path) -> JsonObject:
    """Return the config.json of a checkpoint directory, or the equivalent from a GGUF file's header.

    ModelError if it is missing or broken.
    """
    if is_gguf(directory):
        return read_checkpoint_json(directory, "config.json")
    path = directory / "config.json"
    if find_in_checkpoint(directory, path.name) is None:
        reason, advice = why_unreadable(path), folder_advice(directory)
        raise ModelError(f"{directory} holds no config.json, so it is no checkpoint{reason}; {advice}")
    return read_json(path)


def _stored_blocks(path: Path) -> tuple[tuple[str, int], ...]:
    """Return the bytes of a GGUF file's tensors by type, largest first."""
    sizes: Counter[str] = Counter()
    for tensor in gguf_header(path).tensors.values():
        sizes[tensor.type.name] += tensor.num_bytes
    return tuple(sizes.most_common())


def _stored_formats(path: Path, model: ModelSpec) -> tuple[tuple[str, str], ...]:
    """Return the matrices of a GGUF file that are in block formats known to kernels, with their formats.

    They have the checkpoint's names. If a matrix is two tensors in the file, both have one format.
    """
    formats: dict[str, set[str]] = {}
    for tensor in gguf_header(path).tensors.values():
        name = checkpoint_name(model, tensor.name)
        if name is not None:
            formats.setdefault(name.removesuffix(GATE).removesuffix(UP), set()).add(tensor.type.name)
    return tuple(
        (name, min(kinds)) for name, kinds in formats.items() if len(kinds) == 1 and kinds <= set(BLOCK_FORMATS)
    )


def with_smallest_item(vision: VisionSpec, directory: Path) -> VisionSpec:
    """Return the encoder spec with the smallest image size that the checkpoint's image processor makes, if it is given.

    An image is enlarged to whole tokens and at least that number of pixels. ModelError if the processor's file is
    damaged.
    """
    nested = read_checkpoint_json(directory, "processor_config.json").get("image_processor")
    path = directory / ("processor_config.json" if isinstance(nested, dict) else "preprocessor_config.json")
    settings = nested if isinstance(nested, dict) else read_checkpoint_json(directory, path.name)
    if vision.cuts_tiles:
        least = settings.get("min_image_tokens", vision.smallest_item)
        settings = {"min_pixels": least * vision.token_side**2 if type(least) is int else least}
    if vision.canvas is not None:
        side = settings.get("scale_resolution") or 448
        settings = {"min_pixels": side**2 if type(side) is int else side}
    if vision.crops_positions:
        patches = settings.get("min_num_patches", 1024)
        settings = {"min_pixels": patches * vision.patch_size**2 if type(patches) is int else patches}
    size = settings.get("size")
    pixels = settings.get("min_pixels") or (size.get("shortest_edge") if isinstance(size, dict) else None)
    if pixels is None:
        return vision
    if type(pixels) is not int or pixels < 1:
        raise ModelError(f"{path} has images of at least {pixels!r} pixels, which should be a whole number above 0")
    return replace(vision, smallest_item=-(-pixels // vision.token_side**2))


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of the model that config.json describes.

    ModelError for a missing or unknown architecture, for weights in a quantization that cannot be read, and for values
    that no such model can have.
    """
    known = ", ".join(sorted(MODELS))
    architecture = config.get("model_type")
    if not architecture:
        raise ModelError(f"config.json names no architecture (model_type); the known ones are {known}")
    if isinstance(architecture, str) and architecture in NOT_IMPLEMENTED:
        raise ModelError(f"architecture {architecture!r} is not known: {NOT_IMPLEMENTED[architecture]}")
    if not isinstance(architecture, str) or architecture not in MODELS:
        raise ModelError(f"architecture {architecture!r} is not known; the known ones are {known}")
    _check_layer_changes(config, architecture)
    read = spec_reader(architecture)
    try:
        stored = stored_weights(config)
        spec = read(config)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ModelError(f"config.json is not one of a {architecture} model: {error}") from error
    _check_sizes(spec)
    try:
        spec = with_weight_table(spec)
    except (ArithmeticError, TypeError, ValueError) as error:  # a factor of 0, a list for a number
        raise ModelError(f"config.json is not one of a {architecture} model: {error}") from error
    vision = () if spec.vision is None else spec.vision.weights
    weights = (*spec.weights, *vision, *(weight for layer in dict.fromkeys(spec.layers) for weight in layer.weights))
    if (empty := next((weight for weight in weights if 0 in weight.shape), None)) is not None:
        raise ModelError(f"config.json describes a weight of no elements: {empty.names[0]} is {list(empty.shape)}")
    if stored is None:
        return spec
    if spec.tied_embeddings:
        # A checkpoint quantises linears; an LM head that shares the embedding's matrix is stored as the embedding.
        stored = replace(stored, ignore=(*stored.ignore, "lm_head"))
    return replace(spec, stored_quantization=stored, quantization=stored.quantization(read=()))


def _check_layer_changes(config: JsonObject, architecture: str) -> None:
    """Raise ModelError for layers that differ from their model by `per_layer_config`, which Gemma 4's text alone reads.

    transformers applies it to every architecture. Values that the whole model has too change nothing.
    """
    parts = {"": config, **{name: part for name, part in config.items() if isinstance(part, dict)}}
    for name, part in parts.items():
        given = part.get("per_layer_config")
        if given is None or (architecture.startswith("gemma4") and name in ("", "text_config")):
            continue
        layers = list(given.values()) if isinstance(given, dict) else [None]
        if any(not isinstance(layer, dict) or {**part, **layer} != part for layer in layers):
            raise ModelError(
                f"config.json has per_layer_config = {given!r:.200}; supported: only values that the whole model has"
            )


def _check_sizes(spec: ModelSpec) -> None:
    """Raise ModelError for inconsistent sizes."""
    longest = spec.max_position_embeddings
    if longest is not None and (type(longest) is not int or not 2 <= longest <= MAX_LENGTH):
        raise ModelError(
            f"config.json has max_position_embeddings = {longest!r:.60}; it should be a whole number above 1, and at "
            f"most {MAX_LENGTH:,}"
        )
    if spec.vocab_size < 1 or not spec.layers:
        raise ModelError(f"config.json describes {spec.vocab_size} tokens and {spec.num_layers} layers")
    layers = (*spec.layers, *(spec.head.layers if spec.head is not None else ()))
    for attention in {layer.attention for layer in layers if layer.attention is not None}:
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        if min(heads, kv_heads, attention.head_dim) < 1 or heads % kv_heads:
            raise ModelError(
                f"config.json has {heads} attention heads, which cannot share {kv_heads} of keys and values"
            )
    for mixer in {layer.mixer for layer in layers if layer.mixer is not None}:
        problem = mixer.problem()
        if problem is not None:
            raise ModelError(f"config.json has {problem}")
    for rope in spec.ropes:
        if rope.rotary_dim % 2:
            raise ModelError(f"config.json rotates {rope.rotary_dim} elements of a head; they should be pairs")
        if not rope.theta > 0:
            raise ModelError(f"config.json has rope_theta = {rope.theta}; it should be above 0")
        _check_frequencies(rope)


def _check_frequencies(rope: RopeSpec) -> None:
    """Raise ModelError unless the frequencies for short and for long requests are finite numbers."""
    for length in (0, MAX_LENGTH):
        try:
            frequencies, scaling = inverse_frequencies(resolve_rope(rope, length)[0])
            is_finite = all(map(isfinite, (*frequencies, scaling)))
        except (ArithmeticError, TypeError, ValueError):
            is_finite = False
        if not is_finite:
            raise ModelError(
                f"config.json has a rotary embedding of the kind {rope.kind} without finite frequencies: rope_theta = "
                f"{rope.theta}, original length {rope.original_max_position:,}, {rope.parameters!r:.300}; all "
                "numbers should be finite, and factors and lengths above 0"
            )
