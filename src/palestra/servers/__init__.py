"""HTTP servers in front of a model, and the parts that they share.

`openai/` has the APIs of OpenAI, SGLang and vLLM, `gateway/` records agents' tokens, `tinker/` serves the Tinker SDK.
`web`, `body`, `guard`, `connections`, `http_errors` and `tally` are used by every server of the project.
"""
