"""Training and sampling for clients of the Tinker SDK (`palestra tinker`)."""
