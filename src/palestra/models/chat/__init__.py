"""Messages to tokens and back, by the model's own chat template, and the tool-call format of each family."""
