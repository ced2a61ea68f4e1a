"""A model behind OpenAI-, SGLang- and vLLM-style HTTP."""
