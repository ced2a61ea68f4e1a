"""Models on the Hugging Face hub, with a card: origin, evaluation and use."""
