"""An elastic pool of rollout actors on a Ray cluster (`backend: ray`)."""
