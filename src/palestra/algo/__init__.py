"""The mathematics of training as pure functions on tensors and numbers.

Advantages, losses, ECHO, entropy control, and the packing of samples into micro-batches.
No I/O, no model classes and no config objects.
"""
