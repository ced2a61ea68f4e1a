"""GGUF files in and out: `read` and `write` combine the conversions of `config`, `rope` and `tokenizer`."""
