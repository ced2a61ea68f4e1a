"""Learner and policy on a Tinker server, by its official SDK (`backend: tinker`)."""
