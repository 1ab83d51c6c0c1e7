"""Writing the trained model as a Hugging Face checkpoint of type `nemotron_h`."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import NemotronHConfig, NemotronHForCausalLM

from ostinato.demo import checkpoint_dir

from .model import DemoModel, Shape
from .tokenizer import END, PAD

MAX_LENGTH = 4096
LAYER_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
CHAT_TEMPLATE = (checkpoint_dir() / "chat_template.jinja").read_text()


def hf_config(shape: Shape, pad: int, end: int) -> NemotronHConfig:
    """The config.json of a shape.

    `time_step_min` is tiny because transformers clamps to it when it reads a prompt and not when it decodes.
    """
    return NemotronHConfig(
        architectures=["NemotronHForCausalLM"],
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        layers_block_type=[LAYER_KINDS[kind] for kind in shape.pattern],
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.mlp,
        ssm_state_size=shape.state,
        mamba_num_heads=shape.mamba_heads,
        mamba_head_dim=shape.mamba_head_dim,
        n_groups=1,
        conv_kernel=shape.conv,
        time_step_min=1e-9,
        layer_norm_epsilon=shape.epsilon,
        num_nextn_predict_layers=1,
        mtp_layers_block_type=[LAYER_KINDS[kind] for kind in shape.mtp_pattern],
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=pad,
        bos_token_id=None,
        eos_token_id=end,
        dtype="bfloat16",
    )


def export(model: DemoModel, tokenizer: Tokenizer, directory: Path) -> None:
    """Replaces `directory`: the trunk as transformers writes it, the head as `mtp.*`, the tokenizer."""
    pad, end = tokenizer.token_to_id(PAD), tokenizer.token_to_id(END)
    config = hf_config(model.shape, pad, end)
    own = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    trunk = NemotronHForCausalLM(config).to(torch.bfloat16)
    trunk.load_state_dict({name: tensor for name, tensor in own.items() if not name.startswith("mtp.")})
    trunk.generation_config.update(bos_token_id=None, eos_token_id=end, pad_token_id=pad)
    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch)
        trunk.save_pretrained(written)
        tensors = load_file(written / "model.safetensors")
        tensors |= {name: tensor.contiguous() for name, tensor in own.items() if name.startswith("mtp.")}
        save_file(tensors, written / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(str(written / "tokenizer.json"))
        (written / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_LENGTH,
            "eos_token": END,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
        }
        (written / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for file in sorted(written.iterdir()):
            shutil.copyfile(file, directory / file.name)
