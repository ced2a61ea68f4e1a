"""One training over several GPUs or machines: ranks of torchrun or `palestra train --nproc`, with FSDP2."""
