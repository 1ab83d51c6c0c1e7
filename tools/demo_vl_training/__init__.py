"""How the embedded vision-language model is trained: tokenizer, shape, data, trainer, evaluation and export."""
