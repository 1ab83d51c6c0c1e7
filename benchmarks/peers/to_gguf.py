"""llama.cpp's converter, told what a random checkpoint cannot tell it.

Run as `python -m benchmarks.peers.to_gguf LLAMA_CPP CHECKPOINT TARGET`, in a process of its own. It needs torch,
transformers and llama.cpp's sources.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PATTERN = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
PRE_TOKENIZER = "gpt-2"


def hub_config(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """`config` in the spelling of the hub's checkpoints; `defaults` are the values that transformers fills in."""
    if config["model_type"] == "nemotron_h":
        # The defaults name experts, and the converter takes that for a model that has some.
        words = config["layers_block_type"]
        rest = {name: value for name, value in config.items() if name != "layers_block_type"}
        return {
            **rest,
            "num_hidden_layers": len(words),
            "hybrid_override_pattern": "".join(PATTERN[word] for word in words),
        }
    return {**defaults, **config}


def convert(sources: Path, checkpoint: Path, target: Path) -> None:
    """Writes the bf16 GGUF file `target` of a checkpoint."""
    sys.path.insert(0, str(sources))
    import convert_hf_to_gguf
    from conversion.base import ModelBase, TextModel
    from transformers import AutoConfig

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    hparams = hub_config(config, AutoConfig.from_pretrained(checkpoint).to_dict())
    ModelBase.load_hparams = staticmethod(lambda *_, **__: dict(hparams))
    # The converter knows tokenizers by a hash of what they do with a text, and this one is nobody's.
    TextModel.get_vocab_base_pre = lambda *_: PRE_TOKENIZER
    TextModel._set_vocab_sentencepiece = _no_such_file
    with TemporaryDirectory() as temporary:
        renamed = Path(temporary)
        for file in checkpoint.iterdir():
            (renamed / file.name).symlink_to(file.resolve())
        # Some of its classes read the file themselves.
        (renamed / "config.json").unlink()
        (renamed / "config.json").write_text(json.dumps(hparams), encoding="utf-8")
        sys.argv = ["convert", str(renamed), "--outtype", "bf16", "--outfile", str(target)]
        # The checkpoints have no weights of a prediction head, which the converter asks for.
        sys.argv += ["--no-mtp"] if config["model_type"].startswith(("qwen3_5", "qwen3_next")) else []
        convert_hf_to_gguf.main()


def _no_such_file(*_: Any) -> None:
    """What the converter expects where there is a tokenizer.json; so it does not need sentencepiece."""
    raise FileNotFoundError("tokenizer.model")


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:4]))
