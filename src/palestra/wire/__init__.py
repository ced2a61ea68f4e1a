"""Training over HTTP: environments in other programs post scored groups, a trainer takes them."""

# Environments filter their groups, and choose the temperature, by themselves.
WIRE_DEFAULTS = {"train.filter_equal_groups": False, "rollout.temperature": 1.0}
