"""How the embedded model is trained: tokenizer, data, model, trainer, evaluation and export."""
