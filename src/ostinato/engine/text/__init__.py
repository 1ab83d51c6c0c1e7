"""Between text and token ids: tokenizer, detokenizer, chat template."""
