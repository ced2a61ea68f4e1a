"""The recording gateway: agents call the model over HTTP, and the exact sampled token ids are trained on."""
