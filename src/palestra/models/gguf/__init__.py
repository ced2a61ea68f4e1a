"""GGUF files, read and written with the same tables.

`architectures`, `rope` and `pretokenizers` hold the tables. Each part of a model is converted by a pair of functions,
`…_from_gguf` and `…_to_gguf`, in `config`, `rope`, `tokenizer` and `architectures`. `read` and `write` combine them.
"""
