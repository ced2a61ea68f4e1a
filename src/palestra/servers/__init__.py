"""HTTP servers in front of a model, and the parts that they share with all servers of the project.

`openai/` has the APIs of OpenAI, SGLang and vLLM, `gateway/` records agents' tokens.
"""
