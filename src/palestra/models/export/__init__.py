"""A trained model as a Hugging Face folder, a GGUF file or an Ollama model."""
