"""The recording gateway: any agent talks to the model by HTTP, and what was sampled is trained as exactly those ids."""
