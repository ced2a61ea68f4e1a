"""The settings `ray.*`."""

from __future__ import annotations

from pydantic import Field

from palestra.core.config_sections import WEEK_S, Section


class RaySection(Section):
    """Rollout actors on a Ray cluster, with `backend: ray`."""

    address: str = "auto"
    """auto: the running cluster (RAY_ADDRESS); local: one that is started for this run; HOST:PORT, or ray://HOST:PORT
    of Ray Client"""
    actors: int = Field(2, ge=1, le=4096, description="rollout actors; one that finds no room joins when there is some")
    cpus_per_actor: float = Field(1.0, gt=0, le=4096)
    gpus_per_actor: float = Field(0.0, ge=0, le=1024, description="0 samples on the CPU")
    timeout_s: float = Field(120.0, gt=0, le=WEEK_S)
    """how long the cluster may not answer, or have no actor, before the run ends"""
