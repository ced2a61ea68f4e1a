"""A trained model as a Hugging Face folder."""
