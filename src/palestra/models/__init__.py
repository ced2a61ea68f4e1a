"""Models: load one by name, folder or file, render chats as tokens, and write trained models.

`loading` accepts Hugging Face names, folders, GGUF files and the embedded `tiny/` model.
`chat/` has templates and tool-call formats, `export/` Hugging Face folders.
"""
