"""The recording gateway: agents call the model over HTTP, and exactly the sampled token ids are trained."""
