"""Environments: they provide problems, tools and scores. `base` defines the interface, `env` the class to subclass.

`library/` has ready environments, `adapters/` those of other frameworks, `sandbox/` runs code that a model wrote.
`discover` and `load` find environments by name or file.
"""
